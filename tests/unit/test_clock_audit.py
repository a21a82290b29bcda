"""No line of the daemon, and none of the client but one, asks for the wall clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_WALL = {
    ("time", "time"), ("time", "time_ns"), ("time", "localtime"), ("time", "gmtime"),
    ("time", "ctime"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"),
    ("date", "today"),
}  # fmt: skip
_ALLOWED = {
    # What people read: the times of log lines.
    "racerd/runtime/logs.py": {("time", "gmtime")},
    # `Stat.expires_at` is told in wall-clock time, for people and for programs of their own.
    "clients/python/racer/src/racer/answers.py": {("time", "time")},
    "clients/python/racer/src/racer/cli/look.py": {("time", "time")},
}


def asked(source: str) -> Iterator[tuple[str, str]]:
    """The calls, or mentions, of a wall clock in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if (name, node.attr) in _WALL:
                yield name, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            for alias in node.names:
                if (node.module, alias.name) in _WALL:
                    yield node.module, alias.name


def test_only_monotonic_time_drives_anything() -> None:
    """Deadlines, times to live, pauses and rates come from clocks that cannot jump."""
    found: dict[str, set[tuple[str, str]]] = {}
    for folder in ("racerd", "clients/python/racer/src"):
        for path in sorted(Path(folder).rglob("*.py")):
            if names := set(asked(path.read_text())):
                found[str(path)] = names
    assert found == _ALLOWED


def test_the_audit_sees_every_way_to_ask() -> None:
    source = """
import time, datetime
from time import time_ns
time.time(); datetime.datetime.now(); datetime.date.today(); time.monotonic()
"""
    assert sorted(asked(source)) == [
        ("date", "today"), ("datetime", "now"), ("time", "time"), ("time", "time_ns"),
    ]  # fmt: skip

"""Kinds of values: how text or TOML becomes a value, and what an error calls it.

Layer: config, pure. A kind's `parse` takes what a flag, a variable or TOML gave and raises
ValueError with what the value should have been; it never guesses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from racerd.units import parse_bytes

Parse = Callable[[Any], Any]


@dataclass(frozen=True)
class Kind:
    """`name` is what people read in errors and docs; `limits` what holds beyond the kind."""

    name: str
    parse: Parse
    limits: str = ""


def _number(raw: Any, name: str) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError(f"{name} is wanted")
    try:
        return float(raw)
    except ValueError:
        raise ValueError(f"{name} is wanted") from None


def size(low: int, high: int) -> Kind:
    """A byte size, `low` to `high`."""
    limits = f"{low:,} to {high:,} bytes"

    def parse(raw: Any) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise ValueError("a byte size is wanted: a number, or 256MiB")
        value = raw if isinstance(raw, int) else parse_bytes(raw)
        if not low <= value <= high:
            raise ValueError(f"{value:,} bytes is out of bounds: {limits}")
        return value

    return Kind("byte size", parse, limits)


def seconds(low: float, high: float) -> Kind:
    """Seconds, fractions allowed, `low` to `high`."""
    limits = f"{low:g} to {high:g} s"

    def parse(raw: Any) -> float:
        value = _number(raw, "a number of seconds")
        if not low <= value <= high:
            raise ValueError(f"{value:g} s is out of bounds: {limits}")
        return value

    return Kind("seconds", parse, limits)


def count(low: int, high: int) -> Kind:
    """A whole number, `low` to `high`."""
    limits = f"{low:,} to {high:,}"

    def parse(raw: Any) -> int:
        value = _number(raw, "a whole number")
        if value != int(value):
            raise ValueError("a whole number is wanted")
        if not low <= value <= high:
            raise ValueError(f"{int(value):,} is out of bounds: {limits}")
        return int(value)

    return Kind("whole number", parse, limits)


def fraction(low: float, high: float) -> Kind:
    """A share, `low` to `high`; `15%` and `0.15` are the same."""
    limits = f"{low:g} to {high:g}"

    def parse(raw: Any) -> float:
        if isinstance(raw, str) and raw.strip().endswith("%"):
            value = _number(raw.strip()[:-1], "a share such as 15%") / 100
        else:
            value = _number(raw, "a share such as 0.15")
        if not low <= value <= high:
            raise ValueError(f"{value:g} is out of bounds: {limits}")
        return value

    return Kind("share", parse, limits)


def choice(*allowed: str) -> Kind:
    """One of `allowed`."""
    limits = ", ".join(allowed)

    def parse(raw: Any) -> str:
        if not isinstance(raw, str) or raw not in allowed:
            raise ValueError(f"one of {limits} is wanted")
        return raw

    return Kind("choice", parse, limits)


def _text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw:
        raise ValueError("text is wanted")
    return raw


def _flag(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    raise ValueError("true or false is wanted")


def _path(raw: Any) -> Path:
    return Path(_text(raw)).expanduser().absolute()


def _texts(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(item, str) and item for item in raw):
        raise ValueError("a list of texts is wanted")
    return tuple(raw)


def _mode(raw: Any) -> int:
    if isinstance(raw, str) and re.fullmatch(r"(0o?)?[0-7]{3}", raw):
        value = int(raw[-3:], 8)
        if value & 0o600 == 0o600:
            return value
    raise ValueError('a file mode such as "0660" that lets its owner read and write is wanted')


def _address(raw: Any) -> tuple[str, int] | None:
    if raw == "off":
        return None
    host, colon, port = _text(raw).rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("HOST:PORT is wanted, or off")
    return host.strip("[]"), int(port)


TEXT = Kind("text", _text)
BOOLEAN = Kind("true or false", _flag)
PATH = Kind("path", _path)
TEXTS = Kind("list of texts", _texts)
MODE = Kind("file mode", _mode)
ADDRESS = Kind("HOST:PORT or off", _address)

"""Kinds of values: how text or TOML becomes a value, and what an error calls it.

Layer: config, pure. A kind's `parse` takes what a flag, a variable or TOML gave and raises
ValueError with what the value should have been; it never guesses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from racerd.units import format_bytes, parse_bytes

Parse = Callable[[Any], Any]


@dataclass(frozen=True)
class Kind:
    """`name` is what people read in errors and docs; `limits` what holds beyond the kind."""

    name: str
    parse: Parse
    limits: str = ""
    show: Callable[[Any], str] = str

    @property
    def text(self) -> str:
        """The kind and its limits, for a message: `byte size, 1 MiB to 4 TiB`."""
        return f"{self.name}, {self.limits}" if self.limits else self.name

    def shown(self, value: Any) -> str:
        """`value` as a person would write it."""
        if value is None:
            return "off" if self.name.endswith("or off") else "none"
        return self.show(value)


def _number(raw: Any, name: str) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError(f"{name} is wanted")
    try:
        value = float(raw)
    except (ValueError, OverflowError):
        raise ValueError(f"{name} is wanted") from None
    if not math.isfinite(value):
        raise ValueError(f"{name} is wanted")
    return value


def size(low: int, high: int) -> Kind:
    """A byte size, `low` to `high`."""
    limits = f"{format_bytes(low)} to {format_bytes(high)}"

    def parse(raw: Any) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise ValueError("a byte size is wanted: a number, or 256MiB")
        value = raw if isinstance(raw, int) else parse_bytes(raw)
        if not low <= value <= high:
            raise ValueError(f"{value:,} bytes is out of bounds")
        return value

    return Kind("byte size", parse, limits, format_bytes)


def seconds(low: float, high: float) -> Kind:
    """Seconds, fractions allowed, `low` to `high`."""
    limits = f"{low:g} to {high:g} s"

    def parse(raw: Any) -> float:
        value = _number(raw, "a number of seconds")
        if not low <= value <= high:
            raise ValueError(f"{value:g} s is out of bounds")
        return value

    return Kind("seconds", parse, limits, lambda value: f"{value:g}")


def count(low: int, high: int) -> Kind:
    """A whole number, `low` to `high`."""
    limits = f"{low:,} to {high:,}"

    def parse(raw: Any) -> int:
        value = _number(raw, "a whole number")
        if value != int(value):
            raise ValueError("a whole number is wanted")
        if not low <= value <= high:
            raise ValueError(f"{int(value):,} is out of bounds")
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
            raise ValueError(f"{value:g} is out of bounds")
        return value

    return Kind("share", parse, limits, lambda value: f"{value:g}")


def or_off(kind: Kind) -> Kind:
    """What `kind` takes, or `off`, which is None."""

    def parse(raw: Any) -> Any:
        return None if raw == "off" else kind.parse(raw)

    return Kind(f"{kind.name} or off", parse, kind.limits, kind.show)


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
    text = _text(raw)
    if "\0" in text:
        raise ValueError("a path without NUL is wanted")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ValueError(f"there is no home folder for {text!r}") from None


def _texts(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(item, str) and item for item in raw):
        raise ValueError("a list of texts is wanted")
    if len(set(raw)) != len(raw):
        raise ValueError("a list without repetitions is wanted")
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
    host, _, port = _text(raw).rpartition(":")
    number = int(port) if re.fullmatch("[0-9]{1,5}", port) else -1
    # Without brackets, the last group of an IPv6 address would pass for a port.
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare and bare == host) or not 0 <= number <= 65535:
        raise ValueError("HOST:PORT is wanted, or off")
    return bare, number


def _show_address(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


TEXT = Kind("text", _text)
BOOLEAN = Kind("true or false", _flag, show=lambda value: "true" if value else "false")
PATH = Kind("path", _path)
TEXTS = Kind("list of texts", _texts, show=", ".join)
MODE = Kind("file mode", _mode, "0600 to 0777", lambda value: f"{value:04o}")
ADDRESS = Kind("HOST:PORT or off", _address, show=_show_address)

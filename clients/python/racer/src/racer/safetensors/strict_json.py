"""JSON read strictly: what RFC 8259 leaves open, or `json` lets pass, is refused.

Layer: bottom, pure. The standard scanner is C and fast (a header of 20,000 tensors takes some
50 ms), so it does the scanning, and what it is too kind about is closed around it:

- bytes are UTF-8, decoded strictly (`json` would guess UTF-16 and UTF-32 too); a byte order mark
  is then no white space and fails;
- a repeated key is an error at any depth (`json` keeps the last one);
- `NaN` and `Infinity` are errors, and so is a number that overflows a double;
- an integer is one only if it is written as one and fits 64 bits: `-0` and what is larger become
  floats, as in the format's reference parser, and a float is never taken for an integer. Digits
  are counted before they are converted, so that no length of a number is a problem;
- an escape for half a surrogate pair is an error (`json` makes a string that cannot be encoded);
- depth is counted before anything recurses, and so are arrays and objects before anything is built:
  `[],[],[],…` takes 25 times its length in memory. The densest header of tensors has one for every
  16 bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final

from racer.safetensors.errors import quoted

U64_MAX: Final = 2**64 - 1
I64_MIN: Final = -(2**63)
DEPTH_MAX: Final = 127  # The reference parser's limit; headers need 3.

_U64_DIGITS_MAX = 20
_BYTES_PER_CONTAINER_MIN = 16
_CONTAINERS_UNCOUNTED_MAX = 4096

_QUOTED = re.compile(rb'"[^"]*+"')
_NOT_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
# `sub` takes some 180 bytes of memory for each match: what it is given has an end.
_MARKS_AT_ONCE = 64 << 10

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


class StrictJsonError(ValueError):
    """Why a text was refused; `member` is the key of the outermost object at fault, if known."""

    def __init__(self, reason: str, *, member: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.member = member


def loads_untrusted(text: bytes) -> Any:
    """The value that `text` holds; dicts keep the order of the text.

    Raises StrictJsonError and nothing else, whatever the bytes are.
    """
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"not UTF-8 at byte {error.start}") from error
    _check_structure(text)
    _check_surrogates(decoded)
    repeats: list[tuple[dict[str, Any], str]] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) != len(pairs):
            repeats.append((built, _first_repeat(pairs)))
        return built

    try:
        value = json.loads(
            decoded,
            object_pairs_hook=unique,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_no_constant,
        )
    except json.JSONDecodeError as error:
        raise StrictJsonError(f"not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:  # Not by depth, which was checked: the caller's stack is deep.
        raise StrictJsonError("the caller left too little stack to parse it") from error
    if repeats:
        raise _repeated(value, *repeats[0])
    return value


def _check_structure(text: bytes) -> None:
    allowed = _CONTAINERS_UNCOUNTED_MAX + len(text) // _BYTES_PER_CONTAINER_MIN
    containers = depth = 0
    for brackets in _brackets(text):
        containers += brackets.count(b"[") + brackets.count(b"{")
        if containers > allowed:
            raise StrictJsonError(
                f"more than {allowed:,} arrays and objects in {len(text):,} bytes"
            )
        for bracket in brackets:
            depth += 1 if bracket in b"[{" else -1
            if depth > DEPTH_MAX:
                raise StrictJsonError(f"nested more than {DEPTH_MAX} deep")


def _brackets(text: bytes) -> Iterator[bytes]:
    """The brackets of `text` that are in no string, part by part.

    Where `text` is no JSON they are right up to the first fault, at which the scanner ends too.
    """
    # Escaped backslashes go first, so that a backslash before a quote is one that escapes it.
    marks = text.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_MARKS)
    inside = b""
    for start in range(0, len(marks), _MARKS_AT_ONCE):
        part = inside + marks[start : start + _MARKS_AT_ONCE]
        inside = b'"' if part.count(b'"') % 2 else b""  # The next part is in a string still.
        yield _QUOTED.sub(b"", part + inside)


def _check_surrogates(text: str) -> None:
    # Escaped backslashes, then whole pairs are taken out: what is left is alone.
    if _SURROGATE.search(text) and _SURROGATE.search(
        _SURROGATE_PAIR.sub(" ", text.replace(r"\\", " "))
    ):
        raise StrictJsonError("a string holds half a surrogate pair")


def _integer(text: str) -> int | float:
    if len(text) <= _U64_DIGITS_MAX and text != "-0":
        value = int(text)
        if I64_MIN <= value <= U64_MAX:
            return value
    return _float(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise StrictJsonError("a number is out of range")
    return value


def _no_constant(text: str) -> None:
    raise StrictJsonError(f"not JSON: {text} is no number")


def _first_repeat(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("called with pairs that repeat no key")


def _repeated(value: Any, inside: dict[str, Any], key: str) -> StrictJsonError:
    members = value.items() if isinstance(value, dict) and value is not inside else ()
    member = next((name for name, held in members if held is inside), None)
    return StrictJsonError(f"duplicate key {quoted(key)}", member=member)

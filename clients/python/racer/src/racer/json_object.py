"""A JSON object of the daemon, read field by field with its type.

Layer: bottom, pure. Every field is checked, because a number that is really `true` or a string ends
as a wrong length somewhere else. What is not as asked for raises ProtocolError, which names the
answer and the field.
"""

from __future__ import annotations

import json
from typing import Any

from racer.errors import ProtocolError

_SECONDS_MAX = 1 << 62  # `json` also takes infinities, and integers that no float holds.


class JsonObject:
    """A JSON object of an answer, read field by field with its type."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"{what} is not a JSON object")
        self._value: dict[str, Any] = value
        self._what = what

    @classmethod
    def of_body(cls, body: bytes, what: str) -> JsonObject:
        try:
            return cls(json.loads(body), what)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{what} is not JSON: {error}") from error

    def _wrong(self, name: str, kind: str) -> ProtocolError:
        return ProtocolError(f"{self._what}: {name!r} is not {kind}")

    def number(self, name: str) -> int:
        value = self._value.get(name)
        if type(value) is not int or value < 0:
            raise self._wrong(name, "a whole number")
        return value

    def number_or_none(self, name: str) -> int | None:
        return None if self._value.get(name) is None else self.number(name)

    def seconds(self, name: str) -> float:
        value = self._value.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        if not abs(value) < _SECONDS_MAX:  # NaN is not, either.
            raise self._wrong(name, "a time that a clock tells")
        return float(value)

    def truth(self, name: str) -> bool:
        value = self._value.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self._value.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def text_or_none(self, name: str) -> str | None:
        return None if self._value.get(name) is None else self.text(name)

    def items(self, name: str) -> list[Any]:
        value = self._value.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def texts_of(self, name: str) -> tuple[str, ...]:
        """A list of strings; none where it is absent."""
        items = [] if self._value.get(name) is None else self.items(name)
        if not all(isinstance(item, str) for item in items):
            raise self._wrong(name, "a list of strings")
        return tuple(items)

    def child(self, name: str) -> JsonObject:
        return JsonObject(self._value.get(name), f"{self._what}, {name}")

    def child_or_none(self, name: str) -> JsonObject | None:
        return None if self._value.get(name) is None else self.child(name)

    def numbers(self) -> dict[str, int]:
        return {name: self.number(name) for name in self._value}

    def texts(self) -> dict[str, str]:
        return {name: self.text(name) for name in self._value}

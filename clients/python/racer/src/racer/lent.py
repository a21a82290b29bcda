"""What is out with somebody, counted.

Layer: bottom; under the lock of whoever lends. Things are not kept here: one that its holder loses,
to an interrupt or to carelessness, is no longer out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Lent(Generic[T]):
    """`reached` looks for what was lost only where the limit seems to be reached."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def add(self, thing: T) -> None:
        self._references.append(weakref.ref(thing))

    def remove(self, thing: T) -> bool:
        """Whether it was out."""
        for number, reference in enumerate(self._references):
            if reference() is thing:
                del self._references[number]
                return True
        return False

    def reached(self, limit: int) -> bool:
        """Whether so many are out."""
        if len(self._references) < limit:
            return False
        self._references = [each for each in self._references if each() is not None]
        return len(self._references) >= limit

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            thing = reference()
            if thing is not None:
                yield thing

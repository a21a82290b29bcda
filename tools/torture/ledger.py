"""What a campaign knows that the daemon promised, and the bytes that it must return.

Layer: torture; thread-safe. `Ledger` holds the **kept** pages, of which the daemon said that they
are on disk, and the **gone** objects, of which it said that they were evicted. Every promise that
was broken becomes a line of `broken`.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

PAGE_BYTES = 64 << 10
FRAME_BYTES = 16 << 10
BUCKET = "models"
_SHARED_SIZES = (3 << 20, (1 << 20) + 777, PAGE_BYTES, 12 * PAGE_BYTES, (2 << 20) - 1, 100)
_OWN_SIZES = (5 * PAGE_BYTES + 1, 7 * PAGE_BYTES, 1)


@dataclass(frozen=True)
class Model:
    """An object of the origin. `owner`: the one reader that may evict it, if any may."""

    name: str
    data: bytes
    owner: int | None = None

    @property
    def url(self) -> str:
        return f"racer://local/{BUCKET}/{self.name}"

    @property
    def pages(self) -> range:
        return range(-(-len(self.data) // PAGE_BYTES))


def make_models(folder: Path, chance: random.Random, readers: int) -> list[Model]:
    """Writes the objects that the origin serves, below `folder`."""
    models = [
        Model(f"shared-{number}", chance.randbytes(size))
        for number, size in enumerate(_SHARED_SIZES)
    ]
    models += [
        Model(f"own-{owner}-{number}", chance.randbytes(size), owner)
        for owner in range(readers)
        for number, size in enumerate(_OWN_SIZES)
    ]
    (folder / BUCKET).mkdir(parents=True)
    for model in models:
        (folder / BUCKET / model.name).write_bytes(model.data)
    return models


@dataclass
class Ledger:
    """Promises and tallies. `keeps`: whether kept pages must be found after every kill, which is
    not so where the disk is too small for all, or where somebody damages it."""

    keeps: bool
    kept: set[tuple[str, int]] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    tally: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self.tally[what] += amount

    def breach(self, text: str) -> None:
        """A promise was broken."""
        with self._lock:
            self.broken.append(text)

    def on_disk(self, model: Model, pages: Iterable[int]) -> None:
        """The daemon said that it has these pages on disk."""
        with self._lock:
            self.gone.discard(model.name)
            self.kept.update((model.name, page) for page in pages)

    def read_again(self, model: Model) -> None:
        """Somebody asks for the object: it may be cached from now on."""
        with self._lock:
            self.gone.discard(model.name)

    def leaving(self, model: Model) -> None:
        """An eviction begins: until it is answered, nothing is known."""
        with self._lock:
            self.kept = {each for each in self.kept if each[0] != model.name}

    def evicted(self, model: Model) -> None:
        """The daemon said that nothing of the object is cached."""
        with self._lock:
            self.gone.add(model.name)

    def kept_of(self, model: Model) -> set[int]:
        with self._lock:
            return {page for name, page in self.kept if name == model.name} if self.keeps else set()

    def is_gone(self, model: Model) -> bool:
        with self._lock:
            return model.name in self.gone

    def compare(self, model: Model, start: int, got: bytes | memoryview) -> None:
        """Every byte that arrived is compared with the source."""
        want = memoryview(model.data)[start : start + len(got)]
        self.count("bytes compared", len(got))
        if got != want:
            self.count("wrong bytes", sum(a != b for a, b in zip(got, want, strict=True)))
            self.breach(f"wrong bytes of {model.name} in [{start}, {start + len(got)})")

"""Measures the store's eviction against LRU and FIFO on three generated traces.

    python -m tools.eviction_traces

Runs the real engine (no disk: I/O is taken as done) on a slab of 128 GiB with pages of 16 MiB. LRU
and FIFO evict page by page, which costs a disk cache one erase-sized hole per page; they are what
the engine's hit ratio is to be compared with, not what could be built instead.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import PageGeometry
from racerd.store.claims import Evict, Prepare, Refused, Reservation
from racerd.store.engine import Engine
from racerd.store.geometry import SlabGeometry
from racerd.store.segments import SegmentState
from racerd.units import GIB

PAGE = PageGeometry()
SLAB_BYTES = 128 * GIB
SEED = 20


@dataclass(frozen=True)
class Model:
    """Every access to a model reads all of its pages in order, as a loader does."""

    version: ObjectVersion
    pages: int

    def read(self) -> Iterator[PageId]:
        return (PageId(self.version, index) for index in range(self.pages))


def model(name: str, gib: float, etag: str = "1") -> Model:
    size = int(gib * GIB)
    object_id = ObjectId("models", "hub", name.encode())
    return Model(ObjectVersion(object_id, f'"{etag}"', size), PAGE.page_count(size))


def zipf(loads: int = 600) -> Iterator[PageId]:
    """Sixty models of 1 to 40 GiB, some much more popular than others (exponent 1)."""
    chance = random.Random(SEED)
    models = [model(f"zipf-{n}", chance.choice([1, 4, 8, 16, 40])) for n in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(models))]
    for _ in range(loads):
        yield from chance.choices(models, weights)[0].read()


def scans(rounds: int = 60) -> Iterator[PageId]:
    """Eight hot models (64 GiB in all), and now and then a huge one that is read once."""
    chance = random.Random(SEED)
    hot = [model(f"hot-{n}", 8) for n in range(8)]
    for number in range(rounds):
        for each in chance.sample(hot, 6):
            yield from each.read()
        if number % 2:
            yield from model(f"once-{number}", 100).read()


def rollouts(nights: int = 40) -> Iterator[PageId]:
    """Ten models of 8 GiB; every night three get a new version, whose old one is never read."""
    chance = random.Random(SEED)
    versions = {f"fleet-{n}": 0 for n in range(10)}
    for night in range(nights):
        for name in chance.sample(sorted(versions), 3):
            versions[name] = night + 1
        for _ in range(20):
            name = chance.choice(sorted(versions))
            yield from model(name, 8, str(versions[name])).read()


@dataclass
class Outcome:
    """Of one policy on one trace. `copied` pages were written again to be kept."""

    accesses: int = 0
    hits: int = 0
    copied: int = 0

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.accesses


def run_engine(trace: Iterator[PageId]) -> Outcome:
    engine = Engine(SlabGeometry.plan(PAGE, SLAB_BYTES))
    for segment in range(engine.geometry.segment_count):
        engine.settle(segment, SegmentState.FRESH, 0, 0)
    engine.recovered()
    outcome = Outcome()
    for page in trace:
        outcome.accesses += 1
        found = engine.start_read(page)
        if found is not None:
            engine.end_read(found)
            outcome.hits += 1
            continue
        space = _reserve(engine, page, outcome)
        if space is not None:
            engine.commit(space)
    return outcome


def _reserve(engine: Engine, page: PageId, outcome: Outcome) -> Reservation | None:
    length = PAGE.page_length(page.version.size, page.index)
    evict = True
    while True:
        match engine.reserve(page, length, evict=evict):
            case Reservation() as space:
                return space
            case Refused():
                return None
            case Prepare() as todo:
                engine.prepared(todo)
            case Evict():
                evict = _evict(engine, outcome)


def _evict(engine: Engine, outcome: Outcome) -> bool:
    victim = engine.next_victim()
    if victim is None:
        return False
    for found in victim.moves:
        copy = engine.start_move(found)
        if copy is not None:
            engine.commit_move(copy)
            outcome.copied += 1
    todo, _ = engine.evicted(victim)
    engine.prepared(todo)
    return True


def run_by_page(trace: Iterator[PageId], *, refresh: bool) -> Outcome:
    """LRU, or FIFO without `refresh`, over as many full pages as the slab holds."""
    room = SlabGeometry.plan(PAGE, SLAB_BYTES).full_records()
    kept: OrderedDict[tuple[bytes, int], None] = OrderedDict()
    outcome = Outcome()
    for page in trace:
        outcome.accesses += 1
        if page.key in kept:
            outcome.hits += 1
            if refresh:
                kept.move_to_end(page.key)
            continue
        if len(kept) == room:
            kept.popitem(last=False)
        kept[page.key] = None
    return outcome


TRACES = {"zipf over models": zipf, "scans between hot models": scans, "nightly roll-out": rollouts}


def measure() -> dict[str, dict[str, Outcome]]:
    """Every policy on every trace."""
    return {
        name: {
            "racerd": run_engine(trace()),
            "LRU": run_by_page(trace(), refresh=True),
            "FIFO": run_by_page(trace(), refresh=False),
        }
        for name, trace in TRACES.items()
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()  # type: ignore[union-attr]
    print(f"{'trace':28} {'racerd':>8} {'LRU':>8} {'FIFO':>8} {'copied per miss':>16}")
    for name, outcomes in measure().items():
        ours = outcomes["racerd"]
        copied = ours.copied / (ours.accesses - ours.hits)
        ratios = " ".join(f"{outcomes[policy].hit_ratio:8.3f}" for policy in outcomes)
        print(f"{name:28} {ratios} {copied:16.3f}")


if __name__ == "__main__":
    main()

"""The fault campaign: the store on a disk that fails in every way, against a dictionary.

    python -m tools.torture faults --seed 1 --rounds 200

It drives the model of tests/sim/test_store_model.py, whose operations and promises it borrows, over
the faulty twin of a disk. Each round is a life of some hundred operations from a seed of its own:
odd seeds know no fault but crashes and power losses, so that nothing that was kept may be lost;
even ones meet every fault that a disk can have, in spells, and nothing wrong may be read. One
thread, no clock: `--seed` of a round that failed with `--rounds 1` replays it exactly.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

from racerd.store.geometry import BLOCK_BYTES
from tests.sim.faulty_device import SECTOR, Faults
from tests.sim.test_store_model import CAPACITY, PAGES, VERSIONS, FaultyStore, HealthyStore
from tests.support.store_pages import GEOMETRY, read_back

_STEPS = 250
_SPELLS: dict[str, tuple[float | bool, ...]] = {
    "read_errors": (0.02, 0.1, 0.5, 1.0),
    "write_errors": (0.02, 0.1, 0.5, 1.0),
    "short_reads": (0.1, 0.5),
    "lost_writes": (0.1, 0.5),
    "misdirected_writes": (0.1, 0.5),
    "rot": (0.05, 0.3),
    "latency_seconds": (0.05, 0.5),
    "no_space": (True,),
    "read_only": (True,),
    "vanished": (True,),
}
_WRONG = ("has wrong bytes", "another seal came back")
_LOST = ("was kept and is not found",)


class Round:
    """One life of a model, from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.faulty = seed % 2 == 0
        self.chance = random.Random(seed)
        self.model: HealthyStore = FaultyStore() if self.faulty else HealthyStore()
        self.step = 0
        self._spell_ends = 0

    def run(self) -> None:
        """Raises AssertionError where a promise is broken."""
        self.model.begin(self.seed)
        try:
            for self.step in range(_STEPS):
                if self.faulty:
                    self._weather()
                self._operation()()
                self.model.every_page_reads_right_or_misses()
                self.model.accounting_equals_the_index()
        finally:
            self.model.teardown()

    def _weather(self) -> None:
        """Fair for a while, then a spell of one or two kinds of faults."""
        faults = self.model.faults
        if self.step < self._spell_ends:
            return
        self._spell_ends = self.step + self.chance.randint(5, 20)
        if faults.any:
            faults.__dict__.update(Faults().__dict__)
            self.model.forget_promises()
            self.model.tick(40.0)
            return
        for kind in self.chance.sample(sorted(_SPELLS), self.chance.randint(1, 2)):
            setattr(faults, kind, self.chance.choice(_SPELLS[kind]))
        self.model.lied = True  # Not every spell lies; to think so only forgets promises.
        self.model.forget_promises()

    def _operation(self) -> Callable[[], object]:
        model, chance = self.model, self.chance
        page, of = chance.choice(PAGES), chance.choice(VERSIONS)
        calls: list[tuple[int, Callable[[], object]]] = [
            (60, lambda: model.write(page)),
            (12, lambda: model.read(page)),
            (8, lambda: self._read_some_frames()),
            (4, lambda: model.drop(page)),
            (5, lambda: model.evict_object(of)),
            (1, lambda: model.evict_prefix(chance.choice([b"", b"hot/", b"cold/c"]))),
            (6, lambda: model.checkpoint()),
            (8, lambda: model.tick(chance.choice([0.0, 1.0, 40.0]))),
            (4, lambda: model.scrub_a_record(1)),
            (2, lambda: model.restart()),
            (5, lambda: model.kill()),
            (2, lambda: model.lose_power()),
            (3, lambda: self._crash_within_a_write()),
        ]
        if self.faulty:
            calls += [(1, self._rot_a_bit), (1, self._punch_a_hole)]
        weights = [weight for weight, _ in calls]
        return chance.choices([call for _, call in calls], weights)[0]

    def _read_some_frames(self) -> None:
        page = self.chance.choice(PAGES)
        count = GEOMETRY.frame_count(GEOMETRY.page_length(page.version.size, page.index))
        first = self.chance.randrange(count)
        read_back(self.model.store, page, first=first, count=self.chance.randint(1, count - first))
        self.model.after()

    def _crash_within_a_write(self) -> None:
        if self.model.faults.any:
            return
        self.model.crash_during(
            page=self.chance.choice(PAGES),
            sectors=self.chance.randrange(400),
            power=self.chance.random() < 0.5,
            of=self.chance.choice(VERSIONS),
            what=self.chance.choice(["write", "evict", "checkpoint", "close"]),
        )

    def _rot_a_bit(self) -> None:
        assert isinstance(self.model, FaultyStore)
        self.model.rot_a_bit(self.chance.randrange(CAPACITY))

    def _punch_a_hole(self) -> None:
        assert isinstance(self.model, FaultyStore)
        first = self.chance.randrange(CAPACITY // SECTOR)
        self.model.punch_a_hole(first, self.chance.randint(1, 4 * BLOCK_BYTES // SECTOR))


class Tally:
    """What all rounds met together. `failures` are told with the seed that replays them."""

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.looked: Counter[str] = Counter()
        self.failures: list[str] = []
        self.operations = 0

    def play(self, seed: int) -> None:
        """Runs a round and adds what it met."""
        played = Round(seed)
        try:
            played.run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
            self.failures.append(f"{_kind(error)} at step {played.step} of seed {seed}: {error!r}")
        self.operations += played.step + 1
        self.injected += played.model.medium.injected
        self.looked += played.model.looked

    def count(self, kind: str) -> int:
        return sum(failure.startswith(kind) for failure in self.failures)


def _kind(error: Exception) -> str:
    text = str(error)
    if any(words in text for words in _WRONG):
        return "wrong read"
    return "lost page" if any(words in text for words in _LOST) else "broken promise"


def run_campaign(first: int, rounds: int) -> Tally:
    """Plays the rounds `first`, `first + 1`, …"""
    tally = Tally()
    for seed in range(first, first + rounds):
        tally.play(seed)
    return tally


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=None, help="random, and printed, by default")
    parser.add_argument("--rounds", type=int, default=200, help="seeds, from --seed on (200)")


def run(arguments: argparse.Namespace) -> int:
    first = arguments.seed
    if first is None:
        first = random.SystemRandom().randrange(10**6)
    print(f"seed {first}", flush=True)
    started = time.monotonic()
    tally = run_campaign(first, arguments.rounds)
    print(table(tally, time.monotonic() - started))
    for failure in tally.failures:
        print(f"BROKEN: {failure}", file=sys.stderr)
    return 1 if tally.failures else 0


def table(tally: Tally, seconds: float) -> str:
    """The figures in Markdown."""
    rows = {f"injected: {kind}": count for kind, count in sorted(tally.injected.items())}
    rows |= {
        "faults injected": tally.injected.total(),
        "operations": tally.operations,
        "pages read right": tally.looked["right"],
        "pages missed": tally.looked["missed"],
        "looked for because they had been kept": tally.looked["promised"],
        "wrong reads": tally.count("wrong read"),
        "kept pages lost without a fault": tally.count("lost page"),
        "other promises broken": tally.count("broken promise"),
        "seconds": round(seconds),
    }
    return "\n".join(["| | |", "| --- | ---: |", *(f"| {k} | {v:,} |" for k, v in rows.items())])

"""The ladder: the rungs that may have a page, asked in order, each with the reason why it did not.

Layer: read; loop thread only. A **rung** is an object behind a protocol, so that peers can stand
between the disks and the origin without anything here changing. Memory is not a rung of a flight:
a reader looks there before it joins one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from racerd.errors import SourceError
from racerd.read.flight import Flight
from racerd.read.sources import Source
from racerd.telemetry import Metrics


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a rung does not serve a page. `reason` is a metric's label: a word from a closed set."""

    reason: str
    text: str


class Rung(Protocol):
    """One place where pages come from."""

    @property
    def name(self) -> str:
        """One word: a metric's label, and what clients see."""

    async def acquire(self, flight: Flight) -> Source | Miss:
        """Returns the flight's page, or why not.

        The last rung raises instead of missing. Cancelling returns at once: what a thread still
        works on becomes a stray.
        """


class RungsExhausted(SourceError):
    """Every rung of a ladder missed."""


class Ladder:
    """The rungs of one cache, fastest first."""

    def __init__(self, rungs: Sequence[Rung], metrics: Metrics) -> None:
        self.rungs = tuple(rungs)
        self._metrics = metrics

    async def acquire(self, flight: Flight) -> Source:
        """Asks the rungs in order and notes in `flight.why` why each that passed did not serve.

        Raises what a rung raised; RungsExhausted if every rung missed.
        """
        for rung in self.rungs:
            flight.rung = rung.name
            if rung.name in flight.key.skip:
                flight.why[rung.name] = "its copy was of no use to this read"
                continue
            caught = await rung.acquire(flight)
            if not isinstance(caught, Miss):
                return caught
            flight.why[rung.name] = caught.text
            if caught.reason != "absent":
                self._metrics.fallbacks.labels(rung.name, caught.reason).inc()
        raise RungsExhausted("origin_unavailable", f"nobody has {flight.page.text}: {flight.why}")

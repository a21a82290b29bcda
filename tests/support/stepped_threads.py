"""Worker threads without threads: a test decides which piece starts, and when it ends.

The same jobs, queue and hand-over as the real ones; only the workers are replaced by `start_one`
and `end_one`, so that any interleaving of pieces with the loop can be brought about and replayed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from racerd.runtime.threads import Job, WorkerThreads


class SteppedThreads(WorkerThreads):
    """At most `count` pieces are running. What runs in `end_one` runs on the loop's thread."""

    def __init__(self, name: str, count: int, chance: random.Random) -> None:
        super().__init__(name, count)
        self._chance = chance
        self._entries: list[Job[Any]] = []
        self._running: list[tuple[Job[Any], Callable[[], Any], bool]] = []

    async def __aenter__(self) -> SteppedThreads:
        count, self.count = self.count, 0
        await super().__aenter__()
        self.count = count
        return self

    def _enqueue(self, job: Job[Any], entries: int) -> None:
        self._entries += [job] * entries

    @property
    def busy(self) -> bool:
        return bool(self._entries or self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    def step(self) -> bool:
        """Starts or ends a piece, by chance; False if there is nothing to do."""
        steps = []
        if self._entries and len(self._running) < self.count:
            steps.append(self.start_one)
        if self._running:
            steps.append(self.end_one)
        if not steps:
            return False
        self._chance.choice(steps)()
        return True

    def start_one(self) -> None:
        """A worker takes an entry: any of them, as the order of the workers is not known."""
        job = self._entries.pop(self._chance.randrange(len(self._entries)))
        piece, more = job._take()
        if piece is not None:
            self._running.append((job, piece, more))

    def end_one(self) -> None:
        """The work of a piece that runs is done now, all at once, and the piece ends."""
        job, piece, more = self._running.pop(self._chance.randrange(len(self._running)))
        over = job._run_piece(piece)
        if over:
            self._finish(job)
        elif more:
            self._enqueue(job, 1)

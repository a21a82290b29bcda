"""Chunks read in the background, a bounded number ahead of the consumer.

Layer: loading, driver of a plan. Each of `in_flight` threads has a landing of its own, reads the
next chunk into it and copies the pieces to their tensors; the consumer takes chunks in order. At
most `in_flight` chunks are between having been started and having been taken, so that memory beyond
the consumer's own tensors is bounded by `in_flight` landings and as much again in tensors that are
ready early, whatever the size of files and tensors.

Ends: `close` cancels reads that are still running and returns when every thread has ended and given
its landing up; only then may the source be closed. The consumer's side uses nothing but queues,
which an interrupt cannot leave locked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from racer.errors import Closed
from racer.loading.frameworks import Building, Framework
from racer.loading.plan import Chunk, LoadPlan
from racer.models.source import Source, SourceLanding
from racer.workers import NOTICE_SECONDS, WorkerGroup


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Where a chunk's bytes came from, how many each, and how long copying them on took."""

    rungs: Mapping[str, int]
    copy_seconds: float


class Pipeline:
    """`start` it inside the `try` whose `finally` closes it."""

    def __init__(
        self, plan: LoadPlan, source: Source, framework: Framework, *, in_flight: int
    ) -> None:
        self._plan = plan
        self._source = source
        self._framework = framework
        self._landing_bytes = max((chunk.nbytes for chunk in plan.chunks), default=0)
        self._count = min(in_flight, len(plan.chunks))
        self._todo: SimpleQueue[int | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[int, ChunkDone] | BaseException] = SimpleQueue()
        # The consumer's own: chunks that came before they were asked for, and the next to start.
        self._early: dict[int, ChunkDone] = {}
        self._following = 0
        # The workers' own, but for finished tensors.
        self._building: dict[int, Building] = {}
        self._building_lock = threading.Lock()
        self._workers = WorkerGroup("racer-load", self._count, self._work, self._stop)

    # --- the consumer's side ----------------------------------------------------------------

    def start(self) -> None:
        for _ in range(self._count):
            self._let_one_start()
        self._workers.start()

    def _let_one_start(self) -> None:
        if self._following < len(self._plan.chunks):
            self._todo.put(self._following)
            self._following += 1

    def wait_for(self, index: int) -> ChunkDone:
        """Waits until chunk `index` and its tensors are there; chunks are asked for in order.

        Raises what ended a read, be it of this chunk or of a later one.
        """
        while index not in self._early:
            try:
                result = self._results.get(timeout=NOTICE_SECONDS)
            except Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            self._early[result[0]] = result[1]
        return self._early.pop(index)

    def take_tensor(self, number: int) -> Any:
        """A finished tensor, which is the caller's alone from now on."""
        return self._building.pop(number).tensor

    def release(self) -> None:
        """The consumer has taken all tensors of another chunk: a later one may be started."""
        self._let_one_start()

    def close(self) -> None:
        """Ends every thread. An interrupt meanwhile is raised once that is done."""
        try:
            self._workers.end()
        finally:
            self._building.clear()

    # --- the threads' side ------------------------------------------------------------------

    def _stop(self) -> None:
        for _ in range(self._count):
            self._todo.put(None)
        self._source.cancel()
        failure = self._workers.failure
        # Whoever still waits must not wait for ever.
        self._results.put(failure or Closed("the load was closed"))

    def _work(self) -> None:
        landing: SourceLanding | None = None
        try:
            if self._landing_bytes:
                landing = self._source.landing(self._landing_bytes)
            while (index := self._todo.get()) is not None:
                done = self._read(self._plan.chunks[index], landing)
                self._results.put((index, done))
        except BaseException as error:  # noqa: BLE001 - raised again where the consumer waits
            self._results.put(error)
        finally:
            if landing is not None:
                landing.close()

    def _read(self, chunk: Chunk, landing: SourceLanding | None) -> ChunkDone:
        if landing is None or not chunk.nbytes:
            self._build_empty(chunk)
            return ChunkDone({}, 0.0)
        try:
            rungs = landing.read(chunk.file, chunk.start, chunk.stop)
        except Exception as error:
            error.add_note(f"while bytes {chunk.start}-{chunk.stop} of {chunk.file.url} were read")
            raise
        began = time.perf_counter()
        self._build_empty(chunk)
        for piece in chunk.pieces:
            # Released at once: an exception's traceback must not keep the landing from closing.
            with landing.view[piece.chunk_offset : piece.chunk_offset + piece.length] as source:
                self._of(piece.tensor).fill(piece.tensor_offset, source)
        return ChunkDone(rungs, time.perf_counter() - began)

    def _build_empty(self, chunk: Chunk) -> None:
        """Makes the tensors that are delivered with this chunk and have no bytes."""
        for number in chunk.completes:
            if not self._plan.tensors[number].info.nbytes:
                self._of(number)

    def _of(self, number: int) -> Building:
        """The tensor `number`, allocated by whichever thread has a piece of it first."""
        with self._building_lock:
            building = self._building.get(number)
            if building is None:
                building = self._framework.build(self._plan.tensors[number].info)
                self._building[number] = building
            return building

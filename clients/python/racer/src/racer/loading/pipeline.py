"""Chunks read in the background, a bounded number ahead of the consumer.

Layer: loading, driver of a plan. Each of `in_flight` threads has a landing of its own, reads the
next chunk into it and copies the pieces to their tensors; the consumer waits for chunks in order.
At most `in_flight` chunks are between having been started and having been taken, so that memory
beyond the consumer's own tensors is bounded by `in_flight` landings and as much again in tensors
that are ready early, whatever the size of files and tensors.

Ends: `close` cancels reads that are still running and returns when every thread has ended and given
its landing up; only then may the source be closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from racer.loading.frameworks import Building, Framework
from racer.loading.plan import Chunk, LoadPlan
from racer.models.source import Source, SourceLanding
from racer.workers import WorkerGroup


class Pipeline:
    """`start` it inside the `try` whose `finally` closes it."""

    def __init__(
        self, plan: LoadPlan, source: Source, framework: Framework, *, in_flight: int
    ) -> None:
        self._plan = plan
        self._source = source
        self._framework = framework
        self._in_flight = in_flight
        self._landing_bytes = max((chunk.nbytes for chunk in plan.chunks), default=0)
        self._changed = threading.Condition()
        self._started = 0  # Chunks that a thread took on.
        self._taken = 0  # Chunks that the consumer is done with.
        self._ready: dict[int, Mapping[str, int]] = {}
        self._building: dict[int, Building] = {}
        self._error: BaseException | None = None
        self._stopping = False
        self.copy_seconds = 0.0
        self._workers = WorkerGroup("racer-load", min(in_flight, len(plan.chunks)), self._work)

    def start(self) -> None:
        self._workers.start()

    # --- the consumer's side ----------------------------------------------------------------

    def wait_for(self, index: int) -> Mapping[str, int]:
        """Waits until chunk `index` and its tensors are there; chunks are asked for in order.

        Returns how many bytes came from where. Raises what ended a read, of this chunk or not.
        """
        with self._changed:
            while index not in self._ready:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            return self._ready.pop(index)

    def take_tensor(self, number: int) -> Any:
        """The finished tensor, which is the caller's alone from now on."""
        with self._changed:
            return self._building.pop(number).tensor

    def release(self, index: int) -> None:
        """The consumer has taken all tensors of chunk `index`: another may be started."""
        with self._changed:
            self._taken = index + 1
            self._changed.notify_all()

    def close(self) -> None:
        """Ends every thread. An interrupt meanwhile is raised once that is done (see workers)."""
        self._workers.end(self._stop)
        self._building.clear()
        self._error = None  # Its traceback leads back here.

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            unfinished = self._taken < len(self._plan.chunks)
            self._changed.notify_all()
        if unfinished:
            self._source.cancel()

    # --- the threads' side ------------------------------------------------------------------

    def _work(self) -> None:
        landing: SourceLanding | None = None
        try:
            if self._landing_bytes:
                landing = self._source.landing(self._landing_bytes)
            while (index := self._next()) is not None:
                rungs = self._read(self._plan.chunks[index], landing)
                with self._changed:
                    self._ready[index] = rungs
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised again where the consumer waits
            self._fail(error)
        finally:
            if landing is not None:
                landing.close()

    def _next(self) -> int | None:
        with self._changed:
            while not self._stopping and self._error is None:
                if self._started == len(self._plan.chunks):
                    return None
                if self._started < self._taken + self._in_flight:
                    self._started += 1
                    return self._started - 1
                self._changed.wait()
            return None

    def _read(self, chunk: Chunk, landing: SourceLanding | None) -> Mapping[str, int]:
        if landing is None or not chunk.nbytes:
            self._build_all(chunk)
            return {}
        try:
            rungs = landing.read(chunk.file, chunk.start, chunk.stop)
        except Exception as error:
            error.add_note(f"while bytes {chunk.start}-{chunk.stop} of {chunk.file.url} were read")
            raise
        began = time.perf_counter()
        self._build_all(chunk)
        for piece in chunk.pieces:
            # Released at once: an exception's traceback must not keep the landing from closing.
            with landing.view[piece.chunk_offset : piece.chunk_offset + piece.length] as source:
                self._of(piece.tensor).fill(piece.tensor_offset, source)
        with self._changed:
            self.copy_seconds += time.perf_counter() - began
        return rungs

    def _build_all(self, chunk: Chunk) -> None:
        """Makes the tensors that end here without a byte of their own."""
        for number in chunk.completes:
            if not self._plan.tensors[number].info.nbytes:
                self._of(number)

    def _of(self, number: int) -> Building:
        """The tensor `number`, allocated by whichever thread has a piece of it first."""
        with self._changed:
            building = self._building.get(number)
            if building is None:
                building = self._framework.build(self._plan.tensors[number].info)
                self._building[number] = building
            return building

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

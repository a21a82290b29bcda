"""Chunks read in the background, a bounded number ahead of the consumer.

Layer: loading, driver of a plan. Each of `in_flight` threads takes the next chunk and puts its
pieces into their tensors; the consumer takes chunks in order. Where the source shares memory, that
is mapped, and nothing is copied but small tensors; where it does not, or not now, the thread reads
into a landing of its own and copies. What others share already the consumer maps itself. What that
is was told when the headers were read, or is asked for by the first thread, some pieces at a time:
the other threads are not started before there is something to wait for.

At most `in_flight` chunks are between having been started and having been taken, so that memory
beyond the consumer's own tensors is bounded by `in_flight` landings and as much again in tensors
that are ready early, whatever the size of files and tensors.

Ends: `close` cancels reads that are still running and returns when every thread has ended and given
its landing up; only then may the source be closed. The consumer's side uses nothing but queues and
plain locks, which an interrupt cannot leave locked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from racer.errors import Closed
from racer.loading.frameworks import Building, Framework, FrameworkLanding
from racer.loading.plan import Chunk, LoadPlan
from racer.loading.sharing import Sharing, add_rungs, share_of
from racer.models.source import Source, SourceShare
from racer.workers import NOTICE_SECONDS, WorkerGroup

# So much of a file is mapped together: each mapping costs time, and stays, with the pages of its
# tensors that were written to, until the last of them is dropped.
_RUN_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class _Survey:
    """What the first thread is told: to find out who shares the chunk of that number."""

    index: int


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Where a chunk's bytes came from, how many each, and how long putting them on took."""

    rungs: Mapping[str, int]
    copy_seconds: float


class Pipeline:
    """Ask it for chunks inside the `try` whose `finally` closes it. It ends with `owner`, too."""

    def __init__(
        self,
        plan: LoadPlan,
        source: Source,
        framework: Framework,
        *,
        in_flight: int,
        sharing: Sharing,
        owner: object,
    ) -> None:
        self._plan = plan
        self._source = source
        self._framework = framework
        self._sharing = sharing
        self._landing_bytes = max((chunk.nbytes for chunk in plan.chunks), default=0)
        self._count = min(in_flight, len(plan.chunks))
        self._todo: SimpleQueue[int | _Survey | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[int, ChunkDone] | _Survey | BaseException] = SimpleQueue()
        # The consumer's own: chunks that came before they were asked for, and the next to start.
        self._early: dict[int, ChunkDone] = {}
        self._following = 0
        self._mapped = 0  # Chunks before this one have all their memory at hand.
        self._threads_started = False
        self._taken_over = False  # By the threads: the consumer only waits from then on.
        # The workers' own, but for finished tensors.
        self._building: dict[int, Building] = {}
        self._building_lock = threading.Lock()
        # What is there already is mapped faster by one thread than by several, which would wait
        # for each other at the interpreter's lock and the kernel's for the address space.
        self._workers = WorkerGroup(
            "racer-load", self._count, self._work, self._stop, one_first=True, owner=owner
        )

    # --- the consumer's side ----------------------------------------------------------------

    def _start_at(self, index: int) -> None:
        """Leaves chunk `index` and all that follow to the threads."""
        self._taken_over = True
        self._following = index
        for _ in range(self._count):
            self._let_one_start()
        self._start_first()

    def _start_first(self) -> None:
        if not self._threads_started:
            self._threads_started = True
            self._workers.start()

    def _let_one_start(self) -> None:
        if self._following < len(self._plan.chunks):
            self._todo.put(self._following)
            self._following += 1

    def wait_for(self, index: int) -> ChunkDone:
        """Waits until chunk `index` and its tensors are there; chunks are asked for in order.

        Raises what ended a read, be it of this chunk or of a later one.
        """
        if not self._taken_over and not self._map_at_hand(index):
            self._start_at(index)
        while index not in self._early:
            self._wait()
        return self._early.pop(index)

    def _wait(self) -> _Survey | None:
        """Waits for a chunk, or for a survey, which is returned. Raises what ended a thread."""
        while True:
            try:
                result = self._results.get(timeout=NOTICE_SECONDS)
            except Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            if isinstance(result, _Survey):
                return result
            self._early[result[0]] = result[1]
            return None

    def take_tensor(self, number: int) -> Any:
        """A finished tensor, which is the caller's alone from now on."""
        return self._building.pop(number).tensor

    def release(self) -> None:
        """The consumer has taken all tensors of another chunk: a later one may be started."""
        if self._taken_over:
            self._let_one_start()

    def _map_at_hand(self, index: int) -> bool:
        """Maps chunk `index`, if others share all its memory already. Only while the threads have
        not taken over."""
        if index >= self._mapped:
            run = self._run_at_hand(index)
            if not run:
                self._survey(index)
                run = self._run_at_hand(index)
            if not run:
                return False
            with self._shares_of(run) as shares:
                self._map_whole([piece.tensor for chunk in run for piece in chunk.pieces], shares)
            self._mapped = index + len(run)
        self._early[index] = self._read(self._plan.chunks[index], None)
        return True

    def _survey(self, index: int) -> None:
        """Has the first thread ask: an interrupt here loses nothing that an answer brings."""
        self._start_first()
        self._todo.put(_Survey(index))
        while self._wait() is None:
            pass

    def _run_at_hand(self, index: int) -> list[Chunk]:
        """Chunks of one file, each beginning where the one before it ends."""
        run: list[Chunk] = []
        for chunk in self._plan.chunks[index:]:
            if run and (
                chunk.file is not run[0].file
                or chunk.start != run[-1].stop
                or chunk.stop - run[0].start > _RUN_BYTES
            ):
                break
            if not self._sharing.is_at_hand(chunk):
                break
            run.append(chunk)
        return run

    @contextmanager
    def _shares_of(self, run: Sequence[Chunk]) -> Iterator[list[SourceShare]]:
        """All shared memory of a run that is at hand."""
        file, at = run[0].file, run[0].start
        held: list[tuple[int, SourceShare]] = []
        try:
            while at < run[-1].stop:
                share = self._sharing.there(file, at)
                assert share is not None, "what is at hand is there"
                held.append((at, share))
                at = share.stop
            yield [share for _, share in held]
        finally:
            for at, share in held:
                self._sharing.put_back(file, at, share)

    def close(self) -> None:
        """Ends every thread. An interrupt meanwhile is raised once that is done."""
        try:
            self._workers.end()
        finally:
            self._building.clear()
            self._sharing.close()

    # --- the threads' side ------------------------------------------------------------------

    def _stop(self) -> None:
        for _ in range(self._count):
            self._todo.put(None)
        self._source.cancel()
        failure = self._workers.failure
        # Whoever still waits must not wait for ever.
        self._results.put(failure or Closed("the load was closed"))

    def _work(self) -> None:
        landing = _LandingWhenNeeded(self._framework, self._source, self._landing_bytes)
        try:
            while (todo := self._todo.get()) is not None:
                if isinstance(todo, _Survey):
                    self._ask_about(self._plan.chunks[todo.index])
                    self._results.put(todo)
                else:
                    self._results.put((todo, self._read(self._plan.chunks[todo], landing)))
        except BaseException as error:  # noqa: BLE001 - raised again where the consumer waits
            self._results.put(error)
        finally:
            landing.close()

    def _ask_about(self, chunk: Chunk) -> None:
        try:
            self._sharing.survey(chunk)
        except Exception as error:
            error.add_note(
                f"while it was asked who shares bytes {chunk.start}-{chunk.stop} of"
                f" {chunk.file.url}"
            )
            raise

    def _read(self, chunk: Chunk, landing: _LandingWhenNeeded | None) -> ChunkDone:
        """`landing` is None where all of the chunk is at hand."""
        self._build_empty(chunk)
        rungs: dict[str, int] = {}
        seconds = 0.0
        at = chunk.start
        try:
            while at < chunk.stop:
                share = self._sharing.there(chunk.file, at)
                if share is None:
                    assert landing is not None, "what is at hand is there"
                    self._workers.start_rest()  # There is something to wait for.
                    share = self._sharing.piece(chunk.file, at)
                try:
                    if share is not None:
                        stop, spent = self._take(chunk, at, share, rungs)
                    else:
                        assert landing is not None, "what is at hand is there"
                        stop = min(chunk.stop, self._sharing.end_of_piece(at))
                        spent = self._copy(chunk, at, stop, landing.get(), rungs)
                finally:
                    if share is not None:
                        self._sharing.put_back(chunk.file, at, share)
                self._sharing.through(chunk, at, stop)
                at = stop
                seconds += spent
        except Exception as error:
            error.add_note(f"while bytes {at}-{chunk.stop} of {chunk.file.url} were read")
            raise
        return ChunkDone(rungs, seconds)

    def _take(
        self, chunk: Chunk, start: int, share: SourceShare, rungs: dict[str, int]
    ) -> tuple[int, float]:
        """Puts what `share` has of the chunk from `start` on into the tensors; where that ends."""
        began = time.perf_counter()
        stop = min(chunk.stop, share.stop)
        parts = [
            (piece, begin)
            for piece in chunk.pieces
            if (begin := chunk.start + piece.chunk_offset) < stop and start < begin + piece.length
        ]
        self._map_whole([piece.tensor for piece, _ in parts], [share])
        for piece, begin in parts:
            self._of(piece.tensor).take(share, max(begin, start), min(begin + piece.length, stop))
        add_rungs(rungs, share_of(share.rungs, stop - start))
        return stop, time.perf_counter() - began

    def _map_whole(self, numbers: Iterable[int], shares: Sequence[SourceShare]) -> None:
        """Makes those of the tensors that `shares`, which adjoin each other, hold from their first
        byte to their last, and that are to be mapped: together. The others, and those begun before,
        are left as they are."""
        if not shares:
            return  # All the tensors are empty.
        start, stop = shares[0].start, shares[-1].stop
        with self._building_lock:
            wanted = {
                number: info
                for number in numbers
                if number not in self._building
                and start <= (info := self._plan.tensors[number].info).start
                and info.stop <= stop
                and self._framework.maps(info)
            }
            if len(wanted) > 1:
                made = self._framework.map_whole(list(wanted.values()), shares)
                self._building.update(zip(wanted, made or (), strict=made is not None))

    def _copy(
        self, chunk: Chunk, start: int, stop: int, landing: FrameworkLanding, rungs: dict[str, int]
    ) -> float:
        """Reads [start, stop) of the chunk's file and copies it to the tensors: how long that
        took."""
        add_rungs(rungs, landing.read(chunk.file, start, stop))
        began = time.perf_counter()
        for piece in chunk.pieces:
            place = chunk.start + piece.chunk_offset
            begin, end = max(place, start), min(place + piece.length, stop)
            if begin >= end:
                continue
            building = self._of(piece.tensor)
            with _part(landing.view, begin - start, end - start) as source:
                building.fill(piece.tensor_offset + begin - place, source)
        return time.perf_counter() - began

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
                building = self._framework.build(
                    self._plan.tensors[number].info, mapped=self._sharing.began
                )
                self._building[number] = building
            return building


class _LandingWhenNeeded:
    """A thread's landing, made for the first chunk that is not shared."""

    def __init__(self, framework: Framework, source: Source, nbytes: int) -> None:
        self._framework = framework
        self._source = source
        self._nbytes = nbytes
        self._landing: FrameworkLanding | None = None

    def get(self) -> FrameworkLanding:
        if self._landing is None:
            self._landing = self._framework.landing(self._source, self._nbytes)
        return self._landing

    def close(self) -> None:
        if self._landing is not None:
            self._landing.close()


@contextmanager
def _part(view: Any, begin: int, end: int) -> Iterator[Any]:
    """A part of a landing's view. One of host memory is released at once: an exception's traceback
    must not keep the landing from closing."""
    part = view[begin:end]
    try:
        yield part
    finally:
        if isinstance(part, memoryview):
            part.release()

"""Named, bounded worker threads with a cheap way back to the event loop.

Layer: bottom. A job is one call or several **pieces** that may run side by side; it crosses to the
workers through a `SimpleQueue` (about 3 us) and back in a batch: finished jobs gather in a deque,
and only the first of a batch wakes the loop. `run_in_executor` costs 50 to 130 us a call on the
same machine, which is why it is not used.

Workers serve jobs round robin, one piece of each in turn, so that a page of many pieces does not
hold up the page behind it. **Urgent** jobs (small reads that somebody waits for) come before the
others, but of every few turns one goes to the rest: neither kind starves.

A queued piece that is cancelled never runs. A running one cannot be interrupted: whoever cancels
waits for it, because its buffers are in use until it returns (R7). A job that is over holds on to
no buffer: its calls are dropped, and the traceback of its error is kept as text.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import traceback as tracebacks
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

# Of so many turns of one worker, one goes to a job that is not urgent (if there is one).
_TURNS_PER_BULK_TURN = 4


class Job(Generic[T]):
    """Pieces of work on worker threads that end together. `future` belongs to the loop thread.

    The result is what `then` returned, which runs on the worker that ended last; without `then`
    it is what the last piece to end returned. The first error wins; pieces that have not started
    by then never run.
    """

    __slots__ = ("_pieces", "_pool", "_running", "_then", "_untaken", "cancelled", "error",
                 "future", "result", "started_at", "submitted_at", "urgent")  # fmt: skip

    def __init__(
        self,
        pool: WorkerThreads,
        pieces: Sequence[Callable[[], Any]],
        then: Callable[[], T] | None,
        urgent: bool,
    ) -> None:
        self.future: asyncio.Future[T] = pool.loop.create_future()
        self.urgent = urgent
        self.cancelled = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self.submitted_at = time.perf_counter()
        self.started_at: float | None = None
        self._pool = pool
        self._pieces = pieces
        self._then = then
        self._untaken = len(pieces)
        self._running = 0

    @property
    def started(self) -> bool:
        return self.started_at is not None

    @property
    def queued_seconds(self) -> float:
        """How long the job waited for its first worker; up to now while it still waits."""
        started_at = time.perf_counter() if self.started_at is None else self.started_at
        return started_at - self.submitted_at

    def cancel(self) -> None:
        """Drops the pieces that have not started. Loop thread only.

        `future` is cancelled at once if nothing runs, else when what runs has ended: as soon as
        it is done, no worker touches the job's buffers.
        """
        with self._pool.lock:
            # Else the worker that ends last hands the job over, or has done so already.
            over = self._running == 0 and self._untaken > 0
            self.cancelled = True
            self._untaken = 0
        if over:
            self._drop_calls()
            self.future.cancel()
            self._pool._one_is_over()

    def _drop_calls(self) -> None:
        self._pieces = ()
        self._then = None

    def _take(self) -> tuple[Callable[[], Any] | None, bool]:
        """The next piece, if one is left, and whether more are. Any worker."""
        with self._pool.lock:
            if self._untaken == 0:
                return None, False
            if self.started_at is None:
                self.started_at = time.perf_counter()
            piece = self._pieces[-self._untaken]
            self._untaken -= 1
            self._running += 1
            return piece, self._untaken > 0

    def _run_piece(self, piece: Callable[[], Any]) -> bool:
        """Runs `piece` and returns whether the whole job ended with it."""
        result: Any = None
        failure: BaseException | None = None
        try:
            result = piece()
        except BaseException as error:  # noqa: BLE001  handed to the awaiting task
            failure = error
            without_frames(error)
        with self._pool.lock:
            self._running -= 1
            if failure is not None:
                self.error = self.error or failure
                self._untaken = 0
            if self._running or self._untaken:
                return False
        self._end(result)
        return True

    def _end(self, result: Any) -> None:
        if self._then is not None and self.error is None and not self.cancelled:
            try:
                result = self._then()
            except BaseException as error:  # noqa: BLE001  handed to the awaiting task
                self.error = error
                without_frames(error)
        self.result = result
        self._drop_calls()

    def _deliver(self) -> None:
        """Resolves `future`. Loop thread."""
        result, self.result = self.result, None
        if self.future.done():
            return
        if self.cancelled:
            self.future.cancel()
        elif isinstance(self.error, StopIteration):  # A future refuses to carry it.
            error = RuntimeError("a call on a worker thread raised StopIteration")
            error.__cause__ = self.error
            self.future.set_exception(error)
        elif self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(result)  # type: ignore[arg-type]  # None where T is


class WorkerThreads:
    """`count` daemon threads named `name-0` … that run blocking calls for one event loop.

    Use as an async context manager; leaving it waits for queued jobs to finish.

    `spread` keeps the threads off each other's cores: the process's cores are dealt out among
    them. Threads that hand the interpreter lock to each other are pulled onto one core by the
    scheduler's wake-up placement and stay there; on two cores that halved decryption.
    """

    def __init__(self, name: str, count: int, *, spread: bool = False) -> None:
        self.name = name
        self.count = count
        self.spread = spread
        self.lock = threading.Lock()
        self.unfinished = 0
        self._turns: SimpleQueue[bool] = SimpleQueue()  # One item for each entry of both deques.
        self._urgent: deque[Job[Any]] = deque()
        self._bulk: deque[Job[Any]] = deque()
        self._done: deque[Job[Any]] = deque()
        self._wake_pending = False
        self._idle: asyncio.Future[None] | None = None
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that this pool works for. Raises RuntimeError while it is not running."""
        if self._loop is None:
            raise RuntimeError(f"{self.name} threads are not running")
        return self._loop

    async def __aenter__(self) -> WorkerThreads:
        self._loop = asyncio.get_running_loop()
        self._threads = [
            threading.Thread(target=self._start, args=(i,), name=f"{self.name}-{i}", daemon=True)
            for i in range(self.count)
        ]
        started = 0
        try:
            for thread in self._threads:
                thread.start()
                started += 1
        except BaseException:
            del self._threads[started:]
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ending = asyncio.ensure_future(self._end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await settled(ending)  # No thread may go on after this, whoever is in a hurry.
            raise

    async def _end(self) -> None:
        loop = self.loop
        await self.drained()
        self._loop = None
        for _ in self._threads:
            self._turns.put(False)
        await loop.run_in_executor(None, self._join)
        self._threads = []

    async def drained(self) -> None:
        """Waits until no job is queued or running."""
        while self.unfinished:
            if self._idle is None:
                self._idle = self.loop.create_future()
            await asyncio.wait([self._idle])

    def _one_is_over(self) -> None:
        self.unfinished -= 1
        if self.unfinished == 0 and self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def submit(self, call: Callable[[], T], *, urgent: bool = False) -> Job[T]:
        """Queues `call`. Loop thread only. `job.future` resolves with its result or error."""
        return self.submit_pieces((call,), urgent=urgent)

    def submit_pieces(
        self,
        pieces: Sequence[Callable[[], Any]],
        *,
        then: Callable[[], T] | None = None,
        urgent: bool = False,
    ) -> Job[T]:
        """Queues `pieces` (at least one) to run side by side. Loop thread only.

        `then` runs after all of them, on a worker, unless one failed or the job was cancelled.
        """
        if not pieces:
            raise ValueError("a job needs at least one piece")
        job: Job[T] = Job(self, pieces, then, urgent)
        self.unfinished += 1
        self._enqueue(job, min(len(pieces), self.count))
        return job

    async def run(self, call: Callable[[], T]) -> T:
        """Runs `call` on a worker and returns its result.

        Cancelling: a job still queued is dropped; a running one is waited for first, so that on
        return its buffers are free. Its result is then lost: give `call` no resource to return
        that it does not also release.
        """
        return await finished(self.submit(call))

    def _enqueue(self, job: Job[Any], entries: int) -> None:
        """Lets up to `entries` workers take pieces of `job`."""
        waiting = self._urgent if job.urgent else self._bulk
        for _ in range(entries):
            waiting.append(job)
            self._turns.put(True)

    def _next_job(self, turn: int) -> Job[Any]:
        """Takes one entry; the caller has taken the item of `_turns` that stands for it."""
        first, second = self._urgent, self._bulk
        if turn % _TURNS_PER_BULK_TURN == 0:
            first, second = second, first
        while True:
            try:
                return first.popleft()
            except IndexError:
                # The other one holds the entry; another worker may still swap which is empty.
                first, second = second, first

    def _start(self, number: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if self.spread and 1 < self.count <= len(cores):
            try:
                os.sched_setaffinity(threading.get_native_id(), cores[number :: self.count])
            except OSError as error:
                # A thread that is not where it should be is slower; one that died would be missed.
                _LOG.warning("%s-%d may run on any core: %s", self.name, number, error)
        self._work()

    def _work(self) -> None:
        turn = 0
        while self._turns.get():
            turn += 1
            self._serve(self._next_job(turn))

    def _serve(self, job: Job[Any]) -> None:
        """Runs one piece of `job`. In a frame of its own: an idle worker refers to no job."""
        piece, more = job._take()
        if piece is None:
            return  # All taken by others, or cancelled.
        over = job._run_piece(piece)
        del piece  # Whoever waits for the job may then close what the piece refers to.
        if over:
            self._finish(job)
        elif more:
            self._enqueue(job, 1)

    def _finish(self, job: Job[Any]) -> None:
        with self.lock:
            self._done.append(job)
            wake = not self._wake_pending
            self._wake_pending = True
            loop = self._loop
        if wake and loop is not None:
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self.lock:
            self._wake_pending = False
            done, self._done = self._done, deque()
        for job in done:
            job._deliver()
            self._one_is_over()


async def finished(job: Job[T]) -> T:
    """Waits for `job` and returns its result or raises its error.

    Cancelling cancels the job, and returns only when no worker touches its buffers any more.
    """
    try:
        return await asyncio.shield(job.future)
    except asyncio.CancelledError:
        job.cancel()
        await settled(job.future)
        raise


async def settled(future: asyncio.Future[Any]) -> None:
    """Waits until `future` is done, through any number of cancellations, and raises nothing.

    For what must not be left half done; the caller that was cancelled raises afterwards.
    """
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # Marks it as seen.


def without_frames(error: BaseException) -> None:
    """Turns the tracebacks of `error`, and of what led to it, into text that travels as a note.

    Frames hold locals, and closures the functions of frames: views of callers' buffers, and a
    mapping with a view left cannot be closed. The text has no lines of source: every fetch that a
    client gives up ends in an error, and reading them costs a millisecond of the interpreter lock.
    """
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        current = rest.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        frames = [
            f'  File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}'
            for frame, line in tracebacks.walk_tb(current.__traceback__)
        ]
        current.__traceback__ = None
        if frames:
            name = threading.current_thread().name
            current.add_note(f"raised on thread {name}:\n" + "\n".join(frames))
        rest += [current.__cause__, current.__context__]

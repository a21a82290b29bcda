"""Named, bounded worker threads with a cheap way back to the event loop.

Layer: bottom. A job goes to a worker through a `SimpleQueue` (about 3 us) and its result comes
back in a batch: finished jobs gather in a deque, and only the first of a batch wakes the loop.
`run_in_executor` costs 50 to 130 us a job on the same machine, which is why it is not used.

A queued job that is cancelled never runs. A running one cannot be interrupted: awaiting callers
that are cancelled keep waiting for it, because its buffers are in use until it returns (R7).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """One call on a worker thread. `future` belongs to the loop thread."""

    __slots__ = ("call", "cancelled", "error", "future", "result", "started")

    def __init__(self, call: Callable[[], T], future: asyncio.Future[T]) -> None:
        self.call = call
        self.future = future
        self.cancelled = False
        self.started = False
        self.result: T | None = None
        self.error: BaseException | None = None


class WorkerThreads:
    """`count` daemon threads named `name-0` … that run blocking calls for one event loop.

    Use as an async context manager; leaving it waits for queued jobs to finish.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self._queue: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._done: deque[Job[Any]] = deque()
        self._lock = threading.Lock()
        self._wake_pending = False
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.unfinished = 0

    async def __aenter__(self) -> WorkerThreads:
        self._loop = asyncio.get_running_loop()
        self._threads = [
            threading.Thread(target=self._work, name=f"{self.name}-{i}", daemon=True)
            for i in range(self.count)
        ]
        for thread in self._threads:
            thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for _ in self._threads:
            self._queue.put(None)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._join)
        self._deliver()
        self._threads = []

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def submit(self, call: Callable[[], T]) -> Job[T]:
        """Queues `call`. Loop thread only. `job.future` resolves with its result or error."""
        if self._loop is None:
            raise RuntimeError(f"{self.name} threads are not running")
        job: Job[T] = Job(call, self._loop.create_future())
        self.unfinished += 1
        self._queue.put(job)
        return job

    async def run(self, call: Callable[[], T]) -> T:
        """Runs `call` on a worker and returns its result.

        Cancelling: a job still queued is dropped; a running one is waited for first, so that on
        return its buffers are free. Its result is then lost: give `call` no resource to return
        that it does not also release.
        """
        job = self.submit(call)
        try:
            return await asyncio.shield(job.future)
        except asyncio.CancelledError:
            job.cancelled = True  # A worker that has not started it yet will skip it.
            await settled(job.future)
            raise

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if not job.cancelled:
                job.started = True
                try:
                    job.result = job.call()
                except BaseException as error:  # noqa: BLE001  handed to the awaiting task
                    job.error = error
            self._finish(job)

    def _finish(self, job: Job[Any]) -> None:
        assert self._loop is not None
        with self._lock:
            self._done.append(job)
            wake = not self._wake_pending
            self._wake_pending = True
        if wake:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            self._wake_pending = False
            done, self._done = self._done, deque()
        for job in done:
            self.unfinished -= 1
            if job.future.done():
                continue
            if job.error is not None:
                job.future.set_exception(job.error)
            elif job.cancelled and not job.started:
                job.future.cancel()
            else:
                job.future.set_result(job.result)


async def settled(future: asyncio.Future[Any]) -> None:
    """Waits until `future` is done, through any number of cancellations, and raises nothing."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()

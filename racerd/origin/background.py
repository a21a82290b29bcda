"""An event loop on a thread of its own, so that blocking callers can give up on what is running.

Layer: origin. obstore's blocking calls cannot be interrupted; its awaitable ones are dropped, and
their connection with them, the moment they are cancelled. Callers block on `run` with a deadline
and a cancel token; bulk bytes never pass through this loop, only handles to them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from racerd.origin.call import Call
from racerd.origin.failures import cancelled
from racerd.runtime.deadline import deadline_exceeded

T = TypeVar("T")


class BackgroundLoop:
    """Started by the first `run`, ended by `close`; thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, request: Callable[[], Awaitable[T]], call: Call) -> T:
        """Runs `request` on the loop, awaits what it returns, and returns the result.

        Raises what it raises, and `deadline_exceeded` or `origin_cancelled` as `call` says: the
        request is cancelled then and its connection dropped.
        """
        call.check()
        future = asyncio.run_coroutine_threadsafe(_awaited(request), self._started())

        def give_up() -> None:
            future.cancel()

        with call.cancel.on_cancel(give_up):
            try:
                return future.result(call.deadline.remaining_seconds())
            except concurrent.futures.CancelledError:
                raise cancelled(call.doing) from None
            except TimeoutError:
                if future.done() and not future.cancelled():
                    raise  # The request's own.
                future.cancel()
                raise deadline_exceeded(call.doing) from None

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop

    def close(self) -> None:
        """Cancels what runs and ends the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _awaited(request: Callable[[], Awaitable[T]]) -> T:
    return await request()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

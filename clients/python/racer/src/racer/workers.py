"""Threads that certainly end, whenever Ctrl-C comes.

Layer: bottom. An interrupt is raised in the main thread between almost any two steps: also behind
an `acquire` of a condition whose `with` has not begun, which leaves it locked for ever, and in the
middle of `Thread.start` or `join`. So the thread that uses a group never touches Python's
conditions: it starts one raw thread, which is a single uninterruptible step, and waits for a plain
lock. Everything else (starting, stopping and joining the workers) is done by a keeper thread, which
no interrupt can reach.
"""

from __future__ import annotations

import _thread
import threading
import weakref
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue

# A signal that arrives just before a wait begins does not end it: the interpreter looks for
# signals between steps and when a wait is woken. Waits are cut so that it looks.
NOTICE_SECONDS = 0.5


class _Word(Enum):
    """What the keeper is told."""

    STOP = "stop"
    RETURNED = "a worker has returned"
    MORE = "the rest is wanted"


class WorkerGroup:
    """`count` threads that run `work`; `stop` makes it return soon, and may be called early.

    With `one_first` there is one thread until `start_rest` is called, maybe by that one.
    `stop` runs in the keeper thread, at most once, and only where `end` asks before `work` has
    returned in every thread, where `owner` is gone before that, or where a thread could not be
    started: `failure` tells then. Neither `work` nor `stop` may keep the owner alive.
    """

    def __init__(
        self,
        name: str,
        count: int,
        work: Callable[[], None],
        stop: Callable[[], None],
        *,
        one_first: bool = False,
        owner: object | None = None,
    ) -> None:
        self._name = name
        self._count = count
        self._work = work
        self._stop = stop
        self._first = min(1, count) if one_first else count
        self._inbox: SimpleQueue[_Word | weakref.ref[object]] = SimpleQueue()
        # The owner's destructor ends the group, and an interrupt may hit it before it does. This
        # call has no step of Python's in it, so nothing can come between.
        self._owner = weakref.ref(owner, self._inbox.put) if owner is not None else None
        self._rest_asked = False
        self._asked = False
        self._ended = False
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self.failure: RuntimeError | None = None

    def start(self) -> None:
        """Returns at once. Raises RuntimeError where the system gives no thread at all."""
        self._asked = True  # Nothing between this line and the call can be interrupted.
        try:
            _thread.start_new_thread(self._start_keeper, ())
        except RuntimeError:
            self._asked = False
            raise

    def start_rest(self, count_max: int | None = None) -> None:
        """Asks for the other threads, `count_max` of all at most. Any thread; asked again it does
        nothing."""
        if not self._rest_asked:
            self._rest_asked = True
            if count_max is not None:
                self._count = min(self._count, count_max)
            self._inbox.put(_Word.MORE)

    def wait(self) -> None:
        """Waits until `work` has returned everywhere. An interrupt ends the wait, not the work."""
        while self._asked and not self._ended:
            self._gate.acquire(timeout=NOTICE_SECONDS)
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Stops the workers and waits for them; an interrupt is raised once they have ended."""
        interrupt: KeyboardInterrupt | None = None
        asked = False
        while self._asked and not self._ended:
            try:
                if not asked:
                    self._inbox.put(_Word.STOP)
                    asked = True
                self._gate.acquire(timeout=NOTICE_SECONDS)
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    # --- the keeper -------------------------------------------------------------------------

    def _start_keeper(self) -> None:
        # Daemons, all of them: a process that ends without closing must not wait for them.
        keeper = threading.Thread(target=self._keep, name=f"{self._name}-keeper", daemon=True)
        try:
            keeper.start()
        except RuntimeError as error:
            self.failure = error
            self._stop()
            self._finish()

    def _keep(self) -> None:
        threads: list[threading.Thread] = []
        try:
            self._start_up_to(self._first, threads)
            returned = 0
            while returned < len(threads):
                word = self._inbox.get()
                if word is _Word.STOP or isinstance(word, weakref.ref):
                    self._stop()
                    break
                if word is _Word.MORE:
                    self._start_up_to(self._count, threads)
                else:
                    returned += 1
        except RuntimeError as error:
            self.failure = error
            self._stop()
        for thread in threads:
            thread.join()
        self._finish()

    def _start_up_to(self, count: int, threads: list[threading.Thread]) -> None:
        for number in range(len(threads), count):
            thread = threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
            thread.start()
            threads.append(thread)

    def _finish(self) -> None:
        self._ended = True
        self._gate.release()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._inbox.put(_Word.RETURNED)

"""Shared memory that daemons know: registered once, written into by many reads.

Layer: on `memory` and `endpoint`; thread-safe. A registration lives as long as the connection that
made it, so each has a connection of its own that nothing else uses; after a restart of the daemon
it is made anew.

Invariant: memory is used again only after every read into it was answered. A read that was not
(the connection ended, the caller gave up) may still be running in the daemon, and could write
late: `give_up` marks the memory, and every later read into it is refused.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from racer import answers, requests
from racer.connection import Connection
from racer.deadline import Deadline
from racer.errors import Closed, Forked, MemoryLost, RacerError, TargetRefused
from racer.memory import SharedMemory
from racer.refusals import error_of
from racer.wire import Request

RELEASE_SECONDS = 2.0


class Memory(Protocol):
    """What can be a target: `fd` is what the daemon gets, for `target_bytes` bytes."""

    target_bytes: int

    @property
    def fd(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    @property
    def touched(self) -> bool:
        """Whether every page was written already."""

    def touch(self) -> None: ...

    def close(self) -> None: ...


class Registrar(Protocol):
    """One cache's daemon, as far as registering memory goes: an `Endpoint`, say."""

    def check_name(self, deadline: Deadline) -> None: ...

    def dedicated(self) -> Connection:
        """A connection for the registration alone."""


M = TypeVar("M", bound=Memory)


class TargetMemory(Generic[M]):
    """Memory, and whether it may be read into. What the blocking and the asyncio target share."""

    operation: ClassVar[str] = requests.HOST_READ

    def __init__(self, memory: M) -> None:
        self.memory = memory
        self._pid = os.getpid()
        self._lost = False

    @property
    def lost(self) -> bool:
        return self._lost

    def give_up(self) -> None:
        """A read into this memory will never be answered."""
        self._lost = True

    def can_be_touched(self, error: RacerError) -> bool:
        """Whether `error` may go away once `memory.touch` wrote every page."""
        return error.code == "target_sparse" and not self.memory.touched

    def check(self) -> None:
        """Raises where the daemon may not be asked to write here."""
        if os.getpid() != self._pid:
            raise Forked(
                "this memory was registered by the parent process",
                hint="make a client, landing or mapping of its own in the child",
            )
        if self._lost:
            raise MemoryLost(
                "a read into this memory was never answered, and the daemon may still write to it",
                hint="close it and make a new one",
            )
        if self.memory.closed:
            raise Closed("this memory was closed")


class Registered(TargetMemory[M]):
    """Owns `memory` and its registrations."""

    def __init__(self, memory: M) -> None:
        super().__init__(memory)
        self._lock = threading.Lock()
        self._registered: dict[object, tuple[Connection, str]] = {}
        _TARGETS.add(self)

    def known_id(self, endpoint: object) -> str | None:
        """The id under which `endpoint` still knows this memory."""
        self.check()
        known = self._registered.get(endpoint)
        if known is None:
            return None
        connection, target_id = known
        if connection.is_fresh():
            return target_id
        connection.close()
        del self._registered[endpoint]
        return None

    def id_for(self, endpoint: Registrar, deadline: Deadline) -> str:
        """The id under which `endpoint` knows this memory; registers it where it does not."""
        with self._lock:
            known = self.known_id(endpoint)
            if known is not None:
                return known
            endpoint.check_name(deadline)
            try:
                registered = self._register(endpoint, deadline)
            except TargetRefused as error:
                if not self.can_be_touched(error):
                    raise
                self.memory.touch()
                registered = self._register(endpoint, deadline)
            self._registered[endpoint] = registered
            return registered[1]

    def _register(self, endpoint: Registrar, deadline: Deadline) -> tuple[Connection, str]:
        connection = endpoint.dedicated()
        try:
            request = self.register_request()
            answer = connection.exchange(request, deadline, [self.memory.fd])
            if answer.head.status >= 400:
                raise error_of(answer.head, answer.body, about="registering memory")
            return connection, answers.read_target_id(answer.body, self.memory.target_bytes)
        except BaseException:
            connection.close()
            raise

    def register_request(self) -> Request:
        return requests.register_request()

    def forget(self, endpoint: object, target_id: str) -> None:
        """The daemon does not know `target_id` (any more)."""
        with self._lock:
            known = self._registered.get(endpoint)
            if known is not None and known[1] == target_id:
                del self._registered[endpoint]
                known[0].close()

    def release(self) -> bool:
        """Has the daemons let go of the memory, which stays; returns whether some knew it, and all
        of them said so.

        A daemon that does not answer in time lets go when it sees the connection end.
        """
        with self._lock:
            registered, self._registered = self._registered, {}
        said = [_release(connection, target_id) for connection, target_id in registered.values()]
        return bool(said) and all(said)

    def close(self) -> None:
        """`release`, then gives the memory up; done twice it does nothing."""
        self.release()
        self.memory.close()

    def _after_fork_in_child(self) -> None:
        registered, self._registered = self._registered, {}
        self._lock = threading.Lock()
        for connection, _ in registered.values():
            connection.close()


class Target(Registered[SharedMemory]):
    """Shared memory and its registrations."""


def _release(connection: Connection, target_id: str) -> bool:
    try:
        if not connection.is_fresh():
            return False
        deadline = Deadline.after(RELEASE_SECONDS)
        answer = connection.exchange(requests.release_request(target_id), deadline)
        return answer.head.status < 400
    except RacerError:
        return False  # The end of the connection releases the target as well.
    finally:
        connection.close()


_TARGETS: weakref.WeakSet[Registered[Any]] = weakref.WeakSet()


def _forget_registrations() -> None:
    for target in list(_TARGETS):
        target._after_fork_in_child()


os.register_at_fork(after_in_child=_forget_registrations)

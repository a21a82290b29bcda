"""Connections to one socket, shared by threads and never by processes.

Layer: on `connection`; thread-safe. At most `connections_max` at a time; who asks for more waits,
up to its deadline. A connection that comes back in the middle of an exchange is closed.
A forked child closes its copies at once (the parent's stay as they are) and starts with none.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from racer.connection import Connection
from racer.deadline import Deadline
from racer.errors import Closed
from racer.lent import Lent
from racer.socket_path import SocketPlace
from racer.turns import Turns


class ConnectionPool:
    """`take` and `give_back`, or `lease` for one exchange."""

    def __init__(self, place: SocketPlace, path: str, connections_max: int) -> None:
        self.path = path
        self._place = place
        self._connections_max = connections_max
        self._closed = False
        self._start_empty()
        _POOLS.add(self)

    def _start_empty(self) -> None:
        self._turns = Turns()
        self._idle: list[Connection] = []
        self._taken: Lent[Connection] = Lent()

    def take(self, deadline: Deadline) -> Connection:
        """Returns a connection that is the caller's alone until `give_back`.

        Raises DaemonUnavailable, Overloaded, Closed or DeadlineExceeded.
        """
        return self._turns.until(self._take_now, deadline)

    def take_nowait(self) -> Connection | None:
        """The same, but None where as many are out as may be."""
        with self._turns.lock:
            return self._take_now()

    def _take_now(self) -> Connection | None:
        """With the lock held: connecting to a Unix socket takes microseconds or fails."""
        if self._closed:
            raise Closed("the client was closed")
        if self._taken.reached(self._connections_max):
            return None
        while self._idle:
            # The last one used first: the others may grow old and be closed by the daemon.
            connection = self._idle.pop()
            if connection.is_fresh():
                break
            connection.close()
        else:
            connection = Connection(self._place, self.path)
        self._taken.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Ends what `take` began. Closes the connection unless it is idle."""
        with self._turns.lock:
            if self._taken.remove(connection):
                self._turns.wake()
            if connection.idle and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()

    @contextmanager
    def lease(self, deadline: Deadline) -> Iterator[Connection]:
        connection = self.take(deadline)
        try:
            yield connection
        finally:
            self.give_back(connection)

    def dedicated(self) -> Connection:
        """A new connection that is not counted and is the caller's to close: one that holds a
        registered target, say, and so has to outlive single exchanges."""
        if self._closed:
            raise Closed("the client was closed")
        return Connection(self._place, self.path)

    def close(self) -> None:
        """Closes what is idle now, and the rest as it comes back. Who waits gets Closed."""
        with self._turns.lock:
            self._closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()
            self._turns.wake_all()

    def abort(self) -> None:
        """`close`, and the exchanges that are running in other threads end as lost, at once."""
        self.close()
        with self._turns.lock:
            for connection in self._taken:
                connection.shut_down()

    def _after_fork_in_child(self) -> None:
        # The lock may have been held by a thread that does not exist here: never take it.
        inherited = [*self._idle, *self._taken]
        self._start_empty()
        for connection in inherited:
            connection.close()


_POOLS: weakref.WeakSet[ConnectionPool] = weakref.WeakSet()


def _forget_connections() -> None:
    for pool in list(_POOLS):
        pool._after_fork_in_child()


os.register_at_fork(after_in_child=_forget_connections)

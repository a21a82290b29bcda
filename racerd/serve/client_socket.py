"""The client socket of one cache: listens, lets connections in, drains.

Layer: serve, loop thread. One Unix stream socket, one task per connection; no task outlives the
context. (Not a TaskGroup: a cache may be closed by another task than the one that opened it.)
Bounded: connections beyond the limit are told so and let go. A turn of the loop lets one new
connection in: those that are there are served between any two that come, however many come. While
those are busy, the doorkeeper bounds what newcomers take: they wait in the kernel's backlog and, in
turn by who they are, in the waiting room, where nothing is read of what they sent.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from racerd.errors import RacerError, RequestError, ResourceError, Retry
from racerd.gpu.node import GpuNode
from racerd.runtime.process import descriptors_max
from racerd.runtime.threads import WorkerThreads, settled
from racerd.serve.answer_room import AnswerRoom
from racerd.serve.connection import ClientConnection
from racerd.serve.doorkeeper import Doorkeeper
from racerd.serve.operations import Operations
from racerd.serve.peer import AccessPolicy, PeerCredentials, SocketModeDecides, peer_credentials
from racerd.serve.reader import Reader
from racerd.serve.responses import error_response
from racerd.serve.serve_metrics import ServeMetrics
from racerd.serve.settings import ClientSocketSettings
from racerd.serve.socket_file import SocketFile, file_identity
from racerd.serve.targets import TargetRegistry
from racerd.serve.waiting_room import WaitingRoom
from racerd.telemetry import Metrics

_LOG = logging.getLogger(__name__)

_ACCEPTED_PER_TURN = 16  # Of which one at most is served.
_TARGETS_SHARE = 8
_PAUSE_SECONDS = 0.5
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ClientSocket:
    """Serves one cache's clients, as an async context manager.

    `threads` check, map and free big targets; several caches may share them. The caches of one loop
    share its doorkeeper.
    """

    def __init__(
        self,
        reader: Reader,
        settings: ClientSocketSettings,
        *,
        metrics: Metrics,
        threads: WorkerThreads,
        policy: AccessPolicy | None = None,
        gpus: GpuNode | None = None,
        keeper: Doorkeeper | None = None,
    ) -> None:
        self.cache = reader.name
        self.state = "ready"
        self._settings = settings
        self._policy = policy or SocketModeDecides()
        self._metrics = ServeMetrics(metrics, self.cache)
        self._threads = threads
        self._targets = TargetRegistry(
            threads,
            metrics,
            per_holder_max=settings.targets_per_connection_max,
            # Each is a descriptor: clients of one cache must leave enough to the others, to
            # origins and to disks.
            targets_max=min(settings.targets_max, descriptors_max() // _TARGETS_SHARE),
            gpus=gpus,
        )
        self._operations = Operations(reader, self._targets, lambda: self.state, gpus)
        self._room = AnswerRoom(settings, self._metrics)
        self.keeper = keeper or Doorkeeper(metrics)
        self._waiting: WaitingRoom[tuple[socket.socket, PeerCredentials]] = WaitingRoom(
            settings.waiting_max
        )
        self._queued = False  # At the doorkeeper's.
        self._file = SocketFile(
            settings.run_dir, self.cache, settings.mode, settings.group, settings.backlog
        )
        self._identity = (0, 0)
        self._listening: socket.socket | None = None
        self._accepting = False
        self._paused: asyncio.TimerHandle | None = None
        self._connections: dict[ClientConnection, asyncio.Task[None]] = {}
        self._surplus = 0
        self._quiet = asyncio.Event()

    @property
    def path(self) -> Path:
        """Where clients connect."""
        return self._file.path

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    @property
    def waiting_count(self) -> int:
        """Connections that wait to be let in. What is in the kernel's backlog is not known."""
        return len(self._waiting)

    @property
    def connections(self) -> Iterable[ClientConnection]:
        """The connections that are open now."""
        return self._connections.keys()

    async def __aenter__(self) -> ClientSocket:
        """Publishes the socket. Raises ConfigError where it cannot be."""
        self._listening = self._file.publish()
        self._identity = file_identity(self.path)
        self._listen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops listening, cancels every connection and waits for them to let go."""
        try:
            self._close()
        finally:
            tasks = tuple(self._connections.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await settled(asyncio.gather(*tasks, return_exceptions=True))

    async def drain(self, seconds: float) -> int:
        """Takes no new connection or request, and waits up to `seconds` for those under way.

        Returns how many were still under way; leaving the context cancels them.
        """
        self.state = "draining"
        self._close()
        self._quiet.clear()
        for connection in tuple(self._connections):
            connection.drain(self._notice_quiet)
        self._notice_quiet()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        return self._busy_count()

    def _busy_count(self) -> int:
        return sum(connection.busy for connection in self._connections)

    def _notice_quiet(self) -> None:
        if self._busy_count() == 0:
            self._quiet.set()

    # Listening.

    def _listen_again(self) -> None:
        self._paused = None
        if not self._queued:
            self._listen()

    def _listen(self) -> None:
        if self._listening is not None and not self._accepting:
            asyncio.get_running_loop().add_reader(self._listening.fileno(), self._on_acceptable)
            self._accepting = True

    def _stop_listening(self) -> None:
        if self._listening is not None and self._accepting:
            asyncio.get_running_loop().remove_reader(self._listening.fileno())
            self._accepting = False

    def _close(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
        self._stop_listening()
        self.keeper.forget(self._turn)
        while (waiting := self._waiting.take()) is not None:
            waiting[0].close()
        self._metrics.waiting.set(0)
        listening, self._listening = self._listening, None
        if listening is not None:
            self._file.withdraw(listening, self._identity)

    def _on_acceptable(self) -> None:
        if not self.keeper.offer(self._turn):
            self._queue("door shut")

    def _queue(self, reason: str) -> None:
        """Newcomers wait until the doorkeeper calls. Meanwhile the backlog is the kernel's."""
        self._queued = True
        self._stop_listening()
        self._metrics.delayed(reason)

    def _turn(self) -> None:
        """Takes some off the backlog and lets one in, of a peer whose turn it is."""
        self._queued = False
        if self._paused is None:
            self._accept()
        self._let_next_in()
        self._metrics.waiting.set(len(self._waiting))
        if len(self._waiting):
            self.keeper.wait(self._turn)
            self._queue("others before")
        elif self._paused is None:
            self._listen()

    def _accept(self) -> None:
        assert self._listening is not None
        for _ in range(_ACCEPTED_PER_TURN):
            if self._waiting.full:
                return
            try:
                sock, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._pause(error)
                return
            peer = peer_credentials(sock)
            self._waiting.add(peer, (sock, peer))

    def _let_next_in(self) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            waiting = self._waiting.take()
            if waiting is None:
                return
            sock, peer = waiting
            if not _has_left(sock):
                self.keeper.entered()
                self._let_in(sock, peer)
                return
            # Closed as it is: the kernel drops what was sent. Memory that came with it is freed,
            # too, which takes time.
            self._metrics.connection_refused("left")
            self._threads.submit(sock.close)

    def _pause(self, error: OSError) -> None:
        """Out of descriptors or memory: the listening socket would stay ready and spin the loop."""
        if error.errno not in _OUT_OF_RESOURCES:
            raise error
        _LOG.warning(
            "cache %s accepts no connection for %g s: %s; raise the limit of open files",
            self.cache,
            _PAUSE_SECONDS,
            os.strerror(error.errno),
        )
        self._metrics.connection_refused("no descriptors")
        self._stop_listening()
        self._paused = asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._listen_again)

    # Connections.

    def _let_in(self, sock: socket.socket, peer: PeerCredentials) -> None:
        sock.setblocking(False)
        self._room.buffers.start(sock)
        refusal = self._refusal(peer)
        if refusal is not None and self._surplus >= self._settings.surplus_max:
            _cut(sock, refusal)
            return
        connection = ClientConnection(
            sock,
            peer,
            self._operations,
            self._targets,
            self._settings,
            self._metrics,
            self._room,
            self.keeper,
            cache=self.cache,
            refusal=refusal,
        )
        self._surplus += refusal is not None
        self._metrics.connections.inc()
        task = asyncio.get_running_loop().create_task(self._run(connection))
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._forget(connection, sock, refusal))

    def _refusal(self, peer: PeerCredentials) -> RacerError | None:
        """Why this connection is not served, if it is not."""
        if len(self._connections) - self._surplus >= self._settings.connections_max:
            self._metrics.connection_refused("too many")
            return ResourceError(
                "overloaded",
                f"{self._settings.connections_max} connections are open to this cache",
                hint="close connections that are not in use, or raise the limit",
                retry=Retry.SAME,
                retry_after_seconds=1.0,
            )
        try:
            self._policy.check(self.cache, peer)
        except RequestError as error:
            self._metrics.connection_refused("policy")
            return error
        return None

    async def _run(self, connection: ClientConnection) -> None:
        try:
            await connection.run()
        except Exception:  # noqa: BLE001  a defect costs one connection, not the daemon
            _LOG.exception("a connection to cache %s failed", self.cache)
            self._metrics.connection_refused("defect")

    def _forget(
        self, connection: ClientConnection, sock: socket.socket, refusal: RacerError | None
    ) -> None:
        sock.close()  # Closed already, unless the task was cancelled before its first step.
        del self._connections[connection]
        self._surplus -= refusal is not None
        self._metrics.connections.dec()
        self._notice_quiet()


def _has_left(sock: socket.socket) -> bool:
    """Whether the peer hung up before it was let in: whatever it asked for, it waits for no answer.

    Where connections come faster than they are served, those are most of them."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _cut(sock: socket.socket, refusal: RacerError) -> None:
    """Says why, if the peer listens at once, and closes."""
    response = error_response(refusal, head_only=False)
    assert isinstance(response.body, bytes)
    with sock, suppress(OSError):
        sock.send(response.head.serialise(close=True) + response.body)

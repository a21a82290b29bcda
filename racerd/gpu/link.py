"""One worker process and the socket to it.

Layer: gpu; the loop thread only; imports no CUDA. Requests carry numbers, and each waits for its
answer: with the worker's word, or with the end of its process, whatever comes first. A link is over
when `gone` is done; it is never used again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable

from racerd.errors import DeviceError, IntegrityError, RacerError, RequestError, Retry
from racerd.gpu.protocol import (
    MESSAGE_BYTES_MAX,
    Done,
    Failed,
    Fatal,
    Message,
    Notice,
    Ready,
    Stop,
    decode,
    encode,
)
from racerd.runtime.threads import settled
from racerd.units import MIB

_log = logging.getLogger(__name__)

STOP_SECONDS_MAX = 15.0


class WorkerLink:
    """One process and its socket. Made by `spawn`; over when `gone` is done."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.process = process
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._outgoing: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._waiting: dict[int, tuple[asyncio.Future[Done], float]] = {}
        self._requests = 0
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.gone: asyncio.Future[Fatal] = self._loop.create_future()
        self.on_notice: Callable[[Notice], None] = lambda notice: None
        self._fatal: Fatal | None = None
        self._ending: asyncio.Task[None] | None = None
        self.started = time.monotonic()
        self._loop.add_reader(connection.fileno(), self._readable)

    @classmethod
    def spawn(cls) -> WorkerLink:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                ours.setblocking(False)
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 * MIB)
                process = subprocess.Popen(
                    [sys.executable, "-m", "racerd.gpu.worker", "--socket", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        return cls(process, ours)

    @property
    def alive(self) -> bool:
        return self._ending is None

    @property
    def fatal(self) -> Fatal:
        """What the worker said it dies of; `SILENT` where it said nothing."""
        return self._fatal or SILENT

    # ---- sending ----

    def send(self, message: Message, *descriptors: int) -> None:
        """Queues a message. Descriptors stay the caller's and must stay open until it is sent."""
        # A copy of each, so that nobody's closing comes before the sending.
        copies = tuple(os.dup(descriptor) for descriptor in descriptors)
        self._outgoing.append((encode(message), copies))
        self._flush()

    def _flush(self) -> None:
        while self._outgoing and self.alive:
            datagram, descriptors = self._outgoing[0]
            try:
                socket.send_fds(self._socket, [datagram], list(descriptors))
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._flush)
                return
            except OSError:
                self.end()
                return
            self._outgoing.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        if self.alive:
            self._loop.remove_writer(self._socket.fileno())

    async def ask(self, make: Callable[[int], Message], *descriptors: int) -> None:
        """Sends a request and waits for its answer. Raises what `Failed` says.

        Cancelling: waits for the answer all the same, then raises CancelledError.
        """
        self._requests += 1
        number = self._requests
        message = make(number)
        future: asyncio.Future[Done] = self._loop.create_future()
        if not self.alive:
            raise lost(self.fatal)
        self._waiting[number] = (future, time.monotonic())
        try:
            self.send(message, *descriptors)
        except OSError as error:
            del self._waiting[number]  # Else it would look as if the worker owed an answer.
            raise DeviceError(
                "gpu_unavailable",
                f"a descriptor cannot be handed to the GPU's worker: {error.strerror}",
                native=error.errno or 0,
                hint="raise the limit of open files of racerd's service",
            ) from error
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            await settled(future)
            raise

    def oldest_wait_seconds(self) -> float:
        """How long the oldest request has been without an answer; 0 without any."""
        first = next(iter(self._waiting.values()), None)
        return time.monotonic() - first[1] if first else 0.0

    # ---- receiving ----

    def _readable(self) -> None:
        try:
            while self.alive:
                datagram = self._socket.recv(MESSAGE_BYTES_MAX)
                if not datagram:
                    self.end()
                    return
                self._take(decode(datagram))
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            _log.error("the GPU worker's socket broke: %s", error)
            self.end()

    def _take(self, message: Message) -> None:
        match message:
            case Done(request=0) | Failed(request=0):
                return  # Of a slab that was handed over: notices tell what became of it.
            case Done() | Failed():
                future, _ = self._waiting.pop(message.request, (None, 0.0))
                if future is None:
                    raise ValueError(f"an answer to no question: {message.request}")
                if isinstance(message, Done):
                    future.set_result(message)
                else:
                    future.set_exception(_error(message))
            case Notice():
                self.on_notice(message)
            case Ready():
                self.ready.set_result(message)
            case Fatal():
                self._fatal = message
            case _:
                raise ValueError(f"a daemon is not sent {type(message).__name__}")

    # ---- the end ----

    def end(self) -> None:
        """Kills the process unless it is going by itself; fails what waits once it is gone."""
        if self._ending is not None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._ending = asyncio.create_task(self._end(), name="gpu-worker-end")

    async def _end(self) -> None:
        self.process.kill()
        # Only the end of the process ends its DMA: until then buffers stay where they are.
        await wait_for_exit(self.process)
        self._socket.close()
        while self._outgoing:
            for descriptor in self._outgoing.popleft()[1]:
                os.close(descriptor)
        fatal = self.fatal
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            future.set_exception(lost(fatal))
            future.exception()  # Nobody may be listening any more.
        if not self.ready.done():
            self.ready.set_exception(lost(fatal))
            self.ready.exception()
        self.gone.set_result(fatal)

    async def stop(self) -> None:
        """Asks the process to finish, and ends it if it does not."""
        if self.alive:
            self.send(Stop())
            await asyncio.wait([self.gone], timeout=STOP_SECONDS_MAX)
            self.end()
        await self.gone


SILENT = Fatal(
    "gpu_worker_died", "the GPU's worker process died without a word", "see the daemon's log", 0
)


async def wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Waits for the process without blocking the loop, and reaps it."""
    if process.poll() is not None:
        return
    loop = asyncio.get_running_loop()
    descriptor = os.pidfd_open(process.pid)  # Only we reap it: the number is still its own.
    exited: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _resolve, exited)
    try:
        await exited
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def lost(fatal: Fatal) -> DeviceError:
    return DeviceError(fatal.code, fatal.message, native=fatal.native, hint=fatal.hint)


def _error(failed: Failed) -> RacerError:
    if failed.code.startswith("corrupt_"):
        return IntegrityError(failed.code, failed.message, hint=failed.hint, retry=Retry.ELSEWHERE)
    if failed.code.startswith("target_"):
        return RequestError(failed.code, failed.message, hint=failed.hint)
    return DeviceError(failed.code, failed.message, native=failed.native, hint=failed.hint)

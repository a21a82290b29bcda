"""One worker's life: messages in, answers out.

Layer: gpu worker. The main thread receives and dispatches; pages are answered by the pipeline's
threads. A lost device ends the process at once with `Fatal`: nothing that CUDA still says can be
believed then, and the driver frees everything with the process (F93).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from racerd.errors import DeviceError
from racerd.gpu import build
from racerd.gpu.protocol import (
    DESCRIPTORS_MAX,
    MESSAGE_BYTES_MAX,
    CloseSlab,
    Done,
    Failed,
    Fatal,
    ImportTarget,
    Message,
    OpenSlab,
    ReadPage,
    Ready,
    ReleaseTarget,
    Request,
    Start,
    Stop,
    decode,
    encode,
)
from racerd.gpu.worker.batch import problem_with
from racerd.gpu.worker.driver import CudaError, Device
from racerd.gpu.worker.kernels import Kernels
from racerd.gpu.worker.lane import Page
from racerd.gpu.worker.memory import ImportedTarget, SharedArena
from racerd.gpu.worker.opener import Opener, Sizes
from racerd.gpu.worker.readers import CuFileReaders

EXIT_LOST = 70
STOP_SECONDS_MAX = 10.0

_log = logging.getLogger(__name__)


class Session:
    """Serves one socket until `Stop` or its end."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._targets: dict[int, ImportedTarget] = {}
        self._releases: dict[int, int] = {}  # target number: the request that waits for it
        self._arena_slots = 0

    def run(self) -> None:
        message, descriptors = self._receive()
        if not isinstance(message, Start) or len(descriptors) != 1:
            raise ValueError("the first message must be Start with the arena's descriptor")
        with ExitStack() as undo:
            try:
                self._open(message, descriptors[0], undo)
            except DeviceError as error:
                self._send(Fatal(error.code, error.message, error.hint, error.native))
                raise
            try:
                self._serve()
            finally:
                # Whoever waits for us waits no longer than this.
                limit = threading.Timer(STOP_SECONDS_MAX, os._exit, (EXIT_LOST,))
                limit.daemon = True
                limit.start()

    # ---- messages ----

    def _receive(self) -> tuple[Message | None, list[int]]:
        datagram, descriptors, flags, _ = socket.recv_fds(
            self._socket, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
        )
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a message was cut")
        return (decode(datagram) if datagram else None), list(descriptors)

    def _send(self, message: Message) -> None:
        with self._send_lock:
            try:
                self._socket.sendall(encode(message))
            except OSError:
                # The daemon is gone; the receiving thread sees it too and ends the session.
                _log.info("nobody takes %s", type(message).__name__)

    def _die(self, error: BaseException) -> NoReturn:
        """Ends the process. On any thread; no clean-up could be trusted, and none is needed."""
        if isinstance(error, DeviceError):
            fatal = Fatal(error.code, error.message, error.hint, error.native)
        else:
            _log.error("a worker thread failed", exc_info=error)
            fatal = Fatal("gpu_worker_defect", repr(error), "report it with the log's trace", 0)
        self._send(fatal)
        sys.stderr.flush()
        os._exit(EXIT_LOST)

    # ---- opening ----

    def _open(self, start: Start, arena: int, undo: ExitStack) -> None:
        try:
            device = Device.open(start.gpu)
        except BaseException:
            os.close(arena)
            raise
        undo.callback(device.close)
        device.make_current()
        self._device = device
        memory = SharedArena(arena, start.arena_bytes)
        undo.callback(memory.close)
        self._arena_slots = start.arena_bytes // start.slot_bytes
        cache = build.KernelCache(Path(start.kernel_cache)) if start.kernel_cache else None
        image = build.load_module(device.architecture, cache)
        kernels = Kernels(image)
        undo.callback(kernels.close)
        self._frame_bytes = start.frame_bytes
        self._readers = self._make_readers(start, device)
        self._opener = Opener(
            device,
            kernels,
            memory,
            Sizes(start.frame_bytes, start.frames_per_page, start.slot_bytes, start.staging_bytes),
            idle_seconds=start.idle_seconds,
            die=self._die,
            cufile=self._readers,
        )
        undo.callback(self._close_targets)
        self._opener.start()
        undo.callback(self._opener.stop)
        if self._readers is not None:
            self._readers.start(self._opener)
            undo.callback(self._readers.stop)
        self._send(Ready(device.name, device.architecture, device.memory_bytes()))

    def _make_readers(self, start: Start, device: Device) -> CuFileReaders | None:
        if start.cufile == "off":
            return None
        return CuFileReaders(
            device,
            provider=start.cufile,
            threads=start.cufile_threads,
            compat_mode=start.compat_mode,
            notify=self._send,
            die=self._die,
            open_seconds_max=start.cufile_open_seconds_max,
        )

    def _close_targets(self) -> None:
        for target in self._targets.values():
            target.close()

    # ---- serving ----

    def _serve(self) -> None:
        while True:
            message, descriptors = self._receive()
            if message is None or isinstance(message, Stop):
                return
            try:
                self._dispatch(message, descriptors)
            except CudaError as error:
                if error.sticky:
                    self._die(error)
                self._fail(message, error)
            except DeviceError as error:
                self._fail(message, error)
            finally:
                for descriptor in descriptors:  # Whoever takes one over empties the list.
                    os.close(descriptor)

    def _fail(self, message: Message, error: DeviceError) -> None:
        assert isinstance(message, Request)
        self._send(Failed(message.request, error.code, error.message, error.hint, error.native))

    def _dispatch(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case ReadPage():
                self._read(message)
            case ImportTarget():
                target = ImportedTarget(self._device, descriptors.pop(), message.size)
                self._targets[message.target] = target
                self._send(Done(message.request))
            case ReleaseTarget():
                self._release(message)
            case OpenSlab():
                if self._readers is not None:
                    self._readers.open_slab(message.slab, descriptors.pop())
                self._send(Done(message.request))
            case CloseSlab():
                done = Done(message.request)
                if self._readers is None:
                    self._send(done)
                else:
                    self._readers.close_slab(message.slab, lambda: self._send(done))
            case _:
                raise ValueError(f"a worker is not sent {type(message).__name__}")

    def _read(self, read: ReadPage) -> None:
        target = self._targets.get(read.target)
        if target is None or target.closing:
            raise DeviceError("target_unknown", "no such target here", native=0)
        problem = problem_with(read, self._frame_bytes, target.size)
        if problem is None and any(not 0 <= s < self._arena_slots for s in read.slots):
            problem = "a slot outside the arena"
        if problem is None and read.slots and len(read.slots) != read.frame_count:
            problem = "as many slots as frames are needed"
        if problem is not None:
            raise DeviceError("gpu_request", f"impossible read: {problem}", native=0)
        with self._lock:
            target.in_use += 1
        page = Page(read, target, lambda answer: self._answered(read, target, answer))
        if read.slots:
            self._opener.submit(page)
        elif self._readers is not None:
            self._readers.submit(page)
        else:
            page.answer(Failed(read.request, "cufile_off", "cuFile is off by settings", "", 0))

    def _answered(self, read: ReadPage, target: ImportedTarget, answer: Done | Failed) -> None:
        """On a pipeline thread: nothing touches the page's part of the target any more."""
        with self._lock:
            target.in_use -= 1
            release = None if target.in_use else self._releases.pop(read.target, None)
        self._send(answer)
        if release is not None:
            target.close()
            self._send(Done(release))

    def _release(self, message: ReleaseTarget) -> None:
        target = self._targets.pop(message.target, None)
        if target is None:
            raise DeviceError("target_unknown", "no such target here", native=0)
        with self._lock:
            target.closing = True
            if target.in_use:
                self._releases[message.target] = message.request
                return
        target.close()
        self._send(Done(message.request))

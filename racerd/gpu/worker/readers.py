"""cuFile's reader threads, its driver and the slabs it reads.

Layer: gpu worker. `cufile-open` opens the driver, so that nothing waits for it (R15); reads that
come before it is open take the host path. `cufile-0` and the others, four by default, take a
staging slot, read a page's ciphertext into it and hand the page to the opener (R14). Whatever goes
wrong, the page is answered `Failed` with a `cufile_…` code, and the daemon takes the host path
(R10).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from racerd.gpu.protocol import Failed, Notice
from racerd.gpu.worker.cufile import (
    CuFileError,
    CuFileProvider,
    make_provider,
    reopen,
    why_not_to_open,
)
from racerd.gpu.worker.cufile_errors import SHORT, Meaning, Remedy, meaning
from racerd.gpu.worker.driver import Device
from racerd.gpu.worker.lane import Page
from racerd.gpu.worker.opener import Opener


@dataclass(eq=False, slots=True)
class Slab:
    """A slab as the store opened it, and per reader what cuFile needs of it."""

    descriptor: int
    files: dict[int, tuple[int, Any]] = field(default_factory=dict)  # by reader
    in_use: int = 0
    off: Meaning | None = None
    closed: Callable[[], None] | None = None  # set while closing


class CuFileReaders:
    """Use as: `start`, then anything from the session's thread, then `stop`."""

    def __init__(
        self,
        device: Device,
        *,
        provider: str,
        threads: int,
        compat_mode: bool,
        notify: Callable[[Notice], None],
        die: Callable[[BaseException], None],
        open_seconds_max: float,
    ) -> None:
        self._device = device
        self._provider_name = provider
        self._thread_count = threads
        self._compat_mode = compat_mode
        self._notify = notify
        self._die = die
        self._open_seconds_max = open_seconds_max
        self._lock = threading.Lock()
        self._provider: CuFileProvider | None = None  # set once the driver is open
        self._off: Meaning | None = None
        self._proved = False  # a read has succeeded
        self._slabs: dict[int, Slab] = {}
        self._memory: int | None = None  # address of the staging memory while it exists
        self._memory_bytes = 0
        self._registered = False
        self._opener: Opener | None = None
        self._pages: SimpleQueue[tuple[Page, Slab] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, opener: Opener) -> None:
        self._opener = opener
        self._threads = [
            threading.Thread(target=self._read_pages, args=(i,), name=f"cufile-{i}")
            for i in range(self._thread_count)
        ]
        for thread in self._threads:
            thread.start()
        # A driver that never comes back must not keep the process, hence daemon threads.
        threading.Thread(target=self._open_driver, name="cufile-open", daemon=True).start()

    def stop(self) -> None:
        """Waits for reads that run, then deregisters everything."""
        for _ in self._threads:
            self._pages.put(None)
        for thread in self._threads:
            thread.join()
        for slab in self._slabs.values():
            self._close_files(slab)
        if self._provider is not None:
            self._quietly("driver_close", self._provider.close)

    # ---- the driver ----

    def _open_driver(self) -> None:
        started = time.monotonic()
        if (reason := why_not_to_open()) is not None:
            self._turn_off(Meaning("no_proc_modules", Remedy.OFF, reason), 0.0)
            return
        opened = threading.Event()
        threading.Thread(
            target=self._time_out, args=(opened,), name="cufile-open-limit", daemon=True
        ).start()
        try:
            self._device.make_current()
            provider = make_provider(self._provider_name)
            provider.open(compat_mode=self._compat_mode)
        except CuFileError as error:
            opened.set()
            self._turn_off(_at_least_off(error.meaning), time.monotonic() - started)
            return
        except BaseException as error:  # noqa: BLE001
            opened.set()
            self._die(error)
            return
        opened.set()
        seconds = time.monotonic() - started
        with self._lock:
            if self._off is not None:  # It came back after its time was up.
                return
            self._provider = provider
            if self._memory is not None:
                self._register(self._memory, self._memory_bytes)
        self._notify(Notice("driver", -1, "on", "opened", self._provider_name, seconds))

    def _time_out(self, opened: threading.Event) -> None:
        if not opened.wait(self._open_seconds_max):
            text = f"the driver did not open within {self._open_seconds_max:g} s: see cufile.log"
            self._turn_off(Meaning("driver_open_timeout", Remedy.OFF, text), self._open_seconds_max)

    def _turn_off(self, why: Meaning, seconds: float) -> None:
        with self._lock:
            if self._off is not None:
                return
            self._off = why
        self._notify(Notice("driver", -1, "off", why.reason, why.text, seconds))

    def staging_made(self, address: int, size: int) -> None:
        """Staging memory exists: registered, so that reads go straight into it."""
        with self._lock:
            self._memory, self._memory_bytes = address, size
            if self._provider is not None and self._off is None:
                self._register(address, size)

    def staging_gone(self, address: int) -> None:
        with self._lock:
            provider = self._provider if self._registered else None
            self._memory, self._registered = None, False
        if provider is not None:
            self._quietly("buf_deregister", lambda: provider.deregister_memory(address))

    def _register(self, address: int, size: int) -> None:
        """Without registration cuFile copies through its own buffers: slower, still right."""
        assert self._provider is not None
        try:
            self._provider.register_memory(address, size)
            self._registered = True
        except CuFileError as error:
            why = error.meaning
            self._notify(Notice("driver", -1, "on", why.reason, why.text, 0.0))

    def _quietly(self, what: str, action: Callable[[], None]) -> None:
        """Runs a clean-up; a failure is told and otherwise changes nothing."""
        try:
            action()
        except CuFileError as error:
            why = error.meaning
            self._notify(Notice("driver", -1, "on", f"{what}_{why.reason}", str(error), 0.0))

    # ---- slabs: the session's thread ----

    def open_slab(self, number: int, descriptor: int) -> None:
        """Takes the descriptor over."""
        self._slabs[number] = Slab(descriptor)

    def close_slab(self, number: int, closed: Callable[[], None]) -> None:
        """Calls `closed` once the last read of the slab has ended and cuFile has let it go."""
        slab = self._slabs.pop(number, None)
        if slab is None:
            closed()
            return
        with self._lock:
            slab.closed = closed
            idle = slab.in_use == 0
        if idle:
            self._close_files(slab)
            closed()

    def _close_files(self, slab: Slab) -> None:
        while slab.files:
            _, (descriptor, handle) = slab.files.popitem()
            if self._provider is not None:
                deregister = partial(self._provider.deregister_file, handle)
                self._quietly("deregister", deregister)
            os.close(descriptor)
        os.close(slab.descriptor)

    def submit(self, page: Page) -> None:
        """Reads the page's ciphertext and passes it on, or answers that cuFile cannot."""
        slab = self._slabs.get(page.read.slab)
        with self._lock:
            why = self._why_not(slab)
            if why is None and slab is not None:
                slab.in_use += 1
        if why is not None or slab is None:
            _refuse(page, why or meaning(5018))
        else:
            self._pages.put((page, slab))

    def _why_not(self, slab: Slab | None) -> Meaning | None:
        if slab is None:
            return Meaning("slab_unknown", Remedy.HOST, "the slab was not opened here")
        if self._off is not None:
            return self._off
        if self._provider is None:
            return Meaning("driver_opening", Remedy.HOST, "the cuFile driver is still opening")
        return slab.off

    # ---- cufile-0 and the others ----

    def _read_pages(self, reader: int) -> None:
        try:
            self._device.make_current()
            while (job := self._pages.get()) is not None:
                page, slab = job
                self._read_page(reader, page, slab)
                self._let_go(slab)
        except BaseException as error:  # noqa: BLE001
            self._die(error)

    def _let_go(self, slab: Slab) -> None:
        with self._lock:
            slab.in_use -= 1
            closed = slab.closed if slab.in_use == 0 else None
        if closed is not None:
            self._close_files(slab)
            closed()

    def _read_page(self, reader: int, page: Page, slab: Slab) -> None:
        assert self._opener is not None
        staging = self._opener.take_staging()
        if staging is None:
            _refuse(page, Meaning("no_staging", Remedy.HOST, "lower gpu_staging_bytes"))
            return
        slot, address = staging
        why = self._read_into(reader, page, slab, address)
        if why is not None:
            self._opener.give_staging_back(slot)
            _refuse(page, why)
            return
        page.staging = slot
        self._opener.submit(page)

    def _read_into(self, reader: int, page: Page, slab: Slab, address: int) -> Meaning | None:
        """Reads the page's frames; returns None, or why the host path must be taken."""
        why: Meaning | None = None
        for _ in range(2):
            try:
                why = self._read_once(self._handle(reader, slab), page, address)
            except CuFileError as error:
                why = error.meaning
            except OSError as error:
                why = Meaning("not_direct", Remedy.SLAB_OFF, f"cannot be reopened: {error}")
            if why is None:
                with self._lock:
                    self._proved = True
                return None
            if why.remedy is not Remedy.RETRY:
                break
        assert why is not None
        self._learn_from(why, page, slab)
        return why

    def _read_once(self, handle: Any, page: Page, address: int) -> Meaning | None:
        assert self._provider is not None and self._opener is not None
        size = (page.read.frame_count - 1) * self._opener.frame_bytes + page.read.last_bytes
        # The record is padded to whole blocks, so a length that is not can be rounded up.
        wanted = -(-size // 4096) * 4096
        got = 0
        while got < size:
            part = self._provider.read(
                handle, address + got, wanted - got, page.read.slab_offset + got
            )
            if part == 0 or (part < size - got and part % 4096):
                return SHORT
            got += part
        return None

    def _handle(self, reader: int, slab: Slab) -> Any:
        file = slab.files.get(reader)
        if file is None:
            assert self._provider is not None
            descriptor = reopen(slab.descriptor)
            try:
                file = (descriptor, self._provider.register_file(descriptor))
            except BaseException:
                os.close(descriptor)
                raise
            slab.files[reader] = file
        return file[1]

    def _learn_from(self, why: Meaning, page: Page, slab: Slab) -> None:
        """Turns off what will not work the next time either, and says so once."""
        # The first read decides (R15): one that fails without being the slab's fault, or a torn
        # record's, will fail again.
        unproved = not self._proved and why is not SHORT
        if why.remedy is Remedy.OFF or (unproved and why.remedy is not Remedy.SLAB_OFF):
            self._turn_off(why, 0.0)
        elif why.remedy is Remedy.SLAB_OFF:
            with self._lock:
                known, slab.off = slab.off, why
            if known is None:
                self._notify(Notice("slab", page.read.slab, "off", why.reason, why.text, 0.0))


def _at_least_off(why: Meaning) -> Meaning:
    return Meaning(why.reason, Remedy.OFF, why.text)


def _refuse(page: Page, why: Meaning) -> None:
    page.answer(
        Failed(page.read.request, f"cufile_{why.reason}", "cuFile did not read it", why.text, 0)
    )

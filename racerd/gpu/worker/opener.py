"""The pipeline of a GPU: ciphertext in, verified plaintext in the target, one answer per page.

Layer: gpu worker. Two threads: `gpu-open` gathers pages that are at hand into a batch and queues
it on a lane's stream; `gpu-wait` waits for lanes in order, reads the verdicts and answers. Pages of
a batch may be of different records and targets.

Order, which is what R9 rests on: verdict words are zeroed, the kernels write them last, the copy
back and the event follow in the same stream; an answer is given only after the event was waited
for and every word of the page said OK. A staging slot and a lane are used again only after that
same event (F85), a target is let go only after its last page was answered.

Device memory: lanes and staging are made with the first read and given back after `idle_seconds`
without one. Staging never exceeds `staging_bytes`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from queue import SimpleQueue
from typing import Any, Protocol

from cuda.bindings import driver as cuda

from racerd.errors import DeviceError
from racerd.gpu import layout
from racerd.gpu.protocol import Done, Failed
from racerd.gpu.worker.batch import JobBlock, Place
from racerd.gpu.worker.driver import CudaError, Device, call
from racerd.gpu.worker.kernels import Kernels
from racerd.gpu.worker.lane import SECRET_BYTES, Lane, Page
from racerd.gpu.worker.memory import DeviceBuffer, SharedArena
from racerd.gpu.worker.verdicts import failed, judge

LANES = 3  # One copies, one computes, one is being filled or answered.


@dataclass(frozen=True, slots=True)
class Sizes:
    frame_bytes: int
    frames_per_page: int
    slot_bytes: int
    staging_bytes: int

    @property
    def page_pitch(self) -> int:
        """Bytes of a staging slot: a page as it lies in arena slots, one behind the other."""
        return self.frames_per_page * self.slot_bytes

    @property
    def staging_slots(self) -> int:
        return self.staging_bytes // self.page_pitch


class StagingObserver(Protocol):
    """Who wants to know where staging memory lies, to register it with cuFile."""

    def staging_made(self, address: int, size: int) -> None: ...

    def staging_gone(self, address: int) -> None: ...


class Opener:
    """Use as: `start`, then `submit` and `take_staging` from any thread, then `stop`."""

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        arena: SharedArena,
        sizes: Sizes,
        *,
        idle_seconds: float,
        die: Callable[[BaseException], None],
        cufile: StagingObserver | None,
    ) -> None:
        """`die` ends the process. `cufile` is told of staging memory, on `gpu-open`."""
        if sizes.staging_slots < 1:
            raise DeviceError(
                "gpu_staging_too_small",
                f"gpu_staging_bytes is {sizes.staging_bytes}, a page needs {sizes.page_pitch}",
                native=0,
                hint=f"set gpu_staging_bytes to at least {2 * sizes.page_pitch}",
            )
        self._device = device
        self._kernels = kernels
        self._arena = arena
        self._sizes = sizes
        self._idle_seconds = idle_seconds
        self._die = die
        self._cufile = cufile
        self._changed = threading.Condition()
        self._at_hand: deque[Page] = deque()  # ciphertext in the arena, or in staging already
        self._staging: DeviceBuffer | None = None
        self._free_staging: list[int] = []
        self._lanes: list[Lane] = []
        self._free_lanes: list[Lane] = []
        self._staging_waiters = 0
        self._refusals = 0
        self._stopping = False
        self._launched: SimpleQueue[Lane | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._guard, args=(body,), name=name)
            for name, body in (("gpu-open", self._open), ("gpu-wait", self._wait))
        ]

    @property
    def frame_bytes(self) -> int:
        return self._sizes.frame_bytes

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Answers everything that was submitted, then frees all device memory."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def submit(self, page: Page) -> None:
        with self._changed:
            self._at_hand.append(page)
            self._changed.notify_all()

    def take_staging(self) -> tuple[int, int] | None:
        """Waits for a staging slot; returns its number and address. For cuFile readers.

        Returns None where staging memory cannot be had, or while stopping.
        """
        with self._changed:
            self._staging_waiters += 1
            refusals = self._refusals
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._free_staging or self._stopping or self._refusals != refusals
            )
            self._staging_waiters -= 1
            self._changed.notify_all()
            if not self._free_staging:
                return None
            slot = self._free_staging.pop()
            return slot, self._address(slot)

    def give_staging_back(self, slot: int) -> None:
        with self._changed:
            self._free_staging.append(slot)
            self._changed.notify_all()

    def _address(self, slot: int) -> int:
        assert self._staging is not None
        return self._staging.address + slot * self._sizes.page_pitch

    # ---- gpu-open ----

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            self._device.make_current()
            body()
        except BaseException as error:  # noqa: BLE001  a pipeline without its thread serves nobody
            self._die(error)

    def _open(self) -> None:
        while (chosen := self._next_batch()) is not None:
            lane, block, pages = chosen
            lane.pages, lane.secret_bytes = pages, block.used_bytes
            try:
                self._launch(lane, block)
            except CudaError as error:
                self._abandon(lane, error)
                continue
            self._launched.put(lane)
        self._launched.put(None)
        self._threads[1].join()
        self._free_memory()

    def _next_batch(self) -> tuple[Lane, JobBlock, list[Page]] | None:
        """Waits for work, a lane and staging; returns None when all is done and it must stop."""
        with self._changed:
            while True:
                if self._at_hand or self._staging_waiters:
                    problem = self._make_memory()
                    if problem is not None:
                        self._refuse_all(problem)
                        continue
                if self._at_hand and self._free_lanes:
                    lane = self._free_lanes.pop()
                    block = JobBlock(
                        lane.block.view, lane.device_block.address, self._sizes.frame_bytes
                    )
                    if pages := self._take_pages(block):
                        return lane, block, pages
                    self._free_lanes.append(lane)
                if self._stopping and not self._at_hand:
                    return None
                if not self._changed.wait(self._idle_seconds) and self._idle():
                    self._free_memory()

    def _idle(self) -> bool:
        return (
            not self._at_hand
            and len(self._free_lanes) == len(self._lanes)
            and len(self._free_staging) == (self._sizes.staging_slots if self._staging else 0)
        )

    def _take_pages(self, block: JobBlock) -> list[Page]:
        """Pages for one batch: those with staging, and arena pages while staging lasts.

        Pages that cuFile has read come first: they hold staging, so waiting for staging in front
        of them could wait for ever.
        """
        taken: list[Page] = []
        rest: deque[Page] = deque()
        for page in sorted(self._at_hand, key=lambda page: page.staging is None):
            fits = not rest and block.has_room(page.read)
            if fits and page.staging is None and self._free_staging:
                page.staging = self._free_staging.pop()
            if not fits or page.staging is None:
                rest.append(page)
                continue
            block.add(page.read, self._place(page))
            taken.append(page)
        self._at_hand = rest
        return taken

    def _place(self, page: Page) -> Place:
        assert page.staging is not None
        pitch = self._sizes.slot_bytes if page.read.slots else self._sizes.frame_bytes
        return Place(self._address(page.staging), pitch, page.target.address + page.read.offset)

    def _launch(self, lane: Lane, block: JobBlock) -> None:
        """Queues the whole batch; nothing here waits for the device."""
        stream, frames = lane.stream, block.frames
        keys, tables = block.keys_address, lane.tables_address
        verdict_bytes = frames * layout.VERDICT_BYTES
        lane.verdicts.view[:verdict_bytes] = bytes(verdict_bytes)
        call(cuda.cuMemcpyHtoDAsync, keys, lane.block.address, block.used_bytes, stream)
        call(cuda.cuMemsetD8Async, lane.device_verdicts.address, 0, verdict_bytes, stream)
        # The tables need only the keys: they are made while ciphertext is still on its way.
        self._kernels.prepare_records(stream, block.pages, keys, tables)
        for page in lane.pages:
            self._copy_from_arena(page, stream)
        self._kernels.open_frames(
            stream,
            frames,
            jobs=block.jobs_address,
            keys=keys,
            tables=tables,
            verdicts=lane.device_verdicts.address,
        )
        call(cuda.cuMemsetD8Async, lane.device_block.address, 0, SECRET_BYTES, stream)
        call(
            cuda.cuMemcpyDtoHAsync,
            lane.verdicts.address, lane.device_verdicts.address, verdict_bytes, stream,
        )  # fmt: skip
        call(cuda.cuEventRecord, lane.event, stream)

    def _copy_from_arena(self, page: Page, stream: Any) -> None:
        """One copy for each run of neighbouring slots, what lies between frames included."""
        assert page.staging is not None
        pitch = self._sizes.slot_bytes
        to = self._address(page.staging)
        for _, run in groupby(enumerate(page.read.slots), key=lambda pair: pair[1] - pair[0]):
            slots = [slot for _, slot in run]
            size = len(slots) * pitch
            call(cuda.cuMemcpyHtoDAsync, to, self._arena.address + slots[0] * pitch, size, stream)
            to += size

    def _abandon(self, lane: Lane, error: CudaError) -> None:
        """A batch that could not be queued whole: what was queued runs out, then all fail."""
        if error.sticky:
            raise error
        call(cuda.cuMemsetD8Async, lane.device_block.address, 0, SECRET_BYTES, lane.stream)
        call(cuda.cuStreamSynchronize, lane.stream)
        lane.wipe_host_block()
        self._finish(lane, [failed(page.read, error) for page in lane.pages])

    def _refuse_all(self, problem: CudaError) -> None:
        """No memory for lanes or staging: reads fail instead of waiting for it."""
        pages, self._at_hand = self._at_hand, deque()
        for page in pages:
            if page.staging is not None:
                self._free_staging.append(page.staging)
            page.answer(failed(page.read, problem))
        self._refusals += 1
        self._changed.notify_all()
        self._changed.wait_for(lambda: not self._staging_waiters)

    # ---- memory: gpu-open only, `_changed` held ----

    def _make_memory(self) -> CudaError | None:
        if self._staging is not None:
            return None
        try:
            size = self._sizes.staging_slots * self._sizes.page_pitch
            self._staging = DeviceBuffer(size)
            if self._cufile is not None:
                self._cufile.staging_made(self._staging.address, size)
            for _ in range(LANES):
                self._lanes.append(Lane())
        except CudaError as error:
            if error.sticky:
                raise
            self._free_memory()
            return error
        self._free_lanes = list(self._lanes)
        self._free_staging = list(range(self._sizes.staging_slots))
        self._changed.notify_all()
        return None

    def _free_memory(self) -> None:
        self._free_lanes.clear()
        self._free_staging.clear()
        while self._lanes:
            self._lanes.pop().close()
        if self._staging is not None:
            staging, self._staging = self._staging, None
            if self._cufile is not None:
                self._cufile.staging_gone(staging.address)
            staging.close()

    # ---- gpu-wait ----

    def _wait(self) -> None:
        while (lane := self._launched.get()) is not None:
            call(cuda.cuEventSynchronize, lane.event)
            # Only now are the verdicts those of this batch. The keys go first, then the answers.
            lane.wipe_host_block()
            words = lane.verdicts.view.cast("I")
            at, answers = 0, []
            for page in lane.pages:
                count = page.read.frame_count
                answers.append(judge(page.read, list(words[at : at + count])))
                at += count
            words.release()
            self._finish(lane, answers)

    def _finish(self, lane: Lane, answers: list[Done | Failed]) -> None:
        pages, lane.pages = lane.pages, []
        with self._changed:
            for page in pages:
                if page.staging is not None:
                    self._free_staging.append(page.staging)
            self._free_lanes.append(lane)
            self._changed.notify_all()
        for page, answer in zip(pages, answers, strict=True):
            page.answer(answer)

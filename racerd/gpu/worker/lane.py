"""What a batch of pages needs on its way through the GPU.

Layer: gpu worker. A lane belongs to one batch at a time: to `gpu-open` while it is filled and
queued, to `gpu-wait` from then on. It holds keys, which are wiped when its batch is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cuda

from racerd.gpu import layout
from racerd.gpu.protocol import Done, Failed, ReadPage
from racerd.gpu.worker.batch import BLOCK_BYTES, FRAMES_MAX, PAGES_MAX
from racerd.gpu.worker.driver import call
from racerd.gpu.worker.memory import DeviceBuffer, ImportedTarget, PinnedBuffer

SECRET_BYTES = BLOCK_BYTES + PAGES_MAX * layout.RECORD_TABLES_BYTES


@dataclass(eq=False, slots=True)
class Page:
    """A read on its way. `answer` is called exactly once, on any thread."""

    read: ReadPage
    target: ImportedTarget
    answer: Callable[[Done | Failed], None]
    staging: int | None = None  # the slot that holds, or will hold, its ciphertext


class Lane:
    """What one batch needs: a stream, an event, the job block twice, tables and verdicts."""

    def __init__(self) -> None:
        with ExitStack() as undo:
            flags = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
            self.stream = call(cuda.cuStreamCreate, flags)
            undo.callback(call, cuda.cuStreamDestroy, self.stream)
            event_flags = (
                cuda.CUevent_flags.CU_EVENT_BLOCKING_SYNC
                | cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING
            )
            self.event = call(cuda.cuEventCreate, event_flags)
            undo.callback(call, cuda.cuEventDestroy, self.event)
            self.block = self._kept(undo, PinnedBuffer(BLOCK_BYTES))
            self.verdicts = self._kept(undo, PinnedBuffer(FRAMES_MAX * layout.VERDICT_BYTES))
            self.device_block = self._kept(undo, DeviceBuffer(SECRET_BYTES))
            self.device_verdicts = self._kept(undo, DeviceBuffer(FRAMES_MAX * layout.VERDICT_BYTES))
            self._undo = undo.pop_all()
        self.pages: list[Page] = []
        self.secret_bytes = 0  # of the host's job block, to wipe when the batch is done

    @staticmethod
    def _kept(undo: ExitStack, buffer: Any) -> Any:
        undo.callback(buffer.close)
        return buffer

    @property
    def tables_address(self) -> int:
        return int(self.device_block.address) + BLOCK_BYTES

    def wipe_host_block(self) -> None:
        ctypes.memset(self.block.address, 0, self.secret_bytes)

    def close(self) -> None:
        self._undo.close()

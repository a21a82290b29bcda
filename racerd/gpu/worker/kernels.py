"""The compiled kernels and how a batch is launched.

Layer: gpu worker. The context must be current on the calling thread.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cuda

from racerd.gpu import layout
from racerd.gpu.worker.driver import call

_ADDRESS = ctypes.c_void_p


class Kernels:
    """The module of one context, from a cubin for its architecture."""

    def __init__(self, image: bytes) -> None:
        self._module = call(cuda.cuModuleLoadData, image)
        try:
            self._prepare = call(cuda.cuModuleGetFunction, self._module, layout.PREPARE_RECORDS)
            self._open = call(cuda.cuModuleGetFunction, self._module, layout.OPEN_FRAMES)
            # More than 48 KiB of shared memory is given only to those who ask.
            attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(cuda.cuFuncSetAttribute, self._open, attribute, layout.SHARED_BYTES)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        call(cuda.cuModuleUnload, self._module)

    def prepare_records(self, stream: Any, count: int, keys: int, tables: int) -> None:
        """Queues the derivation of `count` records' tables. Arguments are device addresses."""
        self._launch(self._prepare, count, 0, stream, (keys, tables))

    def open_frames(self, stream: Any, count: int, *, jobs: int, keys: int, tables: int,
                    verdicts: int) -> None:  # fmt: skip
        """Queues the verification and decryption of `count` frames."""
        arguments = (jobs, keys, tables, verdicts)
        self._launch(self._open, count, layout.SHARED_BYTES, stream, arguments)

    @staticmethod
    def _launch(
        function: Any, blocks: int, shared: int, stream: Any, arguments: tuple[int, ...]
    ) -> None:
        parameters = (arguments, (_ADDRESS,) * len(arguments))
        call(
            cuda.cuLaunchKernel,
            function, blocks, 1, 1, layout.THREADS, 1, 1, shared, stream, parameters, 0,
        )  # fmt: skip

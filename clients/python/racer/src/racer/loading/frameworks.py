"""Tensors of numpy and torch: made empty, filled piece by piece, given away.

Layer: loading; the one door to numpy, torch and ml_dtypes, none of which is imported before it is
asked for. A tensor has memory of its own from the start and is never a view of memory that is used
again, so that a consumer may keep it for ever. Thread-safe: pieces of one tensor may be filled by
several threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from racer.errors import MemoryUnavailable
from racer.host_memory import MAPPED_BYTES_MIN, bytes_at, copy_bytes, mapped_memory
from racer.loading.plan import PlannedTensor
from racer.models.source import DeviceLanding, Source, SourceFile, SourceShare
from racer.safetensors.errors import SafetensorsError
from racer.safetensors.header import TensorInfo
from racer.window import Window

FrameworkName = Literal["pt", "numpy"]

_log = logging.getLogger("racer.load")
_said = threading.Event()

_TORCH: Final = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
# Little endian by name: that is what files hold, on every machine.
_NUMPY: Final = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "C64": "<c8",
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
}
_ML_DTYPES: Final = {
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}

_DIMENSIONS_UNTRIED_MAX = 64


class Building(Protocol):
    """A tensor on its way. Each of its bytes is put there once, by one of the two methods."""

    tensor: Any

    def fill(self, offset: int, piece: Any) -> None:
        """Puts `piece`, a part of a landing's view, at byte `offset`. On return the piece is not
        read any more."""

    def take(self, share: SourceShare, start: int, stop: int) -> None:
        """Takes its bytes of [start, stop) of the file from shared memory, which has them all."""


class Framework(Protocol):
    def check(self, info: TensorInfo) -> None:
        """Raises SafetensorsError, without file, if it has no such tensor."""

    def build(self, info: TensorInfo, *, mapped: bool = False) -> Building:
        """Makes a tensor that passed `check`; `mapped` where its bytes may be shared memory."""

    def maps(self, info: TensorInfo) -> bool:
        """Whether a tensor that passed `check` is better mapped than copied."""

    def map_whole(
        self, infos: Sequence[TensorInfo], shares: Sequence[SourceShare]
    ) -> list[Building] | None:
        """Makes tensors that are to be mapped, of which `shares`, which adjoin each other, hold
        every byte, as views of one mapping. None where the process has no more room for one: they
        are made one by one."""

    def landing(self, source: Source, nbytes: int) -> FrameworkLanding:
        """Memory for the calling thread to read into, near where the tensors are."""

    def takes_shared(self, source: Source) -> bool:
        """Whether memory that readers share is a good way to its tensors."""


class FrameworkLanding(Protocol):
    """A `SourceLanding` whose view `Building.fill` understands."""

    @property
    def view(self) -> Any: ...

    def read(self, file: SourceFile, start: int, stop: int) -> Mapping[str, int]: ...

    def close(self) -> None: ...


class _OnHost:
    """What frameworks do whose tensors are in host memory."""

    def landing(self, source: Source, nbytes: int) -> FrameworkLanding:
        return source.landing(nbytes)

    def takes_shared(self, source: Source) -> bool:
        return True


class _Copied:
    """Whatever is copied to, also from shared memory."""

    def __init__(self, info: TensorInfo) -> None:
        self._info = info

    def fill(self, offset: int, piece: memoryview) -> None:
        raise NotImplementedError

    def take(self, share: SourceShare, start: int, stop: int) -> None:
        begin, end = max(start, self._info.start), min(stop, self._info.stop)
        with share.view as whole, whole[begin - share.start : end - share.start] as piece:
            self.fill(begin - self._info.start, piece)


class _InHostMemory(_Copied):
    """`memory` is the tensor's own, and `tensor` keeps it alive."""

    def __init__(self, info: TensorInfo, tensor: Any, memory: memoryview) -> None:
        super().__init__(info)
        self.tensor = tensor
        self._memory = memory

    def fill(self, offset: int, piece: memoryview) -> None:
        copy_bytes(self._memory[offset : offset + len(piece)], piece)


class _InWindow:
    """A large tensor, mapped from shared memory where it can be, and copied where it cannot."""

    def __init__(self, info: TensorInfo, make: Callable[[memoryview], Any]) -> None:
        self._info = info
        self._window = Window(info.start, info.stop)
        self._memory = self._window.view()
        self.tensor = make(self._memory)

    def fill(self, offset: int, piece: memoryview) -> None:
        start = self._info.start + offset
        self._window.make_private(start, start + len(piece))
        copy_bytes(self._memory[offset : offset + len(piece)], piece)

    def take(self, share: SourceShare, start: int, stop: int) -> None:
        self._window.map_shared(share.fileno(), share.start, start, stop)


class _Whole:
    """A tensor that had all its bytes when it was made: there is nothing left to put there."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def fill(self, offset: int, piece: Any) -> None:
        """The same bytes are there."""

    def take(self, share: SourceShare, start: int, stop: int) -> None:
        """The same."""


def _mapped_whole(
    infos: Sequence[TensorInfo],
    shares: Sequence[SourceShare],
    make: Callable[[memoryview, int, TensorInfo], Any],
) -> list[Building] | None:
    """`make(memory, offset, info)` gives a tensor as a view of memory, which it keeps alive.

    One mapping for all of them costs what one for each would cost. It stays until the last of them
    is dropped: as do the pieces of shared memory behind it.
    """
    start, stop = min(info.start for info in infos), max(info.stop for info in infos)
    try:
        window = Window(start, stop)
        for share in shares:
            window.map_shared(share.fileno(), share.start, share.start, share.stop)
    except MemoryUnavailable as error:
        _say_once(error)
        return None
    memory = window.view()
    return [_Whole(make(memory, info.start - start, info)) for info in infos]


def _in_window(info: TensorInfo, make: Callable[[memoryview], Any]) -> Building | None:
    """None where the process has no more room for windows: memory of its own will do."""
    try:
        return _InWindow(info, make)
    except MemoryUnavailable as error:
        _say_once(error)
        return None


def _say_once(error: MemoryUnavailable) -> None:
    if not _said.is_set():
        _said.set()
        _log.warning("copying tensors that could be mapped: %s", error)


def _worth_mapping(info: TensorInfo, alignment: int) -> bool:
    """Small tensors are copied: a mapping costs more. So are those that lie askew in their file."""
    return info.nbytes >= MAPPED_BYTES_MIN and info.start % alignment == 0


class NumpyFramework(_OnHost):
    """Arrays; with ml_dtypes, where it is installed, also bfloat16 and the float8 types."""

    def __init__(self) -> None:
        import numpy

        self._numpy = numpy
        self._dtypes: dict[str, Any] = {}

    def check(self, info: TensorInfo) -> None:
        self._dtype(info.dtype)
        _check_shape(self.build, info, "numpy")

    def _dtype(self, name: str) -> Any:
        dtype = self._dtypes.get(name)
        if dtype is None:
            dtype = self._dtypes[name] = self._find_dtype(name)
        return dtype

    def _find_dtype(self, name: str) -> Any:
        if name in _NUMPY:
            return self._numpy.dtype(_NUMPY[name])
        if name not in _ML_DTYPES:
            raise _unsupported(name, "numpy", "load it with framework='pt'")
        try:
            import ml_dtypes
        except ImportError as error:
            hint = "install ml_dtypes, or load it with framework='pt'"
            raise _unsupported(name, "numpy", hint) from error
        if not hasattr(ml_dtypes, _ML_DTYPES[name]):
            raise _unsupported(name, f"ml_dtypes {ml_dtypes.__version__}", "update it")
        return self._numpy.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))

    def build(self, info: TensorInfo, *, mapped: bool = False) -> Building:
        dtype = self._dtype(info.dtype)

        def over(memory: Any) -> Any:
            return self._over(memory, 0, info)

        if info.nbytes < MAPPED_BYTES_MIN:
            array = self._numpy.empty(info.shape, dtype)
            return _InHostMemory(info, array, array.reshape(-1).view("u1").data)
        if mapped and self.maps(info):
            in_window = _in_window(info, over)
            if in_window is not None:
                return in_window
        memory = mapped_memory(info.nbytes)
        return _InHostMemory(info, over(memory), memoryview(memory))

    def _over(self, memory: Any, offset: int, info: TensorInfo) -> Any:
        """An array over the bytes of `memory` from `offset` on."""
        dtype = self._dtype(info.dtype)
        count = info.nbytes // dtype.itemsize
        return self._numpy.frombuffer(memory, dtype, count, offset).reshape(info.shape)

    def maps(self, info: TensorInfo) -> bool:
        return _worth_mapping(info, self._dtype(info.dtype).itemsize)

    def map_whole(
        self, infos: Sequence[TensorInfo], shares: Sequence[SourceShare]
    ) -> list[Building] | None:
        return _mapped_whole(infos, shares, self._over)


class TorchFramework:
    """Tensors on `device`, which is the only device that is touched."""

    def __init__(self, device: object) -> None:
        import torch

        self._torch = torch
        try:
            self._device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device is {device!r}: {_first_line(error)}") from error

    def check(self, info: TensorInfo) -> None:
        torch, dtype = self._torch, info.dtype
        if getattr(torch, _TORCH[dtype], None) is None:
            raise _unsupported(dtype, f"torch {torch.__version__}", "update torch")
        if dtype == "F4" and (not info.shape or info.shape[-1] % 2):
            raise SafetensorsError(
                "torch keeps F4 in pairs, and the last dimension is odd", unsupported=True
            )
        _check_shape(self.build, info, "torch")

    def build(self, info: TensorInfo, *, mapped: bool = False) -> Building:
        torch = self._torch
        dtype, shape = self._type_of(info)
        if self._device.type != "cpu":
            return _OnDevice(info, torch, torch.empty(shape, dtype=dtype, device=self._device))

        def over(memory: Any) -> Any:
            return self._over(memory, 0, info)

        if info.nbytes < MAPPED_BYTES_MIN:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            return _InHostMemory(info, tensor, bytes_at(tensor.data_ptr(), info.nbytes))
        if mapped and self.maps(info):
            in_window = _in_window(info, over)
            if in_window is not None:
                return in_window
        memory = mapped_memory(info.nbytes)
        return _InHostMemory(info, over(memory), memoryview(memory))

    def _type_of(self, info: TensorInfo) -> tuple[Any, tuple[int, ...]]:
        """dtype and shape of torch: elements of 4 bits are kept in pairs."""
        shape = info.shape
        if info.dtype == "F4":
            shape = (*shape[:-1], shape[-1] // 2)
        return getattr(self._torch, _TORCH[info.dtype]), shape

    def _over(self, memory: Any, offset: int, info: TensorInfo) -> Any:
        """A tensor, with a storage of its own, over the bytes of `memory` from `offset` on."""
        dtype, shape = self._type_of(info)
        count = info.nbytes // dtype.itemsize
        return self._torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)

    def maps(self, info: TensorInfo) -> bool:
        if self._device.type != "cpu":
            return False
        dtype, _ = self._type_of(info)
        return _worth_mapping(info, dtype.itemsize)

    def map_whole(
        self, infos: Sequence[TensorInfo], shares: Sequence[SourceShare]
    ) -> list[Building] | None:
        return _mapped_whole(infos, shares, self._over)

    def landing(self, source: Source, nbytes: int) -> FrameworkLanding:
        if self._device.type == "cuda":
            landing = source.device_landing(nbytes, self._device)
            if landing is not None:
                return _TorchLanding(self._torch, landing)
        return source.landing(nbytes)

    def takes_shared(self, source: Source) -> bool:
        """Bytes that the daemon writes into GPU memory need no host memory at all."""
        return self._device.type != "cuda" or not source.reads_into(self._device)


class _TorchLanding:
    """GPU memory that the daemon writes into, as a tensor of bytes."""

    def __init__(self, torch: Any, landing: DeviceLanding) -> None:
        self._torch = torch
        self._landing = landing
        self._buffer: Any = None
        self._view: Any = None

    @property
    def view(self) -> Any:
        if self._buffer is not self._landing.buffer:
            self._buffer = self._landing.buffer
            self._view = self._torch.from_dlpack(self._buffer)
        return self._view

    def read(self, file: SourceFile, start: int, stop: int) -> Mapping[str, int]:
        return self._landing.read(file, start, stop)

    def close(self) -> None:
        self._view = self._buffer = None
        self._landing.close()


class _OnDevice(_Copied):
    """Filled by copies that have ended when they return: no fence is left to wait for."""

    def __init__(self, info: TensorInfo, torch: Any, tensor: Any) -> None:
        super().__init__(info)
        self.tensor = tensor
        self._torch = torch
        self._bytes = tensor.reshape(-1).view(torch.uint8)

    def fill(self, offset: int, piece: Any) -> None:
        place = self._bytes[offset : offset + len(piece)]
        if isinstance(piece, memoryview):
            source = self._torch.frombuffer(piece, dtype=self._torch.uint8)
            place.copy_(source, non_blocking=False)
            return
        place.copy_(piece)  # From the same device, and so only queued.
        self._torch.cuda.current_stream(self.tensor.device).synchronize()


def _check_shape(build: Callable[[TensorInfo], Building], info: TensorInfo, name: str) -> None:
    """Tries what costs nothing: only an empty tensor, or one of very many dimensions, can be legal
    in a file and too much for a framework."""
    if info.nbytes and len(info.shape) <= _DIMENSIONS_UNTRIED_MAX:
        return
    try:
        build(info)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        reason = f"{name} refuses its shape: {_first_line(error)}"
        raise SafetensorsError(reason, unsupported=True) from error


def _first_line(error: BaseException) -> str:
    """torch puts a trace of itself behind it."""
    return str(error).partition("\n")[0]


def _unsupported(dtype: str, where: str, hint: str) -> SafetensorsError:
    return SafetensorsError(f"{where} has no type for {dtype}", hint=hint, unsupported=True)


def open_framework(name: str, device: object) -> Framework:
    """Imports what is asked for. Raises ValueError for what there is not."""
    if name == "pt":
        return TorchFramework(device)
    if name != "numpy":
        raise ValueError(f"framework is {name!r}: 'pt' or 'numpy'")
    if device != "cpu":
        raise ValueError(f"numpy has no device {device!r}: framework='pt' has")
    return NumpyFramework()


def check_all(framework: Framework, tensors: Iterable[PlannedTensor]) -> None:
    """Raises SafetensorsError for the first tensor that cannot be made, before any is."""
    for tensor in tensors:
        try:
            framework.check(tensor.info)
        except SafetensorsError as error:
            error.file, error.tensor = tensor.file.url, tensor.info.name
            raise

"""Tensors of numpy and torch: made empty, filled piece by piece, given away.

Layer: loading; the one door to numpy, torch and ml_dtypes, none of which is imported before it is
asked for. A tensor has memory of its own from the start and is never a view of memory that is used
again, so that a consumer may keep it for ever. Thread-safe: pieces of one tensor may be filled by
several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, Protocol

from racer.host_memory import MAPPED_BYTES_MIN, bytes_at, copy_bytes, mapped_memory
from racer.loading.plan import PlannedTensor
from racer.safetensors.errors import SafetensorsError
from racer.safetensors.header import TensorInfo

FrameworkName = Literal["pt", "numpy"]

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
    """A tensor on its way."""

    tensor: Any

    def fill(self, offset: int, piece: memoryview) -> None:
        """Puts `piece` at byte `offset`. On return the piece is not read any more."""


class Framework(Protocol):
    def check(self, info: TensorInfo) -> None:
        """Raises SafetensorsError, without file, if it has no such tensor."""

    def build(self, info: TensorInfo) -> Building:
        """Allocates a tensor that passed `check`."""


class _InHostMemory:
    """`memory` is the tensor's own, and `tensor` keeps it alive."""

    def __init__(self, tensor: Any, memory: memoryview) -> None:
        self.tensor = tensor
        self._memory = memory

    def fill(self, offset: int, piece: memoryview) -> None:
        copy_bytes(self._memory[offset : offset + len(piece)], piece)


class NumpyFramework:
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

    def build(self, info: TensorInfo) -> Building:
        dtype = self._dtype(info.dtype)
        if info.nbytes < MAPPED_BYTES_MIN:
            array = self._numpy.empty(info.shape, dtype)
            return _InHostMemory(array, array.reshape(-1).view("u1").data)
        memory = mapped_memory(info.nbytes)
        array = self._numpy.frombuffer(memory, dtype).reshape(info.shape)
        return _InHostMemory(array, memoryview(memory))


class TorchFramework:
    """Tensors on `device`, which is the only device that is touched."""

    def __init__(self, device: object) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)

    def check(self, info: TensorInfo) -> None:
        torch, dtype = self._torch, info.dtype
        if getattr(torch, _TORCH[dtype], None) is None:
            raise _unsupported(dtype, f"torch {torch.__version__}", "update torch")
        if dtype == "F4" and (not info.shape or info.shape[-1] % 2):
            raise SafetensorsError(
                "torch keeps F4 in pairs, and the last dimension is odd", unsupported=True
            )
        _check_shape(self.build, info, "torch")

    def build(self, info: TensorInfo) -> Building:
        torch = self._torch
        shape = info.shape
        if info.dtype == "F4":
            shape = (*shape[:-1], shape[-1] // 2)
        dtype = getattr(torch, _TORCH[info.dtype])
        if self._device.type != "cpu":
            return _OnDevice(torch, torch.empty(shape, dtype=dtype, device=self._device))
        if info.nbytes < MAPPED_BYTES_MIN:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            return _InHostMemory(tensor, bytes_at(tensor.data_ptr(), info.nbytes))
        memory = mapped_memory(info.nbytes)
        tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
        return _InHostMemory(tensor, memoryview(memory))


class _OnDevice:
    """Filled by copies that have ended when they return: no fence is left to wait for."""

    def __init__(self, torch: Any, tensor: Any) -> None:
        self.tensor = tensor
        self._torch = torch
        self._bytes = tensor.reshape(-1).view(torch.uint8)

    def fill(self, offset: int, piece: memoryview) -> None:
        source = self._torch.frombuffer(piece, dtype=self._torch.uint8)
        self._bytes[offset : offset + len(piece)].copy_(source, non_blocking=False)


def _check_shape(build: Callable[[TensorInfo], Building], info: TensorInfo, name: str) -> None:
    """Tries what costs nothing: only an empty tensor, or one of very many dimensions, can be legal
    in a file and too much for a framework."""
    if info.nbytes and len(info.shape) <= _DIMENSIONS_UNTRIED_MAX:
        return
    try:
        build(info)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        # The first line: torch puts a trace of itself behind it.
        reason = str(error).partition("\n")[0]
        raise SafetensorsError(f"{name} refuses its shape: {reason}", unsupported=True) from error


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

"""As much of torch as loading to a GPU uses, on whatever CUDA driver this process has.

torch itself does not run on the stand-in driver. Only contiguous tensors; copies within a GPU are
queued on the default stream and not waited for, as torch does it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

from racer.cuda import dlpack
from racer.cuda.device import Device

__version__ = "0.stand-in"
_BYTES = {
    "uint8": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int64": 8,
}


class DType(str):
    """The name of a type."""

    @property
    def itemsize(self) -> int:
        return _BYTES[self]


for _name in _BYTES:
    globals()[_name] = DType(_name)


class device:
    def __init__(self, name: object) -> None:
        self._name = str(name)
        self.type = self._name.partition(":")[0]

    def __str__(self) -> str:
        return self._name


def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _checked(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA error {status}")


def _free(where: Device, address: int) -> None:
    with where.current():
        _library().cuMemFree_v2(ctypes.c_uint64(address))


class Tensor:
    """`shape` of `dtype` at `address`; `keep` is what the memory belongs to."""

    def __init__(self, where: Device, address: int, shape: Any, dtype: DType, keep: object) -> None:
        self.where, self.address, self.keep = where, address, keep
        self.shape, self.dtype = tuple(shape), dtype
        self.device = f"cuda:{where.ordinal}"

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for extent in self.shape:
            count *= extent
        return count

    def reshape(self, _: int) -> Tensor:
        count = self.nbytes // self.dtype.itemsize
        return Tensor(self.where, self.address, (count,), self.dtype, self)

    def view(self, dtype: DType) -> Tensor:
        assert dtype == "uint8"
        return Tensor(self.where, self.address, (self.nbytes,), dtype, self)

    def __getitem__(self, part: slice) -> Tensor:
        assert self.dtype == "uint8" and len(self.shape) == 1
        start, stop, _ = part.indices(self.shape[0])
        return Tensor(self.where, self.address + start, (stop - start,), self.dtype, self)

    def copy_(self, source: Any, non_blocking: bool = False) -> None:
        assert source.nbytes == self.nbytes
        to, count = ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes)
        with self.where.current():
            if isinstance(source, Tensor):
                assert source.where is self.where, "a copy between GPUs"
                address = ctypes.c_uint64(source.address)
                _checked(_library().cuMemcpyDtoDAsync_v2(to, address, count, None))
            else:
                _checked(_library().cuMemcpyHtoD_v2(to, source.memory, count))

    # --- lending, with torch's refusals ---------------------------------------------------------

    requires_grad = False
    contiguous = True

    def is_contiguous(self) -> bool:
        return self.contiguous

    def detach(self) -> Tensor:
        return Tensor(self.where, self.address, self.shape, self.dtype, self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.where.ordinal

    def __dlpack__(self, *, stream: int = -1, max_version: Any = None) -> object:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient")
        if _current() != self.where.ordinal:
            raise BufferError("Can't export tensors on a different CUDA device index")
        if self.dtype == "float8_e8m0fnu":
            raise BufferError("float8 types are not supported by dlpack")
        versioned = max_version is not None
        return dlpack.lend(self, self.address, self.nbytes, self.where.ordinal, versioned=versioned)

    def tobytes(self) -> bytes:
        data = (ctypes.c_char * self.nbytes)()
        with self.where.current():
            count = ctypes.c_size_t(self.nbytes)
            _checked(_library().cuMemcpyDtoH_v2(data, ctypes.c_uint64(self.address), count))
        return bytes(data)


class _HostBytes:
    def __init__(self, piece: memoryview) -> None:
        self.nbytes = len(piece)
        self.memory = (ctypes.c_char * len(piece)).from_buffer(piece)


class _Allocation:
    """Freed with the last tensor in it."""

    def __init__(self, where: Device, nbytes: int) -> None:
        address = ctypes.c_uint64()
        with where.current():
            size = ctypes.c_size_t(max(1, nbytes))
            _checked(_library().cuMemAlloc_v2(ctypes.byref(address), size))
        self.address = address.value
        weakref.finalize(self, _free, where, address.value).atexit = False


def empty(shape: Any, *, dtype: DType, device: device) -> Tensor:
    where = Device.find(device)
    tensor = Tensor(where, 0, shape, dtype, None)
    tensor.keep = allocation = _Allocation(where, tensor.nbytes)
    tensor.address = allocation.address
    return tensor


def frombuffer(piece: memoryview, *, dtype: DType) -> _HostBytes:
    return _HostBytes(piece)


class _Borrowed:
    def __init__(self, borrowed: dlpack.Borrowed) -> None:
        weakref.finalize(self, borrowed.close).atexit = False


def from_dlpack(lender: Any) -> Tensor:
    kind, ordinal = lender.__dlpack_device__()
    assert kind == dlpack.CUDA
    borrowed = dlpack.Borrowed(lender.__dlpack__(stream=1, max_version=(1, 0)))
    tensor = borrowed.tensor
    where, address = Device.numbered(ordinal), tensor.data
    return Tensor(where, address, (tensor.shape[0],), uint8, _Borrowed(borrowed))  # type: ignore[name-defined]  # noqa: F821


class _Stream:
    def __init__(self, where: Device) -> None:
        self._where = where

    def synchronize(self) -> None:
        with self._where.current():
            _checked(_library().cuStreamSynchronize(None))


_devices: list[str] = ["cuda:0"]


def _current() -> int:
    return Device.find(_devices[-1]).ordinal


@contextlib.contextmanager
def _device(name: object) -> Iterator[None]:
    _devices.append(str(name))
    try:
        yield
    finally:
        _devices.pop()


cuda = types.SimpleNamespace(current_stream=lambda name: _Stream(Device.find(name)), device=_device)


def install() -> None:
    """Makes `import torch` give this module."""
    sys.modules["torch"] = sys.modules[__name__]

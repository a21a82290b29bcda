"""Other people's CUDA memory to write to: torch, cupy, numba, and whatever speaks their protocols.

Layer: `cuda`, on `device` and `dlpack`; any thread. `Destination.open` says where an array lies,
and `wait` returns when what its owner had queued for it has run, so that another process or stream
may write to it: by DLPack the owner's stream is ordered before one of ours; by the CUDA array
interface the owner names a stream, or says that there is nothing to wait for; where it says
nothing, all of the GPU's work is waited for. `open` is quick and belongs on the thread that uses
the array (an owner's "current stream" is a thread's); `wait` may take as long as that work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from racer.cuda import dlpack
from racer.cuda.device import Device, Stream

_INTERFACE_WITH_STREAMS = 3


def is_cuda(value: object) -> bool:
    """Whether `value` is an array in GPU memory. Loads no driver, and torch only never."""
    where = getattr(value, "__dlpack_device__", None)
    if where is not None:
        return int(where()[0]) in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    return getattr(value, "__cuda_array_interface__", None) is not None


class Destination:
    """`nbytes` bytes at `address` on `device`, kept until `close`."""

    def __init__(self, device: Device, address: int, nbytes: int, keep: object) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self._keep: object = keep
        self._stream: Stream | None = None
        self._wait: Callable[[], None] | None = None

    @classmethod
    def open(cls, array: Any) -> Destination:
        """Where `array` lies. Raises TypeError for one that cannot be written to as bytes."""
        array = _as_bytes(array)
        if getattr(array, "__dlpack_device__", None) is not None:
            return cls._by_dlpack(array)
        return cls._by_interface(array)

    @classmethod
    def _by_dlpack(cls, array: Any) -> Destination:
        device = Device.numbered(int(array.__dlpack_device__()[1]))
        stream = Stream(device)
        try:
            borrowed = dlpack.Borrowed(_capsule(array, device, stream.handle))
            try:
                if borrowed.read_only:
                    raise TypeError("the CUDA array is read-only")
                nbytes = dlpack.nbytes_of(borrowed.tensor)
            except BaseException:
                borrowed.close()
                raise
        except BaseException:
            stream.close()
            raise
        address = (borrowed.tensor.data or 0) + borrowed.tensor.byte_offset
        opened = cls(device, address, nbytes, borrowed)
        opened._stream, opened._wait = stream, stream.synchronize
        return opened

    @classmethod
    def _by_interface(cls, array: Any) -> Destination:
        told: dict[str, Any] = array.__cuda_array_interface__
        address, read_only = told["data"]
        if read_only:
            raise TypeError("the CUDA array is read-only")
        nbytes = _interface_bytes(told)
        if nbytes == 0:
            return cls(Device.find("cuda"), 0, 0, array)
        device = Device.of_pointer(address)
        opened = cls(device, address, nbytes, array)
        stream = told.get("stream")
        if told.get("version", 0) < _INTERFACE_WITH_STREAMS or "stream" not in told:
            opened._wait = device.synchronize
        elif stream is not None:
            opened._wait = partial(device.wait_for_stream, stream)
        return opened

    def wait(self) -> None:
        """Blocks until nothing that was queued for the array before `open` runs any more."""
        if self._wait is not None:
            self._wait()

    def close(self) -> None:
        keep, self._keep = self._keep, None
        try:
            if self._stream is not None:
                self._stream.close()
        finally:
            if isinstance(keep, dlpack.Borrowed):
                keep.close()


def _as_bytes(array: Any) -> Any:
    """A torch tensor as its bytes: torch lends neither what has a gradient nor every dtype."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return array
    if not array.is_contiguous():
        raise TypeError("the tensor is not contiguous: read into a contiguous one")
    return array.detach().reshape(-1).view(torch.uint8)


def _capsule(array: Any, device: Device, stream: int) -> object:
    """A capsule of `array`, whose owner orders its current stream before `stream`.

    Owners take "current" to mean the current GPU: it has to be the array's own meanwhile.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        with torch.cuda.device(array.device):
            return _asked(array, stream)
    with device.current():
        return _asked(array, stream)


def _asked(array: Any, stream: int) -> object:
    try:
        return array.__dlpack__(stream=stream, max_version=(1, 1))
    except TypeError:
        return array.__dlpack__(stream=stream)  # From before versions.


def _interface_bytes(told: dict[str, Any]) -> int:
    """Bytes of a contiguous array. Raises TypeError for one that has gaps, or a mask."""
    if told.get("mask") is not None:
        raise TypeError("a CUDA array with a mask cannot be read into")
    kind: str = told["typestr"]
    count = int(kind[2:])
    strides = told.get("strides")
    for axis in reversed(range(len(told["shape"]))):
        extent = told["shape"][axis]
        if strides is not None and extent > 1 and strides[axis] != count:
            raise TypeError("the CUDA array is not contiguous: read into a contiguous one")
        count *= extent
    return count

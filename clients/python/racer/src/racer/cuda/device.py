"""One GPU of this process, found by number, name or UUID, and no other.

Layer: `cuda`, on `driver`; any thread. A `Device` keeps the primary context of its GPU retained:
the context that torch, cupy and numba use. Counting GPUs and asking for UUIDs makes no context, so
that a GPU that was not asked for is not touched (it may be lost, or another process's alone).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from racer.cuda.driver import (
    DEINITIALIZED,
    DISABLE_TIMING,
    EXPORTS_DESCRIPTORS,
    NON_BLOCKING,
    ORDINAL_OF_POINTER,
    Driver,
    driver,
)
from racer.errors import GpuError, GpuUnavailable

_UUID_PREFIX = "GPU-"


def plain_uuid(text: str) -> str:
    """A UUID without what its spellings differ in: 32 hex digits."""
    return text.removeprefix(_UUID_PREFIX).replace("-", "").lower()


def _spelled(uuid: bytes) -> str:
    digits = uuid.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return _UUID_PREFIX + "-".join(parts)


class Device:
    """A GPU. `ordinal` is this process's number for it, `uuid` everybody's ("GPU-…").

    Use `Device.find` or `Device.numbered`: it exists, therefore its context does. Whoever uses
    memory of the GPU holds it; the context is given back with the last of them.
    """

    def __init__(self, api: Driver, ordinal: int) -> None:
        self.api = api
        self.ordinal = ordinal
        self.uuid = _uuid_of(api, ordinal)
        context = ctypes.c_void_p()
        api.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal)
        self._context = context
        self._pid = os.getpid()
        weakref.finalize(self, _release, api, ordinal, self._pid).atexit = False

    @staticmethod
    def find(which: object) -> Device:
        """The GPU that `which` names: a number, "cuda:1", "cuda" (the current one), "GPU-…", or
        what prints as one of these, such as a torch.device. Raises GpuUnavailable, GpuError."""
        api = driver()
        text = str(which).strip()
        if text == "cuda":
            return Device.numbered(_current(api))
        number = text.removeprefix("cuda:")
        if number.isdecimal():
            return Device.numbered(int(number))
        wanted = plain_uuid(text)
        if len(wanted) != 32 or set(wanted) - set("0123456789abcdef"):
            raise ValueError(f"{text!r} is no GPU: a number, 'cuda:<number>' or 'GPU-<uuid>'")
        for ordinal in range(_count(api)):
            if plain_uuid(_uuid_of(api, ordinal)) == wanted:
                return Device.numbered(ordinal)
        raise _absent(f"no GPU that this process sees has the UUID {text}")

    @staticmethod
    def numbered(ordinal: int) -> Device:
        """The GPU with this number. Raises GpuUnavailable, GpuError."""
        api = driver()
        with _opening:
            known = _devices.get(ordinal)
            if known is None or known.api is not api:
                count = _count(api)
                if ordinal >= count:
                    raise _absent(f"there is no GPU {ordinal}: this process sees {count}")
                known = _devices[ordinal] = Device(api, ordinal)
            return known

    @staticmethod
    def of_pointer(address: int) -> Device:
        """The GPU that device memory at `address` is on."""
        ordinal = ctypes.c_int()
        api = driver()
        api.cuPointerGetAttribute(ctypes.byref(ordinal), ORDINAL_OF_POINTER, address)
        return Device.numbered(ordinal.value)

    @contextmanager
    def current(self) -> Iterator[Driver]:
        """The context is current in the block, and what was current before it afterwards."""
        self.api.cuCtxPushCurrent(self._context)
        try:
            yield self.api
        finally:
            self.api.cuCtxPopCurrent(ctypes.byref(ctypes.c_void_p()))

    def synchronize(self) -> None:
        """Waits for everything that runs on the GPU for this process."""
        with self.current() as api:
            api.cuCtxSynchronize()

    def wait_for_stream(self, handle: int) -> None:
        """Waits for somebody else's stream; 1 and 2 are the default ones, as the driver has it."""
        with self.current() as api:
            api.cuStreamSynchronize(handle)

    def exports_memory(self) -> bool:
        """Whether memory of this GPU can be passed to another process by descriptor."""
        value = ctypes.c_int()
        self.api.cuDeviceGetAttribute(ctypes.byref(value), EXPORTS_DESCRIPTORS, self.ordinal)
        return bool(value.value)

    def __str__(self) -> str:
        return f"cuda:{self.ordinal} ({self.uuid})"


class Stream:
    """A stream of copies that waits for no other stream. `close` waits for its end."""

    def __init__(self, device: Device) -> None:
        self._device = device
        stream = ctypes.c_void_p()
        with device.current() as api:
            api.cuStreamCreate(ctypes.byref(stream), NON_BLOCKING)
        self.handle: int = stream.value or 0

    def copy_from_device(self, to: int, source: int, nbytes: int) -> None:
        """Queues a copy; both ranges are in use until the stream was waited for."""
        with self._device.current() as api:
            api.cuMemcpyDtoDAsync(to, source, nbytes, self.handle)

    def copy_from_host(self, to: int, source: int, nbytes: int) -> None:
        """Queues a copy from pageable or pinned memory; in use as above."""
        with self._device.current() as api:
            api.cuMemcpyHtoDAsync(to, source, nbytes, self.handle)

    def synchronize(self) -> None:
        with self._device.current() as api:
            api.cuStreamSynchronize(self.handle)

    def close(self) -> None:
        handle, self.handle = self.handle, 0
        if handle:
            with self._device.current() as api:
                try:
                    api.cuStreamSynchronize(handle)
                finally:
                    api.cuStreamDestroy(handle)


class Event:
    """A point in a stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._recorded = False
        event = ctypes.c_void_p()
        with device.current() as api:
            api.cuEventCreate(ctypes.byref(event), DISABLE_TIMING)
        self._handle: ctypes.c_void_p | None = event

    def record(self, stream: Stream) -> None:
        with self._device.current() as api:
            api.cuEventRecord(self._handle, stream.handle)
        self._recorded = True

    def wait(self) -> None:
        """Blocks until the stream has come to where the event was recorded, if it was."""
        if self._recorded:
            with self._device.current() as api:
                api.cuEventSynchronize(self._handle)
            self._recorded = False

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with self._device.current() as api:
                api.cuEventDestroy(handle)


def _count(api: Driver) -> int:
    count = ctypes.c_int()
    api.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def _current(api: Driver) -> int:
    """The number of the calling thread's current GPU; 0 where it has none."""
    ordinal = ctypes.c_int()
    try:
        api.cuCtxGetDevice(ctypes.byref(ordinal))
    except GpuError:
        return 0  # No context is current: then "cuda" means the first GPU, as everywhere.
    return ordinal.value


def _uuid_of(api: Driver, ordinal: int) -> str:
    uuid = (ctypes.c_ubyte * 16)()
    api.cuDeviceGetUuid(ctypes.byref(uuid), ordinal)
    return _spelled(bytes(uuid))


def _absent(message: str) -> GpuUnavailable:
    return GpuUnavailable(
        message, code="gpu_absent", hint="check CUDA_VISIBLE_DEVICES and the container's devices"
    )


def _release(api: Driver, ordinal: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # The parent's context.
    try:
        api.cuDevicePrimaryCtxRelease(ordinal)
    except GpuError as error:
        if error.native != DEINITIALIZED:  # The process is ending.
            _log.warning("the context of cuda:%d was not given back: %s", ordinal, error)


_log = logging.getLogger("racer")
_devices: weakref.WeakValueDictionary[int, Device] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _forget_devices() -> None:
    global _opening
    _opening = threading.Lock()
    _devices.clear()


os.register_at_fork(after_in_child=_forget_devices)

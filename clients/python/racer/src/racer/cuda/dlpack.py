"""DLPack: the structures, capsules of our memory, and capsules of others.

Layer: `cuda`; any thread. Source: dlpack.h, version 1.1, and the Python array API's
"Data interchange". Both forms are made and taken: the legacy one ("dltensor") and the versioned
one ("dltensor_versioned", what a consumer that says `max_version` of 1 or more gets).

Lifetime: a capsule, and later its consumer, keeps the object that owns the memory, until the
consumer calls the deleter (which needs no thread of ours and may come from any). A capsule that
goes unused is found by `sweep`: a destructor in Python would run while whatever kept the consumer
from taking it is being raised, and would replace that exception. Consumers may outlive the
interpreter: at exit the deleters are taken out of what is still lent, because nothing of Python can
be called afterwards; the process's end frees it.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from ctypes import c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, Final, NamedTuple

CUDA: Final = 2  # kDLCUDA
CUDA_MANAGED: Final = 13  # kDLCUDAManaged
_VERSION: Final = (1, 1)
_READ_ONLY: Final = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_UINT: Final = 1  # kDLUInt

# A capsule keeps a pointer to its name: these are never freed.
_PLAIN: Final = b"dltensor"
_VERSIONED: Final = b"dltensor_versioned"
_USED: Final = {_PLAIN: b"used_dltensor", _VERSIONED: b"used_dltensor_versioned"}


class _DataType(ctypes.Structure):
    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", Tensor), ("context", c_void_p), ("deleter", c_void_p))


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", Tensor),
    )


_api = ctypes.pythonapi
_new = _api.PyCapsule_New
_new.argtypes, _new.restype = (c_void_p, ctypes.c_char_p, c_void_p), ctypes.py_object
_holds = ctypes.PYFUNCTYPE(ctypes.c_int, c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, c_void_p, ctypes.c_char_p)(("PyCapsule_SetName", _api))
_increase = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", _api))

_Deleter = ctypes.CFUNCTYPE(None, c_void_p)


class _Lent(NamedTuple):
    """What a consumer holds: its structure, the arrays behind it, the owner of the memory."""

    managed: _Managed | _ManagedVersioned
    extents: Any
    owner: object


_lent: dict[int, _Lent] = {}
_capsules: list[tuple[Any, int]] = []  # Capsules that were made, and where their structures lie.
_UNHELD: Final = 3  # References to a capsule that nobody has: a tuple, a name, and the question.


def _give_back(address: int) -> None:
    _lent.pop(address, None)


_deleter = _Deleter(_give_back)
_increase(_deleter)  # Called by consumers that nobody knows of: it outlives this module.


def sweep() -> None:
    """Gives back what capsules hold that were dropped without having been taken."""
    global _capsules
    mine, _capsules = _capsules, []
    while mine:
        entry = mine.pop()
        capsule, address = entry
        if sys.getrefcount(capsule) > _UNHELD:
            _capsules.append(entry)
        elif _name_of(capsule) is not None:
            _lent.pop(address, None)


def _name_of(capsule: object) -> bytes | None:
    """The name of a capsule that nobody has taken; None of anything else."""
    return next((name for name in _USED if _holds(id(capsule), name)), None)


@atexit.register
def _let_go() -> None:
    for lent in _lent.values():
        lent.managed.deleter = None
        _increase(lent)


def lend(owner: object, address: int, nbytes: int, ordinal: int, *, versioned: bool) -> Any:
    """A capsule of `nbytes` bytes of GPU `ordinal` at `address`, which keeps `owner`."""
    sweep()
    extents = (c_int64 * 2)(nbytes, 1)
    first = ctypes.cast(extents, ctypes.POINTER(c_int64))
    second = ctypes.cast(ctypes.byref(extents, 8), ctypes.POINTER(c_int64))
    tensor = Tensor(address, CUDA, ordinal, 1, _DataType(_UINT, 8, 1), first, second, 0)
    deleter = ctypes.cast(_deleter, c_void_p)
    managed = (
        _ManagedVersioned(*_VERSION, None, deleter, 0, tensor)
        if versioned
        else _Managed(tensor, None, deleter)
    )
    at = ctypes.addressof(managed)
    _lent[at] = _Lent(managed, extents, owner)
    try:
        capsule = _new(at, _VERSIONED if versioned else _PLAIN, None)
    except BaseException:
        del _lent[at]
        raise
    _capsules.append((capsule, at))
    return capsule


class Borrowed:
    """The memory of somebody else's capsule; `close` gives it back. A context manager.

    The capsule is consumed: its producer keeps the memory until `close`.
    """

    def __init__(self, capsule: object) -> None:
        name = _name_of(capsule)
        if name is None:
            raise TypeError("__dlpack__ gave no DLPack capsule, or one that was used before")
        at = id(capsule)
        self._address = _pointer(at, name)
        kind = _ManagedVersioned if name is _VERSIONED else _Managed
        self._managed: _Managed | _ManagedVersioned | None = kind.from_address(self._address)
        _rename(at, _USED[name])
        self.read_only = (
            isinstance(self._managed, _ManagedVersioned) and self._managed.flags & _READ_ONLY != 0
        )

    @property
    def tensor(self) -> Tensor:
        assert self._managed is not None
        tensor: Tensor = self._managed.tensor
        return tensor

    def close(self) -> None:
        managed, self._managed = self._managed, None
        if managed is not None and managed.deleter:
            _Deleter(managed.deleter)(self._address)


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a contiguous tensor. Raises TypeError for one that has gaps."""
    count = 1
    for axis in reversed(range(tensor.ndim)):
        extent = tensor.shape[axis]
        if tensor.strides and extent > 1 and tensor.strides[axis] != count:
            raise TypeError("the CUDA array is not contiguous: read into a contiguous one")
        count *= extent
    bits: int = count * tensor.dtype.bits * tensor.dtype.lanes
    return -(-bits // 8)

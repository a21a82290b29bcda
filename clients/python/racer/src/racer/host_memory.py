"""Memory of a tensor's own, and copies to it that do not hold up the other threads.

Layer: bottom. Large tensors get a mapping each instead of a piece of the heap: it can be backed by
huge pages (first touch is what loading waits for: half the time on the machine this was measured
on), and it goes back to the system the moment the tensor is dropped, where heaps of several threads
keep what was freed. Assigning to a slice of a memoryview holds the interpreter lock for as long as
the copy takes, page faults of fresh memory included; a foreign call does not, but costs more than
the copy of a small tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

MAPPED_BYTES_MIN = 1 << 20
_HELD_BYTES_MAX = 64 << 10


def mapped_memory(nbytes: int) -> mmap.mmap:
    """Fresh private memory; whoever exports its buffer keeps it."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages says EINVAL: small ones do.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def copy_bytes(destination: memoryview, source: memoryview) -> None:
    """Copies `source` over `destination`; both are writable, contiguous bytes of one length."""
    assert len(destination) == len(source), "a piece fits its place"
    if len(source) <= _HELD_BYTES_MAX:
        destination[:] = source
        return
    ctypes.memmove(address_of(destination), address_of(source), len(source))


def address_of(view: memoryview) -> int:
    """Where a writable view begins; good for as long as somebody holds the view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Writable bytes of memory that somebody else keeps alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")

"""Memory that is written once and then read by many: what the kernel is asked to guarantee."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from racerd.runtime import memory_map
from racerd.runtime.memory_map import HUGE_PAGE_BYTES
from racerd.runtime.shared_memory import PageKind, SharedMemory, sharing_trouble
from racerd.units import MIB


def sealed(content: bytes) -> SharedMemory:
    memory = SharedMemory(len(content))
    with memory.view() as view:
        view[:] = content
    memory.seal()
    return memory


def contents(descriptor: int, length: int) -> bytes:
    with mmap.mmap(descriptor, length, prot=mmap.PROT_READ) as mapping:
        return mapping[:]


def test_what_was_written_is_read_and_the_rest_is_zero() -> None:
    memory = sealed(b"payload" * 1000)
    reader = memory.reader()
    assert contents(reader, 7000) == b"payload" * 1000
    assert os.fstat(reader).st_size == memory.allocated_bytes == HUGE_PAGE_BYTES
    assert contents(reader, memory.allocated_bytes)[7000:] == bytes(memory.allocated_bytes - 7000)
    os.close(reader)
    memory.close()


@pytest.mark.parametrize(
    ("number", "times", "comes"),
    [
        (errno.EBUSY, 3, False),
        (errno.EBUSY, 100, True),
        (errno.ENOMEM, 1, True),
    ],
)
def test_a_page_that_the_kernel_holds_for_a_moment_is_sealed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, number: int, times: int, comes: bool
) -> None:
    """F5: EBUSY passes; nothing else is tried again, and nothing for ever."""
    real, left = fcntl.fcntl, times

    def busy(fd: int, command: int, argument: int = 0) -> int:
        nonlocal left
        if command == fcntl.F_ADD_SEALS and left:
            left -= 1
            raise OSError(number, os.strerror(number))
        return int(real(fd, command, argument))

    monkeypatch.setattr(fcntl, "fcntl", busy)
    memory = SharedMemory(100)
    if comes:
        with pytest.raises(OSError, match=os.strerror(number)):
            memory.seal()
    else:
        memory.seal()
        os.close(memory.reader())
    memory.close()


def test_nobody_can_write_to_it_any_more() -> None:
    """R5, F5: not through what a reader gets, nor through a descriptor opened anew for writing."""
    memory = sealed(b"x" * 100)
    reader = memory.reader()
    assert fcntl.fcntl(reader, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with pytest.raises(OSError, match=r"denied|permitted"):
        mmap.mmap(reader, 100)
    again = os.open(f"/proc/self/fd/{reader}", os.O_RDWR | os.O_CLOEXEC)
    for attack in (
        lambda: os.pwrite(again, b"y", 0),
        lambda: os.ftruncate(again, 10),
        lambda: os.ftruncate(again, 10 * MIB),
        lambda: mmap.mmap(again, 100),
        lambda: fcntl.fcntl(again, fcntl.F_ADD_SEALS, 0x0010),
    ):
        with pytest.raises(OSError, match=r"denied|permitted"):
            attack()
    assert contents(reader, 100) == b"x" * 100
    os.close(again)
    os.close(reader)
    memory.close()


def test_a_private_mapping_is_written_to_without_anybody_seeing_it() -> None:
    memory = sealed(b"x" * 100)
    reader = memory.reader()
    access = mmap.PROT_READ | mmap.PROT_WRITE
    with mmap.mmap(reader, 100, mmap.MAP_PRIVATE, access) as private:
        private[:] = b"y" * 100
        assert contents(reader, 100) == b"x" * 100
    os.close(reader)
    memory.close()


def test_the_kernel_tells_whether_it_is_used() -> None:
    memory = sealed(b"x" * 100)
    assert not memory.in_use()
    reader = memory.reader()
    assert memory.in_use(), "a descriptor uses it"
    mapping = mmap.mmap(reader, 100, prot=mmap.PROT_READ)
    os.close(reader)
    assert memory.in_use(), "so does a mapping without one"
    mapping.close()
    assert not memory.in_use()
    memory.close()


MAPS_AND_WAITS = """
import mmap, os, sys
mapping = mmap.mmap(int(sys.argv[1]), 100, prot=mmap.PROT_READ)
os.close(int(sys.argv[1]))
print(mapping[:1].decode(), flush=True)
sys.stdin.read()
"""


def test_a_process_that_dies_does_not_use_it_any_more() -> None:
    """R7: nothing is counted that could be counted wrong: the kernel knows."""
    memory = sealed(b"x" * 100)
    reader = memory.reader()
    with subprocess.Popen(
        [sys.executable, "-c", MAPS_AND_WAITS, str(reader)],
        pass_fds=[reader],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        os.close(reader)
        assert child.stdout is not None
        assert child.stdout.readline() == b"x\n"
        assert memory.in_use()
        child.kill()
        child.wait()
        assert not memory.in_use()
    memory.close()


def test_what_the_kernel_does_not_tell_of() -> None:
    """The limit of what can be known: a descriptor opened with O_PATH. It gives no right that its
    maker had not, and is why the budget is not said to stop who is out to waste memory."""
    memory = sealed(b"x" * 100)
    reader = memory.reader()
    hidden = os.open(f"/proc/self/fd/{reader}", os.O_PATH | os.O_CLOEXEC)
    os.close(reader)
    assert not memory.in_use()
    os.close(hidden)
    memory.close()


def test_before_it_is_sealed_it_is_given_to_nobody() -> None:
    memory = SharedMemory(100)
    assert memory.in_use(), "whoever fills it uses it"
    with pytest.raises(AssertionError):
        memory.reader()
    with memory.view(), pytest.raises(BufferError):
        memory.seal()
    memory.close()
    memory.close()


def test_a_view_that_is_left_behind_keeps_no_descriptor() -> None:
    memory = SharedMemory(100)
    view = memory.view()
    memory.close()
    view[:1] = b"x"  # Still memory, though nobody's.
    view.release()


def test_memory_is_out_of_core_dumps_while_it_is_written() -> None:
    memory = SharedMemory(3 * MIB)
    entries = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = [
        after.splitlines()[0]
        for before, after in itertools.pairwise(entries)
        if "racerd-share" in before
    ]
    assert flags and all("dd" in line.split() for line in flags)
    memory.close()


def test_no_descriptor_is_left_where_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        SharedMemory(100)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_without_huge_pages_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_map, "_MADV_COLLAPSE", 9999)  # As on kernels before 6.1.
    memory = sealed(b"x" * 5000)
    assert memory.page_kind is PageKind.BASE
    reader = memory.reader()
    assert contents(reader, 5000) == b"x" * 5000
    os.close(reader)
    memory.close()


def test_this_system_can_share() -> None:
    assert sharing_trouble() is None


def test_what_is_settled_outlives_sealing_and_closing() -> None:
    """Whoever still needs the bytes has them; nobody can write through it, and it counts as use."""
    memory = SharedMemory(5 * MIB)
    with memory.view() as view:
        view[:3] = b"abc"
        settled = memory.settled()
    assert settled.readonly
    assert settled.nbytes == 5 * MIB
    memory.seal()
    assert settled[:3] == b"abc"
    assert memory.in_use()
    memory.close()
    assert settled[:3] == b"abc"
    assert memory.in_use()
    settled.release()
    assert not memory.in_use()


def test_memory_that_somebody_can_still_write_to_is_not_sealed() -> None:
    """R7: a thread that was left behind must not write to what readers have."""
    memory = SharedMemory(100)
    view = memory.view()
    with pytest.raises(BufferError):
        memory.seal()
    with pytest.raises(BufferError):  # Nor by trying again.
        memory.seal()
    view[:1] = b"x"
    memory.close()
    assert memory.in_use()
    view.release()
    assert not memory.in_use()


def test_the_kernel_refuses_to_seal_what_it_has_mapped_for_writing() -> None:
    """R7: whatever we know of who writes."""
    memory = SharedMemory(100)
    with mmap.mmap(memory._fd, mmap.PAGESIZE), pytest.raises(OSError, match="busy"):
        memory.seal()
    memory.close()
    assert not memory.in_use()


def test_what_could_not_be_sealed_is_once_the_last_view_is_gone() -> None:
    memory = SharedMemory(100)
    view = memory.view()
    view[:1] = b"x"
    with pytest.raises(BufferError):
        memory.seal()
    view.release()
    memory.seal()
    reader = memory.reader()
    assert os.pread(reader, 2, 0) == b"x\0"
    os.close(reader)
    memory.close()

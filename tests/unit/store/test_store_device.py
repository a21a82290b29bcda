"""Slabs on the real disk: O_DIRECT, locks, and what errors tell."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from racerd.store.buffers import aligned_buffer
from racerd.store.device import DiskError, Extent
from racerd.store.file_device import FileDevice, open_file_device
from racerd.store.geometry import BLOCK_BYTES
from racerd.units import KIB, MIB


@pytest.fixture
def path(disk_path: Path) -> Path:
    return disk_path / "slab"


@pytest.fixture
def device(path: Path):
    device = open_file_device(path)
    yield device
    if device.fd >= 0:
        device.close()


def filled(size: int) -> memoryview:
    buffer = aligned_buffer(size)
    buffer[:] = os.urandom(size)
    return buffer


def test_a_file_on_a_real_disk_is_read_and_written_directly(device: FileDevice) -> None:
    """R21: O_DIRECT, O_NOFOLLOW, O_CLOEXEC, with the alignment that the kernel tells."""
    device.prove_writes()
    flags = fcntl.fcntl(device.fd, fcntl.F_GETFL)
    assert device.direct and flags & os.O_DIRECT and flags & os.O_NOFOLLOW
    assert fcntl.fcntl(device.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert device.alignment in (512, 1024, 2048, 4096)
    assert device.path.stat().st_mode & 0o777 == 0o600


def test_a_device_whose_close_fails_is_closed_all_the_same(device: FileDevice) -> None:
    """The number of its descriptor may be another file's afterwards: nothing goes there again."""
    os.close(device.fd)
    with pytest.raises(DiskError, match="close of slab"):
        device.close()
    with pytest.raises(DiskError, match="EBADF"):
        device.write(0, [filled(4 * KIB)])


def test_vectors_go_to_one_range_and_come_back(device: FileDevice) -> None:
    parts = [filled(8 * KIB), filled(4 * KIB), filled(64 * KIB)]
    device.write(16 * KIB, parts)
    back = [aligned_buffer(len(part)) for part in parts]
    assert device.read(16 * KIB, back) == 76 * KIB
    assert back == parts
    assert device.bounced_bytes == 0


def test_a_read_past_the_end_is_short(device: FileDevice) -> None:
    device.write(0, [filled(8 * KIB)])
    assert device.read(4 * KIB, [aligned_buffer(16 * KIB)]) == 4 * KIB
    assert device.read(MIB, [aligned_buffer(4 * KIB)]) == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    shift=st.integers(0, 4096),
    lengths=st.lists(st.integers(1, 5).map(lambda n: n * 4 * KIB), min_size=1, max_size=4),
    offset=st.integers(0, 8).map(lambda n: n * 4 * KIB),
)
def test_memory_at_any_address_works(
    device: FileDevice, shift: int, lengths: list[int], offset: int
) -> None:
    """F25, F33: memory that O_DIRECT refuses is copied; the descriptor stays direct."""
    total = sum(lengths)
    source = filled(total + shift)[shift:]
    target = aligned_buffer(total + shift)[shift:]
    cut = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    device.write(offset, [source[a:b] for a, b in pairwise(cut)])
    views = [target[a:b] for a, b in pairwise(cut)]
    assert device.read(offset, views) == total
    assert target == source
    assert device.direct


def test_large_unaligned_memory_is_copied_in_parts(device: FileDevice) -> None:
    """F25: what was copied is counted."""
    source = filled(3 * MIB + 1)[1:]
    device.write(0, [source])
    target = aligned_buffer(3 * MIB + 1)[1:]
    assert device.read(0, [target]) == 3 * MIB and target == source
    assert device.bounced_bytes == 6 * MIB


def test_an_error_tells_errno_operation_offset_length_and_alignment(device: FileDevice) -> None:
    """F22: everything that an operator needs, in one message, and what to do."""
    os.close(device.fd)
    device.fd = os.open(device.path, os.O_RDONLY | os.O_DIRECT)
    with pytest.raises(DiskError) as caught:
        device.write(12 * KIB, [filled(8 * KIB)])
    error = caught.value
    assert error.native == errno.EBADF and error.errno_name == "EBADF"
    assert f"write of slab {device.path} failed at offset 12288, length 8192" in error.message
    assert f"alignment {device.alignment}" in error.message and "errno 9" in error.message
    assert error.hint


def test_a_full_file_system_is_told_apart(device: FileDevice, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(DiskError) as caught:
        device.write(0, [filled(4 * KIB)])
    assert caught.value.full and caught.value.code == "disk_full"
    assert "free space" in caught.value.hint


def test_a_file_system_that_takes_the_flag_and_refuses_the_write(
    device: FileDevice, monkeypatch
) -> None:
    """F21, F34: the probe finds out, the slab goes on through the page cache."""
    real = os.pwritev

    def picky(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not like this")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", picky)
    device.prove_writes()
    assert not device.direct
    device.write(0, [filled(4 * KIB)])


def test_a_file_system_that_refuses_o_direct_at_open(path: Path, monkeypatch) -> None:
    """R21: it works, through the page cache."""
    real = os.open

    def picky(name: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(name, flags, mode)

    monkeypatch.setattr(os, "open", picky)
    device = open_file_device(path)
    device.prove_writes()
    assert not device.direct and device.alignment == 1
    device.close()


def test_a_file_system_that_refuses_direct_reads(path: Path, monkeypatch) -> None:
    """F34: an overlay over a file system without direct I/O accepts the flag."""
    real = os.preadv

    def picky(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not like this")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", picky)
    device = open_file_device(path)
    assert not device.direct
    device.prove_writes()
    device.close()


def test_a_medium_that_does_not_keep_the_probe_is_refused(device: FileDevice, monkeypatch) -> None:
    def forgetful(fd: int, buffers: list[memoryview], offset: int) -> int:
        return sum(len(buffer) for buffer in buffers)

    monkeypatch.setattr(os, "pwritev", forgetful)
    with pytest.raises(DiskError, match="not the one written"):
        device.prove_writes()


def test_short_transfers_are_continued(device: FileDevice, monkeypatch) -> None:
    real_read, real_write = os.preadv, os.pwritev
    source = [filled(8 * KIB), filled(12 * KIB)]

    def short(real):
        return lambda fd, buffers, at: real(fd, [buffers[0][: 4 * KIB]], at)

    monkeypatch.setattr(os, "pwritev", short(real_write))
    monkeypatch.setattr(os, "preadv", short(real_read))
    device.write(0, source)
    target = [aligned_buffer(16 * KIB), aligned_buffer(4 * KIB)]
    assert device.read(0, target) == 20 * KIB
    assert b"".join(target) == b"".join(source)


def test_two_daemons_cannot_share_a_slab_and_death_releases_it(path: Path) -> None:
    """F37: the kernel drops the lock, also after kill -9."""
    code = (
        "import sys, time; from pathlib import Path;"
        "from racerd.store.file_device import open_file_device;"
        "device = open_file_device(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"locked\n"
    with pytest.raises(DiskError) as caught:
        open_file_device(path)
    assert caught.value.code == "slab_locked" and "another process" in caught.value.message
    child.kill()
    child.wait()
    child.stdout.close()
    open_file_device(path).close()


def test_a_symbolic_link_a_folder_and_a_pipe_are_refused(path: Path) -> None:
    """R21: O_NOFOLLOW, and nothing but a file or a block device."""
    path.symlink_to("/etc/passwd")
    with pytest.raises(DiskError) as link:
        open_file_device(path)
    assert link.value.native == errno.ELOOP and "symbolic link" in link.value.hint
    with pytest.raises(DiskError) as folder:
        open_file_device(path.parent)
    assert folder.value.native == errno.EISDIR
    os.mkfifo(path.parent / "pipe")
    with pytest.raises(DiskError, match="neither a file nor a block device"):
        open_file_device(path.parent / "pipe")


def test_a_folder_that_is_missing_is_told(path: Path) -> None:
    with pytest.raises(DiskError) as caught:
        open_file_device(path / "not" / "there")
    assert caught.value.native == errno.ENOENT and "make the slab's folder" in caught.value.hint


def test_space_is_reserved_and_given_back(device: FileDevice) -> None:
    """F19, F74: allocated bytes are real; released ones read as zeros."""
    device.allocate(Extent(0, 4 * MIB))
    assert device.size_bytes == 4 * MIB
    space = device.space()
    assert space is not None and space.own >= 4 * MIB and 0 < space.free < space.total
    device.write(MIB, [filled(8 * KIB)])
    device.release(Extent(MIB, MIB))
    back = filled(8 * KIB)
    device.read(MIB, [back])
    assert back == bytes(8 * KIB)
    after = device.space()
    assert after is not None and after.own <= space.own - MIB
    device.truncate(MIB)
    assert device.size_bytes == MIB


def test_a_file_system_without_fallocate_grows_sparse(device: FileDevice, monkeypatch) -> None:
    """F27: no call is needed that network file systems refuse."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    device.allocate(Extent(0, MIB))
    assert device.size_bytes == MIB
    device.allocate(Extent(0, BLOCK_BYTES))
    assert device.size_bytes == MIB


def test_tmpfs_works_too(tmp_path_factory) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no tmpfs at /dev/shm")
    path = Path("/dev/shm") / f"racer-test-{os.getpid()}"
    device = open_file_device(path)
    try:
        device.prove_writes()
    finally:
        device.close()
        path.unlink()

"""Publishing a socket: modes, path limits, stale and live sockets."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path

import pytest

from racerd.errors import ConfigError
from racerd.serve.socket_file import PATH_BYTES_MAX, SocketFile, file_identity


def socket_file(run_dir: Path, mode: int = 0o660, group: int | None = None) -> SocketFile:
    return SocketFile(run_dir, "local", mode, group, backlog=4)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
@pytest.mark.parametrize(("mode", "folder_mode"), [(0o660, 0o750), (0o600, 0o750), (0o666, 0o755)])
def test_modes_are_as_asked_whatever_the_umask(
    tmp_path: Path, umask: int, mode: int, folder_mode: int
) -> None:
    """F77: the socket is for its owner and group, unless the settings say otherwise."""
    before = os.umask(umask)
    try:
        file = socket_file(tmp_path / "run", mode)
        listening = file.publish()
    finally:
        os.umask(before)
    with listening:
        assert file.path == tmp_path / "run" / "local" / "client" / "socket"
        assert mode_of(file.path) == mode
        assert mode_of(file.folder) == folder_mode
        assert mode_of(tmp_path / "run") == mode_of(tmp_path / "run" / "local") == 0o755
        assert not listening.getblocking()
        assert os.listdir(file.folder) == ["socket"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to any group")
def test_the_group_is_that_of_the_settings(tmp_path: Path) -> None:
    """F77."""
    file = socket_file(tmp_path, group=12345)
    with file.publish():
        assert file.path.stat().st_gid == file.folder.stat().st_gid == 12345


def test_a_path_is_as_long_as_the_kernel_takes_and_no_longer(tmp_path: Path) -> None:
    """F75: said at once, with the limit."""
    rest = len(os.fsencode(socket_file(tmp_path / "x").path)) - 1
    longest = socket_file(tmp_path / ("x" * (PATH_BYTES_MAX - rest)))
    with longest.publish():
        assert len(os.fsencode(longest.path)) == PATH_BYTES_MAX
        assert connects(longest.path)
    for extra in ("y", "y" * 50):
        with pytest.raises(ConfigError, match=r"has 1\d\d bytes, the limit is 107"):
            socket_file(longest.run_dir.with_name(longest.run_dir.name + extra)).publish()
    # The limit is one of bytes, not of characters.
    with pytest.raises(ConfigError, match="the limit is 107"):
        socket_file(tmp_path / ("ü" * (PATH_BYTES_MAX - rest))).publish()


def test_the_socket_of_a_crash_is_replaced(tmp_path: Path) -> None:
    """F77: a daemon that was killed leaves its file, which nobody listens on."""
    file = socket_file(tmp_path)
    file.publish().close()
    (file.folder / ".sock").write_text("killed half-way")
    assert not connects(file.path)
    with file.publish():
        assert connects(file.path)


def test_a_live_socket_is_left_alone(tmp_path: Path) -> None:
    """F77: also when its backlog is full, so that a connect would wait."""
    file = socket_file(tmp_path)
    with file.publish() as listening:
        listening.listen(0)
        waiting = []
        for _ in range(3):
            before = file_identity(file.path)
            with pytest.raises(ConfigError, match="another process listens"):
                file.publish()
            assert file_identity(file.path) == before
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            client.connect_ex(os.fspath(file.path))
            waiting.append(client)
        for client in waiting:
            client.close()


def test_two_daemons_cannot_start_at_once(tmp_path: Path) -> None:
    """F77: the probe and the replacement are one step under a lock."""
    file = socket_file(tmp_path)
    file.publish().close()
    with open(file.folder.parent / "socket.lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another racerd is starting"):
            file.publish()
    file.publish().close()


def test_withdrawing_leaves_the_socket_of_another(tmp_path: Path) -> None:
    file = socket_file(tmp_path)
    first = file.publish()
    identity = file_identity(file.path)
    first.close()
    with file.publish():
        file.withdraw(first, identity)
        assert connects(file.path)
    second = file.publish()
    file.withdraw(second, file_identity(file.path))
    assert not file.path.exists()
    file.withdraw(second, identity)


def test_withdrawing_does_not_wait_for_a_starting_daemon(tmp_path: Path) -> None:
    file = socket_file(tmp_path)
    listening = file.publish()
    with open(file.folder.parent / "socket.lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file.withdraw(listening, file_identity(file.path))
    assert not connects(file.path)


def test_what_is_not_a_socket_is_left_alone(tmp_path: Path) -> None:
    file = socket_file(tmp_path)
    file.folder.mkdir(parents=True)
    file.path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"):
        file.publish()
    assert file.path.read_text() == "mine"
    file.path.unlink()
    file.folder.rmdir()
    file.folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        file.publish()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made: Not a directory; see --run-dir"):
        socket_file(tmp_path / "file").publish()

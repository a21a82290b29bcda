"""Where the socket is looked for, and what is said when nobody answers."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

import racer
from racer.socket_path import SOCKET_PATH_BYTES_MAX, SocketPlace, cache_of_path

URL = "racer://local/b/k"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RACER_SOCKET", "RACER_RUN_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_the_order_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert SocketPlace.find().run_dir == "/run/racer"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert SocketPlace.find().run_dir == "/run/user/1000/racer"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert SocketPlace.find().run_dir == "/run/racer"
    monkeypatch.setenv("RACER_RUN_DIR", "/somewhere")
    assert SocketPlace.find().path_for("a.b") == "/somewhere/a.b/client/socket"
    monkeypatch.setenv("RACER_SOCKET", "/run/racer/local/client/socket")
    assert SocketPlace.find().path_for("local") == "/run/racer/local/client/socket"
    assert SocketPlace.find(run_dir="/else").path_for("x") == "/else/x/client/socket"
    assert SocketPlace.find(socket="/s").path_for("x") == "/s"
    with pytest.raises(ValueError, match="not both"):
        SocketPlace.find("/s", "/d")


@pytest.mark.parametrize(
    ("path", "cache"),
    [
        ("/run/racer/local/client/socket", "local"),
        ("local/client/socket", "local"),
        ("/run/racer/Local/client/socket", None),
        ("/run/racer/local/client/socket2", None),
        ("/tmp/socket", None),
        ("/client/socket", None),
    ],
)
def test_the_cache_that_a_path_names(path: str, cache: str | None) -> None:
    assert cache_of_path(path) == cache


def test_no_socket_says_which_and_what_else_there_is(tmp_path: Path) -> None:
    (tmp_path / "other" / "client").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "other" / "client" / "socket"))
        with racer.Client(run_dir=tmp_path) as client:
            with pytest.raises(racer.DaemonUnavailable) as caught:
                client.stat(URL)
            assert client.caches() == ["other"]
    assert str(tmp_path / "local" / "client" / "socket") in caught.value.message
    assert "caches there: other" in caught.value.message
    assert "run_dir=" in caught.value.hint


def test_nobody_listens(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    with racer.Client(socket=path) as client:
        with pytest.raises(racer.DaemonUnavailable, match=f"nobody listens on {path}"):
            client.stat(URL)


def test_not_allowed_to_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F77: says who owns the socket, and with which mode."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()

        class Refused(socket.socket):
            def connect(self, address: object) -> None:
                raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(socket, "socket", Refused)
        with racer.Client(socket=path) as client:
            with pytest.raises(racer.DaemonUnavailable) as caught:
                client.stat(URL)
    assert f"uid {os.getuid()}, gid {os.getgid()}, mode 0600" in caught.value.message
    assert "group" in caught.value.hint
    assert caught.value.retry == "never"


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    """F75: the limit is in the message, before anything is tried."""
    deep = tmp_path / ("d" * 100)
    with racer.Client(run_dir=deep) as client:
        with pytest.raises(racer.DaemonUnavailable, match=str(SOCKET_PATH_BYTES_MAX)):
            client.stat(URL)


def test_a_queue_that_is_full_is_waited_for(tmp_path: Path, pauses: list[float]) -> None:
    path = tmp_path / "local" / "client" / "socket"
    path.parent.mkdir(parents=True)
    filling: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock = socket.socket(socket.AF_UNIX)
                filling.append(sock)
                sock.setblocking(False)
                sock.connect(str(path))
        with racer.Client(run_dir=tmp_path) as client:
            with pytest.raises(racer.Overloaded, match="does not keep up"):
                client.stat(URL)
    for sock in filling:
        sock.close()
    assert len(pauses) == 19


def test_timeouts_are_times() -> None:
    for timeout in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            racer.Client(timeout=timeout)

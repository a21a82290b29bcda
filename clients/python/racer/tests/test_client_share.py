"""What a client takes from a daemon that shares memory, and what it refuses."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import racer
from tests.support.sealing import seal_writing

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
URL = "racer://local/b/k"
GOOD = {"offset": 0, "bytes": 5000, "size": 5000, "rungs": {"memory": 5000}}


def memory(size: int = 8192, seals: int = SEALS) -> int:
    fd = os.memfd_create("shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, b"x" * size)
    if seals & fcntl.F_SEAL_WRITE:
        seal_writing(fd, seals)
    elif seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@contextmanager
def daemon(folder: Path, make: Callable[[], list[int]], shown: dict[str, object]) -> Iterator[Path]:
    """Answers one request with `shown` and with the descriptors that `make` makes."""
    path = folder / "local" / "client" / "socket"
    path.parent.mkdir(parents=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.listen()

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(65_536)
            body = json.dumps(shown).encode()
            head = f'HTTP/1.1 200 OK\r\nETag: "v"\r\nContent-Length: {len(body)}\r\n\r\n'
            descriptors = make()
            answer = head.encode() + body
            # The descriptors go with the first byte, whatever the kernel makes of the rest.
            with suppress(ConnectionError):  # A client that was told too much hangs up.
                socket.send_fds(sock, [answer[:10]], descriptors)
                sock.sendall(answer[10:])
                sock.recv(1)
            for descriptor in descriptors:
                os.close(descriptor)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield folder
    finally:
        thread.join()
        listener.close()


def share(run_dir: Path, kind: str = "blocking") -> racer.SharedChunk:
    if kind == "blocking":
        with racer.Client(run_dir=run_dir) as client:
            return client.share(URL, timeout=20)

    async def main() -> racer.SharedChunk:
        async with racer.AsyncClient(run_dir=run_dir) as client:
            return await client.share(URL, timeout=20)

    return asyncio.run(main())


both = pytest.mark.parametrize("kind", ["blocking", "asyncio"])


@both
def test_a_good_answer(tmp_path: Path, kind: str) -> None:
    with daemon(tmp_path, lambda: [memory()], GOOD) as run_dir, share(run_dir, kind) as chunk:
        assert bytes(chunk.view) == b"x" * 5000
        assert not os.get_inheritable(chunk.fileno())
        assert chunk.part.etag == '"v"'
        assert chunk.part.rungs == {"memory": 5000}


@both
@pytest.mark.parametrize(
    ("make", "shown", "why"),
    [
        (list, GOOD, "0 descriptors came"),
        (lambda: [memory(seals=0)], GOOD, "not sealed"),
        (lambda: [memory(seals=fcntl.F_SEAL_SHRINK)], GOOD, "not sealed"),
        (lambda: [memory(seals=fcntl.F_SEAL_WRITE)], GOOD, "not sealed"),
        (lambda: [memory(4096)], GOOD, "less memory"),
        (lambda: [memory(), memory()], GOOD, "2 descriptors came"),
        (lambda: [memory() for _ in range(17)], GOOD, "more than 16"),
        (lambda: [memory()], {**GOOD, "offset": 100, "bytes": 4900}, "cannot be"),
        (lambda: [memory()], {**GOOD, "bytes": 6000}, "cannot be"),
        (lambda: [memory()], {**GOOD, "bytes": 0}, "cannot be"),
        (lambda: [memory()], {**GOOD, "rungs": []}, "JSON object"),
    ],
)
def test_what_could_end_the_process_or_change_under_it_is_refused(
    tmp_path: Path, make: Callable[[], list[int]], shown: dict[str, object], why: str, kind: str
) -> None:
    """R5: no descriptor is left either; the fixture of all tests looks."""
    with daemon(tmp_path, make, shown) as run_dir, pytest.raises(racer.ProtocolError, match=why):
        share(run_dir, kind)


def test_what_is_no_memory_at_all(tmp_path: Path) -> None:
    def pipe() -> list[int]:
        reading, writing = os.pipe()
        os.close(writing)
        return [reading]

    with daemon(tmp_path, pipe, GOOD) as run_dir, pytest.raises(racer.ProtocolError):
        share(run_dir)


def test_a_chunk_that_was_dropped_closes_its_descriptor(tmp_path: Path) -> None:
    """R36: quietly; with a view of it left, too."""
    with (
        daemon(tmp_path, lambda: [memory()], GOOD) as run_dir,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        chunk = share(run_dir)
        descriptor, view = chunk.fileno(), chunk.view
        inode = os.fstat(descriptor).st_ino
        del chunk
        assert bytes(view[:3]) == b"xxx"
        with suppress(OSError):  # Its number may be another file's by now.
            assert os.fstat(descriptor).st_ino != inode
        view.release()
    assert not told


def test_a_chunk_that_was_closed_gives_no_descriptor(tmp_path: Path) -> None:
    with daemon(tmp_path, lambda: [memory()], GOOD) as run_dir:
        chunk = share(run_dir)
        view = chunk.view
        chunk.close()
        chunk.close()
        assert bytes(view[:3]) == b"xxx"
        with pytest.raises(racer.Closed):
            chunk.fileno()
        view.release()

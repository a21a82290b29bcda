"""Runs a server process for a test: a free port, readiness by asking it, always killed whole."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

_READY_SECONDS = 90.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def need(program: str | Path, what: str) -> str:
    """The program's path. Without it the test skips loudly, or fails if RACER_TEST_SERVERS=1."""
    found = shutil.which(program)
    if found is None:
        text = f"{what} is not installed: run tests/servers/install.sh"
        if os.environ.get("RACER_TEST_SERVERS") == "1":
            pytest.fail(text)
        pytest.skip(text)
    return found


def _die_with_parent() -> None:
    """In the child: the kernel ends it when the tests are killed and cannot."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def server(
    command: Sequence[str],
    log: Path,
    ready: Callable[[], bool],
    environ: Mapping[str, str] = {},
    *,
    ready_seconds: float = _READY_SECONDS,
    drain_seconds: float = 0.0,
) -> Iterator[None]:
    """Runs `command` in a process group of its own until the block ends.

    It is killed then; a server that would leave something behind is asked to end before.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environ},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            _wait(process, ready, log, ready_seconds)
            yield
        finally:
            if drain_seconds:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(drain_seconds)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(
    process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path, seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if ready():
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} is not ready:\n{log.read_text(errors='replace')}")
        time.sleep(0.05)


def answers(port: int) -> bool:
    """Whether something accepts connections on `port`."""
    with socket.create_connection(("127.0.0.1", port), 1):
        return True

"""Runs a real racerd in a process of its own: for the demo, the benchmarks and the tests.

    with DaemonProcess(folder, caches={"local": f"file://{models}"}) as daemon:
        daemon.socket("local")

The state survives in `folder`; starting again on the same folder is a restart.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_READY_SECONDS = 60.0
_STOP_SECONDS = 60.0


class DaemonProcess:
    """One racerd process. `folder` gets `state/`, `run/` and `log`; `log` grows over restarts."""

    def __init__(
        self,
        folder: Path,
        *,
        caches: Mapping[str, str],
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.caches = dict(caches)
        self.arguments = list(arguments)
        self.environ = dict(environ or {})
        self.process: subprocess.Popen[bytes] | None = None
        self.diagnostics = ""
        self.started_text = ""

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def socket(self, cache: str) -> Path:
        return self.run_dir / cache / "client" / "socket"

    @property
    def command(self) -> list[str]:
        named = [f"--cache={name}={url}" for name, url in self.caches.items()]
        return [
            *(sys.executable, "-m", "racerd", "--gpu=auto"),
            *(f"--state-dir={self.state_dir}", f"--run-dir={self.run_dir}"),
            # What is shown and tested here must not depend on how full somebody's disk is.
            *("--diagnostics=127.0.0.1:0", "--free-space-floor=0", *named, *self.arguments),
        ]

    def __enter__(self) -> DaemonProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process is not None:
            self.stop()

    def start(self) -> None:
        """Starts racerd and returns once it says that it is ready."""
        self.spawn()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def spawn(self) -> None:
        """Starts racerd and returns at once: what follows is `wait_ready`, or `kill`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RACER_")}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ | self.environ,
            )

    def wait_ready(self) -> None:
        """Returns once racerd says that it is ready. Raises TimeoutError, or RuntimeError where
        it ends before that; the process is then still to be `kill`ed, to be reaped."""
        assert self.process is not None and self.process.stdout is not None
        deadline = time.monotonic() + _READY_SECONDS
        text = b""
        while b"\nready" not in text:
            wait = deadline - time.monotonic()
            if wait <= 0 or not select.select([self.process.stdout], [], [], wait)[0]:
                raise TimeoutError(f"racerd was not ready in {_READY_SECONDS:.0f} s:\n{self.log}")
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if not chunk:
                code = self.process.wait()
                raise RuntimeError(f"racerd ended with {code} before it was ready:\n{self.log}")
            text += chunk
        self.started_text = text.decode()
        found = re.search(r"http://(\S+?)/metrics", self.started_text)
        self.diagnostics = found.group(1) if found else ""

    def get(self, path: str) -> str:
        """The text of a diagnostics page, whatever its status."""
        try:
            with urllib.request.urlopen(f"http://{self.diagnostics}{path}", timeout=30) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return str(error.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name` whose labels include `labels`."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(
                f'{key}="{wanted}"' in sample for key, wanted in labels.items()
            ):
                total += float(value)
        return total

    def stop(self, *, signal_number: int = signal.SIGTERM) -> int:
        """Asks racerd to drain, waits, and returns its exit status."""
        assert self.process is not None
        self.process.send_signal(signal_number)
        try:
            return self._ended(self.process.wait(_STOP_SECONDS))
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"racerd did not drain:\n{self.log}") from None

    def kill(self) -> int:
        """SIGKILL: the crash that every promise must survive."""
        assert self.process is not None
        self.process.kill()
        return self._ended(self.process.wait())

    def _ended(self, status: int) -> int:
        assert self.process is not None and self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return status

"""Runs `gpu_client_child` on the stand-in driver, and reads what it tells."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.gpu_rig import driver_calls
from tests.support.standin import StandIn


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Told:
    """What a child said."""

    result: Any
    error: dict[str, Any]
    left: dict[str, int]
    said: list[str]


class Children:
    """Runs scenarios against the daemon in `run_dir`."""

    def __init__(self, standin: StandIn, run_dir: Path, folder: Path) -> None:
        self._standin = standin
        self._run_dir = run_dir
        self.log = folder / "calls"

    def run(self, scenario: str, *, seconds: float = 60, **arguments: Any) -> Told:
        return self.on(scenario, {}, seconds=seconds, **arguments)

    def on(
        self, scenario: str, driver: dict[str, str], *, seconds: float = 60, **arguments: Any
    ) -> Told:
        """With what the stand-in is asked for in `driver`: see faults.h."""
        self.log.unlink(missing_ok=True)
        environment = self._standin.environment(
            RACER_RUN_DIR=str(self._run_dir), FAKECUDA_LOG=str(self.log), **driver
        )
        environment.pop("RACER_SOCKET", None)
        command = [sys.executable, "-m", "tests.support.gpu_client_child", scenario]
        done = subprocess.run(
            [*command, json.dumps(arguments)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        return Told(told.get("result"), told.get("error", {}), told["left"], told["said"])

    def calls(self) -> Counter[str]:
        return Counter(name for name, _ in driver_calls(self.log))


PAIRS = (
    ("cuMemCreate", "cuMemRelease"),
    ("cuMemAddressReserve", "cuMemAddressFree"),
    ("cuMemMap", "cuMemUnmap"),
    ("cuStreamCreate", "cuStreamDestroy"),
    ("cuEventCreate", "cuEventDestroy"),
    ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"),
    ("cuCtxPushCurrent", "cuCtxPopCurrent"),
)


def assert_paired(calls: Counter[str]) -> None:
    for begin, end in PAIRS:
        assert calls[begin] == calls[end], (begin, calls)

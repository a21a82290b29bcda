"""Runs the lanes in turn, A B C A B C …, each load in a process of its own.

Every load's tensors have to have the same checksum, and racerd has to have served from the rung
that the lane is about; otherwise the benchmark ends with an error instead of figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.bench_loaders.lanes import RUNGS, Lane, State
from tools.bench_loaders.results import LaneResult, Run
from tools.bench_loaders.scene import Place, Scene, cpu_seconds, wait_unused

_WORKER = Path(__file__).with_name("worker.py")
# Tensors, a copy of each (runai + clone holds both), and what else a loader needs.
_WARM_SHARE = 2.25
# A load that fails is tried again: the machine is shared, and who else uses it may be in the way.
_TRIES = 3


class Disagreement(Exception):
    """A loader's tensors are not those of the others, or came from elsewhere: never tried again."""


def _tell(line: str) -> None:
    print(line, flush=True)


class Worker:
    """A process that loads once: `load`, then `verify`; a context manager, killed at its end."""

    def __init__(self, python: Path, job: dict[str, Any], environ: dict[str, str]) -> None:
        self._name = job["loader"]
        self._process = subprocess.Popen(
            [str(python), str(_WORKER), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        try:
            self._hear()  # That it is ready.
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def load(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._hear()

    def verify(self) -> dict[str, Any]:
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended with {self._process.wait()}: see above")
        said: dict[str, Any] = json.loads(line)
        return said

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if error[0] is not None:
            self._process.kill()
        status = self._process.wait()
        self._process.stdout.close()
        if error[0] is None and status:
            raise RuntimeError(f"{self._name} ended with {status}: see above")


class Benchmark:
    """`python` has the loaders; `framework` is racer's and safetensors' ("numpy" needs no torch).

    `tensor_bytes` and `tensors` are those of the first load; all others have to agree with it.
    """

    def __init__(self, scene: Scene, python: Path, *, framework: str = "pt") -> None:
        self._scene = scene
        self._python = python
        self._framework = framework
        self.tensor_bytes = 0
        self.tensors = 0
        self._checksum: int | None = None

    def run(
        self, lanes: Sequence[Lane], rounds: int, tell: Callable[[str], None] = _tell
    ) -> tuple[LaneResult, ...]:
        runs: dict[str, list[Run]] = {lane.key: [] for lane in lanes}
        versions: dict[str, str] = {}
        for number in range(1, rounds + 1):
            for lane in lanes:
                run, versions[lane.key] = self._load_with_patience(lane, tell)
                runs[lane.key].append(run)
                rate = self.tensor_bytes / run.seconds / 1e9
                tell(f"{number}/{rounds}  {lane.key:<24} {run.seconds:7.3f} s  {rate:6.2f} GB/s")
        return tuple(
            LaneResult(lane.key, versions[lane.key], tuple(runs[lane.key])) for lane in lanes
        )

    def _load_with_patience(self, lane: Lane, tell: Callable[[str], None]) -> tuple[Run, str]:
        for _ in range(_TRIES - 1):
            try:
                return self._load(lane)
            except (OSError, RuntimeError) as error:
                tell(f"{lane.key} failed, and is tried again: {error}")
        return self._load(lane)

    def _load(self, lane: Lane) -> tuple[Run, str]:
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(self._scene.ready(lane.state))
            if lane.state is State.RACERD_SHARED:
                holder = stack.enter_context(self._worker(lane, place))
                holder.load()
                holder.verify()
            worker = stack.enter_context(self._worker(lane, place))
            place.touch()
            daemon = place.daemon
            spent = cpu_seconds(daemon) if daemon else 0.0
            loaded = worker.load()
            if daemon is not None:
                if lane.state is State.RACERD_COLD:
                    wait_unused(daemon, "dirty")
                spent = cpu_seconds(daemon) - spent
            verified = worker.verify()
        self._check(lane, loaded, verified)
        run = Run(
            seconds=loaded["seconds"],
            touch_seconds=verified["touch_seconds"],
            extra_bytes=verified["extra_bytes"],
            client_cpu_seconds=loaded["cpu_seconds"],
            daemon_cpu_seconds=spent if daemon is not None else None,
        )
        return run, loaded["version"]

    def _worker(self, lane: Lane, place: Place) -> Worker:
        options = dict(lane.options)
        if lane.loader in ("racer", "safetensors"):
            options["framework"] = self._framework
        if lane.is_told_names:
            options["names"] = self._scene.names
        job = {
            "loader": lane.loader,
            "source": place.source,
            "options": options,
            "warm_bytes": int(_WARM_SHARE * self._scene.size),
        }
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("RACER_", "RUNAI_"))}
        return Worker(self._python, job, {**clean, **place.environ, **lane.environ})

    def _check(self, lane: Lane, loaded: dict[str, Any], verified: dict[str, Any]) -> None:
        if self._checksum is None:
            self._checksum = verified["checksum"]
            self.tensor_bytes, self.tensors = verified["tensor_bytes"], verified["tensors"]
        if verified["checksum"] != self._checksum:
            raise Disagreement(f"{lane.key}: its tensors are not those of the other loaders")
        others = {
            rung: nbytes
            for rung, nbytes in loaded.get("rungs", {}).items()
            if nbytes and rung not in RUNGS[lane.state]
        }
        if others:
            raise Disagreement(f"{lane.key} was served by {others} too: see {RUNGS[lane.state]}")

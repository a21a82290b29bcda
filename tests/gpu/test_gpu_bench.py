"""`make bench-gpu` runs, and never passes a figure of the stand-in off as one of a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.standin import StandIn


def _bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("RACER_", "FAKECU"))}
    return subprocess.run(
        [sys.executable, "-m", "tools.bench_gpu", f"--folder={folder}", *arguments],
        env=environ, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_every_part_runs_on_the_stand_in(standin: StandIn, slab_folder: Path) -> None:
    """R9, R10, R19: kernels by batch, memory, cuFile and the host path, pages; all that came went
    through the "GPU", and the first and the last line say what the figures are worth."""
    done = _bench(slab_folder, "--stand-in")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert "mean nothing" in lines[0] and "mean nothing" in lines[-1]
    for figure in ("kernels, 8 pages", "memory tier to GPU", "disk to GPU, cuFile",
                   "disk to GPU, host path", "p50", "p99"):  # fmt: skip
        assert figure in done.stdout
    served = re.findall(r"share that (\w+) served +([\d.]+)", done.stdout)
    assert [name for name, _ in served] == ["memory", "cufile", "disk"]
    assert all(float(share) > 0 for _, share in served)


def test_without_a_gpu_nothing_is_measured(slab_folder: Path) -> None:
    """R17: it says what is missing, and prints no figure."""
    done = _bench(slab_folder)
    if done.returncode == 0:
        pytest.skip("this machine has a GPU: `make bench-gpu` measures it")
    assert done.stdout.startswith("nothing was measured: ")
    assert "GB/s" not in done.stdout

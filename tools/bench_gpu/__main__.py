"""`make bench-gpu`: what reads into GPU memory cost on this machine's GPU. See docs/gpu.md.

    python -m tools.bench_gpu [PART ...] [--bytes 4GiB] [--rounds 5] [--gpu 0] [--stand-in]

Each part pairs racerd with the bare work it is made of, in turn, and prints medians, below the
GPU's name, the driver and the date, which belong to every figure. Without a GPU it measures nothing
and says so; `--stand-in` runs all of it on the tests' driver, to see that it runs: its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from racerd.gpu.worker.probe import probe
from racerd.units import GIB, MIB, parse_bytes
from tools.bench.report import Figure
from tools.bench_gpu import parts

PARTS: dict[str, Callable[[parts.Options], list[Figure]]] = {
    "kernels": parts.kernels,
    "memory": parts.memory,
    "disk": parts.disk,
    "page": parts.page,
}
_ON_STAND_IN = "RACER_BENCH_STAND_IN"
_NOTHING = "*** the stand-in driver: these figures mean nothing, and are not to be written down ***"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--bytes", type=parse_bytes, default=4 * GIB, help="object size (4GiB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", type=int, default=0, help="the GPU's number in this process")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="on the disk to measure")
    parser.add_argument("--stand-in", action="store_true", help="a smoke test without a GPU")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}: use {', '.join(PARTS)}")
    if chosen.stand_in and _ON_STAND_IN not in os.environ:
        lack = _again_on_the_stand_in()
        print(f"nothing can be tried: {lack}")
        return 1
    found = probe()
    if not found["gpus"]:
        print(f"nothing was measured: {found['message'] or 'no GPU is visible'}; {found['hint']}")
        return 1
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=chosen.folder) as folder:
        options = parts.Options(
            Path(folder).resolve(),
            4 * MIB if chosen.stand_in else chosen.bytes,
            1 if chosen.stand_in else chosen.rounds,
            chosen.gpu,
            small=chosen.stand_in,
        )
        print(_NOTHING if chosen.stand_in else parts.heading(options))
        for name in chosen.parts or PARTS:
            print(f"\n{name}", flush=True)
            for figure in PARTS[name](options):
                print(f"  {figure}", flush=True)
        if chosen.stand_in:
            print(f"\n{_NOTHING}")
    return 0


def _again_on_the_stand_in() -> str:
    """Runs this program anew where the CUDA driver is the tests' own; returns what it lacks."""
    from tests.support.standin import build_standin, missing

    lack = missing()
    if lack is not None:
        return lack
    environ = build_standin().environment(**{_ON_STAND_IN: "1"})
    command = [sys.executable, "-m", "tools.bench_gpu", *sys.argv[1:]]
    return str(os.execve(sys.executable, command, environ))  # It does not come back.


if __name__ == "__main__":
    sys.exit(main())

"""`make bench`: ratios of one run on this machine. See docs/performance.md for what they mean.

    python -m tools.bench [PART ...] [--bytes 1GiB] [--rounds 5]

Each part pairs racerd with the bare work it is made of, A B A B …, and prints the ratio of the
medians. Nothing here gates a test: machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from racerd.units import GIB, parse_bytes
from tools.bench import parts
from tools.bench.report import Figure

PARTS: dict[str, Callable[[parts.Options], list[Figure]]] = {
    "memory": parts.memory,
    "disk": parts.disk,
    "cold": parts.cold,
    "hot": parts.hot,
    "budget": parts.budget,
    "store": parts.store,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--bytes", type=parse_bytes, default=GIB, help="object size (1GiB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="a disk, not tmpfs")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}: use {', '.join(PARTS)}")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=chosen.folder) as folder:
        options = parts.Options(Path(folder).resolve(), chosen.bytes, chosen.rounds)
        for name in chosen.parts or PARTS:
            print(f"\n{name}", flush=True)
            for figure in PARTS[name](options):
                print(f"  {figure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-loaders`: racer beside the other loaders of safetensors, in one run.

    python -m tools.bench_loaders [LANE ...] [--rounds 5] [--bytes 1GiB]

Each load runs in a process of its own, in turn (A B C A B C …), in the environment that `--python`
names. Results go to docs/loaders.json; docs/loaders.svg and the section "Loaders" of
docs/performance.md are made from them. `--draw` makes these two from the results that are there.
With lanes named, nothing is written: figures of other runs do not belong beside them.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import sys
import tempfile
from pathlib import Path

from racer.loading.stream import STAGING_BYTES
from racerd.units import GIB, MIB, format_bytes, parse_bytes
from tools.bench_loaders.chart import svg
from tools.bench_loaders.lanes import LANES
from tools.bench_loaders.measure import Benchmark
from tools.bench_loaders.results import Results
from tools.bench_loaders.scene import Scene
from tools.bench_loaders.table import markdown, put
from tools.sample_model import make_model


def machine() -> str:
    """The machine in words: processor, cores, memory, kernel."""
    processors = Path("/proc/cpuinfo").read_text().splitlines()
    cores = sum(line.startswith("processor") for line in processors)
    names = [line.partition(":")[2].strip() for line in processors if line.startswith("model name")]
    memory = Path("/proc/meminfo").read_text().split()[1]  # MemTotal comes first, in KiB.
    kernel = ".".join(platform.release().split(".")[:2])
    name = names[0] if names else platform.machine()
    return f"{cores} cores ({name}), {int(memory) / MIB:.0f} GiB, Linux {kernel}"


def measure(options: argparse.Namespace) -> Results:
    known = {lane.key: lane for lane in LANES}
    load, _, _ = os.getloadavg()
    lanes = [known[key] for key in options.lanes or known]
    model = options.model
    if model is None:
        model = options.folder / "loaders-model"
        size = make_model(model, size_bytes=options.bytes)
        print(f"the model: {format_bytes(size)} in {model}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-loaders-", dir=options.folder) as folder,
        Scene(model.resolve(), Path(folder).resolve()) as scene,
    ):
        benchmark = Benchmark(scene, options.python.absolute(), framework=options.framework)
        results = benchmark.run(lanes, options.rounds)
    return Results(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        machine=machine(),
        load=load,
        tensor_bytes=benchmark.tensor_bytes,
        tensors=benchmark.tensors,
        staging_bytes=STAGING_BYTES,
        lanes=results,
    )


def publish(results: Results, docs: Path) -> None:
    """Draws the picture, and writes the table into the page."""
    (docs / "loaders.svg").write_text(svg(results))
    page = docs / "performance.md"
    page.write_text(put(page.read_text(), markdown(results)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench_loaders", description=__doc__)
    parser.add_argument("lanes", nargs="*", metavar="LANE", help=", ".join(x.key for x in LANES))
    parser.add_argument("--bytes", type=parse_bytes, default=GIB, help="about the model (1GiB)")
    parser.add_argument("--model", type=Path, help="a directory of safetensors, not a sample")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", type=Path, default=Path(".venv-loaders/bin/python"))
    parser.add_argument("--framework", choices=("pt", "numpy"), default="pt")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="a disk, not tmpfs")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = parser.parse_args()
    unknown = set(options.lanes) - {lane.key for lane in LANES}
    if unknown:
        parser.error(f"unknown lane {min(unknown)!r}: use {', '.join(x.key for x in LANES)}")
    kept = options.docs / "loaders.json"
    if options.draw:
        publish(Results.from_json(kept.read_text()), options.docs)
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    # Whoever ends this ends its servers and daemons, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before all was measured"))
    results = measure(options)
    print(f"\n{markdown(results)}")
    if not options.lanes:
        options.docs.mkdir(parents=True, exist_ok=True)
        kept.write_text(results.to_json())
        publish(results, options.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The demo: a sample model, a real racerd, three loads, every byte verified.

    python tools/demo.py [--bytes 1GiB] [--folder .demo]

1. cold: every page comes from the origin (a directory);  2. the daemon is restarted and the pages
come from its encrypted slab;  3. they come from memory. The table says which rung served.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import racer
from racerd.units import GIB, format_bytes, parse_bytes
from tools.daemon_process import DaemonProcess
from tools.sample_model import make_model

_MODEL = "sample-llama"
_ROOT = "racer://local/"
_URL = f"{_ROOT}{_MODEL}/"
_COMPARE_BYTES = 8 << 20
_STEP_BYTES = 128 << 20


@dataclass
class Load:
    """One load of the whole model: what it took and who served it."""

    name: str
    size: int = 0
    seconds: float = 0.0
    rungs: Counter[str] = field(default_factory=Counter)

    @property
    def row(self) -> str:
        speed = f"{self.size / self.seconds / 1e9:.2f}"
        served = ", ".join(f"{rung} {100 * n / self.size:.0f} %" for rung, n in self.rungs.items())
        return f"  {self.name:<8} {self.size:>13,} {self.seconds:>9.2f} {speed:>7}   {served}"


class ProgressBar:
    """A line that fills up on a terminal, and nothing elsewhere."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self.shown = sys.stderr.isatty()

    def add(self, size: int) -> None:
        self.done += size
        if self.shown:
            share = self.done / max(1, self.total)
            bar = "█" * int(30 * share) + "░" * (30 - int(30 * share))
            text = f"\r  {self.title:<8} {bar} {100 * share:3.0f} %  {format_bytes(self.done):>10}"
            print(text, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _verify(view: memoryview, path: Path) -> None:
    """Compares every byte of `view` with the file at `path`."""
    with path.open("rb") as file:
        at = 0
        while block := file.read(_COMPARE_BYTES):
            if view[at : at + len(block)] != block:
                raise SystemExit(f"{path} differs near byte {at}: this must never happen")
            at += len(block)
    if at != len(view):
        raise SystemExit(f"{path} has {at} bytes, racerd delivered {len(view)}")


def load(name: str, socket: Path, source: Path) -> Load:
    """Reads every file of the model into one landing; making and checking memory is not timed."""
    done = Load(name)
    with racer.Client(socket=socket) as client:
        entries = list(client.list(_URL))
        bar = ProgressBar(name, sum(entry.size for entry in entries))
        with client.landing(max(entry.size for entry in entries)) as landing:
            for entry in entries:
                for at in range(0, entry.size, _STEP_BYTES):
                    start = time.perf_counter()
                    part = landing.read(entry.url, at, min(_STEP_BYTES, entry.size - at), at=at)
                    done.seconds += time.perf_counter() - start
                    done.size += part.bytes
                    done.rungs.update(part.rungs)
                    bar.add(part.bytes)
                _verify(landing.view[: entry.size], source / entry.url.removeprefix(_ROOT))
        bar.end()
    return done


def _wait_kept(daemon: DaemonProcess) -> None:
    """Waits until every page that was read is on disk, so that the restart has them all."""
    deadline = time.monotonic() + 120
    while daemon.metric("racer_budget_used_bytes", budget="dirty") > 0:
        if time.monotonic() > deadline:
            raise SystemExit("the pages did not reach the disk in 120 s; see the log")
        time.sleep(0.1)


def demo(folder: Path, size_bytes: int) -> None:
    print(f"Making a sample model of about {format_bytes(size_bytes)} …")
    models = folder / "models"
    size = make_model(models / _MODEL, size_bytes=size_bytes)
    daemon = DaemonProcess(
        folder / "daemon",
        caches={"local": f"file://{models.resolve()}"},
        arguments=[
            f"--disk={folder / 'daemon' / 'slab'}:{2 * size}",
            f"--memory={size + size // 4}",
        ],
    )
    loads = []
    with daemon:
        print(daemon.started_text)
        loads.append(load("cold", daemon.socket("local"), models))
        _wait_kept(daemon)
        print("Restarting racerd …")
        if status := daemon.stop():
            raise SystemExit(f"racerd ended with {status}:\n{daemon.log}")
        daemon.start()
        loads.append(load("disk", daemon.socket("local"), models))
        loads.append(load("memory", daemon.socket("local"), models))
    print("\n  load             bytes   seconds    GB/s   served by")
    for done in loads:
        print(done.row)
    print("\nEvery byte was compared with its source. racerd was stopped; nothing runs any more.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bytes", type=parse_bytes, default=GIB, help="size of the model (1GiB)")
    parser.add_argument("--folder", type=Path, default=Path(".demo"))
    options = parser.parse_args()
    demo(options.folder.resolve(), options.bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())

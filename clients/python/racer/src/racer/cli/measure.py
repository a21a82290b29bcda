"""`load` and `bench`: how fast bytes come.

Layer: cli commands. Both read into landings, memory that was touched before, as loaders do: what is
measured is the dataplane and not the kernel's page faults.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from racer.bulk import SMALL_BYTES
from racer.cli.connect import open_client
from racer.cli.output import ProgressBar, print_json, print_table, rungs_text
from racer.cli.prefixes import known_size, objects
from racer.cli.units import counted, format_bytes, format_rate
from racer.cli.work import for_each
from racer.client import Client
from racer.landing import Landing
from racer.results import Entry, add_rungs
from racer.transfer import PART_BYTES
from racer.urls import RacerUrl

_LOAD_STEP_BYTES = 4 * PART_BYTES
_PERCENTILES = (50, 90, 99)


# --- load ---------------------------------------------------------------------------------------


@dataclass
class _Loaded:
    """What reading one object took."""

    size: int = 0
    seconds: float = 0.0
    rungs: dict[str, int] = field(default_factory=dict)


def run_load(options: argparse.Namespace) -> int:
    url = RacerUrl.parse(options.url)
    with open_client(options, connections_max=8 * options.jobs) as client:
        entries = objects(client, url, recursive=True)
        sizes = {entry.url: known_size(client, entry) for entry in entries}
        loads = {entry.url: _Loaded() for entry in entries}
        local = threading.local()
        landings: list[Landing] = []
        step = max(1, min(_LOAD_STEP_BYTES, max(sizes.values())))
        jobs = min(options.jobs, len(entries))
        for _ in range(jobs):
            landings.append(client.landing(step))
        spare = list(landings)
        try:
            shown = not (options.quiet or options.json)
            with ProgressBar("load", sum(sizes.values()), shown=shown) as bar:

                def load(entry: Entry) -> None:
                    if not hasattr(local, "landing"):
                        local.landing = spare.pop()
                    _load(client, local.landing, entry.url, loads[entry.url], bar)

                for_each(entries, load, jobs, client.abort)
                seconds = bar.seconds
        finally:
            for landing in landings:
                landing.close()
    _show_loads(options, loads, seconds)
    return 0


def _load(client: Client, landing: Landing, url: str, load: _Loaded, bar: ProgressBar) -> None:
    started = time.monotonic()
    stat = client.stat(url)
    while load.size < stat.size:
        length = min(landing.nbytes, stat.size - load.size)
        done = landing.read(url, load.size, length, etag=stat.etag)
        load.size += done.bytes
        add_rungs(load.rungs, done.rungs)
        bar.add(done.bytes)
    load.seconds = time.monotonic() - started


def _show_loads(options: argparse.Namespace, loads: dict[str, _Loaded], seconds: float) -> None:
    total = _Loaded(sum(load.size for load in loads.values()), seconds)
    for load in loads.values():
        add_rungs(total.rungs, load.rungs)
    if options.json:
        told = [
            {"url": url, "bytes": load.size, "seconds": load.seconds, "rungs": load.rungs}
            for url, load in loads.items()
        ]
        print_json({"bytes": total.size, "seconds": seconds, "rungs": total.rungs, "objects": told})
        return
    lines = [*loads.items(), (f"all ({counted(len(loads), 'object')})", total)]
    rows = [
        (url, str(load.size), f"{load.seconds:.2f}", _rate(load), rungs_text(load.rungs))
        for url, load in lines
    ]
    print_table(("object", "bytes", "seconds", "speed", "served by"), rows, "lrrr")


def _rate(load: _Loaded) -> str:
    return format_rate(load.size, load.seconds) if load.size else "-"


# --- bench --------------------------------------------------------------------------------------


def run_bench(options: argparse.Namespace) -> int:
    with open_client(options, connections_max=8 * options.jobs) as client:
        stat = client.stat(options.url)
        if not stat.size:
            print("the object is empty: there is nothing to read")
            return 1
        size = min(options.size or stat.size, stat.size)
        bench = _Bench(client, stat.url, stat.etag, stat.size, size, gpu=options.gpu)
        bench.read_all(options.jobs, options.count, options.seconds)
    bench.show(as_json=options.json)
    return 0


class _Sink(Protocol):
    """Where one thread's reads go."""

    def read(self, offset: int) -> Mapping[str, int]:
        """Reads one piece; returns its bytes by rung, where they are told."""

    def close(self) -> None: ...


class _BytesSink:
    """Bytes objects: for small reads, which come over the socket."""

    def __init__(self, bench: _Bench) -> None:
        self._bench = bench

    def read(self, offset: int) -> Mapping[str, int]:
        bench = self._bench
        bench.client.read(bench.url, offset, bench.size, etag=bench.etag)
        return {}

    def close(self) -> None:
        """Nothing is held."""


class _LandingSink:
    def __init__(self, bench: _Bench) -> None:
        self._bench = bench
        self._landing = bench.client.landing(bench.size)

    def read(self, offset: int) -> Mapping[str, int]:
        bench = self._bench
        return self._landing.read(bench.url, offset, bench.size, etag=bench.etag).rungs

    def close(self) -> None:
        self._landing.close()


class _GpuSink:
    """GPU memory that the daemon writes into."""

    def __init__(self, bench: _Bench, device: str) -> None:
        self._bench = bench
        self._url = RacerUrl.parse_object(bench.url)
        self._buffer = bench.client.gpu_alloc(bench.size, device)

    def read(self, offset: int) -> Mapping[str, int]:
        from racer.gpu.place import GpuPlace

        bench = self._bench
        stop = min(offset + bench.size, bench.object_size)
        with GpuPlace(self._buffer) as place:
            return bench.client.fill_gpu(self._url, place, offset, stop, bench.etag)

    def close(self) -> None:
        self._buffer.close()


class _Bench:
    """Reads of `size` bytes at random multiples of it. What one thread measures, all add up."""

    def __init__(
        self,
        client: Client,
        url: str,
        etag: str,
        object_size: int,
        size: int,
        *,
        gpu: str | None = None,
    ) -> None:
        self.client = client
        self.url = url
        self.etag = etag
        self.object_size = object_size
        self.gpu = gpu
        self.places = max(1, object_size // size)
        self.size = size
        self.seconds = 0.0
        self.latencies: list[float] = []
        self.rungs: dict[str, int] = {}
        self._lock = threading.Lock()

    def read_all(self, jobs: int, count: int | None, seconds: float) -> None:
        shares = [(count or 0) // jobs + (n < (count or 0) % jobs) for n in range(jobs)]
        sinks: list[_Sink] = []
        try:
            for _ in range(jobs):
                sinks.append(self._sink())
            started = time.monotonic()
            stop = started + seconds

            def read(n: int) -> None:
                self._read_share(sinks[n], None if count is None else shares[n], stop)

            for_each(range(jobs), read, jobs, self.client.abort)
            self.seconds = time.monotonic() - started
        finally:
            for sink in sinks:
                sink.close()

    def _sink(self) -> _Sink:
        if self.gpu is not None:
            return _GpuSink(self, self.gpu)
        return _LandingSink(self) if self.size > SMALL_BYTES else _BytesSink(self)

    def _read_share(self, sink: _Sink, count: int | None, stop: float) -> None:
        latencies: list[float] = []
        rungs: dict[str, int] = {}
        places = random.Random(self.size)
        while len(latencies) < count if count is not None else time.monotonic() < stop:
            offset = places.randrange(self.places) * self.size
            started = time.perf_counter()
            add_rungs(rungs, sink.read(offset))
            latencies.append(time.perf_counter() - started)
        with self._lock:
            self.latencies += latencies
            add_rungs(self.rungs, rungs)

    def show(self, *, as_json: bool) -> None:
        ordered = sorted(self.latencies)
        total = len(ordered) * self.size
        quantiles = {f"p{p}": _percentile(ordered, p) for p in _PERCENTILES}
        quantiles["max"] = ordered[-1] if ordered else 0.0
        if as_json:
            told = {"url": self.url, "read_bytes": self.size, "reads": len(ordered)}
            told |= {"bytes": total, "seconds": self.seconds, "rungs": self.rungs}
            print_json(told | {"latency_seconds": quantiles})
            return
        rate, reads = format_rate(total, self.seconds), len(ordered) / max(self.seconds, 1e-9)
        print(
            f"{counted(len(ordered), 'read')} of {format_bytes(self.size)} in {self.seconds:.2f} s"
        )
        print(f"  throughput  {rate}, {reads:.0f} reads/s")
        print("  latency     " + "  ".join(f"{k} {v * 1e3:.3f} ms" for k, v in quantiles.items()))
        if self.rungs:
            print(f"  served by   {rungs_text(self.rungs)}")


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0

"""What `make bench-gpu` measures, part by part. Each starts daemons of its own and stops them."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import racer
from racerd.pages import FRAME_BYTES_DEFAULT, PAGE_BYTES_DEFAULT
from racerd.units import KIB, MIB, format_bytes
from tools.bench.baseline import bare_preadv
from tools.bench.report import Figure, paired, ratio
from tools.daemon_process import DaemonProcess

DISK_THREADS = 4
PAGE_READS = 500
_OBJECT = "bench/object.bin"
_URL = f"racer://local/{_OBJECT}"


@dataclass(frozen=True)
class Options:
    """`folder` is empty and on the disk to measure; `size` is the object's, in bytes. `small` cuts
    pages down, for a smoke test."""

    folder: Path
    size: int
    rounds: int
    gpu: int
    small: bool

    @property
    def page_bytes(self) -> int:
        return 256 * KIB if self.small else PAGE_BYTES_DEFAULT

    @property
    def frame_bytes(self) -> int:
        return 64 * KIB if self.small else FRAME_BYTES_DEFAULT


def heading(options: Options) -> str:
    """The GPU, the driver and the date: no figure is worth anything without them."""
    told = _device(options, "name")
    module = Path("/proc/driver/nvidia/version")
    driver = module.read_text().splitlines()[0] if module.exists() else "kernel module unknown"
    date = datetime.now(UTC).date().isoformat()
    return f"{told['name']}, {told['architecture']}, CUDA {told['cuda']}, {driver}, {date}"


def _device(options: Options, *arguments: str) -> Any:
    """What `device_child` says: nothing in this process holds a context while it measures."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench_gpu.device_child", str(options.gpu), *arguments],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


def kernels(options: Options) -> list[Figure]:
    """CRC, GHASH and decryption on the device alone, by pages in a batch; data is there already."""
    speeds = _device(
        options, "kernels", str(options.page_bytes), str(options.frame_bytes), str(options.rounds)
    )
    return [
        Figure(f"kernels, {pages} pages in a batch", speed / 1e9, "GB/s",
               ">= 200" if pages == "8" else "", "verify and decrypt, plaintext bytes")
        for pages, speed in speeds.items()
    ]  # fmt: skip


def _make_object(options: Options) -> Path:
    root = options.folder / "objects"
    path = root / _OBJECT
    if not path.exists():
        path.parent.mkdir(parents=True)
        block = os.urandom(min(16 * MIB, options.size))
        with path.open("wb") as file:
            for _ in range(options.size // len(block)):
                file.write(block)
    return root


@contextmanager
def _daemon(options: Options, name: str, *arguments: str) -> Iterator[DaemonProcess]:
    folder = options.folder / name
    daemon = DaemonProcess(
        folder,
        caches={"local": f"file://{_make_object(options)}"},
        arguments=[
            f"--disk={folder / 'slab'}:{2 * options.size + 256 * MIB}",
            f"--page-bytes={options.page_bytes}",
            f"--frame-bytes={options.frame_bytes}",
            "--scrub-bytes-per-second=0",
            "--gpu=on",
            *arguments,
        ],
        environ={k: v for k, v in os.environ.items() if k == "RACER_KERNEL_CACHE"},
    )
    with daemon:
        while any(gpu["cufile"] == "opening" for gpu in _gpus(daemon)):
            time.sleep(0.1)
        yield daemon


def _gpus(daemon: DaemonProcess) -> list[dict[str, Any]]:
    return list(json.loads(daemon.get("/readyz"))["gpus"])


def _wait_kept(daemon: DaemonProcess) -> None:
    while daemon.metric("racer_budget_used_bytes", budget="dirty") > 0:
        time.sleep(0.1)


def _speed(daemon: DaemonProcess, client: racer.Client, buffer: Any, size: int) -> float:
    """One read of the whole object; it must have gone through the GPU, page by page."""
    before = daemon.metric("racer_gpu_pages_total", result="ok")
    start = time.perf_counter()
    got = client.read_into(_URL, buffer)
    seconds = time.perf_counter() - start
    opened = daemon.metric("racer_gpu_pages_total", result="ok") - before
    if got != size or opened == 0:
        raise RuntimeError(f"{got} of {size} bytes came, {opened:.0f} pages through the GPU")
    return size / seconds


def memory(options: Options) -> list[Figure]:
    """Pages in the memory tier to GPU memory against a plain copy from pinned memory."""
    slots = options.size + options.size // options.frame_bytes * 4 * KIB
    with (
        _daemon(options, "memory", f"--memory={slots + slots // 4 + 64 * MIB}") as daemon,
        racer.Client(socket=daemon.socket("local")) as client,
        client.gpu_alloc(options.size, options.gpu) as buffer,
    ):
        _speed(daemon, client, buffer, options.size)
        _wait_kept(daemon)
        before = daemon.metric("racer_rung_bytes_total", rung="memory")
        ours, plain = paired(
            lambda: _speed(daemon, client, buffer, options.size),
            lambda: float(_device(options, "copy", str(options.page_bytes))),
            options.rounds,
        )
        served = daemon.metric("racer_rung_bytes_total", rung="memory") - before
    return [
        ratio("memory tier to GPU / pinned copy", ours, plain, "", "one link"),
        Figure("  share that memory served", served / (options.rounds * options.size)),
    ]


def disk(options: Options) -> list[Figure]:
    """Pages on disk to GPU memory, with cuFile and by the host path, against a plain read."""
    figures = []
    for name, argument in (("cuFile", "cuda"), ("host path", "off")):
        # A memory tier far smaller than the object: each pass reads everything from the slab.
        little = f"--memory={8 * options.page_bytes}"
        with (
            _daemon(options, f"disk-{argument}", little, f"--cufile-provider={argument}") as daemon,
            racer.Client(socket=daemon.socket("local")) as client,
            client.gpu_alloc(options.size, options.gpu) as buffer,
        ):
            client.prefetch(_URL)
            _wait_kept(daemon)
            slab = daemon.folder / "slab"
            rung = "cufile" if argument == "cuda" else "disk"
            before = daemon.metric("racer_rung_bytes_total", rung=rung)
            ours, plain = paired(
                lambda: _speed(daemon, client, buffer, options.size),
                partial(bare_preadv, slab, options.size, options.page_bytes, DISK_THREADS),
                options.rounds,
            )
            served = daemon.metric("racer_rung_bytes_total", rung=rung) - before
            state = _gpus(daemon)[options.gpu]["cufile"]
        figures += [
            ratio(f"disk to GPU, {name} / O_DIRECT pread", ours, plain, "", f"cuFile {state}"),
            Figure(f"  share that {rung} served", served / (options.rounds * options.size)),
        ]
    return figures


def page(options: Options) -> list[Figure]:
    """One page at a time from the memory tier: how long a client waits for it."""
    slots = options.size + options.size // options.frame_bytes * 4 * KIB
    chance = random.Random(1)
    count = 20 if options.small else PAGE_READS
    with (
        _daemon(options, "page", f"--memory={slots + slots // 4 + 64 * MIB}") as daemon,
        racer.Client(socket=daemon.socket("local")) as client,
        client.gpu_alloc(options.page_bytes, options.gpu) as buffer,
    ):
        client.prefetch(_URL)
        waits = []
        for number in range(count + 5):
            offset = chance.randrange(options.size // options.page_bytes) * options.page_bytes
            start = time.perf_counter()
            client.read_into(_URL, buffer, offset)
            if number >= 5:  # The first ones make staging memory and the client's target.
                waits.append(time.perf_counter() - start)
        opened = daemon.metric("racer_gpu_pages_total", result="ok")
    if opened < count:
        raise RuntimeError(f"only {opened:.0f} of {count} pages went through the GPU")
    waits.sort()
    size = format_bytes(options.page_bytes)
    return [
        Figure(f"page of {size}, p50", 1e3 * statistics.median(waits), "ms"),
        Figure(f"page of {size}, p99", 1e3 * waits[int(0.99 * len(waits))], "ms"),
    ]

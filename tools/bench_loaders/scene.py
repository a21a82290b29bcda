"""Where the loaders find the model: files, an S3 server, and daemons in every state.

A `Scene` owns it all while its `with` block lasts. Daemons that hold something (memory, disk) live
as long; one that has nothing is made for a single load.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import racer
from racerd.units import GIB, MIB
from tests.servers.s3 import KEY, S3, SECRET, seaweedfs
from tools.bench_loaders import page_cache
from tools.bench_loaders.lanes import State
from tools.daemon_process import DaemonProcess

BUCKET = "models"
_PREFIX = "llama"
_URL = f"racer://local/{BUCKET}/{_PREFIX}/"
_UNUSED_SECONDS = 120.0


def _nothing_to_touch() -> None:
    """What a loader reads is not in memory, or is there because of another loader."""


@dataclass(frozen=True)
class Place:
    """What a loader is given. `daemon` is the racerd that serves it, if any does.

    `touch` reads once what is to be in memory, be it the page cache or racerd's, and asks those
    that will be asked: called when the loader is ready to go, since memory that was idle for a
    second is slow on some machines.
    """

    source: str
    environ: Mapping[str, str]
    daemon: DaemonProcess | None = None
    touch: Callable[[], None] = _nothing_to_touch


class Scene:
    """`model` is a directory of safetensors files; `folder` is empty and on a disk."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.names = sorted(path.name for path in model.iterdir() if path.is_file())
        self.shards = sorted(model.glob("*.safetensors"))
        self.size = sum(path.stat().st_size for path in self.shards)
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._s3: S3 | None = None
        self._in_memory: DaemonProcess | None = None
        self._on_disk: DaemonProcess | None = None

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def ready(self, state: State) -> Iterator[Place]:
        """Brings `state` about. What was made for this load alone ends with the block.

        For RACERD_SHARED the caller has somebody load the model from here, and keep it.
        """
        if state is State.FILES_CACHED:
            page_cache.warm(self.shards)
            self._expect_cached(0.99, 1.0)
            yield Place(str(self.model), {}, touch=lambda: page_cache.warm(self.shards))
        elif state is State.FILES_DROPPED:
            page_cache.drop(self.shards)
            self._expect_cached(0.0, 0.01)
            yield Place(str(self.model), {})
        elif state is State.S3:
            yield Place(f"s3://{BUCKET}/{_PREFIX}", self._s3_environ())
        elif state in (State.RACERD_MEMORY, State.RACERD_SHARED):
            daemon = self._daemon_with_memory()
            wait_unused(daemon, "share")
            touch = self._touch_memory if state is State.RACERD_MEMORY else self._touch_shared
            yield replace(self._served(daemon), touch=lambda: touch(daemon))
        elif state is State.RACERD_DISK:
            yield self._served(self._restarted_daemon())
        else:
            with self._cold_daemon() as daemon:
                yield self._served(daemon)

    def _expect_cached(self, at_least: float, at_most: float) -> None:
        share = page_cache.resident_share(self.shards)
        if not at_least <= share <= at_most:
            raise RuntimeError(
                f"{share:.1%} of {self.model} is in the page cache: somebody else uses the files,"
                " or memory is short"
            )

    # --- the object store -------------------------------------------------------------------

    def _server(self) -> S3:
        """Started, and given the model, when it is first asked for."""
        if self._s3 is None:
            server = self._stack.enter_context(seaweedfs(self._folder / "s3", [BUCKET]))
            for name in self.names:
                content = (self.model / name).read_bytes()
                server.put(BUCKET, f"{_PREFIX}/{name}".encode(), content)
            self._s3 = server
        return self._s3

    def _s3_environ(self) -> dict[str, str]:
        """Names that the streamer and racerd both know, and how each takes plain http."""
        return {
            "AWS_ENDPOINT_URL": self._server().url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }

    # --- daemons ----------------------------------------------------------------------------

    def _daemon(self, folder: Path) -> DaemonProcess:
        return DaemonProcess(
            folder,
            caches={"local": "s3://"},
            arguments=[
                f"--disk={folder / 'slab'}:{2 * self.size + GIB // 4}",
                f"--memory={self.size + self.size // 4 + 64 * MIB}",
                f"--share={self.size + self.size // 4 + 64 * MIB}",
                "--share-idle-seconds=0",
            ],
            environ=self._s3_environ(),
        )

    @staticmethod
    def _served(daemon: DaemonProcess) -> Place:
        return Place(_URL, {"RACER_SOCKET": str(daemon.socket("local"))}, daemon)

    def _daemon_with_memory(self) -> DaemonProcess:
        if self._in_memory is None:
            daemon = self._stack.enter_context(self._daemon(self._folder / "memory"))
            self._fill(daemon)
            self._in_memory = daemon
        return self._in_memory

    def _restarted_daemon(self) -> DaemonProcess:
        if self._on_disk is None:
            daemon = self._stack.enter_context(self._daemon(self._folder / "disk"))
            self._fill(daemon)
            self._on_disk = daemon
        if status := self._on_disk.stop():
            raise RuntimeError(f"racerd ended with {status}:\n{self._on_disk.log}")
        self._on_disk.start()
        return self._on_disk

    @contextlib.contextmanager
    def _cold_daemon(self) -> Iterator[DaemonProcess]:
        self._server()
        with tempfile.TemporaryDirectory(prefix="cold-", dir=self._folder) as folder:
            with self._daemon(Path(folder)) as daemon:
                yield daemon

    def _fill(self, daemon: DaemonProcess) -> None:
        """Reads every page once, and waits until all are on the disk."""
        self._read_all(daemon)
        wait_unused(daemon, "dirty")

    def _touch_memory(self, daemon: DaemonProcess) -> None:
        self._read_all(daemon)
        # Programs are memory, too: of a store that was idle a listing takes twenty times as long.
        with racer.Client(socket=daemon.socket("local")) as client:
            list(client.list(_URL))

    def _touch_shared(self, daemon: DaemonProcess) -> None:
        with racer.Client(socket=daemon.socket("local")) as client:
            for entry in client.list(_URL):
                with client.shared(entry.url) as pieces:
                    for chunk in pieces.chunks:
                        bytes(chunk.view[:: mmap.PAGESIZE])
                    if not pieces.chunks:  # The index, which nobody shares.
                        client.read(entry.url)

    @staticmethod
    def _read_all(daemon: DaemonProcess) -> None:
        with racer.Client(socket=daemon.socket("local")) as client:
            sizes = {entry.url: entry.size for entry in client.list(_URL) if entry.size}
            with client.landing(max(sizes.values())) as landing:
                for url, size in sizes.items():
                    landing.read(url, 0, size)


def wait_unused(daemon: DaemonProcess, budget: str) -> None:
    """Waits until nothing is charged to `budget`: "dirty" is what waits for the disk."""
    deadline = time.monotonic() + _UNUSED_SECONDS
    while used := daemon.metric("racer_budget_used_bytes", budget=budget):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"after {_UNUSED_SECONDS:.0f} s {used:,.0f} bytes are still charged to {budget!r}"
            )
        time.sleep(0.2)  # Each look costs racerd some milliseconds.


def cpu_seconds(daemon: DaemonProcess) -> float:
    """What racerd's process has used so far."""
    assert daemon.process is not None
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""The real daemon with GPUs: every way that bytes take into a client's GPU memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import racer
from racerd.units import KIB
from tests.support.counting_origin import CountingOrigin
from tests.support.gpu_daemon import (
    ClientProcess,
    GpuClient,
    eventually,
    gpu_daemon,
    gpu_name,
    gpu_ready,
)
from tests.support.gpu_rig import TARGET_BYTES, GpuMemory
from tests.support.standin import StandIn
from tools.daemon_process import DaemonProcess

SIZE = 1_000_003
PAGES = 16
OBJECT = "models/weights.bin"
DATA = random.Random(1).randbytes(SIZE)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "objects" / "models"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(DATA)
    (folder / "empty").write_bytes(b"")
    return folder.parent


@pytest.fixture
def origin(models: Path) -> Iterator[CountingOrigin]:
    with CountingOrigin(models) as counting:
        yield counting


def kept(daemon: DaemonProcess, pages: int = PAGES) -> None:
    eventually(lambda: daemon.metric("racer_store_pages") >= pages, f"{pages} pages on disk")


def on_disk(daemon: DaemonProcess) -> None:
    """Fills the slab, and starts the daemon again so that memory has nothing."""
    with racer.Client(socket=daemon.socket("local")) as client:
        assert client.read(f"racer://local/{OBJECT}") == DATA
    kept(daemon)
    assert daemon.stop() == 0
    daemon.start()
    kept(daemon)


@contextlib.contextmanager
def serving(
    standin: StandIn, folder: Path, origin: CountingOrigin, slab: Path, *arguments: str,
    **environ: str,
) -> Iterator[DaemonProcess]:  # fmt: skip
    with gpu_daemon(
        standin, folder, origin.url, *arguments, slab=slab / "slab", **environ
    ) as daemon:
        yield daemon


def test_from_the_origin_from_memory_and_straight_from_the_disk(
    standin: StandIn, tmp_path: Path, origin: CountingOrigin, slab_folder: Path
) -> None:
    """R2, R9, R10, R12, R16, R19: each rung gives the same bytes; the origin is asked once a page,
    and memory comes before cuFile."""
    with serving(standin, tmp_path, origin, slab_folder) as daemon:
        gpu_ready(daemon)
        with GpuClient(daemon) as client:
            cold = client.read(OBJECT)
            assert (cold.status, cold.json["rungs"]) == (200, {"origin": SIZE}), cold
            assert client.memory.bytes(0, SIZE) == DATA
            assert (cold.json["bytes"], cold.json["offset"], cold.json["size"]) == (SIZE, 0, SIZE)
            assert cold.json["gpu"] == gpu_name() and cold.fields["ETag"]
            client.memory.fill(0xEE)
            assert client.read(OBJECT).json["rungs"] == {"memory": SIZE}
            assert client.memory.bytes(0, SIZE) == DATA
            assert client.memory.bytes(SIZE, SIZE + 1) == b"\xee"
            assert client.release().status == 200
        kept(daemon)
        fetched = origin.requests["GET"]
        assert fetched == PAGES
        assert daemon.stop() == 0
        daemon.start()
        gpu_ready(daemon)
        kept(daemon)
        with GpuClient(daemon) as client:
            told = client.read(OBJECT)
            assert told.json["rungs"] == {"cufile": SIZE}, daemon.log
            assert client.memory.bytes(0, SIZE) == DATA
        assert origin.requests["GET"] == fetched
        assert daemon.metric("racer_cufile_pages_total") == PAGES
        assert daemon.metric("racer_gpu_host_path_pages_total") == 0
        assert daemon.metric("racer_rung_bytes_total", rung="cufile") == SIZE


def test_without_cufile_the_disk_is_read_by_the_host(
    standin: StandIn, tmp_path: Path, origin: CountingOrigin, slab_folder: Path
) -> None:
    """R10, R19: O_DIRECT into the arena, from there to the GPU; counted with the reason."""
    with serving(standin, tmp_path, origin, slab_folder, "--cufile-provider=off") as daemon:
        on_disk(daemon)
        gpu_ready(daemon, cufile="off")
        with GpuClient(daemon) as client:
            assert client.read(OBJECT).json["rungs"] == {"disk": SIZE}
            assert client.memory.bytes(0, SIZE) == DATA
        reason = {"reason": "cufile_settings"}
        assert daemon.metric("racer_gpu_host_path_pages_total", **reason) == PAGES
        assert daemon.metric("racer_cufile_pages_total") == 0


@pytest.mark.parametrize("provider", ["cuda", "off"])
def test_small_and_cut_ranges(
    standin: StandIn, tmp_path: Path, origin: CountingOrigin, slab_folder: Path, provider: str
) -> None:
    """R2, R9, R10: any bytes to any offset, within frames and across pages, and not one beside."""
    with serving(standin, tmp_path, origin, slab_folder, f"--cufile-provider={provider}") as daemon:
        on_disk(daemon)
        gpu_ready(daemon, cufile="on" if provider == "cuda" else "off")
        chance = random.Random(7)
        ranges = [(0, 1), (SIZE - 1, SIZE), (16383, 16385), (65535, 65537), (5, 65541)]
        for _ in range(12):
            start = chance.randrange(SIZE)
            ranges.append((start, min(SIZE, start + chance.randrange(1, 150_000))))
        with GpuClient(daemon) as client:
            for start, stop in ranges:
                offset = chance.randrange(1, 70_000)
                client.memory.fill(0xEE)
                told = client.read(OBJECT, f"Range: bytes={start}-{stop - 1}", offset=offset)
                assert (told.status, told.json["bytes"]) == (200, stop - start), told
                assert client.memory.bytes(offset, offset + stop - start) == DATA[start:stop]
                assert client.memory.bytes(offset - 1, offset) == b"\xee"
                end = offset + stop - start
                assert client.memory.bytes(end, end + 64) == b"\xee" * 64
            assert client.read("models/empty").json["bytes"] == 0


def test_rot_on_the_disk_falls_to_the_origin_and_only_then_fails(
    standin: StandIn, tmp_path: Path, models: Path, slab_folder: Path
) -> None:
    """R9, R22: what cuFile reads is verified on the GPU; a page that is rotten there comes from
    the origin, and with an origin that is gone the read fails and nothing is reported."""
    with contextlib.ExitStack() as until, contextlib.ExitStack() as stack:
        origin = until.enter_context(CountingOrigin(models))
        daemon = stack.enter_context(
            gpu_daemon(standin, tmp_path, origin.url, slab=slab_folder / "slab")
        )
        on_disk(daemon)
        assert daemon.stop() == 0
        _rot_every_page(slab_folder / "slab")
        fetched = origin.requests["GET"]
        daemon.start()
        kept(daemon)
        gpu_ready(daemon)
        with GpuClient(daemon) as client:
            told = client.read(OBJECT, "Range: bytes=0-65535")
            assert told.json["rungs"] == {"origin": 65536}, told
            assert client.memory.bytes(0, 65536) == DATA[:65536]
            assert origin.requests["GET"] == fetched + 1
            assert daemon.metric("racer_corrupt_pages_total", rung="cufile") == 1
            assert daemon.metric("racer_corrupt_pages_total", rung="disk") == 1
            until.close()
            client.memory.fill(0)
            failed = client.read(OBJECT, "Range: bytes=131072-196607", "Racer-Deadline-Ms: 20000")
            assert failed.status in (502, 504), failed
            frames = [client.memory.bytes(at, at + 16 * KIB) for at in range(0, 65536, 16 * KIB)]
            good = [DATA[at : at + 16 * KIB] for at in range(131072, 196608, 16 * KIB)]
            assert [frame == bytes(16 * KIB) for frame in frames] == [False, True, False, False]
            assert [frames[i] == good[i] for i in (0, 2, 3)] == [True] * 3


def _rot_every_page(slab: Path) -> None:
    """Changes one byte in the ciphertext of each page: 20 KiB after where its header starts."""
    content = bytearray(slab.read_bytes())
    found = 0
    at = content.find(b"weights.bin")
    while at >= 0:
        content[at // 4096 * 4096 + 20 * KIB] ^= 1
        found += 1
        at = content.find(b"weights.bin", at + 4096)
    assert found >= PAGES
    with slab.open("r+b") as file:
        file.write(content)


def test_what_a_client_may_name_and_what_not(
    standin: StandIn, tmp_path: Path, origin: CountingOrigin, slab_folder: Path
) -> None:
    """R2, R8, R18: unknown GPUs, foreign descriptors, wrong sizes, kinds and devices are refused
    by name with what to do, and the daemon is none the worse for it."""
    with serving(standin, tmp_path, origin, slab_folder, FAKECUDA_DEVICES="2") as daemon:
        gpu_ready(daemon)
        before = daemon.metric("racer_open_descriptors")
        with GpuClient(daemon) as client:
            nowhere = gpu_name().replace("7374", "0000")
            unknown = client.register(nowhere, TARGET_BYTES)
            assert (unknown.status, unknown.code) == (422, "gpu_unknown")
            assert gpu_name(0) in unknown.json["error"]["message"]
            assert gpu_name(1) in unknown.json["error"]["message"]
            foreign = os.memfd_create("ordinary", os.MFD_CLOEXEC)
            os.ftruncate(foreign, TARGET_BYTES)
            refused = {
                "target_not_gpu_memory": client.register(gpu_name(), TARGET_BYTES, foreign),
                "target_misaligned": client.register(gpu_name(), TARGET_BYTES + 4096),
                "target_too_small": client.register(gpu_name(), 2 * TARGET_BYTES),
                "target_wrong_gpu": client.register(gpu_name(1), TARGET_BYTES),
            }
            os.close(foreign)
            for code, answer in refused.items():
                assert (answer.status, answer.code) == (422, code), answer
                assert answer.json["error"]["hint"]
                assert daemon.metric("racer_targets_refused_total", code=code) == 1
            late = client.read(OBJECT, offset=TARGET_BYTES - 5)
            assert (late.status, late.code) == (422, "target_too_small")
            wrong = client.raw.ask(f"POST /v1/host-read/{OBJECT}", f"Racer-Target: {client.id}")
            assert (wrong.status, wrong.code) == (422, "target_wrong_kind")
            with GpuMemory() as memory:
                no_target = client.raw.ask(f"POST /v1/gpu-read/{OBJECT}", fds=[memory.descriptor])
            assert no_target.status == 400
        with GpuClient(daemon, gpu=1) as client:
            assert client.read(OBJECT).json["gpu"] == gpu_name(1)
            assert client.memory.bytes(0, SIZE) == DATA
        eventually(lambda: daemon.metric("racer_targets", kind="gpu") == 0, "no target is left")
        eventually(
            lambda: daemon.metric("racer_target_mapped_bytes", kind="gpu") == 0, "nothing is mapped"
        )
        eventually(
            lambda: daemon.metric("racer_open_descriptors") <= before,
            lambda: f"{before} descriptors, now {daemon.metric('racer_open_descriptors')}",
        )


def test_a_model_loaded_by_two_processes_while_things_fail(
    standin: StandIn, tmp_path: Path, slab_folder: Path
) -> None:
    """R2, R4, R9, R16, R18, R19, F93: several shards, two client processes at once with CUDA of
    their own; cuFile reads fail, kernels poison the GPU, copies fail. Every answer is the right
    bytes, or a clear error after which asking again gives them; in the end all of it is there."""
    folder = tmp_path / "objects" / "llama"
    folder.mkdir(parents=True)
    shards = {
        f"model-{i:05}-of-00003.safetensors": random.Random(i).randbytes(size)
        for i, size in enumerate((900_001, 1_300_007, 777_777), 1)
    }
    for name, content in shards.items():
        (folder / name).write_bytes(content)
    faults = "cuFileRead:5:9,cuFileRead:5036:17,kernel:700:61,cuMemcpyHtoDAsync:2:90"
    with gpu_daemon(
        standin, tmp_path, f"file://{folder.parent}", "--memory=1MiB",  # Less than a shard has.
        slab=slab_folder / "slab", FAKECUDA_FAIL=faults,
    ) as daemon:  # fmt: skip
        gpu_ready(daemon)
        with ClientProcess(standin, daemon) as first, ClientProcess(standin, daemon) as second:
            failures: Counter[str] = Counter()
            rungs: set[str] = set()
            for name, content in [*shards.items()] * 2:
                for client in (first, second):
                    client.ask(f"llama/{name}", 0, len(content))
                for client in (first, second):
                    told = client.told()
                    while told["status"] == 503:
                        error = told["told"]["error"]
                        assert error["hint"] and error["retry"] == "same"
                        failures[error["code"]] += 1
                        time.sleep(0.1)  # As `Retry-After` asks, if not so long.
                        told = client.read(f"llama/{name}", 0, len(content))
                    assert told["status"] == 200, told
                    assert told["digest"] == hashlib.sha256(content).hexdigest()
                    rungs |= told["told"]["rungs"].keys()
        assert failures["gpu_lost"] > 0, "no fault was ever met"
        assert failures.keys() <= {"gpu_lost", "gpu_unavailable", "gpu_out_of_memory"}
        assert {"origin", "cufile"} <= rungs
        assert daemon.metric("racer_gpu_worker_deaths_total", reason="gpu_lost") > 0
        eventually(lambda: daemon.metric("racer_targets", kind="gpu") == 0, "no target is left")

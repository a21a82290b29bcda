"""The real client with GPU memory and the real daemon, each with its own stand-in driver."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import racer
from tests.support.gpu_client import Children, assert_paired, digest
from tests.support.gpu_daemon import eventually, gpu_daemon, gpu_name, gpu_ready
from tests.support.gpu_rig import driver_calls
from tests.support.standin import StandIn
from tools.daemon_process import DaemonProcess

SIZE = 3_000_007
DATA = random.Random(5).randbytes(SIZE)
URL = "racer://local/models/weights.bin"


@pytest.fixture
def origin(tmp_path: Path) -> str:
    folder = tmp_path / "objects" / "models"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(DATA)
    return f"file://{folder.parent}"


@pytest.fixture
def daemon(
    standin: StandIn, tmp_path: Path, origin: str, slab_folder: Path
) -> Iterator[DaemonProcess]:
    """Two GPUs, no faults."""
    with gpu_daemon(
        standin, tmp_path, origin, slab=slab_folder / "slab", FAKECUDA_DEVICES="2"
    ) as running:
        gpu_ready(running)
        yield running


def children(standin: StandIn, daemon: DaemonProcess, folder: Path, name: str = "") -> Children:
    own = folder / f"client{name}"
    own.mkdir()
    return Children(standin, daemon.run_dir, own)


def nothing_left(daemon: DaemonProcess) -> None:
    eventually(lambda: daemon.metric("racer_targets", kind="gpu") == 0, "no target is left")
    eventually(lambda: daemon.metric("racer_target_mapped_bytes", kind="gpu") == 0, "no mapping")


@pytest.mark.parametrize("scenario", ["direct", "direct_async"])
def test_the_daemon_writes_into_memory_of_the_client(
    standin: StandIn, daemon: DaemonProcess, tmp_path: Path, scenario: str
) -> None:
    """R2, R4, R9, F89: verified and decrypted where the client's program uses it; what was
    exported is freed when the daemon's worker has unmapped it."""
    client = children(standin, daemon, tmp_path)
    told = client.run(scenario, url=URL, nbytes=SIZE)
    assert told.result == {"counts": [SIZE] * 2, "gpu": gpu_name(), "digest": digest(DATA)}
    assert (told.left, told.said) == ({}, [])
    assert daemon.metric("racer_rung_bytes_total", rung="memory") >= SIZE
    assert_paired(client.calls())
    nothing_left(daemon)


@pytest.mark.parametrize("scenario", ["staged", "staged_async"])
def test_an_array_of_another_library_on_the_second_gpu(
    standin: StandIn, daemon: DaemonProcess, tmp_path: Path, scenario: str
) -> None:
    """R18, R36: staging on the array's GPU; GPU 0 is broken for the client and is not missed."""
    client = children(standin, daemon, tmp_path)
    told = client.on(
        scenario,
        {"FAKECUDA_DEVICES": "2", "FAKECUDA_BROKEN": "0", "FAKECUDA_DELAY_US": "1000"},
        url=URL,
        nbytes=SIZE + 5,
        interface="dlpack-1",
        ordinal=1,
    )
    assert told.result["digest"] == digest(DATA)
    assert told.result["rest"] == digest(b"\xee" * 5)
    assert (told.left, told.said) == ({}, [])
    assert {where for _, where in driver_calls(client.log)} == {"-", "1"}
    nothing_left(daemon)


def test_bench_into_gpu_memory(standin: StandIn, daemon: DaemonProcess) -> None:
    """R2: what GPU reads cost is measured with the client's own command."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "racer.cli", "bench", URL, "--gpu", "cuda:1", "--json"),
            *("--size", "1MiB", "--count", "6", "--jobs", "2"),
        ],
        env=standin.environment(FAKECUDA_DEVICES="2", RACER_RUN_DIR=str(daemon.run_dir)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["reads"] == 6 and not {"host", "stream"} & set(told["rungs"])
    nothing_left(daemon)


def test_a_gpu_that_is_lost_in_the_middle(
    standin: StandIn, tmp_path: Path, origin: str, slab_folder: Path
) -> None:
    """R4, F93: the daemon's worker dies of a sticky error; the rest comes through host memory."""
    with gpu_daemon(
        standin, tmp_path, origin, slab=slab_folder / "slab", FAKECUDA_FAIL="kernel:700:4"
    ) as daemon:
        gpu_ready(daemon)
        told = children(standin, daemon, tmp_path).run(
            "staged", url=URL, nbytes=SIZE + 1, interface="cuda"
        )
        assert told.result["digest"] == digest(DATA)
        assert len(told.said) == 1 and "through host memory" in told.said[0]
        assert "gpu_lost" in told.said[0] or "gpu_unavailable" in told.said[0]
        assert told.left == {}
        nothing_left(daemon)


def test_a_daemon_without_gpus(
    standin: StandIn, tmp_path: Path, origin: str, slab_folder: Path
) -> None:
    """R4, R17: the client has a GPU, the daemon none: the reason is the daemon's own."""
    with gpu_daemon(standin, tmp_path, origin, slab=slab_folder / "slab", gpu="off") as daemon:
        told = children(standin, daemon, tmp_path).run("direct", url=URL, nbytes=SIZE)
        assert told.result["digest"] == digest(DATA)
        assert len(told.said) == 1 and "off by settings" in told.said[0]


def test_two_processes_at_once_while_the_driver_fails(
    standin: StandIn, tmp_path: Path, origin: str, slab_folder: Path
) -> None:
    """R2, L33, F93: one daemon, two clients, a worker that dies meanwhile: each has every byte."""
    with gpu_daemon(
        standin, tmp_path, origin, slab=slab_folder / "slab",
        FAKECUDA_FAIL="copy:719:9,cuMemcpyHtoDAsync:700:31",
    ) as daemon:  # fmt: skip
        gpu_ready(daemon)
        clients = [children(standin, daemon, tmp_path, str(n)) for n in range(2)]
        with ThreadPoolExecutor(2) as threads:
            runs = [
                threads.submit(clients[0].run, "direct", url=URL, nbytes=SIZE),
                threads.submit(
                    clients[1].run, "staged_async", url=URL, nbytes=SIZE, interface="dlpack"
                ),
            ]  # fmt: skip
            for run in runs:
                told = run.result()
                assert told.result["digest"] == digest(DATA), told
                assert told.left == {}
        nothing_left(daemon)
        with racer.Client(socket=daemon.socket("local")) as client:
            assert client.read(URL) == DATA

"""`racer.load` to a GPU: chunks land in its memory, from the real daemon on the stand-in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from racerd.units import MIB
from tests.support.gpu_client import Children
from tests.support.gpu_daemon import eventually, gpu_daemon, gpu_ready
from tests.support.gpu_rig import driver_calls
from tests.support.safetensors_bytes import model_file
from tests.support.standin import StandIn
from tools.daemon_process import DaemonProcess

URL = "racer://local/models/llama"
SHARDS = (
    {
        "embed": ("BF16", (300, 1001)),
        "norm": ("F32", (7,)),
        "layers.0.up": ("U8", (1_234_567,)),
        "layers.0.empty": ("F16", (0, 4)),
    },
    {
        "layers.1.up": ("F32", (513, 601)),
        "layers.1.down": ("F16", (601, 513)),
        "head": ("U8", (3,)),
    },
)
STAGING = 4 * MIB


@pytest.fixture
def model(tmp_path: Path) -> tuple[str, dict[str, str]]:
    """The origin's URL, and the digest of each tensor."""
    folder = tmp_path / "objects" / "models" / "llama"
    folder.mkdir(parents=True)
    digests, weights = {}, {}
    for number, tensors in enumerate(SHARDS):
        name = f"model-0000{number + 1}-of-00002.safetensors"
        data, contents = model_file(tensors, seed=10 * number)
        (folder / name).write_bytes(data)
        weights |= dict.fromkeys(contents, name)
        digests |= {key: hashlib.sha256(value).hexdigest() for key, value in contents.items()}
    index = {"metadata": {}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return f"file://{tmp_path}/objects", digests


@pytest.fixture
def daemon(
    standin: StandIn, tmp_path: Path, model: tuple[str, dict[str, str]], slab_folder: Path
) -> Iterator[DaemonProcess]:
    with gpu_daemon(
        standin, tmp_path, model[0], slab=slab_folder / "slab", FAKECUDA_DEVICES="2"
    ) as running:
        gpu_ready(running)
        yield running


def client(standin: StandIn, daemon: DaemonProcess, folder: Path, name: str = "") -> Children:
    own = folder / f"client{name}"
    own.mkdir()
    return Children(standin, daemon.run_dir, own)


def nothing_left(daemon: DaemonProcess) -> None:
    eventually(lambda: daemon.metric("racer_targets", kind="gpu") == 0, "no target is left")


def test_chunks_land_on_the_gpu_that_is_loaded_to(
    standin: StandIn, daemon: DaemonProcess, tmp_path: Path, model: tuple[str, dict[str, str]]
) -> None:
    """R2, R18, R35, R36, L26: no byte of a tensor comes through host memory, and GPU 0, which is
    broken here, is not touched; copies that are slow have ended before a landing is used again."""
    loading = client(standin, daemon, tmp_path)
    driver = {"FAKECUDA_DEVICES": "2", "FAKECUDA_BROKEN": "0", "FAKECUDA_DELAY_US": "60000"}
    told = loading.on("load", driver, url=URL, device="cuda:1", staging_bytes=STAGING)
    assert told.result["digests"] == model[1]
    assert not {"host", "stream"} & set(told.result["rungs"])
    assert (told.left, told.said) == ({}, [])
    assert {where for _, where in driver_calls(loading.log)} == {"-", "1"}
    assert loading.calls()["cuMemcpyHtoD"] == 0
    assert loading.calls()["cuMemCreate"] == 2  # A landing for each chunk in flight.
    nothing_left(daemon)


def test_leaving_early(
    standin: StandIn, daemon: DaemonProcess, tmp_path: Path, model: tuple[str, dict[str, str]]
) -> None:
    """R36: cleanup is certain, also when the consumer stops."""
    loading = client(standin, daemon, tmp_path)
    told = loading.on(
        "load", {"FAKECUDA_DELAY_US": "2000"}, url=URL, device="cuda:0", staging_bytes=STAGING,
        early=2,
    )  # fmt: skip
    assert len(told.result["digests"]) == 2
    assert told.left == {}
    nothing_left(daemon)


def test_a_daemon_without_gpus(
    standin: StandIn, tmp_path: Path, model: tuple[str, dict[str, str]], slab_folder: Path
) -> None:
    """R4: through host memory, with the reason, onto the same GPU."""
    with gpu_daemon(standin, tmp_path, model[0], slab=slab_folder / "slab", gpu="off") as daemon:
        loading = client(standin, daemon, tmp_path)
        told = loading.run("load", url=URL, device="cuda:0", staging_bytes=STAGING)
        assert told.result["digests"] == model[1]
        assert len([text for text in told.said if "loading through host memory" in text]) == 1
        assert told.left == {}


def test_two_processes_load_while_the_driver_fails(
    standin: StandIn, tmp_path: Path, model: tuple[str, dict[str, str]], slab_folder: Path
) -> None:
    """R2, R4, F93, L33: a model of several shards, byte for byte, by two processes at once, while
    the daemon's worker dies of one error after the other."""
    with gpu_daemon(
        standin, tmp_path, model[0], slab=slab_folder / "slab",
        FAKECUDA_FAIL="kernel:700:5,cuLaunchKernel:719:9,copy:702:23",
    ) as daemon:  # fmt: skip
        gpu_ready(daemon)
        with ThreadPoolExecutor(2) as threads:
            runs = [
                threads.submit(
                    client(standin, daemon, tmp_path, str(n)).run,
                    "load", url=URL, device="cuda:0", staging_bytes=STAGING,
                )
                for n in range(2)
            ]  # fmt: skip
            for run in runs:
                told = run.result()
                assert told.result["digests"] == model[1], told
                assert told.left == {}
        assert daemon.metric("racer_gpu_worker_deaths_total") > 0
        nothing_left(daemon)

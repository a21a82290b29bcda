"""GPU memory of clients: real driver calls on the stand-in, a scripted daemon at the socket."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.python.racer.tests.fake_daemon import HANG_UP, FakeDaemon, Seen, error
from clients.python.racer.tests.patterns import MIB, pattern
from racer.cuda.device import plain_uuid
from racer.gpu.staging import STAGING_SLOTS
from tests.support.gpu_client import Children, assert_paired, digest
from tests.support.gpu_daemon import gpu_name
from tests.support.gpu_rig import driver_calls
from tests.support.standin import StandIn

PART_BYTES = 2 * MIB  # Of staging, here: so that small objects have many parts.


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "run") as running:
        running.gpus = [gpu_name(0), gpu_name(1)]
        yield running


@pytest.fixture
def children(standin: StandIn, daemon: FakeDaemon, tmp_path: Path) -> Children:
    return Children(standin, daemon.run_dir, tmp_path)


# --- reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["direct", "direct_async"])
def test_memory_of_the_client_is_written_by_the_daemon(
    daemon: FakeDaemon, children: Children, scenario: str
) -> None:
    """R2, F89: exported once, registered once, released before it is freed."""
    data = pattern(5 * MIB + 17)
    url = daemon.put("llama", "weights", data)
    told = children.run(scenario, url=url, nbytes=6 * MIB)
    assert told.result == {"counts": [len(data)] * 2, "gpu": gpu_name(0), "digest": digest(data)}
    assert (told.left, told.said) == ({}, [])
    assert daemon.count("POST /v1/targets") == daemon.count("DELETE /v1/targets") == 1
    assert daemon.count("POST /v1/gpu-read") == 2
    assert daemon.count("host-read|GET /v1/objects") == 0
    assert not daemon.targets
    registered = next(seen for seen in daemon.seen if seen.line == "POST /v1/targets")
    assert registered.fields["racer-target-kind"] == "gpu"
    assert registered.fields["racer-gpu"] == gpu_name(0)
    assert_paired(children.calls())


def test_range_and_end_of_the_object(daemon: FakeDaemon, children: Children) -> None:
    data = pattern(3 * MIB)
    url = daemon.put("llama", "weights", data)
    told = children.run("direct", url=url, nbytes=4 * MIB, offset=MIB + 1)
    assert told.result["counts"] == [2 * MIB - 1] * 2
    assert told.result["digest"] == digest(data[MIB + 1 :])


@pytest.mark.parametrize("interface", ["dlpack", "dlpack-1", "cuda"])
@pytest.mark.parametrize("scenario", ["staged", "staged_async"])
def test_other_memory_is_reached_through_the_ring(
    daemon: FakeDaemon, children: Children, scenario: str, interface: str
) -> None:
    """R36: a slot is written to again only when it was copied out of, and every copy has ended when
    the call returns; what is behind the object is left alone."""
    data = pattern(11 * MIB + 12_345)
    url = daemon.put("llama", "weights", data)
    nbytes = len(data) + 1001
    told = children.on(
        scenario, {"FAKECUDA_DELAY_US": "20000"}, url=url, nbytes=nbytes, interface=interface
    )
    assert told.result["counts"] == [len(data)] * 2
    assert told.result["digest"] == digest(data)
    assert told.result["rest"] == digest(b"\xee" * 1001)
    assert all(told.result["ordered"])
    assert told.left == {} and told.said == []
    assert daemon.count("POST /v1/gpu-read") == 12
    assert not daemon.targets
    calls = children.calls()
    assert calls["cuMemCreate"] <= STAGING_SLOTS
    assert calls["cuMemcpyDtoDAsync"] == 12
    assert_paired(calls)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e8m0fnu"])
def test_parameters_of_torch(daemon: FakeDaemon, children: Children, dtype: str) -> None:
    """L41: any type, with a gradient, on another GPU than the current one, which torch does not
    lend as they are."""
    data = pattern(2 * MIB)
    url = daemon.put("llama", "weights", data)
    count = len(data) // (2 if dtype == "bfloat16" else 1)
    driver = {"FAKECUDA_DEVICES": "2"}
    told = children.on("torch_tensor", driver, url=url, count=count, dtype=dtype, device="cuda:1")
    assert told.result["count"] == len(data) and told.result["digest"] == digest(data)
    assert "contiguous" in told.result["refused"]
    assert told.left == {} and told.said == []


def test_threads_share_a_bounded_ring(daemon: FakeDaemon, children: Children) -> None:
    """The staging of a client stays bounded, however many threads read."""
    contents = [bytes([n + 1]) * (2 * PART_BYTES) for n in range(6)]
    urls = [daemon.put("llama", f"f{n}", data) for n, data in enumerate(contents)]
    told = children.run("many_threads", urls=urls, nbytes=len(contents[0]), interface="dlpack")
    assert told.result["errors"] == []
    assert told.result["digests"] == [digest(data) for data in contents]
    assert told.result["mapped"] <= STAGING_SLOTS + len(urls)
    assert told.left == {}
    assert not daemon.targets


def test_a_small_read_takes_no_detour(daemon: FakeDaemon, children: Children) -> None:
    data = pattern(1000)
    url = daemon.put("llama", "norm", data)
    told = children.run("staged", url=url, nbytes=1000, interface="dlpack")
    assert told.result["digest"] == digest(data)
    assert daemon.count("gpu-read") == 0 and told.said == []
    told = children.run("direct", url=url, nbytes=1000)
    assert told.result["digest"] == digest(data)
    assert daemon.count("gpu-read") == 2


# --- lifetimes ------------------------------------------------------------------------------------


def test_consumers_keep_the_memory(daemon: FakeDaemon, children: Children) -> None:
    """L33, L49: lifetimes cannot dangle: the last of capsule, array and buffer frees the memory."""
    data = pattern(2 * MIB)
    url = daemon.put("llama", "weights", data)
    told = children.run("lifetimes", url=url, nbytes=len(data))
    result = told.result
    assert result["same"] and result["view"] == len(data)
    assert result["digests"] == [digest(data)] * 2
    assert result["held"]["mappings"] == 1
    assert result["after one"] == digest(data)
    assert result["with the buffer"] == 1  # The array interface was read: it may be in use.
    assert result["at the end"] == 0
    assert told.left == {}
    assert daemon.count("POST /v1/targets") == 1  # The view was known as a part of the buffer.
    assert_paired(children.calls())


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [1, "cuda:1", gpu_name(1), plain_uuid(gpu_name(1))])
def test_only_the_gpu_that_is_asked_for_is_touched(
    daemon: FakeDaemon, children: Children, device: object
) -> None:
    """R18, L26, F95: GPU 0 may be lost or somebody else's."""
    data = pattern(MIB)
    url = daemon.put("llama", "weights", data)
    driver = {"FAKECUDA_DEVICES": "2", "FAKECUDA_BROKEN": "0"}
    told = children.on("direct", driver, url=url, nbytes=MIB, device=device)
    assert told.result["digest"] == digest(data)
    assert told.result["gpu"] == gpu_name(1)
    assert {where for _, where in driver_calls(children.log)} == {"-", "1"}


def test_staging_is_on_the_gpu_of_the_array(daemon: FakeDaemon, children: Children) -> None:
    """R18: never on GPU 0 for an array on GPU 1."""
    data = pattern(PART_BYTES + 1)
    url = daemon.put("llama", "weights", data)
    driver = {"FAKECUDA_DEVICES": "2", "FAKECUDA_BROKEN": "0"}
    for interface in ("dlpack", "cuda"):
        told = children.on(
            "staged", driver, url=url, nbytes=len(data) + 1, interface=interface, ordinal=1
        )
        assert told.result["digest"] == digest(data)
        assert {where for _, where in driver_calls(children.log)} == {"-", "1"}
    registered = [seen for seen in daemon.seen if seen.line == "POST /v1/targets"]
    assert {seen.fields["racer-gpu"] for seen in registered} == {gpu_name(1)}


def test_gpus_that_there_are_not(children: Children) -> None:
    told = children.run("alloc_only", nbytes=10, device=3)
    assert told.error["type"] == "GpuUnavailable" and told.error["code"] == "gpu_absent"
    told = children.run("alloc_only", nbytes=10, device="GPU-" + "ab" * 16)
    assert told.error["code"] == "gpu_absent"
    told = children.on("alloc_only", {"FAKECUDA_MEM_MB": "4"}, nbytes=16 * MIB)
    assert told.error["type"] == "GpuError" and told.error["code"] == "gpu_out_of_memory"
    assert told.left == {}


def test_a_forked_child_is_told(daemon: FakeDaemon, children: Children) -> None:
    """CUDA does not survive a fork: the child gets a clear error, the parent goes on as before."""
    data = pattern(PART_BYTES)
    url = daemon.put("llama", "weights", data)
    told = children.run("forked", url=url, nbytes=len(data))
    assert told.result["child"] == ["Forked", "Forked", len(data)]
    assert told.result["status"] == 0
    assert told.result["digest"] == digest(data)
    assert told.left == {}


# --- the ladder -----------------------------------------------------------------------------------

HOST = "through host memory"


@pytest.mark.parametrize(
    ("where", "status", "code"),
    [
        ("POST /v1/targets", 422, "gpu_unknown"),
        ("POST /v1/targets", 422, "target_not_gpu_memory"),
        ("POST /v1/targets", 503, "gpu_unavailable"),
        ("POST /v1/gpu-read", 503, "gpu_lost"),
        ("POST /v1/gpu-read", 503, "gpu_out_of_memory"),
        ("POST /v1/gpu-read", 422, "target_misaligned"),
    ],
)
@pytest.mark.parametrize("scenario", ["direct", "staged", "direct_async", "staged_async"])
def test_one_step_down_is_said_once(
    daemon: FakeDaemon, children: Children, where: str, scenario: str, status: int, code: str
) -> None:
    """R4, L37, F93: GPU, then host memory, each step with its reason; the bytes end up on the
    GPU."""
    data = pattern(2 * PART_BYTES + 3)
    url = daemon.put("llama", "weights", data)
    told_of_gpu = error(status, code, retry="same" if status == 503 else "never")

    def refuse(seen: Seen) -> Any:
        return told_of_gpu if seen.fields.get("racer-target-kind", "gpu") == "gpu" else None

    daemon.always(where, refuse)
    extra = {"interface": "dlpack"} if "staged" in scenario else {}
    told = children.run(scenario, url=url, nbytes=len(data), **extra)
    assert told.result["digest"] == digest(data)
    assert told.left == {}
    assert len(told.said) == 1 and code in told.said[0] and HOST in told.said[0]
    assert daemon.count("POST /v1/host-read") > 0
    assert not daemon.targets
    assert_paired(children.calls())


@pytest.mark.parametrize("scenario", ["staged", "staged_async"])
def test_all_the_way_down(daemon: FakeDaemon, children: Children, scenario: str) -> None:
    """R4: no GPU in the daemon, host memory refused: the stream, still into GPU memory."""
    data = pattern(9 * MIB)
    url = daemon.put("llama", "weights", data)
    daemon.gpus = []
    daemon.always("POST /v1/targets", error(422, "target_sparse"))
    told = children.run(scenario, url=url, nbytes=len(data), interface="cuda")
    assert told.result["digest"] == digest(data)
    assert len(told.said) == 2
    assert HOST in told.said[0] and "gpu_off" in told.said[0]
    assert "over the socket" in told.said[1]
    assert daemon.count("gpu-read") == 0


@pytest.mark.parametrize("scenario", ["staged", "staged_async"])
def test_parts_that_came_are_not_read_again(
    daemon: FakeDaemon, children: Children, scenario: str
) -> None:
    """R4: the GPU is lost in the middle: the rest comes through host memory."""
    data = pattern(4 * PART_BYTES)
    url = daemon.put("llama", "weights", data)
    daemon.on("POST /v1/gpu-read", None, None, error(503, "gpu_lost", retry="same"))
    told = children.run(scenario, url=url, nbytes=len(data), interface="dlpack-1")
    assert told.result["digest"] == digest(data)
    assert len(told.said) == 1


def test_an_old_daemon(daemon: FakeDaemon, children: Children) -> None:
    url = daemon.put("llama", "weights", pattern(MIB))
    daemon.gpus = []
    told = children.run("direct", url=url, nbytes=MIB)
    assert told.result["digest"] == digest(pattern(MIB))
    assert len(told.said) == 1 and "gpu_off" in told.said[0]


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["staged", "staged_async"])
def test_daemon_that_hangs_up_under_staging(
    daemon: FakeDaemon, children: Children, scenario: str
) -> None:
    """R7: memory of a read that was not answered is not used again; the read goes on in other."""
    data = pattern(4 * PART_BYTES)
    url = daemon.put("llama", "weights", data)
    daemon.on("POST /v1/gpu-read", None, HANG_UP, None, HANG_UP)
    told = children.run(scenario, url=url, nbytes=len(data), interface="dlpack")
    assert told.result["digest"] == digest(data)
    assert told.left == {} and told.said == []
    assert not daemon.targets


@pytest.mark.parametrize("scenario", ["direct", "direct_async"])
def test_memory_is_regained_when_the_daemon_lets_go(
    daemon: FakeDaemon, children: Children, scenario: str
) -> None:
    """R7, F89: after a read without an answer, the release is what makes the memory good again."""
    data = pattern(MIB)
    url = daemon.put("llama", "weights", data)
    daemon.on("POST /v1/gpu-read", HANG_UP)
    told = children.run(scenario, url=url, nbytes=MIB)
    assert told.result["digest"] == digest(data)
    assert daemon.count("POST /v1/targets") == daemon.count("DELETE /v1/targets") == 2


@pytest.mark.parametrize("scenario", ["direct", "direct_async"])
def test_memory_stays_lost_when_nobody_says_so(
    daemon: FakeDaemon, children: Children, scenario: str
) -> None:
    """R7: late bytes could still come."""
    url = daemon.put("llama", "weights", pattern(MIB))
    daemon.on("POST /v1/gpu-read", HANG_UP)
    daemon.on("DELETE /v1/targets", HANG_UP)
    told = children.run(scenario, url=url, nbytes=MIB)
    assert told.error["type"] == "ConnectionLost"
    assert told.left == {}
    assert_paired(children.calls())


@pytest.mark.parametrize("interface", ["dlpack", "cuda"])
def test_cancelling_a_read(
    daemon: FakeDaemon, children: Children, tmp_path: Path, interface: str
) -> None:
    """R7, R36: a cancelled call has fenced its copies; nothing of it is left."""
    data = pattern(4 * PART_BYTES)
    url = daemon.put("llama", "weights", data)
    reached, cancelled = tmp_path / "reached", tmp_path / "reached.cancelled"

    def hold(seen: Seen) -> None:
        reached.touch()
        while not cancelled.exists():
            time.sleep(0.001)  # No event reaches across processes.

    daemon.on("POST /v1/gpu-read", None, None, hold)
    told = children.on(
        "cancelled",
        {"FAKECUDA_DELAY_US": "5000"},
        url=url,
        nbytes=len(data),
        interface=interface,
        after=str(reached),
    )
    assert told.result == {"outcome": "CancelledError", "quiet": True, "digest": digest(data)}
    assert told.left == {}
    assert not daemon.targets
    assert_paired(children.calls())


def test_errors_of_the_object_are_not_steps(daemon: FakeDaemon, children: Children) -> None:
    url = daemon.put("llama", "weights", pattern(MIB))
    daemon.always("POST /v1/gpu-read", error(502, "corrupt", retry="same"))
    told = children.run("direct", url=url, nbytes=MIB)
    assert told.error["type"] == "Corrupt"
    assert told.said == [] and told.left == {}
    assert daemon.count("host-read") == 0


# Calls without which nothing can be given back: where the driver refuses, it keeps what it had.
FREEING = {
    "cuMemUnmap", "cuMemAddressFree", "cuMemRelease", "cuStreamDestroy", "cuEventDestroy",
    "cuDevicePrimaryCtxRelease", "cuCtxPushCurrent", "cuCtxPopCurrent",
}  # fmt: skip
# What the test's own arrays call, before anything is read and after.
OF_THE_TEST = {"cuMemAlloc", "cuMemFree", "cuMemsetD8", "cuMemcpyDtoH", "cuGetErrorName",
               "cuCtxGetDevice"}  # fmt: skip


def fault_plan(calls: Counter[str], code: int, *, thorough: bool) -> list[tuple[str, int, int]]:
    """Each call that was made, at its first and last time, and (thorough) in the middle."""
    return [
        (name, code, nth)
        for name, count in sorted(calls.items())
        if name not in OF_THE_TEST
        for nth in sorted({1, (count + 1) // 2 if thorough else 1, count})
    ]


@pytest.mark.parametrize(
    ("scenario", "code"),
    [
        ("direct", 2),
        ("direct", 700),
        ("staged", 2),
        ("staged", 700),
        ("direct_async", 2),
        ("staged_async", 700),
    ],
)
def test_each_driver_call_fails_in_turn(
    daemon: FakeDaemon, children: Children, scenario: str, code: int
) -> None:
    """F93, R36: the right bytes or a clear error, never a hang; nothing is left but what the
    driver did not take back."""
    data = pattern(4 * MIB + 5)
    url = daemon.put("llama", "weights", data)
    arguments: dict[str, Any] = {"url": url, "nbytes": len(data)}
    if "staged" in scenario:
        arguments["interface"] = "dlpack"
    children.run("faults", of=scenario, plan=[("none", 1, 1)], **arguments)
    plan = fault_plan(children.calls(), code, thorough="async" not in scenario)
    assert len(plan) > 15
    told = children.run("faults", of=scenario, plan=plan, **arguments)
    wrong = []
    for fault, outcome in told.result.items():
        if "status" in outcome:
            wrong.append(f"{fault}: ended with {outcome['status']}")
        elif "result" in outcome:
            if outcome["result"]["digest"] != digest(data):
                wrong.append(f"{fault}: wrong bytes")
        elif outcome["error"]["type"] != "GpuError" or outcome["error"]["native"] != code:
            wrong.append(f"{fault}: {outcome['error']}")
        left = {} if code == 700 or fault.partition(":")[0] in FREEING else outcome.get("left")
        if left:
            wrong.append(f"{fault}: left {left}")
    assert not wrong, "\n".join(wrong)
    assert not daemon.targets

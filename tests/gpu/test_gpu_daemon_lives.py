"""What comes and goes under a daemon with GPUs: clients, targets, workers, and GPUs themselves."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import racer
from tests.support.gpu_daemon import (
    ClientProcess,
    GpuClient,
    eventually,
    gpu_daemon,
    gpu_name,
    gpu_ready,
    readiness,
)
from tests.support.gpu_rig import TARGET_BYTES, driver_calls
from tests.support.socket_rig import Answer
from tests.support.standin import StandIn
from tools.daemon_process import DaemonProcess

SIZE = 300_007
OBJECT = "models/weights.bin"
DATA = random.Random(2).randbytes(SIZE)


@pytest.fixture
def url(tmp_path: Path) -> str:
    folder = tmp_path / "objects" / "models"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(DATA)
    return f"file://{folder.parent}"


class Hold:
    """While it is up the stand-in's kernels wait. It may be lifted and put up again."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "hold"
        self.environ = {"FAKECUDA_HOLD": str(self._file)}

    def put_up(self) -> None:
        Path(f"{self._file}.reached").unlink(missing_ok=True)
        self._file.touch()

    def wait_reached(self) -> None:
        eventually(Path(f"{self._file}.reached").exists, "a kernel runs")

    def lift(self) -> None:
        self._file.unlink()


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    return Hold(tmp_path)


def nothing_left(daemon: DaemonProcess) -> None:
    eventually(lambda: daemon.metric("racer_targets", kind="gpu") == 0, "no target is left")
    eventually(lambda: daemon.metric("racer_target_mapped_bytes", kind="gpu") == 0, "no mapping")
    eventually(lambda: daemon.metric("racer_flights") == 0, "no flight is left")


def worker_pid(daemon: DaemonProcess) -> int:
    return int(readiness(daemon)["gpus"][0]["worker"])


@contextlib.contextmanager
def asking(client: GpuClient, path: str = OBJECT) -> Iterator[ThreadPoolExecutor]:
    """A read that was sent and has no answer yet."""
    client.send_read(path)
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_client_that_dies_in_the_middle_of_its_read(
    standin: StandIn, tmp_path: Path, url: str, hold: Hold
) -> None:
    """R7, F91, L33: its memory stays mapped until the GPU has done with it, then it is let go; the
    other client's read goes on."""
    with gpu_daemon(standin, tmp_path, url, **hold.environ) as daemon:
        gpu_ready(daemon)
        with ClientProcess(standin, daemon) as dying, ClientProcess(standin, daemon) as living:
            hold.put_up()
            dying.ask(OBJECT, 0, SIZE)
            living.ask(OBJECT, 0, SIZE)
            hold.wait_reached()
            dying.process.kill()
            dying.process.wait()
            mapped = daemon.metric("racer_target_mapped_bytes", kind="gpu")
            assert mapped == 2 * TARGET_BYTES
            hold.lift()
            assert living.told()["status"] == 200
            eventually(
                lambda: daemon.metric("racer_target_mapped_bytes", kind="gpu") == TARGET_BYTES,
                "the dead client's memory is let go",
            )
        nothing_left(daemon)


def test_a_target_released_during_a_read(
    standin: StandIn, tmp_path: Path, url: str, hold: Hold
) -> None:
    """R7, F89: the read ends with `target_unknown`; the release is answered only when the GPU has
    done with the memory, so that its exporter may free it."""
    with gpu_daemon(standin, tmp_path, url, **hold.environ) as daemon:
        gpu_ready(daemon)
        with GpuClient(daemon) as client, GpuClient(daemon, register=False) as other:
            hold.put_up()
            client.memory.fill(0xEE)
            with asking(client) as pool:
                answer = pool.submit(client.raw.receive)
                hold.wait_reached()
                other.id = client.id
                release = pool_of_one(other.release)
                # Somebody else's exchange is over, and the release still is not.
                assert json.loads(daemon.get("/readyz"))["gpu"] == "ready"
                with GpuClient(daemon):
                    pass
                assert not release.done() and not answer.done()
                hold.lift()
                assert release.result(60).status == 200
                told = answer.result(60)
                assert (told.status, told.code) == (404, "target_unknown")
        nothing_left(daemon)


def pool_of_one(call: Callable[[], Answer]) -> Future[Answer]:
    """Runs `call` on a thread of its own, which ends with it."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def test_nothing_is_answered_before_it_is_verified(
    standin: StandIn, tmp_path: Path, url: str, hold: Hold
) -> None:
    """R9: while the kernels are held back there is no answer, and no plaintext in the target."""
    with gpu_daemon(standin, tmp_path, url, **hold.environ) as daemon:
        gpu_ready(daemon)
        with GpuClient(daemon) as client:
            client.memory.fill(0xEE)
            hold.put_up()
            with asking(client) as pool:
                answer = pool.submit(client.raw.receive)
                hold.wait_reached()
                with racer.Client(socket=daemon.socket("local")) as host:
                    assert host.read(f"racer://local/{OBJECT}") == DATA  # Host reads go on.
                assert not answer.done()
                assert client.memory.bytes(0, SIZE) == b"\xee" * SIZE
                hold.lift()
                assert answer.result(60).status == 200
                assert client.memory.bytes(0, SIZE) == DATA


def test_a_deadline_ends_a_read_when_the_gpu_has_done_with_it(
    standin: StandIn, tmp_path: Path, url: str, hold: Hold
) -> None:
    """R7: `deadline_exceeded` is told once nothing touches the memory any more, and not before."""
    with gpu_daemon(standin, tmp_path, url, **hold.environ) as daemon:
        gpu_ready(daemon)
        with GpuClient(daemon) as client:
            hold.put_up()
            client.send_read(OBJECT, "Racer-Deadline-Ms: 300")
            hold.wait_reached()
            answer = pool_of_one(client.raw.receive)
            passed = time.monotonic() + 0.5
            eventually(lambda: time.monotonic() > passed, "the deadline is over")
            assert not answer.done()
            hold.lift()
            assert answer.result(60).code == "deadline_exceeded"
            assert client.read(OBJECT).status == 200
            assert client.memory.bytes(0, SIZE) == DATA


# ---- workers ----


def test_a_worker_that_dies_while_it_starts(standin: StandIn, tmp_path: Path, url: str) -> None:
    """F93, R17: the daemon serves host memory meanwhile; the next worker serves the GPU."""
    with gpu_daemon(standin, tmp_path, url) as daemon:
        eventually(lambda: readiness(daemon)["gpus"][0]["worker"] is not None, "a worker")
        os.kill(worker_pid(daemon), signal.SIGKILL)
        with racer.Client(socket=daemon.socket("local")) as host:
            assert host.read(f"racer://local/{OBJECT}") == DATA
        gpu_ready(daemon)
        with GpuClient(daemon) as client:
            assert client.read(OBJECT).status == 200
            assert client.memory.bytes(0, SIZE) == DATA


def test_a_worker_that_dies_idle_is_replaced_and_targets_stay(
    standin: StandIn, tmp_path: Path, url: str
) -> None:
    """F91, F93, F94: the target of before is imported again by itself; while the next worker
    pauses, reads are told so, with when to come back."""
    with gpu_daemon(standin, tmp_path, url) as daemon:
        gpu_ready(daemon)
        with GpuClient(daemon) as client:
            os.kill(worker_pid(daemon), signal.SIGKILL)
            eventually(lambda: readiness(daemon)["gpu"] == "degraded", "its death is seen")
            info = client.raw.ask("GET /v1/info").json
            assert info["gpu"] == "degraded" and gpu_name() in info["gpu_why"]
            early = client.read(OBJECT)
            if early.status != 200:
                assert (early.status, early.code) == (503, "gpu_unavailable")
                assert int(early.fields["Retry-After"]) >= 1
            gpu_ready(daemon)
            assert client.read(OBJECT).status == 200
            assert client.memory.bytes(0, SIZE) == DATA
        nothing_left(daemon)


def test_a_worker_that_dies_in_the_middle_of_a_read(
    standin: StandIn, tmp_path: Path, url: str, hold: Hold
) -> None:
    """F93, R7: the read is `gpu_lost` and says what to do; host reads go on; the same target is
    read into by the next worker."""
    with gpu_daemon(standin, tmp_path, url, **hold.environ) as daemon:
        gpu_ready(daemon)
        with GpuClient(daemon) as client:
            hold.put_up()
            client.send_read(OBJECT)
            hold.wait_reached()
            os.kill(worker_pid(daemon), signal.SIGKILL)
            lost = client.raw.receive()
            assert (lost.status, lost.code) == (503, "gpu_lost")
            assert "host memory" in lost.json["error"]["hint"]
            assert int(lost.fields["Retry-After"]) >= 1
            hold.lift()
            with racer.Client(socket=daemon.socket("local")) as host:
                assert host.read(f"racer://local/{OBJECT}") == DATA
            gpu_ready(daemon)
            assert client.read(OBJECT).status == 200
            assert client.memory.bytes(0, SIZE) == DATA
        nothing_left(daemon)


def test_a_worker_that_dies_while_it_imports(standin: StandIn, tmp_path: Path, url: str) -> None:
    """F91, F93: a stopped worker is killed while it owes an import: the client is told, and no
    descriptor stays."""
    with gpu_daemon(standin, tmp_path, url) as daemon:
        gpu_ready(daemon)
        before = daemon.metric("racer_open_descriptors")
        pid = worker_pid(daemon)
        os.kill(pid, signal.SIGSTOP)
        with GpuClient(daemon, register=False) as client:
            answer = pool_of_one(lambda: client.register(gpu_name(), TARGET_BYTES))
            eventually(lambda: daemon.metric("racer_open_descriptors") > before + 1, "it came")
            os.kill(pid, signal.SIGKILL)
            refused = answer.result(60)
            assert (refused.status, refused.code) == (503, "gpu_lost")
        gpu_ready(daemon)
        with GpuClient(daemon) as client:
            assert client.read(OBJECT).status == 200
        nothing_left(daemon)
        eventually(lambda: daemon.metric("racer_open_descriptors") <= before, "no descriptor more")


def test_a_client_that_leaves_while_its_memory_is_imported(
    standin: StandIn, tmp_path: Path, url: str
) -> None:
    """F90, F91: what was imported for somebody who is gone by then is unmapped all the same."""
    log = tmp_path / "calls"
    with gpu_daemon(standin, tmp_path, url, FAKECUDA_LOG=str(log)) as daemon:
        gpu_ready(daemon)
        before = daemon.metric("racer_open_descriptors")
        pid = worker_pid(daemon)
        os.kill(pid, signal.SIGSTOP)
        with GpuClient(daemon, register=False) as client:
            client.raw.send(
                "\r\n".join(
                    [
                        "POST /v1/targets HTTP/1.1",
                        "Racer-Target-Kind: gpu",
                        f"Racer-Gpu: {gpu_name()}",
                        f"Racer-Target-Bytes: {TARGET_BYTES}",
                        *("", ""),
                    ]
                ),
                [client.memory.descriptor],
            )
            eventually(lambda: daemon.metric("racer_open_descriptors") > before + 1, "it came")
        os.kill(pid, signal.SIGCONT)
        nothing_left(daemon)
        eventually(lambda: daemon.metric("racer_open_descriptors") <= before, "no descriptor more")
        names = [name for name, _ in driver_calls(log)]
        assert names.count("cuMemUnmap") == names.count("cuMemMap") == 1
        assert worker_pid(daemon) == pid


def test_a_daemon_that_drains_finishes_its_gpu_reads(
    standin: StandIn, tmp_path: Path, url: str, hold: Hold
) -> None:
    """F78: SIGTERM waits for what the GPU has in hand; the worker ends with the daemon."""
    with gpu_daemon(standin, tmp_path, url, **hold.environ) as daemon:
        gpu_ready(daemon)
        worker = worker_pid(daemon)
        with GpuClient(daemon) as client:
            hold.put_up()
            client.send_read(OBJECT)
            hold.wait_reached()
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGTERM)
            eventually(lambda: "draining" in daemon.get("/readyz"), "it drains")
            hold.lift()
            assert client.raw.receive().status == 200
            assert client.memory.bytes(0, SIZE) == DATA
        assert daemon.process.wait(60) == 0
        assert not Path(f"/proc/{worker}").exists()


def test_a_killed_daemon_takes_its_workers_with_it(
    standin: StandIn, tmp_path: Path, url: str
) -> None:
    """R23, F91: nobody is left who holds clients' GPU memory; the next daemon serves."""
    with gpu_daemon(standin, tmp_path, url) as daemon:
        gpu_ready(daemon)
        worker = worker_pid(daemon)
        with GpuClient(daemon) as client:
            assert client.read(OBJECT).status == 200
            daemon.kill()
            eventually(lambda: not Path(f"/proc/{worker}").exists(), "the worker is gone")
        daemon.start()
        gpu_ready(daemon)
        with GpuClient(daemon) as client:
            assert client.read(OBJECT).status == 200
            assert client.memory.bytes(0, SIZE) == DATA


def test_targets_that_come_and_go_leave_nothing(standin: StandIn, tmp_path: Path, url: str) -> None:
    """F89, F90, F91: neither the daemon nor the worker holds more after many clients, whether they
    released their targets or just went."""
    with gpu_daemon(standin, tmp_path, url) as daemon:
        gpu_ready(daemon)
        worker = worker_pid(daemon)

        def held() -> tuple[float, int, int]:
            mapped = Path(f"/proc/{worker}/maps").read_text().count("fakegpu")
            descriptors = len(os.listdir(f"/proc/{worker}/fd"))
            return daemon.metric("racer_open_descriptors"), descriptors, mapped

        with GpuClient(daemon) as client:  # What a first read makes for good.
            assert client.read(OBJECT).status == 200
        nothing_left(daemon)
        before = held()
        for number in range(12):
            with GpuClient(daemon) as client:
                assert client.read(OBJECT).status == 200
                if number % 2:
                    assert client.release().status == 200
        nothing_left(daemon)
        eventually(lambda: all(map(operator.le, held(), before)), lambda: f"{before}, {held()}")


@pytest.mark.parametrize("fault", ["kernel:700:2", "kernel:719:1", "copy:702:1"])
def test_a_sticky_error_is_told_and_the_gpu_comes_back(
    standin: StandIn, tmp_path: Path, url: str, fault: str
) -> None:
    """F93, F94: nothing that a poisoned device says is believed: what was read is `gpu_lost`, and a
    fresh process serves the same target."""
    with gpu_daemon(standin, tmp_path, url, FAKECUDA_FAIL=fault) as daemon:
        gpu_ready(daemon)
        with GpuClient(daemon) as client:
            lost = client.read(OBJECT)
            assert (lost.status, lost.code) == (503, "gpu_lost"), lost
            assert daemon.metric("racer_gpu_worker_deaths_total", reason="gpu_lost") == 1
            with racer.Client(socket=daemon.socket("local")) as host:
                assert host.read(f"racer://local/{OBJECT}") == DATA
        nothing_left(daemon)


def test_a_full_gpu_is_told(standin: StandIn, tmp_path: Path, url: str) -> None:
    """R10: no memory for staging is `gpu_out_of_memory`, with the setting that helps."""
    with gpu_daemon(
        standin, tmp_path, url, "--gpu-staging-bytes=64MiB", FAKECUDA_MEM_MB="8"
    ) as daemon:
        gpu_ready(daemon)
        with GpuClient(daemon) as client:
            full = client.read(OBJECT)
            assert (full.status, full.code) == (503, "gpu_out_of_memory")
            assert "gpu_staging_bytes" in full.json["error"]["hint"]
        assert readiness(daemon)["gpus"][0]["restarts"] == 0


# ---- GPUs ----


def test_gpu_0_is_left_alone(standin: StandIn, tmp_path: Path, url: str) -> None:
    """R18, F95, L26: with GPU 0 gone, a target on GPU 1 is served by GPU 1 alone; GPU 0's worker
    never gets a context, and its targets are told why."""
    log = tmp_path / "calls"
    with gpu_daemon(
        standin, tmp_path, url, FAKECUDA_DEVICES="2", FAKECUDA_BROKEN="0", FAKECUDA_LOG=str(log)
    ) as daemon:
        eventually(lambda: readiness(daemon)["gpu"] == "degraded", "GPU 0 has failed")
        eventually(lambda: readiness(daemon)["gpus"][1]["why_not"] is None, "GPU 1 serves")
        with GpuClient(daemon, gpu=1) as client:
            told = client.read(OBJECT)
            assert (told.status, told.json["gpu"]) == (200, gpu_name(1))
            assert client.memory.bytes(0, SIZE) == DATA
            refused = client.register(gpu_name(0), TARGET_BYTES)
            assert (refused.status, refused.code) == (503, "gpu_unavailable"), refused
            info = client.raw.ask("GET /v1/info").json
            assert info["gpus"] == [gpu_name(0), gpu_name(1)]
            assert gpu_name(0) in info["gpu_why"] and gpu_name(1) not in info["gpu_why"]
    assert {device for _, device in driver_calls(log)} == {"-", "1"}
    # Said once, however often the next worker fails: the tries after the first say nothing new.
    assert daemon.log.count("cannot be used") == 1


def test_the_daemon_itself_never_calls_the_driver(
    standin: StandIn, tmp_path: Path, url: str
) -> None:
    """R17, F93: every call of the driver is another process's: a poisoned one is not the node's."""
    log = tmp_path / "calls"
    with gpu_daemon(standin, tmp_path, url, FAKECUDA_LOG=str(log)) as daemon:
        gpu_ready(daemon)
        assert daemon.process is not None
        pid = str(daemon.process.pid)
        with GpuClient(daemon) as client:
            assert client.read(OBJECT).status == 200
        callers = {line.split()[0] for line in log.read_text().splitlines()}
        assert pid not in callers and len(callers) == 2  # The probe and the worker.


def test_a_cufile_driver_that_takes_for_ever(
    standin: StandIn, tmp_path: Path, url: str, slab_folder: Path
) -> None:
    """R15, F79, F95: it is opened at start on a thread of its own; no read waits for it, and pages
    take the host path, counted as that."""
    hang = tmp_path / "hang"
    with gpu_daemon(
        standin, tmp_path, url, "--cufile-provider=cuda", slab=slab_folder / "slab"
    ) as daemon:
        with racer.Client(socket=daemon.socket("local")) as host:
            assert host.read(f"racer://local/{OBJECT}") == DATA
        eventually(lambda: daemon.metric("racer_store_pages") >= 5, "kept")
        daemon.stop()
        hang.touch()
        daemon.environ["FAKECUFILE_HANG"] = str(hang)
        daemon.start()
        gpu_ready(daemon, cufile="opening")
        eventually(lambda: daemon.metric("racer_store_pages") >= 5, "recovered")
        with GpuClient(daemon) as client:
            assert client.read(OBJECT).json["rungs"] == {"disk": SIZE}
            assert client.memory.bytes(0, SIZE) == DATA
        reason = {"reason": "cufile_opening"}
        assert daemon.metric("racer_gpu_host_path_pages_total", **reason) == 5
        hang.unlink()
        gpu_ready(daemon)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("cuFileHandleRegister:5019:1", "cufile_open_flags"),
        ("cuFileHandleRegister:5030:1", "cufile_device_not_classified"),
        ("cuFileRead:5007:1", "cufile_platform_not_supported"),
        ("cuFileDriverOpen:5001:1", "cufile_driver_not_initialized"),
    ],
)
def test_cufile_that_refuses_is_said_once_and_the_host_path_serves(
    standin: StandIn, tmp_path: Path, url: str, slab_folder: Path, fault: str, reason: str
) -> None:
    """R10, R13, R15, R19, F79, F82, F95: off for the slab or for good, counted with the reason, and
    one line in the log that says what to do."""
    with gpu_daemon(standin, tmp_path, url, slab=slab_folder / "slab") as daemon:
        with racer.Client(socket=daemon.socket("local")) as host:
            assert host.read(f"racer://local/{OBJECT}") == DATA
        eventually(lambda: daemon.metric("racer_store_pages") >= 5, "kept")
        daemon.stop()
        daemon.environ["FAKECUDA_FAIL"] = fault
        daemon.start()
        gpu_ready(daemon, cufile="off" if "DriverOpen" in fault else "on")
        eventually(lambda: daemon.metric("racer_store_pages") >= 5, "recovered")
        with GpuClient(daemon) as client:
            told = client.read(OBJECT)
            assert told.status == 200 and client.memory.bytes(0, SIZE) == DATA
        host_pages = daemon.metric("racer_gpu_host_path_pages_total", reason=reason)
        assert host_pages >= 1
        assert host_pages + daemon.metric("racer_cufile_pages_total") == 5
        short = reason.removeprefix("cufile_")
        assert daemon.metric("racer_fallbacks_total", step="cufile", reason=short) == 1
        said = [line for line in daemon.log.splitlines() if f": {short}. " in line]
        assert len(said) == 1, daemon.log


@pytest.mark.parametrize(
    ("arguments", "environ", "rung"),
    [
        ((), {}, "disk"),
        ((), {"CUFILE_ALLOW_COMPAT_MODE": "false"}, "disk"),
        ((), {"CUFILE_ALLOW_COMPAT_MODE": "true"}, "cufile"),
        (("--cufile-allow-compat-mode=false",), {"CUFILE_ALLOW_COMPAT_MODE": "true"}, "disk"),
    ],
)
def test_compatibility_mode_is_off_unless_it_is_asked_for(
    standin: StandIn, tmp_path: Path, url: str, slab_folder: Path, arguments: tuple[str, ...],
    environ: dict[str, str], rung: str,
) -> None:  # fmt: skip
    """R11: without GPUDirect the daemon's own host path reads, unless CUFILE_ALLOW_COMPAT_MODE is
    true."""
    slow = {"FAKECUFILE_NO_GPUDIRECT": "1", **environ}
    with gpu_daemon(
        standin, tmp_path, url, *arguments, slab=slab_folder / "slab", **slow
    ) as daemon:
        with racer.Client(socket=daemon.socket("local")) as host:
            assert host.read(f"racer://local/{OBJECT}") == DATA
        eventually(lambda: daemon.metric("racer_store_pages") >= 5, "kept")
        daemon.stop()
        daemon.start()
        gpu_ready(daemon, cufile="on" if rung == "cufile" else "off")
        eventually(lambda: daemon.metric("racer_store_pages") >= 5, "recovered")
        with GpuClient(daemon) as client:
            assert client.read(OBJECT).json["rungs"] == {rung: SIZE}
            assert client.memory.bytes(0, SIZE) == DATA


# ---- modes ----


def run_racerd(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RACER_", "FAKECU"))}
    return subprocess.run(
        [sys.executable, "-m", "racerd", f"--state-dir={folder}/state", f"--run-dir={folder}/run",
         "--diagnostics=off", *arguments],
        env=clean | environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_on_without_a_driver_says_all_there_is_to_say(tmp_path: Path, url: str) -> None:
    """R17: `--gpu=on` and RACER_ENABLE_GPU=true fail at start where there is no NVIDIA library:
    what was looked for, what was missing, what to do. Nothing was made on a disk."""
    cache = f"--cache=local={url}"
    for arguments, environ in (("--gpu=on", {}), ("--memory=64MiB", {"RACER_ENABLE_GPU": "true"})):
        ended = run_racerd(tmp_path, cache, arguments, **environ)
        assert ended.returncode == 2
        assert "`on` was asked for, and no GPU can be used" in ended.stderr
        assert "looked for libcuda.so.1 (the NVIDIA driver): missing" in ended.stderr
        assert "to do: install the NVIDIA driver" in ended.stderr
        assert "--gpu=auto" in ended.stderr
        assert "Traceback" not in ended.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"FAKECUDA_DEVICES": "0"}, ["cuda.bindings (Python package): found", "a visible GPU: "
                                     "missing", "CUDA_VISIBLE_DEVICES"]),
        ({"FAKECUDA_FAIL": "cuInit:803:1"}, ["cuInit: missing", "different versions"]),
        ({"FAKECUDA_FAIL": "cuMemHostRegister:801:1"}, ["no GPU of this node can be used",
                                                        gpu_name(), "memlock"]),
        ({"FAKECUDA_BROKEN": "0"}, ["no GPU of this node can be used", gpu_name(), "nvidia-smi"]),
        ({"FAKECUDA_EXCLUSIVE": "0"}, ["Exclusive_Process", "nvidia-smi -c DEFAULT"]),
    ],
)  # fmt: skip
def test_on_with_a_gpu_that_cannot_be_used(
    standin: StandIn, tmp_path: Path, url: str, environ: dict[str, str], words: list[str]
) -> None:
    """R17, R18: a driver without a GPU, one that does not start, memory that cannot be pinned, a
    GPU that is broken or somebody's own: each is named, with its remedy."""
    ended = run_racerd(
        tmp_path, "--gpu=on", f"--cache=local={url}", "--memory=64MiB",
        **standin.environment(**environ),
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    for word in words:
        assert word in ended.stderr, ended.stderr


def test_on_with_a_gpu_serves(standin: StandIn, tmp_path: Path, url: str) -> None:
    """R17: `ready` is said when a GPU is."""
    with gpu_daemon(standin, tmp_path, url, gpu="on") as daemon:
        assert readiness(daemon)["gpus"][0]["why_not"] is None
        assert gpu_name() in daemon.started_text
        with GpuClient(daemon) as client:
            assert client.read(OBJECT).status == 200
            assert client.memory.bytes(0, SIZE) == DATA


def test_auto_without_a_gpu_serves_and_says_why_once(tmp_path: Path, url: str) -> None:
    """R17: where no NVIDIA library is installed the daemon starts, reads into host memory, and
    tells clients of gpu targets why not."""
    with DaemonProcess(tmp_path, caches={"local": url}, arguments=["--memory=64MiB"]) as daemon:
        with racer.Client(socket=daemon.socket("local")) as host:
            assert host.read(f"racer://local/{OBJECT}") == DATA
        with GpuClient(daemon, register=False) as client:
            for _ in range(2):
                refused = client.register(gpu_name(), TARGET_BYTES)
                assert (refused.status, refused.code) == (503, "gpu_unavailable")
                assert "libcuda.so.1" in refused.json["error"]["message"]
                assert refused.json["error"]["retry"] == "never"
            info = client.raw.ask("GET /v1/info").json
            assert (info["gpu"], info["gpus"]) == ("off", [])
            assert "libcuda.so.1" in info["gpu_why"]
        assert daemon.started_text.count("gpu off (") == 1
        assert "libcuda.so.1" in daemon.started_text and "libcuda.so.1" not in daemon.log


def test_off_looks_for_nothing(standin: StandIn, tmp_path: Path, url: str) -> None:
    """R17: `--gpu=off` starts no probe and no worker."""
    log = tmp_path / "calls"
    with gpu_daemon(standin, tmp_path, url, gpu="off", FAKECUDA_LOG=str(log)) as daemon:
        with GpuClient(daemon, register=False) as client:
            refused = client.register(gpu_name(), TARGET_BYTES)
            assert (refused.code, refused.json["error"]["retry"]) == ("gpu_unavailable", "never")
            assert "--gpu=off" in refused.json["error"]["message"]
    assert not log.exists()

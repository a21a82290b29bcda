"""`racerd doctor` on the stand-in driver: what it tries, and what it says of each failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from racerd.doctor.finding import Verdict
from racerd.doctor.gpu_try import judge_gpu, try_gpu
from tests.support.gpu_rig import driver_calls, gpu_uuid, standin_environment
from tests.support.standin import StandIn


class Doctor:
    """Runs the command with what the stand-in is asked for."""

    def __init__(self, standin: StandIn, folder: Path) -> None:
        self._standin = standin
        self._folder = folder
        self.status = -1

    def run(self, *flags: str, **driver: str) -> list[dict[str, Any]]:
        folder = self._folder
        done = subprocess.run(
            [
                *(sys.executable, "-m", "racerd", "doctor", "--json", "--page-bytes=256KiB"),
                *(f"--state-dir={folder}/state", f"--run-dir={folder}/run"),
                *(f"--disk={folder}/slab:256MiB", "--frame-bytes=64KiB", *flags),
            ],
            env=self._standin.environment(**driver),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout, done.stderr
        assert list(folder.glob(".racer-doctor-*")) == []
        self.status = done.returncode
        findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
        return findings

    def wrong(self, *flags: str, **driver: str) -> dict[str, str]:
        """Checks that failed, or whose verdict is `slower` and a GPU's, with their texts."""
        return {
            finding["check"]: finding["text"]
            for finding in self.run(*flags, **driver)
            if finding["verdict"] == "failed"
            or (finding["verdict"] == "slower" and finding["check"].startswith("cufile"))
        }


@pytest.fixture
def doctor(standin: StandIn, tmp_path: Path) -> Doctor:
    return Doctor(standin, tmp_path)


def test_two_gpus_that_are_well(doctor: Doctor, tmp_path: Path) -> None:
    """F111, R2: memory goes from one process to another, a page is opened and compared, on each."""
    log = tmp_path / "calls"
    found = doctor.run(FAKECUDA_DEVICES="2", FAKECUDA_LOG=str(log))
    for check in ("gpu", "gpu-ipc", "kernels", "decrypt", "cufile", "cufile-read"):
        lines = [finding for finding in found if finding["check"] == check]
        assert [line["verdict"] for line in lines] == ["ok", "ok"], lines
    assert doctor.status == 0
    calls = driver_calls(log)
    assert calls.count(("cuMemImportFromShareableHandle", "0")) == 1
    assert calls.count(("cuMemImportFromShareableHandle", "1")) == 1
    assert "slab" in next(f["text"] for f in found if f["check"] == "cufile-read")


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("cuDevicePrimaryCtxRetain:46:1", "gpu"),
        ("cuMemExportToShareableHandle:801:1", "gpu-ipc"),
        ("cuMemImportFromShareableHandle:800:1", "gpu-ipc"),
        ("cuModuleLoadData:209:1", "kernels"),
        ("kernel:700:2", "decrypt"),
        ("cuMemHostAlloc:2:1", "decrypt"),
    ],
)
def test_each_failure_has_its_line(doctor: Doctor, fault: str, check: str) -> None:
    wrong = doctor.wrong("--cufile-provider=off", FAKECUDA_FAIL=fault)
    assert set(wrong) == {check}
    assert doctor.status == 1
    assert fault.split(":")[1] in wrong[check]  # The driver's own number is told.


def test_cufile_that_does_not_work_is_slower_and_no_failure(doctor: Doctor) -> None:
    """R13, R15, F79: why cuFile is not used, by its own codes."""
    assert set(doctor.wrong(FAKECUFILE_PROC_MODULES="/nowhere")) == {"cufile"}
    assert doctor.status == 0
    wrong = doctor.wrong(FAKECUDA_FAIL="cuFileHandleRegister:5030:1")
    assert set(wrong) == {"cufile-read"} and "5030" in wrong["cufile-read"]
    assert doctor.status == 0


def test_a_driver_that_hangs_is_given_up(
    standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F79: the cuFile driver never comes back on some machines; the rest was said before."""
    hang = tmp_path / "hang"
    hang.touch()
    standin_environment(standin, monkeypatch, FAKECUFILE_HANG=str(hang))
    order = {
        "kernel_cache": "", "cufile": "cuda", "compat_mode": False, "slabs": {},
        "page_bytes": 65536,
    }  # fmt: skip
    tried = try_gpu(gpu_uuid(0), "Stand-in", order, seconds_max=8)
    assert tried.stuck == "cufile" and "8 s" in tried.end
    assert [step["step"] for step in tried.steps] == ["context", "ipc", "kernels", "decrypt"]
    assert judge_gpu(tried)[-1].verdict is Verdict.FAILED
    assert "libcuda" not in Path("/proc/self/maps").read_text()  # Nothing of CUDA is here.


def test_no_gpu_that_is_visible(doctor: Doctor) -> None:
    """R17: where a driver is, an empty list of GPUs is something to look into."""
    wrong = doctor.wrong(CUDA_VISIBLE_DEVICES="")
    assert set(wrong) == {"driver"}
    assert doctor.status == 1


def test_one_gpu_is_broken_and_the_other_is_well(doctor: Doctor) -> None:
    """R18: GPUs are tried in processes of their own."""
    found = doctor.run("--cufile-provider=off", FAKECUDA_DEVICES="2", FAKECUDA_BROKEN="0")
    gpus = [finding["verdict"] for finding in found if finding["check"] == "gpu"]
    assert gpus == ["failed", "ok"]
    assert [f["verdict"] for f in found if f["check"] == "decrypt"] == ["ok"]
    assert doctor.status == 1

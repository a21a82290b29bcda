"""Verdicts of the doctor over given facts, and its reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racerd.cli import main
from racerd.doctor.direct import (
    BarFacts,
    DirectFacts,
    judge_bar,
    judge_direct,
    probe_bar,
    probe_direct,
)
from racerd.doctor.disks import DiskFacts, judge_disk, mount_of, probe_disk
from racerd.doctor.examine import judge_driver
from racerd.doctor.finding import Finding, Verdict, exit_status, failed, not_applicable, ok, slower
from racerd.doctor.folders import (
    FolderFacts,
    KeyFileFacts,
    judge_folder,
    judge_key_file,
    probe_folder,
)
from racerd.doctor.gpu_try import TriedGpu, collected, judge_gpu
from racerd.doctor.libraries import LibraryFacts, judge_libraries
from racerd.doctor.limits import LimitFacts, judge_limits
from racerd.doctor.report import as_json, as_text
from racerd.gpu.probe import FoundGpu, FoundGpus
from racerd.units import GIB, MIB

OK, SLOWER, FAILED = Verdict.OK, Verdict.SLOWER, Verdict.FAILED
NOT_APPLICABLE = Verdict.NOT_APPLICABLE


def verdicts(findings: list[Finding]) -> dict[str, Verdict]:
    return {finding.check: finding.verdict for finding in findings}


# --- findings and reports -------------------------------------------------------------------------


@given(st.sampled_from(list(Verdict)), st.text(max_size=3))
def test_a_remedy_is_there_exactly_where_something_is_wrong(verdict: Verdict, remedy: str) -> None:
    wanted = verdict in (SLOWER, FAILED)
    if wanted == bool(remedy):
        Finding("check", verdict, "text", remedy)
    else:
        with pytest.raises(ValueError):
            Finding("check", verdict, "text", remedy)


FINDINGS = [
    ok("driver", "2 GPU(s)"),
    slower("udev", "/run/udev is missing", "mount it"),
    failed("gpu-ipc", "refused", "do this"),
    not_applicable("memlock", "no NVIDIA driver"),
]


def test_text_has_the_remedy_below_its_line() -> None:
    lines = as_text(FINDINGS).splitlines()
    assert lines[2].strip() == "-> mount it"
    assert lines[3].startswith("FAILED  gpu-ipc")
    assert "not applicable: no NVIDIA driver" in lines[5]
    assert lines[-1].endswith("1 ok, 1 slower, 1 failed, 1 not applicable")


def test_json_tells_the_same() -> None:
    told = json.loads(as_json(FINDINGS))
    assert not told["ok"]
    assert [finding["verdict"] for finding in told["findings"]] == [
        "ok", "slower", "failed", "not applicable",
    ]  # fmt: skip
    assert told["findings"][0]["remedy"] is None


def test_only_what_failed_counts_for_the_exit_status() -> None:
    assert exit_status(FINDINGS) == 1
    assert exit_status([finding for finding in FINDINGS if finding.verdict is not FAILED]) == 0


# --- folders --------------------------------------------------------------------------------------

FOLDER = FolderFacts(Path("/run/racer"), Path("/run/racer"), 0o755, 1000, True, True, 1000)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        (FOLDER, OK),
        (replace(FOLDER, there=Path("/run")), OK),
        (replace(FOLDER, writable=False), FAILED),
        (replace(FOLDER, there=Path("/run"), writable=False), FAILED),
        (replace(FOLDER, is_folder=False), FAILED),
        (replace(FOLDER, mode=0o777), FAILED),
        (replace(FOLDER, mode=0o1777), OK),
        (replace(FOLDER, there=Path("/run"), mode=0o1777), OK),
    ],
)
def test_folders(facts: FolderFacts, verdict: Verdict) -> None:
    finding = judge_folder("run-dir", facts, "--run-dir")
    assert finding.verdict is verdict
    assert verdict is not FAILED or "--run-dir" in finding.remedy or "chmod" in finding.remedy


def test_folder_that_will_be_made(tmp_path: Path) -> None:
    facts = probe_folder(tmp_path / "a" / "b")
    assert facts.there == tmp_path and not facts.exists
    file = tmp_path / "file"
    file.touch()
    assert not probe_folder(file / "x").is_folder


@pytest.mark.parametrize(
    ("mode", "readable", "verdict"),
    [
        (None, False, NOT_APPLICABLE),
        (0o600, True, OK),
        (0o640, True, FAILED),
        (0o600, False, FAILED),
    ],
)
def test_key_file(mode: int | None, readable: bool, verdict: Verdict) -> None:
    assert judge_key_file(KeyFileFacts(Path("/k"), mode, readable, 0)).verdict is verdict


# --- disks ----------------------------------------------------------------------------------------

DISK = DiskFacts(
    Path("/d/slab"), "file", "xfs", "/d", True, 100 * GIB, 50 * GIB, 10 * GIB, 20 * GIB
)


@pytest.mark.parametrize(
    ("facts", "place", "space"),
    [
        (DISK, OK, OK),
        (replace(DISK, kind="missing", own_bytes=0), OK, OK),
        (replace(DISK, kind="block device"), OK, OK),
        (replace(DISK, kind="symbolic link"), FAILED, OK),
        (replace(DISK, direct=False), SLOWER, OK),
        (replace(DISK, error="Permission denied"), FAILED, OK),
        (replace(DISK, free_bytes=10 * GIB), OK, SLOWER),
        (replace(DISK, wanted_bytes=46 * GIB), OK, SLOWER),
        (replace(DISK, wanted_bytes=45 * GIB), OK, OK),
        (replace(DISK, wanted_bytes=None), OK, OK),
    ],
)
def test_disks(facts: DiskFacts, place: Verdict, space: Verdict) -> None:
    """R21: a file system without O_DIRECT is named; the floor of free space counts."""
    assert verdicts(judge_disk(facts, 0.15)) == {"disk": place, "disk-space": space}


def test_a_real_file_system_is_tried_and_nothing_is_left(tmp_path: Path) -> None:
    facts = probe_disk(tmp_path / "slab-0", MIB)
    assert facts.kind == "missing" and not facts.error and facts.file_system != "unknown"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "link").symlink_to(tmp_path)
    assert probe_disk(tmp_path / "link", None).kind == "symbolic link"


MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:5 / /data rw - xfs /dev/nvme0n1 rw
31 30 0:6 / /data/with\\040space rw shared:1 - btrfs /dev/x rw
32 22 0:7 / /data rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "mount", "kind"),
    [
        ("/var/slab", "/", "ext4"),
        ("/data/slab", "/data", "overlay"),
        ("/database/slab", "/", "ext4"),
        ("/data/with space/slab", "/data/with space", "btrfs"),
    ],
)
def test_file_system_by_mount(path: str, mount: str, kind: str) -> None:
    assert mount_of(Path(path), MOUNTS) == (mount, kind)


# --- limits and libraries -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "why", "verdict"),
    [
        (None, None, OK),
        (8 * MIB, None, SLOWER),
        (4 * GIB, None, OK),
        (8 * MIB, "no NVIDIA driver", NOT_APPLICABLE),
    ],
)
def test_memlock(limit: int | None, why: str | None, verdict: Verdict) -> None:
    """F101: the limit is told before something runs into it."""
    finding = judge_limits(LimitFacts(limit, 4 * GIB), why_unused=why)
    assert finding.verdict is verdict
    assert verdict is not SLOWER or "8 MiB" in finding.text


def test_libraries() -> None:
    """R39: libcufile and libnuma are the image's to bring."""
    there = LibraryFacts("/lib/libcufile.so.0", "libnuma.so.1", "/lib/libnvrtc.so.13", "13.5.0")
    assert set(verdicts(judge_libraries(there)).values()) == {OK}
    found = judge_libraries(replace(there, cufile=None, numa=None))
    assert verdicts(found) == {"libcufile": SLOWER, "libnuma": SLOWER, "nvrtc": OK}
    assert "libnuma1" in found[1].remedy


# --- GPUDirect ------------------------------------------------------------------------------------

DIRECT = DirectFacts(True, "2.25", "6.8.0-31-generic", True, True)


@pytest.mark.parametrize(
    ("facts", "wrong"),
    [
        (DIRECT, set()),
        (replace(DIRECT, nvidia_fs=None), set()),
        (replace(DIRECT, nvidia_fs=None, kernel="5.15.0-1"), {"gpudirect"}),
        (replace(DIRECT, nvidia_fs=None, open_driver=False), {"gpudirect"}),
        (replace(DIRECT, modules_readable=False), {"proc-modules"}),
        (replace(DIRECT, udev=False), {"udev"}),
    ],
)
def test_gpudirect(facts: DirectFacts, wrong: set[str]) -> None:
    """R11, R13, F79: why the host path is taken, and what would change that."""
    found = judge_direct(facts)
    assert {finding.check for finding in found if finding.verdict is SLOWER} == wrong


def test_gpudirect_is_read_from_the_kernel(tmp_path: Path) -> None:
    """R13: /run/udev missing is said."""
    assert probe_direct(tmp_path) == DirectFacts(False, None, os.uname().release, None, False)
    for name, text in {
        "proc/modules": "nvidia_fs 1 0 - Live 0x0\nnvidia 2 1 nvidia_fs, Live 0x0\n",
        "proc/driver/nvidia-fs/version": "GDS Version: 1.17.0.92\nNVFS driver version: 2.28\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module 580.1\n",
        "run/udev/data/b259:0": "",
        "sys/bus/pci/devices/0000:01:00.0/resource": (
            "0x00000000b2000000 0x00000000b2ffffff 0x0000000000040200\n"
            "0x0000380000000000 0x00003807ffffffff 0x000000000014220c\n"
        ),
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    facts = probe_direct(tmp_path)
    assert facts == DirectFacts(True, "1.17.0.92", os.uname().release, True, True)
    assert probe_bar("0000:01:00.0", tmp_path) == 32 * GIB
    assert probe_bar("0000:02:00.0", tmp_path) is None


@pytest.mark.parametrize(
    ("bar", "verdict"),
    [(None, NOT_APPLICABLE), (80 * GIB, OK), (GIB, OK), (256 * MIB, SLOWER)],
)
def test_bar(bar: int | None, verdict: Verdict) -> None:
    """F81: staging that does not fit into the BAR is told."""
    assert judge_bar(BarFacts("H100", bar, 80 * GIB, 256 * MIB)).verdict is verdict


# --- GPUs -----------------------------------------------------------------------------------------

GPU = FoundGpu("ab" * 16, "H100")
MISSING = FoundGpus((), (), "driver_library_missing", "no libcuda", "install it")


def test_driver() -> None:
    """R17: in auto a node without a driver is fine; `on` is not."""
    assert verdicts(judge_driver(MISSING, wanted=False)) == {"driver": NOT_APPLICABLE}
    assert verdicts(judge_driver(MISSING, wanted=True)) == {"driver": FAILED}
    assert verdicts(judge_driver(FoundGpus((GPU,), ()), wanted=True)) == {"driver": OK}
    assert verdicts(judge_driver(FoundGpus((), ()), wanted=False)) == {"driver": FAILED}
    broken = FoundGpus((), (), "driver_failed", "cuInit failed", "")
    assert judge_driver(broken, wanted=False)[0].remedy


def test_gpu_that_racerd_would_not_use() -> None:
    shut = replace(GPU, reason="prohibited", problem="compute mode Prohibited: allow it again")
    found = judge_driver(FoundGpus((GPU, shut), ()), wanted=False)
    assert [finding.verdict for finding in found] == [OK, FAILED]
    assert found[1].remedy == "allow it again"


STEPS = {
    "context": {
        "architecture": "sm_90", "memory_bytes": 80 * GIB, "bus": "0000:01:00.0",
        "driver_cuda": 13050,
    },
    "ipc": {"same": True},
    "kernels": {"cached": True, "folder": "/k", "bytes": 9},
    "decrypt": {"same": True, "refused": True, "bytes": 16 * MIB, "best_seconds": 1e-4},
    "cufile": {},
    "cufile-read": {"slab": "/d/slab", "same": True},
}  # fmt: skip


def tried(name: str = "", **changes: object) -> TriedGpu:
    steps = tuple(
        {"step": step, "seconds": 1.0, **told, **(changes if step == name else {})}
        for step, told in STEPS.items()
    )
    return TriedGpu("ab" * 16, "H100", steps)


def test_a_gpu_that_is_well() -> None:
    found = judge_gpu(tried())
    assert {finding.verdict for finding in found} == {OK}
    assert [finding.check for finding in found] == [
        "gpu", "gpu-ipc", "kernels", "decrypt", "cufile", "cufile-read",
    ]  # fmt: skip
    assert "168" in next(f.text for f in found if f.check == "decrypt")


@pytest.mark.parametrize(
    ("step", "changes", "check", "verdict"),
    [
        ("context", {"driver_cuda": 12040}, "gpu", FAILED),
        ("context", {"error": "it is gone", "remedy": "look"}, "gpu", FAILED),
        ("ipc", {"same": False}, "gpu-ipc", FAILED),
        ("ipc", {"error": "not permitted", "remedy": ""}, "gpu-ipc", FAILED),
        ("kernels", {"cached": False}, "kernels", SLOWER),
        ("kernels", {"error": "no NVRTC", "remedy": ""}, "kernels", FAILED),
        ("decrypt", {"same": False}, "decrypt", FAILED),
        ("decrypt", {"refused": False}, "decrypt", FAILED),
        ("cufile", {"error": "5007", "remedy": "load nvidia-fs"}, "cufile", SLOWER),
        ("cufile-read", {"error": "5030", "remedy": "mount udev"}, "cufile-read", SLOWER),
        ("cufile-read", {"same": False}, "cufile-read", FAILED),
    ],
)
def test_a_step_that_went_wrong(
    step: str, changes: dict[str, object], check: str, verdict: Verdict
) -> None:
    """F111: export, import and pattern; each failure has its remedy."""
    wrong = [f for f in judge_gpu(tried(step, **changes)) if f.verdict is not OK]
    assert [(finding.check, finding.verdict) for finding in wrong] == [(check, verdict)]


def test_a_child_that_hangs_or_dies_tells_how_far_it_came() -> None:
    said = b'{"begins": "context"}\n{"step": "context", "error": "x", "remedy": "y"}\n'
    assert collected("ab" * 16, "H100", said, "").stuck == ""
    said += b'{"begins": "ipc"}\n{"step": "ip'
    stuck = collected("ab" * 16, "H100", said, "did not end within 1 s")
    assert (stuck.stuck, len(stuck.steps)) == ("ipc", 1)
    assert "`ipc`" in judge_gpu(stuck)[-1].text
    assert collected("ab" * 16, "H100", b"", "ended with -9").stuck == "start"


# --- the command ----------------------------------------------------------------------------------


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    state = [f"--state-dir={folder}/state", f"--run-dir={folder}/run"]
    environment = {name: value for name, value in os.environ.items() if "RACER" not in name}
    return subprocess.run(
        [sys.executable, "-m", "racerd", "doctor", *state, *flags],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_without_gpus(tmp_path: Path) -> None:
    """R17: everything works without NVIDIA libraries, and is said to be not applicable."""
    done = run(tmp_path, "--gpu=off", "--json", f"--disk={tmp_path}/slab:256MiB")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = {finding["check"]: finding for finding in told["findings"]}
    assert told["ok"] and found["run-dir"]["verdict"] == "ok"
    for check in ("gpu-ipc", "cufile", "udev", "memlock"):
        assert found[check]["verdict"] == "not applicable"
        assert "GPUs are off by settings" in found[check]["text"]
    assert list(tmp_path.iterdir()) == []


def test_something_that_fails(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    done = run(tmp_path, "--gpu=off")
    assert done.returncode == 1
    assert "FAILED  run-dir" in done.stdout and "-> remove it" in done.stdout


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--state-dir=/s", "--run-dir=/r"]
    assert main(["doctor", "--gpu=maybe", *flags]) == 2
    assert main(["check-config", "--json", *flags]) == 2
    assert "--json" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["doctor", "--gpu=off"], ["check-config"], ["--help"]])
def test_a_closed_pipe_is_no_error(tmp_path: Path, arguments: list[str]) -> None:
    """`racerd doctor | head -1` ends like any command whose reader has enough, and says nothing."""
    reading, writing = os.pipe()
    os.close(reading)  # Whatever is printed meets a reader that is gone.
    folders = [f"--state-dir={tmp_path}/state", f"--run-dir={tmp_path}/run"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "racerd", *arguments, *folders],
            stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")

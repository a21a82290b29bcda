"""Paths that the daemon's user may not reach: each is told with its reason, nothing is a crash."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from racerd.cli import main
from racerd.config.machine import FileSystem, closest_seen
from racerd.crypto.keyring import Keyring
from racerd.errors import ConfigError, RequestError
from racerd.ids import ObjectId
from racerd.origin.beneath import Beneath
from racerd.origin.directory import DirectoryOrigin, why_unusable
from racerd.pages import PageGeometry
from racerd.runtime.deadline import Deadline
from racerd.store import Store
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB
from tests.support.out_of_reach import out_of_reach


@pytest.fixture
def shut(tmp_path: Path) -> Iterator[Path]:
    with out_of_reach(tmp_path) as folder:
        yield folder


def settings_of(shut: Path, **changed: Path) -> list[str]:
    flags = {"state-dir": shut.parent / "state", "run-dir": shut.parent / "run"} | {
        name.replace("_", "-"): path for name, path in changed.items()
    }
    always = ["--gpu=off", "--free-space-floor=0"]  # However full the disk is.
    return [*always, *(f"--{name}={path}" for name, path in flags.items())]


def test_what_is_above_a_path_that_cannot_be_seen(shut: Path) -> None:
    """The closest folder that is seen, whose file system the slab would be on."""
    there = closest_seen(shut / "a" / "b")
    assert there in shut.parents or there == shut
    assert FileSystem.of(shut / "slab").total_bytes > 0


@pytest.mark.parametrize(
    ("setting", "checks"),
    [
        ("state_dir", {"state-dir", "key-file", "disk"}),
        ("run_dir", {"run-dir"}),
        ("key_file", {"key-file"}),
        ("disk", {"disk"}),
    ],
)
def test_the_doctor_tells_it_with_a_remedy(
    shut: Path, capsys: pytest.CaptureFixture[str], setting: str, checks: set[str]
) -> None:
    assert main(["doctor", "--json", *settings_of(shut, **{setting: shut / "x"})]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    failed = {each["check"]: each for each in findings if each["verdict"] == "failed"}
    assert checks <= failed.keys()
    assert all(failed[check]["remedy"] for check in checks)


def test_settings_out_of_reach_are_a_problem_in_words(
    shut: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-config", *settings_of(shut, config=shut / "racer.toml")]) == 2
    assert "racer.toml: cannot be read: Permission denied" in capsys.readouterr().err
    assert main(["check-config", *settings_of(shut, state_dir=shut / "x")]) == 0


def test_a_slab_out_of_reach_is_down(shut: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R23: as any slab that cannot be opened; not a defect."""
    settings = StoreSettings(disks=(DiskSettings(shut / "slab", 8 * MIB),))
    with Store(settings, PageGeometry(64 * KIB, 16 * KIB), Metrics()) as store:
        [report] = store.reports()
    assert report.state == "down" and "EACCES" in report.reason
    assert "let the daemon's user read and write" in caplog.text and "defect" not in caplog.text


def test_a_key_file_out_of_reach_is_one_problem(
    shut: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError) as caught:
        Keyring.open(shut / "keys")
    [problem] = caught.value.problems
    assert "Permission denied" in problem and f"let user {os.geteuid()}" in problem
    assert caplog.text == ""  # Nothing is said of copies that nobody has seen.


@pytest.mark.parametrize("walk", [False, True], ids=["openat2", "walk"])
def test_a_directory_out_of_reach_names_the_user_and_is_logged_once(
    shut: Path, caplog: pytest.LogCaptureFixture, walk: bool
) -> None:
    opens = Beneath(os.fsencode(shut), lambda error: None)
    opens._refused = walk
    origin = DirectoryOrigin(os.fsencode(shut), opens)
    with caplog.at_level(logging.WARNING):
        for name in (b"one", b"two"):
            with pytest.raises(RequestError) as caught:
                origin.head(ObjectId("c", "bucket", name), deadline=Deadline.after(30))
            assert caught.value.code == "forbidden"
            assert f"the daemon runs as user {os.geteuid()}" in caught.value.hint
            assert "credentials" not in caught.value.hint
    assert len(caplog.records) == 1
    assert f"user {os.geteuid()} may not" in why_unusable(os.fsencode(shut))


def test_why_a_directory_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert why_unusable(os.fsencode(tmp_path)) == ""
    assert why_unusable(os.fsencode(tmp_path / "none")) == "not there yet"
    assert why_unusable(os.fsencode(tmp_path / "file")) == "not a directory"

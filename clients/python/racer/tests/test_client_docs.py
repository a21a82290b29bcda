"""The examples of docs/client.md run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import racer
from clients.python.racer.tests.fake_daemon import FakeDaemon
from clients.python.racer.tests.patterns import MIB, pattern

TEXT = (Path(__file__).resolve().parents[4] / "docs" / "client.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SHELL = "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).splitlines()


@pytest.fixture
def environment(daemon: FakeDaemon) -> dict[str, str]:
    daemon.put("llama", "config.json", b"{}")
    daemon.put("llama", "model.safetensors", pattern(3 * MIB))
    return os.environ | {"RACER_RUN_DIR": str(daemon.run_dir), "RACER_SOCKET": ""}


@pytest.mark.parametrize("example", PYTHON)
def test_python_examples(environment: dict[str, str], example: str) -> None:
    subprocess.run([sys.executable, "-c", example], env=environment, check=True, timeout=60)


@pytest.mark.parametrize("line", SHELL)
def test_shell_examples(environment: dict[str, str], tmp_path: Path, line: str) -> None:
    command, *arguments = line.partition("#")[0].split()
    assert command == "racer"
    run = [sys.executable, "-m", "racer.cli", *arguments]
    subprocess.run(run, env=environment, check=True, timeout=60, cwd=tmp_path)


def test_every_exported_error_is_told_of() -> None:
    errors = {
        name
        for name in racer.__all__
        if isinstance(value := getattr(racer, name), type) and issubclass(value, racer.RacerError)
    }
    assert not {name for name in errors if f"`{name}`" not in TEXT and f"racer.{name}" not in TEXT}

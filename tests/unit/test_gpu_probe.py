"""The probe for GPUs, where it cannot even be started."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from racerd.gpu.probe import find_gpus


@pytest.mark.parametrize("there", [True, False], ids=["not executable", "missing"])
def test_an_interpreter_that_cannot_be_started_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """R17: it is why GPUs are off, and nothing that ends the daemon."""
    interpreter = tmp_path / "python"
    if there:
        interpreter.touch(mode=0o600)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    found = asyncio.run(find_gpus())
    assert found.code == "probe_not_started" and not found.gpus
    assert str(interpreter) in found.message and "interpreter" in found.hint

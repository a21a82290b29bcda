"""The wrap of SGLang's readers: what it takes over, and what it leaves alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import racer
from racer_vllm import sglang
from racer_vllm.fetch import fetch


def original(files: list[str], *arguments: object, **options: object) -> Iterator[tuple[str, Any]]:
    yield "original", (files, arguments, options)


@pytest.fixture
def folder(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RACER_SOCKET", str(model.daemon.path))
    load = racer.load
    # torch is not here: numpy holds the same bytes.
    monkeypatch.setattr(racer, "load", lambda url, **given: load(url, framework="numpy", **given))
    fetch(model.url, lambda _: tmp_path / "dir")
    return tmp_path / "dir"


def read(folder: Path, names: tuple[str, ...]) -> list[str]:
    files = [os.path.join(folder, name) for name in names]
    return [name for name, _ in sglang.read_weights(original, files, 8, prefetch=True)]


def test_all_files_of_a_prepared_directory(model: Any, folder: Path) -> None:
    """R4: one load of the whole model, that lists nothing."""
    model.daemon.seen.clear()
    assert read(folder, model.shards) == ["t0", "t1"]
    assert model.daemon.count("/v1/list") == 0


def test_some_files_of_it(model: Any, folder: Path) -> None:
    """R4: what SGLang leaves out is not read."""
    assert read(folder, model.shards[1:]) == ["t1"]


def test_other_directories_are_not_touched(model: Any, tmp_path: Path) -> None:
    """R4: SGLang reads them as it would have, with all it was told."""
    files = [str(tmp_path / "model.safetensors")]
    [(name, told)] = sglang.read_weights(original, files, 8, prefetch=True)
    assert (name, told) == ("original", (files, (8,), {"prefetch": True}))


def test_another_version(model: Any, folder: Path) -> None:
    """R34: configuration and weights go together here, too."""
    model.put('"v2"')
    for names in (model.shards, model.shards[:1]):
        with pytest.raises(racer.VersionChanged, match="run racer-vllm-fetch again"):
            read(folder, names)

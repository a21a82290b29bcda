"""Real vLLM with `--load-format racer`: the same tokens as with its own loader, every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from racer_vllm.fetch import fetch
from tests.vllm.conftest import EngineProcess, Store
from tests.vllm.tiny_models import tensors, write_model

pytestmark = [pytest.mark.vllm, pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(300)]


def prepared(store: Store, url: str, folder: Path) -> Path:
    """What `racer-vllm-fetch` makes of a model."""
    fetch(url, lambda _: folder, socket=store.socket)
    return folder


def own(engine: EngineProcess, folder: Path, **settings: Any) -> list[int]:
    """The tokens with vLLM's own loader on the files themselves."""
    tokens: list[int] = engine.run(folder, load_format="safetensors", **settings)["token_ids"]
    return tokens


def test_tokens_equal_and_a_second_load_is_local(
    engine: EngineProcess, store: Store, tmp_path: Path
) -> None:
    """R4, R18, R34, R35, L23: from a cold S3 server, then with no request to it at all."""
    files = write_model(tmp_path / "files", tensors(1))
    url = store.upload(files, "plain")
    folder = prepared(store, url, tmp_path / "dir")
    first = engine.run(folder, load_format="racer")
    assert first["token_ids"] == own(engine, files)
    requests = store.origin_requests()
    again = engine.run(folder, load_format="racer")
    assert again["token_ids"] == first["token_ids"]
    assert store.origin_requests() == requests
    print(first["log"], again["log"])

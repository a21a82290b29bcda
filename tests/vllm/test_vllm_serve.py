"""`racer-vllm serve`: one command from a URL to an answer, on two ranks."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.servers.process import free_port, server
from tests.vllm.conftest import EngineProcess, Store
from tests.vllm.engine import PROMPT, TOKENS
from tests.vllm.tiny_models import tensors, write_model

pytestmark = [pytest.mark.vllm, pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(400)]

ARGUMENTS = (
    *("--tensor-parallel-size=2", "--dtype=float32", "--max-model-len=64", "--max-num-seqs=2"),
    "--enforce-eager",
)


def post(url: str, request: dict[str, object]) -> dict[str, Any]:
    asked = urllib.request.Request(
        url, json.dumps(request).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        got: dict[str, Any] = json.load(answer)
    return got


def healthy(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return bool(answer.status == 200)


@contextmanager
def serving(command: list[str], log: Path, port: int, environ: dict[str, str]) -> Iterator[None]:
    """vLLM while it answers, and nothing of it afterwards: it leaves its ranks' shared memory."""
    try:
        with server(
            command, log, lambda: healthy(port), environ, ready_seconds=240, drain_seconds=30
        ):
            yield
    finally:
        for name in set(re.findall(r"/(vllm_dist_[0-9a-f]{32})", log.read_text())):
            for left in Path("/dev/shm").glob(f"{name}*"):
                left.unlink()


def test_two_ranks(
    engine: EngineProcess,
    vllm_python: Path,
    environ: dict[str, str],
    store: Store,
    tmp_path: Path,
) -> None:
    """R4, R34, L18, L19, L21: both ranks load, and together they say what one process with vLLM's
    own loader says; the model has its prefix's name; the directory that was made stays."""
    held = tensors(1)
    files = write_model(tmp_path / "files", held)
    url = store.upload(files, "served")
    expected = engine.run(files, load_format="safetensors")["token_ids"]
    port = free_port()
    command = [
        str(vllm_python), "-m", "racer_vllm", "serve", f"--socket={store.socket}", url, *ARGUMENTS,
        "--host=127.0.0.1", f"--port={port}",
    ]  # fmt: skip
    changed = {
        **environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1", "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip
    log = tmp_path / "log"
    with serving(command, log, port, changed):
        request = {
            "model": "served", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        answer = post(f"http://127.0.0.1:{port}/v1/completions", request)
    assert answer["choices"][0]["token_ids"] == expected
    lines = [line for line in log.read_text().splitlines() if "racer: loaded" in line]
    assert len(lines) == 2
    for rank, line in enumerate(sorted(lines, key=lambda line: line.rpartition("; ")[2])):
        assert f"loaded {len(held)} tensors" in line and line.endswith(f"TP rank {rank} of 2")
    [folder] = (tmp_path / "cache" / "racer-vllm").iterdir()
    again = subprocess.run(
        [vllm_python, "-m", "racer_vllm", "fetch", f"--socket={store.socket}", url, folder],
        env=changed, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert "0 files copied, 7 unchanged" in again

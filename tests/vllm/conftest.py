"""Real vLLM on the CPU, racer's packages as pip installs them, racerd, and a real S3 server.

The environment with vLLM is made by tests/servers/install_vllm.sh and found by its name; without
it these tests skip, or fail where RACER_TEST_VLLM=1 says that it has to be there. All of a session
share one vLLM process, one racerd and one S3 server: each test has models of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers.s3 import KEY, S3, SECRET, seaweedfs
from tools.daemon_process import DaemonProcess

REPOSITORY = Path(__file__).parents[2]
BUCKET = "models"
_INSTALL = REPOSITORY / "tests" / "servers" / "install_vllm.sh"


def _python() -> Path:
    """The interpreter of the environment that has vLLM."""
    made = subprocess.run(
        [_INSTALL, "--where"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not made:
        text = "vLLM is not installed: run tests/servers/install_vllm.sh (3 GB, two minutes)"
        if os.environ.get("RACER_TEST_VLLM") == "1":
            pytest.fail(text)
        pytest.skip(text)
    return Path(made)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    return _python()


@pytest.fixture(scope="session")
def packages(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `racer` and `racer-vllm` as plain pip installs them, which needs no index: they
    require nothing but each other (R33)."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("racer", "racer-vllm"):
        source = folder / "source" / name
        ignored = shutil.ignore_patterns("build", "*.egg-info", "tests", "__pycache__")
        shutil.copytree(REPOSITORY / "clients" / "python" / name, source, ignore=ignored)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
               "--no-index", "--no-build-isolation", "--target", folder / "site",
               folder / "source" / "racer", folder / "source" / "racer-vllm"]  # fmt: skip
    subprocess.run(command, check=True)
    return folder / "site"


@pytest.fixture(scope="session")
def environ(packages: Path) -> dict[str, str]:
    """The environment of processes that run vLLM."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RACER_", "VLLM_"))}
    return kept | {
        "PYTHONPATH": str(packages),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


# --- where models are -------------------------------------------------------------------------


@dataclass(frozen=True)
class Store:
    """An S3 server with models, and the racerd in front of it."""

    s3: S3
    daemon: DaemonProcess

    @property
    def socket(self) -> str:
        return str(self.daemon.socket("hub"))

    def upload(self, folder: Path, name: str) -> str:
        """Puts a model directory into the bucket; returns its URL."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                key = f"{name}/{file.relative_to(folder)}".encode()
                self.s3.put(BUCKET, key, file.read_bytes())
        return f"racer://hub/{BUCKET}/{name}"

    def origin_requests(self) -> float:
        return self.daemon.metric("racer_origin_requests_total")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    with seaweedfs(folder / "weed", [BUCKET]) as s3:
        environ = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": s3.url,
            "AWS_ALLOW_HTTP": "true",
        }
        sizes = ("--memory=128MiB", f"--disk={folder / 'slab'}:256MiB")
        with DaemonProcess(
            folder / "d", caches={"hub": "s3://"}, arguments=sizes, environ=environ
        ) as daemon:
            yield Store(s3, daemon)


# --- vLLM -------------------------------------------------------------------------------------


class EngineError(Exception):
    """The engine answered with an error; the text has all causes and notes."""


class EngineProcess:
    """The process of engine.py."""

    def __init__(self, python: Path, environ: Mapping[str, str], log: Path) -> None:
        request_end, self._requests = os.pipe()
        self._answers, answer_end = os.pipe()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [python, Path(__file__).with_name("engine.py"), str(request_end), str(answer_end)],
                pass_fds=(request_end, answer_end),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                     "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
            )  # fmt: skip
        os.close(request_end)
        os.close(answer_end)
        self._log = log
        self._lines = os.fdopen(self._answers)

    def ask(self, action: str, **arguments: object) -> dict[str, Any]:
        """Runs one action. Raises EngineError for what it raised."""
        os.write(self._requests, json.dumps({"action": action, **arguments}).encode() + b"\n")
        line = self._lines.readline()
        if not line:
            log = self._log.read_text(errors="replace")
            raise RuntimeError(f"the engine ended with {self.process.wait()}:\n{log[-20_000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["text"])
        return answer

    def run(self, model: str | Path, **settings: object) -> dict[str, Any]:
        return self.ask("run", model=str(model), **settings)

    def end(self) -> None:
        os.close(self._requests)
        self._lines.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def engine_process(python: Path, environ: Mapping[str, str], log: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess(python, environ, log)
    try:
        engine.ask("start")
        yield engine
    finally:
        engine.end()


@pytest.fixture(scope="session")
def engine(
    vllm_python: Path, environ: dict[str, str], store: Store,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:  # fmt: skip
    log = tmp_path_factory.mktemp("engine") / "log"
    found = {**environ, "RACER_SOCKET": store.socket}
    with engine_process(vllm_python, found, log) as running:
        yield running

"""What every test here gets: the client's stand-in for racerd, a model behind it, and nothing
left behind."""

from __future__ import annotations

import json

import pytest

from clients.python.racer.tests.conftest import _warm_loop, daemon, nothing_left_behind
from clients.python.racer.tests.fake_daemon import FakeDaemon
from tests.support.safetensors_bytes import model_file

__all__ = ["_warm_loop", "daemon", "nothing_left_behind"]


class TinyModel:
    """A model of some hundred bytes: what of it is copied, what is not, and its weights."""

    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    copied = {  # noqa: RUF012 - nobody changes it
        "config.json": b'{"architectures": ["Tiny"]}',
        "tokenizer.json": b"{}",
        "1_Pooling/config.json": b"[]",
    }
    skipped = {  # noqa: RUF012 - nobody changes it
        "pytorch_model.bin": b"pickle",
        "picture.png": b"png",
        "original/params.json": b"{}",
        "racer-model.json": b"another's",
    }
    index = "model.safetensors.index.json"

    def __init__(self, daemon: FakeDaemon, prefix: str = "llama") -> None:
        self.daemon = daemon
        self.prefix = prefix
        self.url = f"racer://local/hub/{prefix}"
        self.put()

    def put(self, etag: str = '"v1"') -> None:
        """Puts all objects, in version `etag`."""
        weight_map = {}
        for number, name in enumerate(self.shards):
            content, held = model_file({f"t{number}": ("F32", [5])}, seed=number)
            self.add(name, content, etag)
            weight_map |= dict.fromkeys(held, name)
        for name, data in {**self.copied, **self.skipped}.items():
            self.add(name, data, etag)
        self.add(self.index, json.dumps({"weight_map": weight_map}).encode(), etag)

    def add(self, name: str, data: bytes, etag: str = '"v1"') -> None:
        self.daemon.put("hub", f"{self.prefix}/{name}", data, etag)

    def remove(self, name: str) -> None:
        del self.daemon.objects["hub", f"{self.prefix}/{name}".encode()]

    def content(self, name: str) -> bytes:
        return self.daemon.objects["hub", f"{self.prefix}/{name}".encode()][1]


@pytest.fixture
def model(daemon: FakeDaemon) -> TinyModel:
    return TinyModel(daemon)

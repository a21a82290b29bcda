"""Models loaded through the real daemon: bytes, origin requests, and every way it can end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import racer
from racer.safetensors import SafetensorsError
from tests.support.counting_origin import CountingOrigin
from tests.support.safetensors_bytes import model_file
from tools.daemon_process import DaemonProcess

KIB = 1 << 10
SMALL = ("--page-bytes=64KiB", "--frame-bytes=16KiB", "--memory=16MiB")
URL = "racer://local/bucket/models/llama"
# 64 KiB chunks: the smallest there are, and pages of the daemon here.
STAGING = 2 * 4 * 64 * KIB


def write_model(folder: Path, *, seed: int = 0) -> dict[str, bytes]:
    """Two shards and an index; tensors across many pages, small ones and empty ones."""
    folder.mkdir(parents=True, exist_ok=True)
    layouts: dict[str, dict[str, tuple[str, list[int]]]] = {
        "model-00001-of-00002.safetensors": {
            "a0": ("U8", [0]),
            "a1": ("F32", [3, 100_000]),
            "a2": ("I16", [7]),
        },
        "model-00002-of-00002.safetensors": {
            **{f"b{n}": ("U8", [50_000]) for n in range(20)},
            "bz": ("F64", [2, 0]),
        },
    }
    contents: dict[str, bytes] = {}
    weight_map = {}
    for number, (name, layout) in enumerate(layouts.items()):
        content, held = model_file(layout, seed=seed + number * 100)
        (folder / name).write_bytes(content)
        weight_map |= dict.fromkeys(layout, name)
        contents |= held
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return contents


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def contents(objects: Path) -> dict[str, bytes]:
    return write_model(objects / "bucket" / "models" / "llama")


@contextlib.contextmanager
def served(folder: Path, url: str, *arguments: str) -> Iterator[DaemonProcess]:
    slab = f"--disk={folder / 'slab'}:64MiB"
    daemon = DaemonProcess(folder, caches={"local": url}, arguments=[*SMALL, slab, *arguments])
    with daemon:
        yield daemon


def stream_of(daemon: DaemonProcess, url: str = URL, **options: Any) -> racer.TensorStream:
    options = {"framework": "numpy", "staging_bytes": STAGING, **options}
    return racer.load(url, socket=daemon.socket("local"), **options)


def loaded(stream: racer.TensorStream) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in stream}


def test_a_model_from_cold_memory_and_disk(
    tmp_path: Path, objects: Path, contents: dict[str, bytes]
) -> None:
    """R32, R35, L1, L14: each load gives the same bytes in the same order, and says from where."""
    with served(tmp_path, f"file://{objects}") as daemon:
        cold, warm = stream_of(daemon), stream_of(daemon)
        assert loaded(cold) == loaded(warm) == contents
        assert list(contents) == [name for name, _ in stream_of(daemon)]
        payload = sum(map(len, contents.values()))
        assert cold.report.read_bytes == warm.report.read_bytes == payload
        assert cold.report.rungs.get("origin", 0) > 0
        assert warm.report.rungs.keys() <= {"memory", "disk", "shared"}


def test_one_file_and_a_choice(tmp_path: Path, objects: Path, contents: dict[str, bytes]) -> None:
    """R34, R35: one shard by its URL; a filter over the model."""
    with served(tmp_path, f"file://{objects}") as daemon:
        one = stream_of(daemon, f"{URL}/model-00001-of-00002.safetensors")
        assert loaded(one) == {name: contents[name] for name in ("a0", "a1", "a2")}
        some = stream_of(daemon, URL + "/", filter=lambda name: name.endswith("7"))
        assert loaded(some) == {name: contents[name] for name in ("b7", "b17")}


def test_an_origin_that_cannot_list(
    tmp_path: Path, objects: Path, contents: dict[str, bytes]
) -> None:
    """R30, R32: the index is found by its name; a second load fetches nothing again."""
    with CountingOrigin(objects) as origin, served(tmp_path, origin.url) as daemon:
        assert loaded(stream_of(daemon)) == contents
        fetched = origin.requests["GET"]
        assert loaded(stream_of(daemon)) == contents
        assert origin.requests["GET"] == fetched


@pytest.mark.parametrize("url", ["racer://local/bucket/nothing", "racer://local/none/x"])
def test_nothing_is_there(
    tmp_path: Path, objects: Path, contents: dict[str, bytes], url: str
) -> None:
    """L34: the daemon's answer comes through as its own type."""
    with served(tmp_path, f"file://{objects}") as daemon, pytest.raises(racer.NotFound):
        next(stream_of(daemon, url))


def test_a_bad_shard_is_found_before_payload(
    tmp_path: Path, objects: Path, contents: dict[str, bytes]
) -> None:
    """R37, L39, L55: trailing bytes in the last shard; of the payload nothing was read."""
    shard = objects / "bucket/models/llama/model-00002-of-00002.safetensors"
    with shard.open("ab") as file:
        file.write(b"\0")
    with served(tmp_path, f"file://{objects}") as daemon:
        stream = stream_of(daemon)
        with pytest.raises(SafetensorsError, match="belong to no tensor") as caught:
            list(stream)
        assert caught.value.file == f"{URL}/{shard.name}"
        assert stream.report.read_bytes == 0


def test_a_shard_that_the_index_needs_is_missing(
    tmp_path: Path, objects: Path, contents: dict[str, bytes]
) -> None:
    """L14, L17: named, with how many tensors it should have held."""
    (objects / "bucket/models/llama/model-00002-of-00002.safetensors").unlink()
    with served(tmp_path, f"file://{objects}") as daemon:
        with pytest.raises(SafetensorsError, match="maps 21 tensors to it, and it is not there"):
            list(stream_of(daemon))


def test_a_model_that_changes_while_it_is_loaded(
    tmp_path: Path, objects: Path, contents: dict[str, bytes]
) -> None:
    """R3, L39, L51: reads are pinned; the new version's bytes never mix in."""
    with served(tmp_path, f"file://{objects}", "--version-seconds=0") as daemon:
        stream = stream_of(daemon, in_flight=1, staging_bytes=STAGING // 4)
        stream.open()
        write_model(objects / "bucket/models/llama", seed=1000)
        got: dict[str, bytes] = {}

        def consume() -> None:
            for name, array in stream:
                got[name] = array.tobytes()

        with pytest.raises(racer.VersionChanged):
            consume()
        assert all(contents[name] == data for name, data in got.items())
        assert got.keys() < contents.keys()


class TestEnds:
    """A load whose reads wait for an origin that does not answer."""

    @pytest.fixture
    def origin(self, objects: Path, contents: dict[str, bytes]) -> Iterator[CountingOrigin]:
        with CountingOrigin(objects) as origin:
            yield origin

    def held(self, daemon: DaemonProcess, origin: CountingOrigin, **options: Any) -> Any:
        """A stream with its first tensor taken, whose next reads are held at the origin."""
        stream = stream_of(daemon, share="off", **options)
        stream.open()
        origin.gate.clear()
        # The headers' pages are in the cache: they hold the first chunk, and the empty tensor.
        assert next(stream)[0] == "a0"
        assert origin.waiting.acquire(timeout=30)
        return stream

    def test_closing_does_not_wait_for_the_origin(
        self, tmp_path: Path, origin: CountingOrigin
    ) -> None:
        """R36, R7: reads in flight are cancelled; the daemon serves the next load at once."""
        with served(tmp_path, origin.url) as daemon:
            stream = self.held(daemon, origin)
            stream.close()
            assert not any(t.name.startswith("racer-load-") for t in _workers())
            origin.gate.set()
            assert len(loaded(stream_of(daemon))) == 24

    def test_a_daemon_that_dies_for_good(self, tmp_path: Path, origin: CountingOrigin) -> None:
        """R36, L34: the load ends with a daemon error, and every thread and landing is gone."""
        with served(tmp_path, origin.url) as daemon:
            # Otherwise the load waits longer for it to come back.
            stream = self.held(daemon, origin, timeout=3.0)
            daemon.kill()
            with pytest.raises(racer.DaemonUnavailable) as caught:
                list(stream)
            assert any("while bytes" in note for note in caught.value.__notes__)
            assert not any(t.name.startswith("racer-load-") for t in _workers())

    def test_a_daemon_that_comes_back(
        self, tmp_path: Path, origin: CountingOrigin, contents: dict[str, bytes]
    ) -> None:
        """R23, R36: a restart in the middle costs a pause, not the load, and never a byte."""
        with served(tmp_path, origin.url) as daemon:
            stream = stream_of(daemon)
            name, array = next(stream)
            got = {name: array.tobytes()}
            daemon.kill()
            daemon.start()
            got |= loaded(stream)
            assert got == contents

    def test_interrupt_while_shared_memory_is_filled(
        self, tmp_path: Path, origin: CountingOrigin
    ) -> None:
        """R36, R7: as below, where the daemon fills memory for several readers."""
        with served(tmp_path, origin.url) as daemon:
            stream = stream_of(daemon)
            stream.open()
            origin.gate.clear()
            main = threading.main_thread().ident
            assert main is not None

            def interrupt() -> None:
                assert origin.waiting.acquire(timeout=30)
                signal.pthread_kill(main, signal.SIGINT)

            interrupting = threading.Thread(target=interrupt)
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                next(stream)
            interrupting.join()
            stream.close()
            assert not any(t.name.startswith("racer-load-") for t in _workers())
            origin.gate.set()
            assert len(loaded(stream_of(daemon))) == 24

    def test_interrupt(self, tmp_path: Path, origin: CountingOrigin) -> None:
        """R36: Ctrl-C while reads wait ends the load at once."""
        with served(tmp_path, origin.url) as daemon:
            stream = self.held(daemon, origin)
            main = threading.main_thread().ident
            assert main is not None

            def consume() -> None:
                interrupt.start()
                for _ in stream:
                    pass

            interrupt = threading.Thread(target=lambda: signal.pthread_kill(main, signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                consume()
            interrupt.join()
            stream.close()
            assert not any(t.name.startswith("racer-load-") for t in _workers())


def _workers() -> list[threading.Thread]:
    """Threads of loads, but for keepers, which end a moment later."""
    return [t for t in threading.enumerate() if not t.name.endswith("-keeper")]


def test_loads_leave_nothing_in_the_daemon(
    tmp_path: Path, objects: Path, contents: dict[str, bytes]
) -> None:
    """R36, L54: after many loads, finished or not, the daemon holds no target of theirs."""
    with served(tmp_path, f"file://{objects}") as daemon:
        assert loaded(stream_of(daemon)) == contents
        assert daemon.process is not None
        folder = f"/proc/{daemon.process.pid}/fd"
        before = len(os.listdir(folder))
        for number in range(30):
            stream = stream_of(daemon)
            if number % 3:
                next(stream)
                stream.close()
            else:
                assert loaded(stream) == contents
        # The first request of a new client is answered after the loop saw the old ones end.
        with racer.Client(socket=daemon.socket("local")) as client:
            client.info("local")
            assert len(os.listdir(folder)) <= before + 2

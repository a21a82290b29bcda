"""Model directories on the local disk: names, index and headers put together."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from clients.python.racer.tests.fake_daemon import FakeDaemon, error
from racer.errors import NotFound, VersionChanged
from racer.models import ModelDirectory, SourceFile, open_source
from racer.models.local import LocalSource
from racer.safetensors import SafetensorsError
from tests.support.memory_source import MemorySource
from tests.support.safetensors_bytes import model_file

F32 = ("F32", (2,))


def write(folder: Path, name: str, *tensors: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model_file(dict.fromkeys(tensors, F32))[0])
    return path


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def opened(folder: Path) -> ModelDirectory:
    return ModelDirectory.open(LocalSource(folder))


def refused(folder: Path, reason: str) -> SafetensorsError:
    with pytest.raises(SafetensorsError, match=reason) as caught:
        opened(folder)
    assert str(folder) in str(caught.value)
    return caught.value


def loaded(model: ModelDirectory) -> list[tuple[str, str]]:
    return [(shard.file.name, tensor.name) for shard, tensor in model.tensors()]


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    """L15: what is wanted instead."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SafetensorsError, match=r"one file, and not.*give the directory of a model"):
        opened(tmp_path / "config.json")


def test_an_object_that_is_no_model(daemon: FakeDaemon) -> None:
    """L15: and a place with nothing is still told as one, with the daemon's hint where it has."""
    url = daemon.put("hub", "llama/config.json", b"{}")
    for location, kind, reason in (
        (url, SafetensorsError, "one file, and not.*give the directory of a model"),
        ("racer://local/hub/none", NotFound, "nothing lies under.*racer ls"),
    ):
        source, _ = open_source(location, socket=daemon.path)
        with pytest.raises(kind, match=reason):
            ModelDirectory.open(source)
        source.close()
    daemon.always("GET /v1/list", error(404, "not_found"))
    source, _ = open_source("racer://local/none/llama", socket=daemon.path)
    with pytest.raises(NotFound, match=r"nothing lies under.*a hint"):
        ModelDirectory.open(source)
    source.close()


@pytest.mark.parametrize(
    ("record", "hint"),
    [
        (b'{"location": "racer://models/hub/llama"}', "weights are at racer://models/hub/llama"),
        (b'{"location": "other"}', "racer-model.json says where"),
        (b"[", "racer-model.json says where"),
    ],
)
def test_a_directory_that_was_prepared(tmp_path: Path, record: bytes, hint: str) -> None:
    """L15: headers without weights are told as such, and where the weights are; a directory that
    has a record and the weights is loaded."""
    path = write(tmp_path, "a.safetensors", "a1")
    (tmp_path / "racer-model.json").write_bytes(record)
    assert loaded(opened(tmp_path)) == [("a.safetensors", "a1")]
    whole = path.read_bytes()
    path.write_bytes(whole[: 8 + int.from_bytes(whole[:8], "little")])
    assert hint in str(refused(tmp_path, "the header alone is here: racer-vllm-fetch prepared"))


def test_index_counts_at_the_level_of_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """L14: of a mapped shard only the mapped tensors are loaded; the others are told of."""
    write(tmp_path, "b.safetensors", "b1", "b2")
    write(tmp_path, "a.safetensors", "a1")
    write(tmp_path, "consolidated.safetensors", "b1", "a1")
    write_index(tmp_path, {"b2": "b.safetensors", "a1": "a.safetensors"})
    with caplog.at_level(logging.WARNING, "racer.models"):
        model = opened(tmp_path)
    assert loaded(model) == [("a.safetensors", "a1"), ("b.safetensors", "b2")]
    assert model.index == "model.safetensors.index.json"
    assert model.left_out == ("consolidated.safetensors",) and model.unmapped == ("b1",)
    assert "consolidated.safetensors" in caplog.text and "'b1'" in caplog.text


def test_shards_below_the_first_level(tmp_path: Path) -> None:
    """R34: the index may name files in folders."""
    write(tmp_path, "x/a.safetensors", "a")
    write_index(tmp_path, {"a": "x/a.safetensors"})
    assert loaded(opened(tmp_path)) == [("x/a.safetensors", "a")]


def test_missing_shard(tmp_path: Path) -> None:
    """L14, L39: what the index needs and nobody has is named."""
    write(tmp_path, "a.safetensors", "a")
    write_index(tmp_path, {"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"})
    error = refused(tmp_path, "maps 2 tensors to it, and it is not there")
    assert error.file == f"{tmp_path}/b.safetensors"


def test_extra_shard(tmp_path: Path) -> None:
    """L14: refused by its name; left out where the caller says so."""
    write(tmp_path, "a.safetensors", "a")
    write(tmp_path, "b.safetensors", "b")
    write_index(tmp_path, {"a": "a.safetensors"})
    assert refused(tmp_path, "names no tensor in it").file == f"{tmp_path}/b.safetensors"
    model = ModelDirectory.open(LocalSource(tmp_path), extra_shards="ignore")
    assert loaded(model) == [("a.safetensors", "a")] and model.left_out == ("b.safetensors",)


@pytest.mark.parametrize("with_index", [True, False])
def test_tensor_in_two_shards(tmp_path: Path, with_index: bool) -> None:
    """L14: one source per tensor; two are refused, named both."""
    write(tmp_path, "a.safetensors", "t", "a")
    write(tmp_path, "b.safetensors", "t")
    if with_index:
        write_index(tmp_path, {"a": "a.safetensors", "t": "b.safetensors"})
    error = refused(tmp_path, "is in 'a.safetensors' too")
    assert (error.file, error.tensor) == (f"{tmp_path}/b.safetensors", "t")


@pytest.mark.parametrize(
    ("holder", "reason"), [("b.safetensors", "'b.safetensors' has it"), (None, "no shard has it")]
)
def test_shard_lacks_a_mapped_tensor(tmp_path: Path, holder: str | None, reason: str) -> None:
    """L14, L25: a tensor that is not where the index says is named."""
    write(tmp_path, "a.safetensors", "a")
    write(tmp_path, "b.safetensors", "b", *(["t"] if holder else []))
    write_index(tmp_path, {"a": "a.safetensors", "b": "b.safetensors", "t": "a.safetensors"})
    error = refused(tmp_path, reason)
    assert (error.file, error.tensor) == (f"{tmp_path}/a.safetensors", "t")


def test_index_that_leads_out(tmp_path: Path) -> None:
    """R34, R37: not even where the file is there."""
    inside = tmp_path / "model"
    write(tmp_path, "secret.safetensors", "t")
    inside.mkdir()
    write_index(inside, {"t": "../secret.safetensors"})
    refused(inside, "leaves the model directory")


def test_broken_index_and_broken_shard(tmp_path: Path) -> None:
    """R37, L46: both are named with the reason."""
    path = write(tmp_path, "a.safetensors", "a")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map":{"a":"a.safetensors","a":"a.safetensors"}}')
    assert refused(tmp_path, "duplicate key 'a'").file == str(index)
    os.truncate(index, 0)
    assert refused(tmp_path, "not JSON").file == str(index)
    index.unlink()
    path.write_bytes(path.read_bytes()[:-1])
    assert refused(tmp_path, "cut short").file == str(path)


def test_first_fault_is_told_each_time(tmp_path: Path) -> None:
    """L22: of several broken shards the first in order is named, whatever finished first."""
    for number in range(20):
        (tmp_path / f"m-{number}.safetensors").write_bytes(bytes(number))
    for _ in range(5):
        assert refused(tmp_path, "too short").file == f"{tmp_path}/m-0.safetensors"


def test_empty_folder_and_missing_folder(tmp_path: Path) -> None:
    """R34: two different things."""
    refused(tmp_path, "no safetensors file and no index")
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "missing")


def test_one_file(tmp_path: Path) -> None:
    """R34: what ends in .safetensors is a file, index or not."""
    path = write(tmp_path, "a.safetensors", "a")
    write(tmp_path, "b.safetensors", "b")
    source, only = open_source(path)
    assert loaded(ModelDirectory.open(source, only=only)) == [("a.safetensors", "a")]
    source, only = open_source(tmp_path / "c.safetensors")
    with pytest.raises(SafetensorsError, match="there is no such file"):
        ModelDirectory.open(source, only=only)


@pytest.mark.parametrize(
    ("location", "folder", "only"),
    [
        ("racer://c/b/models/x", "racer://c/b/models/x", None),
        ("racer://c/b/models/x/", "racer://c/b/models/x", None),
        ("racer://c/b", "racer://c/b", None),
        ("racer://c/b/x/a%20b.safetensors", "racer://c/b/x", "a b.safetensors"),
        ("racer://c/b/a.safetensors", "racer://c/b", "a.safetensors"),
        ("/models/x/", "/models/x", None),
        ("/a.safetensors", "/", "a.safetensors"),
        ("a.safetensors", ".", "a.safetensors"),
        (Path("/x/a.safetensors"), "/x", "a.safetensors"),
    ],
)
def test_locations(location: str | Path, folder: str, only: str | None) -> None:
    """R33: a URL or a path, of a directory or of one file; nothing is opened for it."""
    source, name = open_source(location)
    assert (source.location, name) == (folder, only)
    source.close()


@pytest.mark.parametrize("name", ["b.safetensors", "model.safetensors.index.json"])
def test_links_to_nothing_are_missing_files(tmp_path: Path, name: str) -> None:
    """L14: a cache of files that lost one has no smaller model, nor one without an index."""
    write(tmp_path, "a.safetensors", "a")
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "gone")
    assert refused(tmp_path, "no such file|cannot be found").file == str(tmp_path / name)


def test_what_is_no_file_is_not_passed_over(tmp_path: Path) -> None:
    """L14, R37: a FIFO under a shard's name is refused, and not waited for."""
    write(tmp_path, "a.safetensors", "a")
    os.mkfifo(tmp_path / "b.safetensors")
    refused(tmp_path, "not a regular file")


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    """R37: one error, whatever an index names."""
    write_index(tmp_path, {"t": "x" * 300 + ".safetensors"})
    refused(tmp_path, "the index maps 1 tensors to it, and it is not there")


def test_files_that_change_are_not_mixed(tmp_path: Path) -> None:
    """L39, L51: every read checks the version itself, whoever read what before."""
    path = write(tmp_path, "a.safetensors", "a")
    source = LocalSource(tmp_path)
    file = source.find("a.safetensors")
    assert isinstance(file, SourceFile)
    assert source.read(file, 0, 8) == path.read_bytes()[:8]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(VersionChanged):
        source.read(file, 0, 8)
    landing = source.landing(16)
    with pytest.raises(VersionChanged):
        landing.read(file, 0, 8)
    landing.close()


def test_only_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: a fault in the last shard is found before a payload byte of the first is read."""
    write(tmp_path, "a.safetensors", "a", "b", "c")
    write(tmp_path, "b.safetensors", "a")
    source = LocalSource(tmp_path)
    reads: list[tuple[str, int, int]] = []
    original = source.read

    def recording(file: SourceFile, start: int, stop: int) -> bytes:
        reads.append((file.name, start, stop))
        return original(file, start, stop)

    monkeypatch.setattr(source, "read", recording)
    with pytest.raises(SafetensorsError, match="too"):
        ModelDirectory.open(source)
    lengths = {
        name: 8 + int.from_bytes((tmp_path / name).read_bytes()[:8], "little")
        for name in ("a.safetensors", "b.safetensors")
    }
    assert sorted(reads) == sorted(
        part for name, stop in lengths.items() for part in ((name, 0, 8), (name, 8, stop))
    )


@pytest.mark.parametrize(("at_hand", "threads"), [(False, 4), (True, 1)])
def test_headers_are_read_side_by_side_where_there_is_something_to_wait_for(
    at_hand: bool, threads: int
) -> None:
    """R37: one reads what is at hand; as many as there are files wait for what is not."""
    names = [f"m-{number}.safetensors" for number in range(4)]
    files = {name: model_file({name: ("U8", [5])})[0] for name in names}
    together = threading.Barrier(threads, timeout=60)
    readers: set[int] = set()

    class Source(MemorySource):
        def read(self, file: SourceFile, start: int, stop: int) -> bytes:
            if start == 0:
                readers.add(threading.get_ident())
                together.wait()
            return super().read(file, start, stop)

    model = ModelDirectory.open(Source(files, at_hand=at_hand))
    assert [shard.file.name for shard in model.shards] == names
    assert len(readers) == threads

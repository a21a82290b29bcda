"""Real vLLM with `--load-format racer`: the same tokens as with its own loader, every time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import racer
from racer.safetensors import SafetensorsError
from racer_vllm.fetch import fetch
from tests.vllm.conftest import BUCKET, EngineError, EngineProcess, Store
from tests.vllm.tiny_models import QUANTISED, Tensors, quantised, tensors, write_model

pytestmark = [pytest.mark.vllm, pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A prefix of the bucket for this test alone."""
    return str(request.node.name).replace("[", "-").rstrip("]")


def prepared(store: Store, url: str, folder: Path) -> Path:
    """What `racer-vllm-fetch` makes of a model."""
    fetch(url, lambda _: folder, socket=store.socket)
    return folder


def own(engine: EngineProcess, folder: Path, **settings: Any) -> dict[str, Any]:
    """vLLM's own loader on the files themselves."""
    return engine.run(folder, load_format="safetensors", **settings)


def untied(held: Tensors) -> Tensors:
    return {name: value for name, value in held.items() if name != "lm_head.weight"}


def test_tokens_equal_and_a_second_load_is_local(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """R4, R18, R34, R35, L11, L23: from a cold S3 server, then with no request to it at all; each
    load says in one line what it did and which versions did it."""
    files = write_model(tmp_path / "files", tensors(1))
    url = store.upload(files, name)
    folder = prepared(store, url, tmp_path / "dir")
    first = engine.run(folder, load_format="racer")
    assert first["token_ids"] == own(engine, files)["token_ids"]
    requests = store.origin_requests()
    again = engine.run(folder, load_format="racer")
    assert again["token_ids"] == first["token_ids"]
    assert store.origin_requests() == requests
    for log in (first["log"], again["log"]):
        [line] = log
        assert "loaded 21 tensors, 1.41 MiB in " in line and f" from {url}: " in line
        assert line.endswith(f"racer {racer.__version__}, racer-vllm 0.1.0, vLLM 0.32.0")
    assert "origin" not in again["log"][0].partition(url)[2]


def test_quantised(engine: EngineProcess, store: Store, tmp_path: Path, name: str) -> None:
    """R4, L35: eight-bit weights go through vLLM's own steps after loading, with `verify` too."""
    config = {"quantization_config": QUANTISED}
    files = write_model(tmp_path / "files", quantised(tensors(1)), config=config)
    folder = prepared(store, store.upload(files, name), tmp_path / "dir")
    settings = {"dtype": "bfloat16"}
    verified = {"model_loader_extra_config": {"verify": True}}
    got = engine.run(folder, load_format="racer", **settings, **verified)
    expected = own(engine, files, **settings)
    assert "CompressedTensorsLinearMethod" in got["quant_methods"]
    assert (got["token_ids"], got["quant_methods"]) == (
        expected["token_ids"], expected["quant_methods"],
    )  # fmt: skip


def test_tied_embeddings(engine: EngineProcess, store: Store, tmp_path: Path, name: str) -> None:
    """R4: one tensor for both ends of the model."""
    tied = {"tie_word_embeddings": True}
    files = write_model(tmp_path / "files", untied(tensors(1)), config=tied)
    folder = prepared(store, store.upload(files, name), tmp_path / "dir")
    got = engine.run(folder, load_format="racer")
    assert got["tied"] is True
    assert got["token_ids"] == own(engine, files)["token_ids"]


def test_embeddings_that_are_not_tied_whatever_the_configuration_says(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """R4, L35: vLLM looks for `lm_head` in the headers, which the prepared directory has."""
    tied = {"tie_word_embeddings": True}
    files = write_model(tmp_path / "files", tensors(1), config=tied)
    folder = prepared(store, store.upload(files, name), tmp_path / "dir")
    got = engine.run(folder, load_format="racer")
    assert got["tied"] is False
    assert got["token_ids"] == own(engine, files)["token_ids"]


def test_the_prepared_directory_is_no_model_for_other_loaders(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """R34: headers without weights are refused, never read as zeros."""
    files = write_model(tmp_path / "files", tensors(1))
    folder = prepared(store, store.upload(files, name), tmp_path / "dir")
    with pytest.raises(EngineError, match=r"incomplete metadata|not fully covered"):
        engine.run(folder, load_format="safetensors")


def test_a_shard_that_is_missing(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """R34, L14, L17, L22: named before vLLM starts; and where it goes later, by the load, which
    says where it ran."""
    files = write_model(tmp_path / "files", tensors(1))
    url = store.upload(files, name)
    folder = prepared(store, url, tmp_path / "dir")
    shard = "model-00002-of-00003.safetensors"
    store.s3.delete(BUCKET, f"{name}/{shard}".encode())
    with racer.Client(socket=store.socket) as client:
        client.evict(url, prefix=True)
    with pytest.raises(EngineError) as failed:
        engine.run(folder, load_format="racer")
    assert f"{url}/{shard}" in str(failed.value)
    assert "tensors to it, and it is not there" in str(failed.value)
    assert f"while {url} was loaded on " in str(failed.value)
    assert engine.ask("left")["left"] == []
    with pytest.raises(SafetensorsError, match="and it is not there") as refused:
        prepared(store, url, tmp_path / "other")
    assert refused.value.file == f"{url}/{shard}"


def test_a_tensor_that_the_index_does_not_map(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """L25: parameters that nothing initialised are an error with `verify`; vLLM's own rule leaves
    linear layers out, and where that is followed, there is a warning."""
    files = write_model(tmp_path / "files", tensors(1))
    index = files / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    del told["weight_map"]["model.layers.1.mlp.down_proj.weight"]
    index.write_text(json.dumps(told))
    folder = prepared(store, store.upload(files, name), tmp_path / "dir")
    missing = "layers.1.mlp.down_proj.weight"
    strict = {"model_loader_extra_config": {"verify": True}}
    with pytest.raises(EngineError, match=f"not initialized.*{re.escape(missing)}"):
        engine.run(folder, load_format="racer", **strict)
    warned, _ = engine.run(folder, load_format="racer")["log"][::-1]
    assert "not initialized" in warned and missing in warned
    unchecked = {"model_loader_extra_config": {"verify": False}}
    assert len(engine.run(folder, load_format="racer", **unchecked)["log"]) == 1


def test_a_norm_that_the_index_does_not_map(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """L25: what vLLM's own loader would refuse is refused without any option."""
    held = tensors(1)
    del held["model.layers.1.input_layernorm.weight"]
    files = write_model(tmp_path / "files", held)
    folder = prepared(store, store.upload(files, name), tmp_path / "dir")
    with pytest.raises(EngineError, match=r"not initialized.*layers\.1\.input_layernorm"):
        engine.run(folder, load_format="racer")


def test_reload_in_place(engine: EngineProcess, store: Store, tmp_path: Path, name: str) -> None:
    """R4: the same directory, another directory, and a URL; a new version wants a new directory."""
    one = write_model(tmp_path / "one", tensors(1))
    two = write_model(tmp_path / "two", tensors(2))
    url_one, url_two = store.upload(one, f"{name}/one"), store.upload(two, f"{name}/two")
    folder = prepared(store, url_one, tmp_path / "dir")
    expected_one, expected_two = own(engine, one)["token_ids"], own(engine, two)["token_ids"]
    assert expected_one != expected_two
    engine.ask("open", model=str(folder), load_format="racer")
    try:
        assert engine.ask("generate")["token_ids"] == expected_one
        engine.ask("reload", weights_path=url_two)
        assert engine.ask("generate")["token_ids"] == expected_two
        [line] = engine.ask("reload", weights_path=str(folder))["log"]
        assert "loaded 21 tensors" in line and url_one in line
        assert engine.ask("generate")["token_ids"] == expected_one
        # The model changes where it lies: first its weights only, then what was prepared, too.
        store.upload(two, f"{name}/one")
        with racer.Client(socket=store.socket) as client:
            client.evict(url_one, prefix=True)
        with pytest.raises(EngineError, match="run racer-vllm-fetch again"):
            engine.ask("reload")
        prepared(store, url_one, folder)
        engine.ask("reload")
        assert engine.ask("generate")["token_ids"] == expected_two
    finally:
        engine.ask("close")


def test_a_draft_model_has_a_place_of_its_own(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """R4: speculation with a draft from another prefix changes nothing but the time."""
    target = write_model(tmp_path / "target", tensors(1))
    draft = write_model(tmp_path / "draft", tensors(2))
    folder = prepared(store, store.upload(target, f"{name}/target"), tmp_path / "dir")
    draft_url = store.upload(draft, f"{name}/draft")
    draft_folder = prepared(store, draft_url, tmp_path / "draft-dir")
    speculation = {
        "model": str(draft_folder), "method": "draft_model", "num_speculative_tokens": 2,
    }  # fmt: skip
    got = engine.run(folder, load_format="racer", speculative_config=speculation)
    assert got["token_ids"] == own(engine, target)["token_ids"]
    assert [draft_url in line for line in got["log"]] == [False, True]


def test_options_are_checked_before_anything_is_opened(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """L15: the error says what there is."""
    files = write_model(tmp_path / "files", tensors(1))
    folder = prepared(store, store.upload(files, name), tmp_path / "dir")
    with pytest.raises(EngineError, match=r"no option 'stagingbytes'.*options: staging_bytes, in_"):
        engine.ask("load_only", model=str(folder), extra={"stagingbytes": 1})
    small = {"staging_bytes": 1 << 20, "in_flight": 2, "share": "off", "socket": store.socket}
    assert len(engine.ask("load_only", model=str(folder), extra=small)["taken"]) == 21


def test_tensors_are_in_host_memory(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """L26, L37: whatever device vLLM has as its default just now, and of the type of the file:
    only parameters touch a device, each its own."""
    files = write_model(tmp_path / "files", tensors(1))
    folder = prepared(store, store.upload(files, name), tmp_path / "dir")
    for extra in ({"share": "auto"}, {"share": "off"}):
        taken = engine.ask("load_only", model=str(folder), extra=extra)["taken"]
        assert set(taken.values()) == {"torch.float32 cpu"}


def test_a_model_that_stops_early(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """R36: its error comes out, and no read, thread or memory is left behind it."""
    files = write_model(tmp_path / "files", tensors(1))
    folder = prepared(store, store.upload(files, name), tmp_path / "dir")
    small = {"staging_bytes": 1 << 20, "in_flight": 4}
    with pytest.raises(EngineError, match="the model has had enough"):
        engine.ask("load_only", model=str(folder), stop_after=2, extra=small)
    assert engine.ask("left")["left"] == []


def test_what_a_model_is_made_of(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """R4, L14, L35: weights in a folder of the model, in a file by name, and of another model."""
    held = tensors(1)
    files = write_model(tmp_path / "files", held)
    write_model(files / "tower", {"conv.weight": held["model.norm.weight"]}, shards=1)
    write_model(files / "head", {"out.weight": held["lm_head.weight"]}, shards=1)
    (files / "head" / "model-00001-of-00001.safetensors").rename(
        files / "head" / "head.safetensors"
    )
    (files / "head" / "model.safetensors.index.json").unlink()
    other = write_model(tmp_path / "other", {"w": held["model.norm.weight"]}, shards=1)
    folder = prepared(store, store.upload(files, name), tmp_path / "dir")
    here = {"model_or_path": str(folder), "revision": None}
    secondary = [
        {**here, "subfolder": "tower", "prefix": "tower."},
        {**here, "allow_patterns_overrides": ["h*/head.safetensors"], "prefix": "head."},
        {"model_or_path": str(other), "revision": None, "prefix": "other."},
    ]
    answer = engine.ask("load_only", model=str(folder), secondary=secondary)
    extra = {"tower.conv.weight", "head.out.weight", "other.w"}
    assert answer["taken"].keys() == held.keys() | extra
    assert [line for line in answer["log"] if line.startswith("racer: loaded")] == answer["log"][
        -1:
    ]


def test_experts_of_other_ranks_are_not_read(
    engine: EngineProcess, store: Store, tmp_path: Path, name: str
) -> None:
    """R4: vLLM's own rule decides: weights of other experts, but not their scales."""
    one = tensors(1)["model.norm.weight"]
    held = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": one for n in range(4)}
    held |= {f"model.layers.0.mlp.experts.{n}.up_proj.weight_scale": one for n in range(4)}
    held |= {"model.layers.0.mlp.gate.weight": one}
    files = write_model(tmp_path / "files", held, shards=1)
    folder = prepared(store, store.upload(files, name), tmp_path / "dir")
    taken = engine.ask("load_only", model=str(folder), experts=[1, 3])["taken"]
    left_out = {f"model.layers.0.mlp.experts.{n}.up_proj.weight" for n in (0, 2)}
    assert taken.keys() == held.keys() - left_out


def test_registered_once(engine: EngineProcess) -> None:
    """R34, L53: the entry point is found, and registering again neither changes nor warns."""
    assert engine.ask("start") == {"version": "0.32.0", "loader": "RacerModelLoader"}
    assert engine.ask("register_again") == {"same": True, "log": []}

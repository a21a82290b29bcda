"""`racer.load` with torch: every dtype, memory of its own, and devices."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import racer
from racer.loading import TensorStream
from racer.safetensors import SafetensorsError
from racer.safetensors.dtypes import BITS, UNREADABLE
from tests.support.memory_source import MemorySource
from tests.support.safetensors_bytes import model_file

torch = pytest.importorskip(
    "torch", reason="torch is not installed: `pip install torch` in an environment of its own"
)

KIB = 1 << 10


def stream_of(source: MemorySource, **options: Any) -> TensorStream:
    return TensorStream(source, **{"framework": "pt", "chunk_bytes": 64 * KIB, **options})


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", sorted(set(BITS) - UNREADABLE))
def test_every_dtype_of_torch(dtype: str) -> None:
    """L41: each dtype, small, mapped, scalar and empty; F4 as pairs."""
    layout = {"small": (dtype, [3, 2]), "none": (dtype, [2, 0]), "large": (dtype, [2 << 20])}
    if dtype != "F4":
        layout["one"] = (dtype, [])
    content, contents = model_file(layout)
    loaded = dict(stream_of(MemorySource({"m.safetensors": content}, page_bytes=1 << 20)))
    assert list(loaded) == list(layout)
    for name, tensor in loaded.items():
        half = 2 if dtype == "F4" else 1
        shape = layout[name][1]
        assert list(tensor.shape) == [*shape[:-1], *(n // half for n in shape[-1:])]
        if name == "large":
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == contents[name]
        else:
            assert bytes_of(tensor) == contents[name]
        assert tensor.is_contiguous() and not tensor.requires_grad


@pytest.mark.parametrize("dtype", sorted(set(BITS) - UNREADABLE))
def test_dtypes_are_the_reference_loader_s(dtype: str) -> None:
    """L41: dtype, shape and values as the format's own loader gives them."""
    reference = pytest.importorskip("safetensors.torch")
    content, _ = model_file({"t": (dtype, [2, 4])})
    try:
        theirs = reference.load(content)["t"]
    except KeyError:
        pytest.skip(f"the reference loader does not know {dtype}")
    ((_, ours),) = stream_of(MemorySource({"m.safetensors": content}))
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert bytes_of(ours) == bytes_of(theirs)


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [
        ("F4", [2, 3, 2, 1], "pairs"),
        ("F4", [0, 3], "pairs"),
        ("U8", [0, 2**62, 4], "shape"),
        ("U8", [2**64 - 1, 0], "shape"),
    ],
)
def test_legal_but_not_in_torch(dtype: str, shape: list[int], reason: str) -> None:
    """L41, R37: typed, with file and tensor, before a payload byte is read."""
    content, _ = model_file({"a": ("U8", [5]), "t": (dtype, shape)})
    source = MemorySource({"m.safetensors": content})
    with pytest.raises(SafetensorsError, match=reason) as caught:
        list(stream_of(source))
    assert caught.value.unsupported and caught.value.tensor == "t"
    assert source.bulk_reads == []


@pytest.mark.parametrize("device", ["no-such", "", "cuda:x", None, -1])
def test_devices_that_cannot_be(tmp_path: Path, device: Any) -> None:
    """L15: a ValueError where `load` is called, as for any other argument."""
    with pytest.raises(ValueError, match="device is"):
        racer.load(tmp_path, device=device)


def test_many_dimensions() -> None:
    """L41: torch takes more dimensions than numpy does."""
    content, contents = model_file({"t": ("I16", [1] * 100 + [4])})
    ((_, tensor),) = stream_of(MemorySource({"m.safetensors": content}))
    assert tensor.ndim == 101 and bytes_of(tensor) == contents["t"]


def test_tensors_are_kept_and_views_too() -> None:
    """L13, L38: views of tensors stay right after the tensors and the stream are gone."""
    layout = {f"t{n}": ("U8", [300 * KIB if n % 2 else 3 << 20]) for n in range(6)}
    content, contents = model_file(layout)
    views = {
        name: tensor[1000:2000]
        for name, tensor in stream_of(MemorySource({"m.safetensors": content}))
    }
    pointers = {tensor.untyped_storage().data_ptr() for tensor in views.values()}
    assert len(pointers) == len(layout)
    for name, view in views.items():
        assert bytes_of(view) == contents[name][1000:2000]


def test_another_device() -> None:
    """R36, L26: what is not the CPU is filled by copies that have ended; only it is named."""
    content, _ = model_file({"t": ("BF16", [3, 100_000]), "z": ("F32", [0]), "f": ("F4", [2, 4])})
    loaded = dict(stream_of(MemorySource({"m.safetensors": content}), device="meta"))
    assert {name: str(tensor.device) for name, tensor in loaded.items()} == {
        "t": "meta",
        "z": "meta",
        "f": "meta",
    }
    assert loaded["t"].shape == (3, 100_000) and loaded["f"].shape == (2, 2)


def test_the_caller_s_default_device_does_not_matter() -> None:
    """R18: inside `with torch.device(…)`, as engines load, tensors lie where they were asked."""
    content, contents = model_file({"s": ("U8", [8]), "t": ("U8", [2 << 20])})
    with torch.device("meta"):
        loaded = dict(stream_of(MemorySource({"m.safetensors": content})))
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}
    assert bytes_of(loaded["s"]) == contents["s"]


def test_a_parameter_takes_it() -> None:
    """R36: the use that loaders make of it, with the tensor dropped at once."""
    content, contents = model_file({"w": ("F32", [256, 1200])})
    parameter = torch.nn.Parameter(torch.zeros(256, 1200))
    for _, tensor in stream_of(MemorySource({"m.safetensors": content})):
        parameter.data.copy_(tensor)
        del tensor
    assert parameter.detach().numpy().tobytes() == contents["w"]
    assert not any(thread.name.startswith("racer-load") for thread in threading.enumerate())

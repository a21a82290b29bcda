"""Makes a sample model directory: llama-like names, shapes and dtypes, seeded random weights.

    python tools/sample_model.py DIR [--bytes 1GiB] [--shards 4] [--seed 7]

The result has what a real one has: config.json, tokenizer files, a safetensors index and shards.
A directory that is already complete for the same arguments is left as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from racerd.units import GIB, format_bytes, parse_bytes

HIDDEN = 2048
KEY_VALUE = 512
INTERMEDIATE = 5632
VOCABULARY = 32000
_DTYPE_BYTES = {"BF16": 2, "F32": 4}
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Tensor:
    """One tensor of the sample: `shape` in elements, `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * _DTYPE_BYTES[self.dtype]


def _layer(index: int) -> Iterator[Tensor]:
    prefix = f"model.layers.{index}"
    for name, shape in (
        ("self_attn.q_proj", (HIDDEN, HIDDEN)),
        ("self_attn.k_proj", (KEY_VALUE, HIDDEN)),
        ("self_attn.v_proj", (KEY_VALUE, HIDDEN)),
        ("self_attn.o_proj", (HIDDEN, HIDDEN)),
        ("mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
        ("mlp.up_proj", (INTERMEDIATE, HIDDEN)),
        ("mlp.down_proj", (HIDDEN, INTERMEDIATE)),
    ):
        yield Tensor(f"{prefix}.{name}.weight", "BF16", shape)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{prefix}.{name}.weight", "F32", (HIDDEN,))


def tensors_of(size_bytes: int) -> list[Tensor]:
    """The embedding, as many layers as fit in `size_bytes` (at least one), and the final norm."""
    tensors = [Tensor("model.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN))]
    layer_bytes = sum(t.nbytes for t in _layer(0))
    layers = max(1, (size_bytes - tensors[0].nbytes) // layer_bytes)
    for index in range(layers):
        tensors += _layer(index)
    return [*tensors, Tensor("model.norm.weight", "F32", (HIDDEN,))]


def _cut(tensors: list[Tensor], shards: int) -> list[list[Tensor]]:
    """Cuts `tensors`, in order, into `shards` runs of about the same size."""
    share = sum(t.nbytes for t in tensors) / shards
    cut: list[list[Tensor]] = [[] for _ in range(shards)]
    seen = 0
    for tensor in tensors:
        cut[min(shards - 1, int(seen / share))].append(tensor)
        seen += tensor.nbytes
    return [run for run in cut if run]


def _write_shard(path: Path, tensors: list[Tensor], random: np.random.Generator) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        stop = offset + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, offset, _BLOCK_BYTES):
            out.write(random.bytes(min(_BLOCK_BYTES, offset - start)))
    part.rename(path)


def make_model(folder: Path, *, size_bytes: int = GIB, shards: int = 4, seed: int = 7) -> int:
    """Makes the model in `folder` and returns its size in bytes."""
    recipe = {"bytes": size_bytes, "shards": shards, "seed": seed}
    stamp = folder.with_name(f".{folder.name}.recipe.json")
    if not (stamp.exists() and json.loads(stamp.read_text()) == recipe):
        folder.mkdir(parents=True, exist_ok=True)
        _write_model(folder, tensors_of(size_bytes), shards, np.random.default_rng(seed))
        stamp.write_text(json.dumps(recipe))
    return sum(p.stat().st_size for p in folder.iterdir())


def _write_model(
    folder: Path, tensors: list[Tensor], shards: int, random: np.random.Generator
) -> None:
    runs = _cut(tensors, shards)
    weight_map = {}
    for number, run in enumerate(runs, 1):
        name = f"model-{number:05}-of-{len(runs):05}.safetensors"
        _write_shard(folder / name, run, random)
        weight_map |= {t.name: name for t in run}
    texts = {
        "model.safetensors.index.json": {
            "metadata": {"total_size": sum(t.nbytes for t in tensors)},
            "weight_map": weight_map,
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": sum(t.name.endswith("input_layernorm.weight") for t in tensors),
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "model_max_length": 4096},
        "tokenizer.json": {
            "version": "1.0",
            "model": {
                "type": "BPE",
                "vocab": {f"t{i}": i for i in range(VOCABULARY)},
                "merges": [],
            },
        },
    }
    for name, value in texts.items():
        (folder / name).write_text(json.dumps(value, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bytes", type=parse_bytes, default=GIB, help="about how large (1GiB)")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    size = make_model(
        options.folder, size_bytes=options.bytes, shards=options.shards, seed=options.seed
    )
    print(f"{options.folder}: {format_bytes(size)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

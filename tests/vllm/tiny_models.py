"""Tiny random Llamas, as they lie on a hub: configuration, tokenizer, shards and index.

Written with numpy: neither torch nor transformers is here. Heads have 32 dimensions, which is the
least that vLLM's attention takes on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN = 128
LAYERS = 2
INNER = 256
VOCABULARY = 288
KEY_VALUE = 64

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
QUANTISED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True,
                "dynamic": True,
            },
        }
    },
}  # fmt: skip

Tensors = dict[str, np.ndarray[Any, Any]]


def tensors(seed: int) -> Tensors:
    """All weights of a Llama; another seed gives another model."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        # Wide enough that the first choices of a greedy completion are far from ties.
        return random.normal(0, 3 / columns**0.5, (rows, columns)).astype("float32")

    held: Tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        held |= {
            f"model.layers.{layer}.{name}": value
            for name, value in {
                "input_layernorm.weight": np.ones(HIDDEN, "float32"),
                "self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
                "self_attn.k_proj.weight": matrix(KEY_VALUE, HIDDEN),
                "self_attn.v_proj.weight": matrix(KEY_VALUE, HIDDEN),
                "self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
                "post_attention_layernorm.weight": np.ones(HIDDEN, "float32"),
                "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
                "mlp.up_proj.weight": matrix(INNER, HIDDEN),
                "mlp.down_proj.weight": matrix(HIDDEN, INNER),
            }.items()
        }
    held["model.norm.weight"] = np.ones(HIDDEN, "float32")
    held["lm_head.weight"] = matrix(VOCABULARY, HIDDEN)
    return held


def quantised(plain: Tensors) -> Tensors:
    """The same in eight bits, with a scale for each output."""
    held: Tensors = {}
    for name, value in plain.items():
        if "_proj" not in name:
            held[name] = value
            continue
        scale = np.abs(value).max(axis=1, keepdims=True) / 127
        held[name] = np.clip(np.rint(value / scale), -127, 127).astype("int8")
        held[f"{name}_scale"] = scale.astype("float32")
    return held


def write_model(
    folder: Path, held: Tensors, *, shards: int = 3, config: Mapping[str, Any] | None = None
) -> Path:
    """Writes a model directory; returns it."""
    folder.mkdir(parents=True)
    names = sorted(held)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        save_file({name: held[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """One token for each word `t0`, `t1` …"""
    vocabulary = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))

"""Which objects of a model an engine needs as files, and which it has no use for.

Layer: bottom, pure. Everything that is not weights, pictures or data is copied: engines and
tokenizers have names of their own for what they read, and new ones appear. Weights stay where they
are; of safetensors files the headers are kept (see `fetch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

LOCK_NAME: Final = ".racer-vllm.lock"
# What prepared directories have for themselves: `record`'s file, and the lock of who writes.
_OWN_NAMES: Final = ("racer-model.json", LOCK_NAME)
# One of these is what makes a directory a model.
CONFIG_NAMES: Final = ("config.json", "params.json")
# One of these is there where the model has its tokenizer with it.
TOKENIZER_PATTERNS: Final = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("*.tiktoken", "tekken.json", "spiece.model", "sentencepiece.bpe.model"),
)
# What is asked for by name where the origin cannot list.
WELL_KNOWN: Final = (
    *CONFIG_NAMES,
    *("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tekken.json", "spiece.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("quantize_config.json", "hf_quant_config.json", "modules.json", "1_Pooling/config.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json", "adapter_config.json"),
    *("model.safetensors.index.json", "consolidated.safetensors.index.json"),
)
_NOT_COPIED: Final = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.ggml", "*.h5", "*.tensors"),
    *("*.msgpack", "*.onnx", "*.onnx_data", "*.npz", "*.npy", "*.tflite", "*.mlmodel", "*.ot"),
    *("*.png", "*.jpg", "*.jpeg", "*.gif", "*.webp", "*.svg", "*.pdf", "*.mp3", "*.mp4", "*.wav"),
    *("*.flac", "*.parquet", "*.arrow", "*.ipynb", "*.zip", "*.tar", "*.tar.gz"),
    *(".git*", "original/*", "onnx/*", "openvino/*"),
)


def is_ours(name: str) -> bool:
    """Whether `name` is one that prepared directories have for themselves: what the model has
    under it is another directory's, and of no use to an engine."""
    base = name.rpartition("/")[2]
    return base in _OWN_NAMES or (base.startswith(".racer-") and base.endswith(".part"))


def is_copied(name: str, also: Sequence[str] = ()) -> bool:
    """Whether the object `name`, relative to the model, is copied as it is.

    `also` are patterns of names that are copied whatever they are.
    """
    if is_ours(name) or name.endswith(".safetensors"):
        return False
    if any(fnmatchcase(name, pattern) for pattern in also):
        return True
    base = name.rpartition("/")[2]
    return not any(fnmatchcase(name, p) or fnmatchcase(base, p) for p in _NOT_COPIED)


def has_tokenizer(names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in TOKENIZER_PATTERNS)

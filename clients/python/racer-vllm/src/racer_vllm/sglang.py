"""The same for SGLang: directories that `racer-vllm-fetch` prepared load through racerd.

Layer: top; entry point of group `sglang.srt.plugins`, and the one door to SGLang. SGLang knows its
load formats by a closed list, but lets plug-ins wrap its functions. Wrapped are the two that read
safetensors files for its usual formats (`auto`, `safetensors`), after it has chosen the files and
before it renames, prefixes and filters what they give: for files of a prepared directory, whose
headers are there and whose weights are not, the weights come from racerd; all others are read as
before. Tried with the loader of SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import racer
from racer_vllm.record import place_of, read_record
from racer_vllm.weights import check_versions

_MODULE: Final = "sglang.srt.model_loader.weight_utils"
_READERS: Final = (
    "safetensors_weights_iterator",
    "buffered_multi_thread_safetensors_weights_iterator",
)

_log = logging.getLogger("racer.sglang")


def register() -> None:
    """Asks SGLang to wrap its readers. Opens nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for reader in _READERS:
        HookRegistry.register(f"{_MODULE}.{reader}", read_weights, HookType.AROUND)


def read_weights(
    original: Callable[..., Iterator[tuple[str, Any]]],
    files: Sequence[str],
    *arguments: object,
    **options: object,
) -> Iterator[tuple[str, Any]]:
    """Names and tensors of `files`: by racerd where they are a prepared directory's headers."""
    folder = _prepared_folder(files)
    if folder is None:
        return original(files, *arguments, **options)
    names = [Path(file).relative_to(folder).as_posix() for file in files]
    return _read(folder, names)


def _prepared_folder(files: Sequence[str]) -> str | None:
    """The prepared directory that all of `files` are in; None where they are in none."""
    if not files:
        return None
    folder = os.path.commonpath([os.path.dirname(file) for file in files])
    return folder if read_record(folder) is not None else None


def _read(folder: str, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    place = place_of(folder)
    if set(names) == place.versions.keys():
        with racer.load(place.location, names=place.names, extra_shards="ignore") as stream:
            check_versions(stream, place)
            yield from stream
        return
    # SGLang left some out, which it does where a draft needs few.
    for name in names:
        with racer.load(place.below(name).location) as stream:
            check_versions(stream, place)
            yield from stream

"""Directories that `racer-vllm-fetch` prepared: weight files of which only the headers are there.

Layer: models, driver. `racer-model.json` beside them says where the weights are. Such a file is
refused as incomplete anyway; here the reason is told.
"""

from __future__ import annotations

import json
import os

from racer.safetensors.errors import SafetensorsError, quoted
from racer.safetensors.header import LENGTH_BYTES
from racer.urls import SCHEME

_RECORD_NAME = "racer-model.json"
_RECORD_BYTES_MAX = 16 << 20


def check_not_prepared(folder: str, path: str, size: int) -> None:
    """Raises SafetensorsError where the file of `size` bytes at `path`, in or below `folder`, ends
    with its header because the folder was prepared."""
    record = os.path.join(folder, _RECORD_NAME)
    if not os.path.isfile(record):
        return
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size != LENGTH_BYTES + header_bytes:
        return
    location = _location_untrusted(record)
    raise SafetensorsError(
        f"the header alone is here: racer-vllm-fetch prepared {folder} for vLLM, without weights",
        file=path,
        hint=f"the weights are at {location}: load that"
        if location
        else f"{record} says where the weights are",
    )


def _location_untrusted(record: str) -> str | None:
    """The URL that a record names, for a message; None where it names none."""
    try:
        with open(record, "rb") as file:
            location = json.loads(file.read(_RECORD_BYTES_MAX)).get("location")
    except (ValueError, RecursionError, AttributeError):
        return None
    if not isinstance(location, str) or not location.startswith(SCHEME):
        return None
    return location if location.isprintable() and len(location) < 4096 else quoted(location)

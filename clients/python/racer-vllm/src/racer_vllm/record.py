"""`racer-model.json`: where the weights of a prepared model directory lie, and which versions.

Layer: bottom; reads one file. `racer-vllm-fetch` writes it, last of all files, and the loader reads
it. The versions (ETags) of the weight files bind the directory to them: configuration of one
version never goes with weights of another, and all ranks load the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from racer.errors import BadUrl, RacerError
from racer.models.names import INDEX_SUFFIX, SUFFIX
from racer.urls import SCHEME, RacerUrl, percent_encode

RECORD_NAME: Final = "racer-model.json"
_FORMAT: Final = 1
_RECORD_BYTES_MAX: Final = 16 << 20


class ModelPlaceError(RacerError):
    """A model directory does not say where its weights are."""

    default_code = "model_place"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One object: its version and, of what was written for it, the length and the SHA-256."""

    etag: str
    size: int
    stored_size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """`location` is the URL of the model's directory. `files` are copied whole, of `shards` only
    the headers."""

    location: str
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    shards: Mapping[str, FileRecord] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Differs where the location or any version differs."""
        held = {**self.files, **self.shards}
        versions = sorted((name, record.etag, record.size) for name, record in held.items())
        text = json.dumps([_FORMAT, self.location, versions])
        return hashlib.sha256(text.encode()).hexdigest()

    def to_bytes(self) -> bytes:
        told = {
            "format": _FORMAT,
            "location": self.location,
            "files": {name: _told(record) for name, record in sorted(self.files.items())},
            "shards": {name: _told(record) for name, record in sorted(self.shards.items())},
        }
        return json.dumps(told, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes_untrusted(cls, data: bytes, *, path: str) -> ModelRecord:
        """Raises ModelPlaceError."""
        try:
            told = json.loads(data)
            if told["format"] != _FORMAT:
                raise ValueError(f"its format is {told['format']!r}, this package reads {_FORMAT}")
            RacerUrl.parse(told["location"])
            return cls(
                told["location"],
                {name: _record(value) for name, value in told["files"].items()},
                {name: _record(value) for name, value in told["shards"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BadUrl) as error:
            raise ModelPlaceError(
                f"{path} cannot be read: {type(error).__name__}: {error}",
                hint="run racer-vllm-fetch again",
            ) from error


def _told(record: FileRecord) -> dict[str, object]:
    return {
        "etag": record.etag,
        "size": record.size,
        "stored_size": record.stored_size,
        "sha256": record.sha256,
    }


def _record(told: Any) -> FileRecord:
    for name, kind in (("etag", str), ("size", int), ("stored_size", int), ("sha256", str)):
        if type(told[name]) is not kind:
            raise ValueError(f"{name} is {told[name]!r}")
    return FileRecord(told["etag"], told["size"], told["stored_size"], told["sha256"])


def read_record(folder: str) -> ModelRecord | None:
    """The record of a directory, None where it has none. Raises ModelPlaceError, OSError."""
    path = os.path.join(folder, RECORD_NAME)
    try:
        with open(path, "rb") as file:
            data = file.read(_RECORD_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(data) > _RECORD_BYTES_MAX:
        raise ModelPlaceError(
            f"{path} has more than {_RECORD_BYTES_MAX:,} bytes", hint="run racer-vllm-fetch again"
        )
    return ModelRecord.from_bytes_untrusted(data, path=path)


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where weights are read from: a `racer://` prefix, or a local directory.

    `versions` binds weight files to versions, as far as they are known, and `names` are those of
    the index and the weight files: with them a load lists nothing, and so asks no origin.
    """

    location: str
    versions: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] | None = None

    def below(self, name: str) -> ModelPlace:
        """A folder or a file of it."""
        return ModelPlace(f"{self.location.rstrip('/')}/{_quoted(self.location, name)}")


def is_known_place(model: str) -> bool:
    """Whether `model` names a place behind racerd, be it by a record or by its URL."""
    return model.startswith(SCHEME) or os.path.isfile(os.path.join(model, RECORD_NAME))


def _quoted(location: str, name: str) -> str:
    return percent_encode(os.fsencode(name)) if location.startswith(SCHEME) else name


def place_of(model: str) -> ModelPlace:
    """Where the weights of vLLM's `--model` lie: it is a prepared directory, a `racer://` URL,
    or a local directory with the weights themselves. Raises ModelPlaceError."""
    if model.startswith(SCHEME):
        return ModelPlace(str(RacerUrl.parse(model)))
    record = read_record(model)
    if record is not None:
        versions = {name: held.etag for name, held in record.shards.items()}
        indexes = [name for name in record.files if name.endswith(INDEX_SUFFIX)]
        return ModelPlace(record.location, versions, (*indexes, *record.shards))
    if os.path.isdir(model) and any(name.endswith(SUFFIX) for name in os.listdir(model)):
        return ModelPlace(model)
    what = f"has no {RECORD_NAME}" if os.path.isdir(model) else "is no directory on this node"
    raise ModelPlaceError(
        f"{model} {what} ({os.uname().nodename})",
        hint="prepare it on every node: racer-vllm-fetch racer://<cache>/<bucket>/<prefix> DIR",
    )

"""`safe_open` over racer: tensors of a file or model by name, each read when it is asked for.

Layer: on `models` and `loading.frameworks`. The interface is that of `safetensors.safe_open`, so
that code written for it works with a URL instead of a path; a directory opens all its shards as
one. For the whole of a model `racer.load` is the faster way. Thread-safe.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final, Literal

from racer.errors import Closed
from racer.loading.frameworks import FrameworkName
from racer.loading.installed import open_installed
from racer.models.directory import ModelDirectory, Shard
from racer.models.opening import Location, open_source
from racer.models.source import SourceLanding
from racer.safetensors.dtypes import BITS
from racer.safetensors.errors import SafetensorsError, quoted
from racer.safetensors.header import TensorInfo

_LANDING_BYTES_MAX = 32 << 20
# How the format's own library also lets them be called.
_ALIASES: Final[dict[str, FrameworkName]] = {"torch": "pt", "pytorch": "pt", "np": "numpy"}

AnyFrameworkName = FrameworkName | Literal["torch", "pytorch", "np"]


def safe_open(
    location: Location,
    framework: AnyFrameworkName = "pt",
    device: object = "cpu",
    *,
    socket: str | os.PathLike[str] | None = None,
) -> TensorFile:
    """Opens `location` (see `racer.load`); a context manager.

    Headers are read and checked here: raises SafetensorsError, RacerError or OSError.
    """
    return TensorFile(location, framework, device, socket=socket)


class TensorFile:
    """What `safe_open` returns: it exists, therefore its headers are right."""

    def __init__(
        self,
        location: Location,
        framework: AnyFrameworkName,
        device: object,
        *,
        socket: str | os.PathLike[str] | None = None,
    ) -> None:
        self._framework = open_installed(_ALIASES.get(framework, framework), device)
        self._source, only = open_source(location, socket=socket)
        self._lock = threading.Lock()
        self._landing: SourceLanding | None = None
        self._closed = False
        try:
            self._model = ModelDirectory.open(self._source, only=only)
        except BaseException:
            self.close()
            raise
        self._tensors = {tensor.name: (shard, tensor) for shard, tensor in self._model.tensors()}

    # --- what there is ----------------------------------------------------------------------

    def keys(self) -> list[str]:
        """Names, sorted."""
        return sorted(self._tensors)

    def offset_keys(self) -> list[str]:
        """Names in the order of their bytes."""
        return list(self._tensors)

    def metadata(self) -> dict[str, str]:
        """The free-form strings of the file; of a directory those of all shards."""
        merged: dict[str, str] = {}
        for shard in self._model.shards:
            merged |= shard.metadata
        return merged

    def _find(self, name: str) -> tuple[Shard, TensorInfo]:
        found = self._tensors.get(name)
        if found is None:
            raise SafetensorsError(f"there is no tensor {quoted(name)}", file=self._source.location)
        return found

    # --- reading ----------------------------------------------------------------------------

    def get_tensor(self, name: str) -> Any:
        """The tensor, in memory of its own."""
        shard, info = self._find(name)
        return self._read(shard, info)

    def get_tensors(self) -> dict[str, Any]:
        """All of them by name, in the order of their bytes; each in memory of its own."""
        return {name: self.get_tensor(name) for name in self._tensors}

    def get_slice(self, name: str) -> TensorSlice:
        """The tensor unread: indexing it reads what is asked for, as far as that is rows."""
        shard, info = self._find(name)
        return TensorSlice(self, shard, info)

    def _read(self, shard: Shard, info: TensorInfo) -> Any:
        try:
            self._framework.check(info)
        except SafetensorsError as error:
            error.file, error.tensor = shard.file.url, info.name
            raise
        building = self._framework.build(info)
        with self._lock:
            position = info.start
            while position < info.stop:
                landing = self._landing_for(info.nbytes)
                stop = min(info.stop, position + len(landing.view))
                landing.read(shard.file, position, stop)
                with landing.view[: stop - position] as piece:
                    building.fill(position - info.start, piece)
                position = stop
        return building.tensor

    def _landing_for(self, nbytes: int) -> SourceLanding:
        """With the lock held: one landing, as large as the largest tensor so far, up to a limit."""
        if self._closed:
            raise Closed("this file was closed")
        wanted = min(nbytes, _LANDING_BYTES_MAX)
        if self._landing is not None and len(self._landing.view) < wanted:
            self._landing.close()
            self._landing = None
        if self._landing is None:
            self._landing = self._source.landing(wanted)
        return self._landing

    # --- lifetime ---------------------------------------------------------------------------

    def close(self) -> None:
        """Cancels reads of other threads, and gives memory and connections up."""
        self._source.cancel()
        with self._lock:
            self._closed = True
            if self._landing is not None:
                self._landing.close()
                self._landing = None
        self._source.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


class TensorSlice:
    """A tensor that is read by indexing, as the format's own library has it."""

    def __init__(self, file: TensorFile, shard: Shard, info: TensorInfo) -> None:
        self._file = file
        self._shard = shard
        self._info = info

    def get_shape(self) -> list[int]:
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """As the format spells it: "BF16"."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        """Reads the rows that a first index without a step asks for, or else the whole tensor."""
        indices = index if isinstance(index, tuple) else (index,)
        rows = _rows(self._info, indices[0]) if indices else None
        if rows is None:
            return self._file._read(self._shard, self._info)[index]
        first, last, row_bytes = rows
        part = self._info._replace(
            shape=(last - first, *self._info.shape[1:]),
            start=self._info.start + first * row_bytes,
            stop=self._info.start + last * row_bytes,
        )
        tensor = self._file._read(self._shard, part)
        rest = (0 if isinstance(indices[0], int) else slice(None), *indices[1:])
        return tensor[rest]


def _rows(info: TensorInfo, index: Any) -> tuple[int, int, int] | None:
    """First row, row behind the last, and bytes of a row; None where rows cannot be read alone."""
    if not info.shape or not info.nbytes or info.nbytes % info.shape[0]:
        return None
    count = info.shape[0]
    if len(info.shape) == 1 and BITS[info.dtype] % 8:
        return None  # A row is half a byte.
    if type(index) is int and -count <= index < count:
        return index % count, index % count + 1, info.nbytes // count
    if isinstance(index, slice) and index.step in (None, 1):
        first, last, _ = index.indices(count)
        return first, max(first, last), info.nbytes // count
    return None

"""A model directory whose headers were read and agree: which tensor lies where.

Layer: models, driver of `names` over a `Source`. Opening reads names, the index and the headers
(several at a time), never a payload byte; whatever is wrong is a SafetensorsError before one is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from racer.models.names import (
    ExtraShards,
    ShardNames,
    find_index,
    read_index_untrusted,
    with_index,
    without_index,
)
from racer.models.source import Source, SourceFile
from racer.safetensors.errors import SafetensorsError, quoted
from racer.safetensors.header import (
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    Header,
    TensorInfo,
    header_stop_untrusted,
    parse_header,
)
from racer.workers import WorkerGroup

_HEADERS_AT_ONCE = 8
_CHOOSING = -1  # Comes before the first header.

_log = logging.getLogger("racer.models")


@dataclass(frozen=True)
class Shard:
    """A file of weights and those of its tensors that count, in the order of their bytes."""

    file: SourceFile
    metadata: Mapping[str, str]
    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class ModelDirectory:
    """The weights under `location`: each tensor in one shard, shards in natural order.

    `index` is the index that decided, if any; `left_out` are files that a rule left unread,
    `unmapped` tensors that lie in the shards but that the index does not name.
    """

    location: str
    shards: tuple[Shard, ...]
    index: str | None = None
    left_out: tuple[str, ...] = ()
    unmapped: tuple[str, ...] = ()

    @classmethod
    def open(
        cls, source: Source, *, only: str | None = None, extra_shards: ExtraShards = "refuse"
    ) -> ModelDirectory:
        """Reads and checks what lies at `source`; with `only`, the one file of that name.

        Raises SafetensorsError, and what the source raises. An interrupt cancels the source's
        reads and comes out when they have ended.
        """
        return _Opening(source, only, extra_shards).run()

    @classmethod
    def _of_files(
        cls, location: str, choice: _Choice, opened: Sequence[tuple[SourceFile, Header]]
    ) -> ModelDirectory:
        _check_one_shard_each(opened)
        index, weight_map = choice.index, choice.weight_map
        unmapped: list[str] = []
        if index is not None:
            _check_mapped(opened, weight_map)
            unmapped = [t.name for _, h in opened for t in h.tensors if t.name not in weight_map]
        shards = tuple(
            Shard(
                file,
                header.metadata,
                tuple(t for t in header.tensors if index is None or t.name in weight_map),
            )
            for file, header in opened
        )
        model = cls(location, shards, index, choice.shards.left_out, tuple(unmapped))
        model._tell()
        return model

    def _tell(self) -> None:
        if self.left_out:
            _log.warning(
                "%s: not read: %s (%s)",
                self.location,
                ", ".join(map(ascii, self.left_out)),
                f"not in {self.index}" if self.index else "the other files hold the same model",
            )
        if self.unmapped:
            _log.warning(
                "%s: %d tensors are in the shards but not in %s, and are not loaded; the first: %s",
                self.location,
                len(self.unmapped),
                self.index,
                quoted(self.unmapped[0]),
            )

    def tensors(self) -> Iterator[tuple[Shard, TensorInfo]]:
        """Every tensor in the order of loading."""
        for shard in self.shards:
            for tensor in shard.tensors:
                yield shard, tensor


@dataclass(frozen=True)
class _Choice:
    """The files to read, and what says so: an index with what it maps, or none."""

    shards: ShardNames
    index: str | None = None
    weight_map: Mapping[str, str] = field(default_factory=dict)


def _choose(source: Source, only: str | None, extra_shards: ExtraShards) -> _Choice:
    if only is not None:
        return _Choice(ShardNames((only,)))
    names = source.names()
    index = find_index(names)
    if index is None:
        return _Choice(_located(source.location, lambda: without_index(names)))
    weight_map = _read_index(source, index)
    shards = _located(source.location, lambda: with_index(names, weight_map, extra_shards))
    return _Choice(shards, index, weight_map)


def _read_index(source: Source, name: str) -> dict[str, str]:
    found = source.read_whole(name, HEADER_BYTES_MAX)
    if found is None:
        raise SafetensorsError(
            "the index is listed, and cannot be found", file=f"{source.location}/{name}"
        )
    file, text = found
    if text is None:
        raise SafetensorsError(
            f"the index has {file.size:,} bytes, the limit is {HEADER_BYTES_MAX:,}", file=file.url
        )
    try:
        return read_index_untrusted(text)
    except SafetensorsError as error:
        error.file = file.url
        raise


class _Opening:
    """Opens a model in threads of its own: one chooses the files and reads their headers; as soon
    as that has something to wait for, others help. Headers come in the order of the names.

    What another reader of the node shares is read faster by one thread than by several, which
    would wait for each other at the interpreter's lock and for the same daemon.
    """

    def __init__(self, source: Source, only: str | None, extra_shards: ExtraShards) -> None:
        self._source = source
        self._only = only
        self._extra_shards: ExtraShards = extra_shards
        self._workers = WorkerGroup(
            "racer-model", _HEADERS_AT_ONCE, self._work, source.cancel, one_first=True
        )
        self._choice: _Choice | None = None
        self._names: Sequence[str] = ()
        self._lock = threading.Lock()
        self._following = 0
        self._opened: dict[int, tuple[SourceFile, Header]] = {}
        self._errors: dict[int, BaseException] = {}

    def run(self) -> ModelDirectory:
        try:
            self._workers.start()
            self._workers.wait()
        finally:
            self._workers.end()
        if self._errors:
            # Names are taken in order: of several faults the same one is told each time.
            raise self._errors[min(self._errors)]
        assert self._choice is not None, "choosing ends with a choice or an error"
        opened = [self._opened[index] for index in range(len(self._names))]
        return ModelDirectory._of_files(self._source.location, self._choice, opened)

    def _work(self) -> None:
        index: int | None = _CHOOSING
        try:
            if self._choice is None:  # The first thread; there is no other one before it is done.
                self._choice = _choose(self._source, self._only, self._extra_shards)
                self._names = self._choice.shards.names
            while (index := self._next()) is not None:
                self._opened[index] = self._read(self._names[index], self._choice.weight_map)
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            assert index is not None
            self._errors[index] = error

    def _next(self) -> int | None:
        with self._lock:
            if self._errors or self._following == len(self._names):
                return None
            self._following += 1
            return self._following - 1

    def _read(self, name: str, weight_map: Mapping[str, str]) -> tuple[SourceFile, Header]:
        file = self._source.find(name)
        if file is None or not self._source.is_at_hand(file):
            self._workers.start_rest(len(self._names))
        if file is None:
            mapped = sum(held == name for held in weight_map.values())
            raise SafetensorsError(
                f"the index maps {mapped} tensors to it, and it is not there"
                if mapped
                else "there is no such file",
                file=f"{self._source.location}/{name}",
                hint="upload the missing shard" if mapped else "",
            )
        return file, read_header(self._source, file)


def read_header(source: Source, file: SourceFile) -> Header:
    """The checked header of one file: its length first, then exactly the header."""
    length = source.read(file, 0, min(LENGTH_BYTES, file.size)) if file.size else b""
    stop = header_stop_untrusted(length, file.size, file=file.url)
    rest = source.read(file, LENGTH_BYTES, stop) if stop > LENGTH_BYTES else b""
    return parse_header(length + rest, file.size, file=file.url)


def _check_one_shard_each(opened: Sequence[tuple[SourceFile, Header]]) -> None:
    seen: dict[str, SourceFile] = {}
    for file, header in opened:
        for tensor in header.tensors:
            other = seen.setdefault(tensor.name, file)
            if other is not file:
                raise SafetensorsError(
                    f"is in {quoted(other.name)} too",
                    file=file.url,
                    tensor=tensor.name,
                    hint="a model has one source for each tensor",
                )


def _check_mapped(
    opened: Sequence[tuple[SourceFile, Header]], weight_map: Mapping[str, str]
) -> None:
    held = {tensor.name: file for file, header in opened for tensor in header.tensors}
    files = {file.name: file for file, _ in opened}
    for name, shard in weight_map.items():
        holder = held.get(name)
        if holder is None or holder.name != shard:
            where = "no shard has it" if holder is None else f"{quoted(holder.name)} has it"
            raise SafetensorsError(
                f"the index maps it here, but {where}", file=files[shard].url, tensor=name
            )


def _located(location: str, choose: Callable[[], ShardNames]) -> ShardNames:
    try:
        return choose()
    except SafetensorsError as error:
        error.file = location if error.file is None else f"{location}/{error.file}"
        raise

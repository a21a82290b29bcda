"""What is read, in which order, and which bytes go to which tensor.

Layer: loading, pure. The bytes of the wanted tensors are cut into chunks on a grid of the file, so
that chunks end where pages end: no page is asked for twice, and only the first and last chunk of a
run of tensors may be shorter. What nobody wants is not read, but for short gaps. Chunks and tensors
come in the order of the files and of the bytes in them; a tensor is complete with the last chunk
that holds a byte of it, and an empty one with the tensor before it, without I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from racer.models.source import SourceFile
from racer.safetensors.header import TensorInfo

CHUNK_BYTES_MIN: Final = 64 << 10
# Reading through a gap of this size costs less than asking twice.
GAP_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    file: SourceFile
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes at `chunk_offset` of a chunk go to `tensor_offset` of tensor `tensor`."""

    tensor: int
    tensor_offset: int
    chunk_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """[start, stop) of a file; nothing is read where they are equal.

    `completes` are the tensors that have all their bytes once all chunks up to this one are there.
    """

    file: SourceFile
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    completes: range

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Tensors are numbered in the order in which they are delivered."""

    tensors: tuple[PlannedTensor, ...]
    chunks: tuple[Chunk, ...]

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.info.nbytes for tensor in self.tensors)

    @property
    def read_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


def chunk_grid(chunk_bytes: int, page_bytes: int) -> int:
    """The distance of chunk borders: as many whole pages as fit, or a page halved until it fits."""
    if chunk_bytes >= page_bytes:
        return chunk_bytes // page_bytes * page_bytes
    grid = page_bytes
    while grid > chunk_bytes:
        grid //= 2
    return grid


def plan_load(
    files: Sequence[tuple[SourceFile, Sequence[TensorInfo]]],
    *,
    grid: int,
    gap_bytes: int = GAP_BYTES,
) -> LoadPlan:
    """Plans the tensors of each file, which are in the order of their bytes and do not overlap."""
    tensors: list[PlannedTensor] = []
    chunks: list[Chunk] = []
    for file, infos in files:
        chunks += _plan_file(file, infos, len(tensors), grid, gap_bytes)
        tensors += [PlannedTensor(file, info) for info in infos]
    return LoadPlan(tuple(tensors), tuple(chunks))


def _plan_file(
    file: SourceFile, infos: Sequence[TensorInfo], first: int, grid: int, gap_bytes: int
) -> Iterator[Chunk]:
    """The chunks of one file, whose first tensor has the number `first`."""
    current = delivered = 0  # Of `infos`: the first not wholly read, the first not delivered.
    ranges = [cut for run in _runs(infos, gap_bytes) for cut in _cut(*run, grid)]
    if infos and not ranges:
        ranges = [(infos[0].start, infos[0].start)]
    for number, (start, stop) in enumerate(ranges):
        pieces: list[Piece] = []
        while current < len(infos) and infos[current].start < stop:
            info = infos[current]
            begin, end = max(info.start, start), min(info.stop, stop)
            if begin < end:
                pieces.append(
                    Piece(first + current, begin - info.start, begin - start, end - begin)
                )
            if info.stop > stop:
                break
            current += 1
        while current < len(infos) and infos[current].nbytes == 0 and infos[current].start <= stop:
            current += 1
        done = len(infos) if number == len(ranges) - 1 else current
        yield Chunk(file, start, stop, tuple(pieces), range(first + delivered, first + done))
        delivered = done


def _runs(infos: Sequence[TensorInfo], gap_bytes: int) -> Iterator[tuple[int, int]]:
    """The ranges that the tensors cover, those with short gaps between them as one."""
    run: tuple[int, int] | None = None
    for info in infos:
        if not info.nbytes:
            continue
        if run is not None and info.start - run[1] <= gap_bytes:
            run = (run[0], info.stop)
            continue
        if run is not None:
            yield run
        run = (info.start, info.stop)
    if run is not None:
        yield run


def _cut(start: int, stop: int, grid: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = min(stop, (start // grid + 1) * grid)
        yield start, end
        start = end

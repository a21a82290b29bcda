"""The plan of a load: which bytes are read in which chunks, and where they go."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racer.loading.plan import Chunk, LoadPlan, chunk_grid, plan_load
from racer.models import SourceFile
from racer.safetensors import TensorInfo

KIB = 1 << 10
MIB = 1 << 20


def file_of(sizes: Sequence[int], *, start: int = 100, name: str = "f") -> list[TensorInfo]:
    infos = []
    for number, size in enumerate(sizes):
        infos.append(TensorInfo(f"{name}{number}", "U8", (size,), start, start + size))
        start += size
    return infos


def source_file(name: str) -> SourceFile:
    return SourceFile(name, name, 1 << 40, "")


def plan_one(infos: Sequence[TensorInfo], grid: int, gap: int = 0) -> LoadPlan:
    return plan_load([(source_file("f"), infos)], grid=grid, gap_bytes=gap)


@pytest.mark.parametrize(
    ("chunk_bytes", "page_bytes", "grid"),
    [
        (32 * MIB, 16 * MIB, 32 * MIB),
        (47 * MIB, 16 * MIB, 32 * MIB),
        (16 * MIB, 16 * MIB, 16 * MIB),
        (16 * MIB - 1, 16 * MIB, 8 * MIB),
        (64 * KIB, 16 * MIB, 64 * KIB),
        (64 * KIB, 64 * KIB, 64 * KIB),
    ],
)
def test_chunk_borders_fall_on_pages(chunk_bytes: int, page_bytes: int, grid: int) -> None:
    """R35: whole pages where they fit; a page is else cut evenly, so that its end is a border."""
    assert chunk_grid(chunk_bytes, page_bytes) == grid
    assert grid % page_bytes == 0 or page_bytes % grid == 0


def test_tensors_across_chunks() -> None:
    """R35: only the first and the last chunk end off the grid."""
    plan = plan_one(file_of([150, 1000, 30]), grid=500)
    assert [(c.start, c.stop) for c in plan.chunks] == [(100, 500), (500, 1000), (1000, 1280)]
    assert [list(c.completes) for c in plan.chunks] == [[0], [], [1, 2]]
    assert plan.tensor_bytes == plan.read_bytes == 1180


def test_what_nobody_wants_is_not_read() -> None:
    """R35: gaps are skipped, unless they are too short to be worth a second read."""
    infos = file_of([100, 1000, 100, 10, 100])
    wanted = [infos[0], infos[2], infos[4]]
    plan = plan_one(wanted, grid=10_000, gap=10)
    assert [(c.start, c.stop) for c in plan.chunks] == [(100, 200), (1200, 1410)]
    assert plan.read_bytes == 310 and plan.tensor_bytes == 300


@pytest.mark.parametrize("sizes", [[0], [0, 0, 0], []])
def test_nothing_to_read(sizes: list[int]) -> None:
    """L1: empty tensors are delivered by a chunk that reads nothing."""
    plan = plan_one(file_of(sizes), grid=100)
    assert [(c.nbytes, list(c.completes)) for c in plan.chunks] == (
        [(0, list(range(len(sizes))))] if sizes else []
    )


def test_files_follow_each_other() -> None:
    """R35: no chunk spans two files; numbers go on."""
    files = [(source_file(name), file_of([10, 0, 10], name=name)) for name in "abc"]
    plan = plan_load(files, grid=1000)
    assert [c.file.name for c in plan.chunks] == ["a", "b", "c"]
    assert [list(c.completes) for c in plan.chunks] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [t.info.name for t in plan.tensors] == [f"{n}{i}" for n in "abc" for i in range(3)]


sizes = st.lists(st.integers(0, 40) | st.just(0) | st.integers(50, 400), max_size=20)


@given(sizes, st.data(), st.integers(1, 200), st.integers(0, 60), st.integers(8, 300))
def test_every_byte_goes_where_it_belongs(
    sizes: list[int], data: st.DataObject, grid: int, gap: int, start: int
) -> None:
    """R35, L1, L14: for any layout, choice, grid and gap, each tensor gets its own bytes once."""
    infos = [info for info in file_of(sizes, start=start) if data.draw(st.booleans())]
    plan = plan_one(infos, grid, gap)
    content = {info: range(info.start, info.stop) for info in infos}
    filled: list[dict[int, int]] = [{} for _ in infos]
    delivered: list[int] = []
    for chunk in plan.chunks:
        for piece in chunk.pieces:
            for offset in range(piece.length):
                place = piece.tensor_offset + offset
                assert place not in filled[piece.tensor]
                filled[piece.tensor][place] = chunk.start + piece.chunk_offset + offset
        for number in chunk.completes:
            assert len(filled[number]) == infos[number].nbytes
            delivered.append(number)
        last = chunk is plan.chunks[-1]
        assert last or not _could_give(chunk, infos, filled, len(delivered))
    assert delivered == list(range(len(infos)))
    for number, info in enumerate(infos):
        assert [filled[number][place] for place in range(info.nbytes)] == list(content[info])
    _check_chunks(plan.chunks, infos, grid, gap)


def _could_give(
    chunk: Chunk, infos: list[TensorInfo], filled: list[dict[int, int]], following: int
) -> bool:
    """Whether a tensor was held back that has bytes, all of them there."""
    if following == len(infos) or not infos[following].nbytes:
        return False
    return len(filled[following]) == infos[following].nbytes


def _check_chunks(
    chunks: Sequence[Chunk], infos: Sequence[TensorInfo], grid: int, gap: int
) -> None:
    ends = {info.stop for info in infos}
    wanted = {byte for info in infos for byte in range(info.start, info.stop)}
    read: list[int] = []
    for chunk in chunks:
        assert chunk.nbytes <= grid
        assert not chunk.nbytes or chunk.stop % grid == 0 or chunk.stop in ends
        read += range(chunk.start, chunk.stop)
    assert read == sorted(set(read))
    assert wanted <= set(read)
    unwanted, run = sorted(set(read) - wanted), 0
    for previous, byte in zip([None, *unwanted], unwanted, strict=False):
        run = run + 1 if previous is not None and byte == previous + 1 else 1
        assert run <= gap

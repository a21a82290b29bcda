"""Loads that share memory: the same bytes, zero copies, and a way on when memory is refused."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from racer.errors import Corrupt, MemoryUnavailable, ShareRefused
from racer.loading import TensorStream, load
from racer.loading.frameworks import NumpyFramework
from racer.loading.plan import Chunk, LoadPlan
from racer.loading.sharing import Sharing, share_of
from racer.models import SourceFile
from racer.window import windows_count
from tests.support.interrupts import run_interrupted
from tests.support.memory_source import MemoryShare, MemorySource
from tests.support.safetensors_bytes import model_file

MIB = 1 << 20

# Large tensors that begin and end within pages and cross pieces, small ones, empty ones.
LAYOUT: Mapping[str, tuple[str, list[int]]] = {
    "a": ("U8", [3, MIB + 12_344]),
    "b": ("F32", [100]),
    "c": ("F32", [0, 4]),
    "d": ("F64", [MIB]),
    "e": ("U8", [2 * MIB + 1]),
    "f": ("F32", [MIB]),  # Behind a tensor of odd length: askew in the file.
}


def model() -> tuple[dict[str, bytes], dict[str, bytes]]:
    first, held = model_file(LAYOUT, seed=1)
    second, more = model_file({f"z{name}": what for name, what in LAYOUT.items()}, seed=2)
    return {"m-1.safetensors": first, "m-2.safetensors": second}, {**held, **more}


def stream_of(source: MemorySource, **options: Any) -> TensorStream:
    return TensorStream(source, **{"framework": "numpy", "chunk_bytes": MIB, **options})


def refusing(code: str, *, first: int = 0, last: int = 1 << 30, seed: int | None = None) -> Any:
    """Refuses the requests from number `first` to `last`, or some of them by chance."""
    count = 0
    chance = random.Random(seed)

    def on_share(file: SourceFile, at: int) -> None:
        nonlocal count
        count += 1
        refused = first < count <= last if seed is None else chance.random() < 0.5
        if refused:
            raise ShareRefused("no room", code=code)

    return on_share


@pytest.mark.parametrize("share_bytes", [MIB, 4 * MIB])
@pytest.mark.parametrize("chunk_bytes", [256 << 10, MIB, 8 * MIB])
def test_the_same_tensors_as_without(share_bytes: int, chunk_bytes: int) -> None:
    """R35: however chunks and shared pieces cut the files."""
    files, contents = model()
    source = MemorySource(files, share_bytes=share_bytes)
    stream = stream_of(source, chunk_bytes=chunk_bytes)
    loaded = dict(stream)
    assert {name: array.tobytes() for name, array in loaded.items()} == contents
    assert list(loaded) == sorted(contents)
    assert source.bulk_reads == []
    assert source.landing_bytes == []
    assert stream.report.read_bytes == stream.plan.read_bytes  # type: ignore[union-attr]
    assert stream.report.rungs == {"shared": stream.report.read_bytes}


@pytest.mark.parametrize("seed", range(8))
def test_pieces_that_are_refused_are_read(seed: int) -> None:
    """R4: any mixture of shared and own memory, within one tensor too, holds the same bytes."""
    files, contents = model()
    source = MemorySource(files, share_bytes=2 * MIB, on_share=refusing("share_full", seed=seed))
    stream = stream_of(source, in_flight=1 + seed % 4)
    assert {name: array.tobytes() for name, array in stream} == contents
    assert set(stream.report.rungs) == {"shared", "memory"}
    assert stream.report.read_bytes == stream.plan.read_bytes  # type: ignore[union-attr]


def test_a_source_that_shares_nothing_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    """R4: one step down, and one line that says why."""
    files, contents = model()
    source = MemorySource(files, share_bytes=MIB, on_share=refusing("share_off"))
    with caplog.at_level(logging.WARNING, "racer.load"):
        loaded = dict(stream_of(source, in_flight=1))
    assert {name: array.tobytes() for name, array in loaded.items()} == contents
    assert source.shared == []
    assert len(caplog.records) == 1
    assert "share_off" in caplog.text or "no room" in caplog.text


def test_no_room_is_said_once_and_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    files, contents = model()
    source = MemorySource(files, share_bytes=MIB, on_share=refusing("share_full", last=3))
    with caplog.at_level(logging.WARNING, "racer.load"):
        loaded = dict(stream_of(source))
    assert {name: array.tobytes() for name, array in loaded.items()} == contents
    assert len(caplog.records) == 1
    assert source.shared, "there was room later"


def test_sharing_can_be_turned_off() -> None:
    files, contents = model()
    source = MemorySource(files, share_bytes=MIB)
    loaded = dict(stream_of(source, share="off"))
    assert {name: array.tobytes() for name, array in loaded.items()} == contents
    assert source.shared == []
    with pytest.raises(ValueError, match="'auto' or 'off'"):
        load("racer://c/b/m", framework="numpy", share="on")  # type: ignore[arg-type]


def test_errors_of_the_daemon_are_not_taken_for_refusals() -> None:
    def rotten(file: SourceFile, at: int) -> None:
        raise Corrupt("rotten")

    files, _ = model()
    source = MemorySource(files, share_bytes=MIB, on_share=rotten)
    with pytest.raises(Corrupt):
        list(stream_of(source))


def test_large_tensors_are_mapped_and_small_ones_copied() -> None:
    """Zero-copy where it pays: what is mapped shows in the process's map, and nowhere else."""
    files, _ = model()
    stream = stream_of(MemorySource(files, share_bytes=MIB))
    loaded = dict(stream)
    assert stream.plan is not None
    where = {tensor.info.name: tensor.info.start for tensor in stream.plan.tensors}
    for name, array in loaded.items():
        straight = where[name] % array.itemsize == 0
        assert lies_in_shared_memory(array) == (array.nbytes >= MIB and straight), name
    assert lies_in_shared_memory(loaded["a"])


def lies_in_shared_memory(array: np.ndarray) -> bool:
    if not array.nbytes:
        return False
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, rest = line.partition(" ")
        start, stop = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < stop:
            return "memfd:share" in rest
    raise AssertionError("an array outside of the process's memory")


def test_what_is_at_hand_of_a_file_is_mapped_together() -> None:
    """R35: one mapping for a run of a file, over its pieces, and so for tensors that lie in two.

    Small tensors are copied, and nothing is asked for twice.
    """
    layout = {f"t{n}": ("U8", [2 * MIB + 4096]) for n in range(8)} | {"small": ("F32", [1000])}
    files, contents = {}, {}
    for name in ("m-1.safetensors", "m-2.safetensors"):
        files[name], held = model_file({f"{name}.{t}": kind for t, kind in layout.items()})
        contents |= held
    source = MemorySource(files, share_bytes=3 * MIB, at_hand=True)
    gc.collect()
    before = windows_count()
    with stream_of(source, chunk_bytes=3 * MIB) as stream:
        loaded = dict(stream)
    assert {name: array.tobytes() for name, array in loaded.items()} == contents
    assert windows_count() - before == len(files)
    assert len(source.shared) == len(set(source.shared)) == 2 * 6
    for name, array in loaded.items():
        assert lies_in_shared_memory(array) == (array.nbytes >= MIB), name


@pytest.mark.parametrize(
    ("run_bytes", "skipped"), [(4 * MIB, ()), (64 * MIB, ("t3", "t4", "t5", "t6"))]
)
def test_a_run_at_hand_ends_where_it_is_too_long_or_has_a_hole(
    monkeypatch: pytest.MonkeyPatch, run_bytes: int, skipped: tuple[str, ...]
) -> None:
    """R35: what is not at hand is waited for; each byte is right on both sides."""
    monkeypatch.setattr("racer.loading.pipeline._RUN_BYTES", run_bytes)
    content, contents = model_file({f"t{n}": ("U8", [MIB + 4096]) for n in range(14)})
    runs: list[list[int]] = []
    real = NumpyFramework.map_whole

    def mapping(self: Any, infos: Any, shares: Any) -> Any:
        runs.append([bound for share in shares for bound in (share.start, share.stop)])
        return real(self, infos, shares)

    monkeypatch.setattr(NumpyFramework, "map_whole", mapping)

    class Holed(MemorySource):
        def shared_at_hand(self, file: SourceFile, at: int) -> MemoryShare | None:
            return None if at // (2 * MIB) == 5 else self.share(file, at)

    source = Holed({"m.safetensors": content}, share_bytes=2 * MIB)
    loaded = dict(stream_of(source, chunk_bytes=2 * MIB, filter=lambda name: name not in skipped))
    assert list(loaded) == [name for name in contents if name not in skipped]
    assert all(array.tobytes() == contents[name] for name, array in loaded.items())
    assert len(source.shared) == len(set(source.shared)), "nothing is asked for twice"
    together = [run for run in runs if len(run) > 2]
    assert together, "several pieces at a time"
    for run in together:
        assert run[-1] - run[0] <= run_bytes
        assert run[1:-1:2] == run[2::2], "pieces adjoin"


def test_files_of_which_only_empty_tensors_are_wanted() -> None:
    """R37: there is nothing to map, at hand or not."""
    content, _ = model_file({"a": ("U8", [2 * MIB]), "e": ("F32", [0, 4])})
    for at_hand in (True, False):
        source = MemorySource({"m.safetensors": content}, share_bytes=MIB, at_hand=at_hand)
        loaded = dict(stream_of(source, filter=lambda name: name == "e"))
        assert {name: array.shape for name, array in loaded.items()} == {"e": (0, 4)}


def test_what_is_copied_from_memory_at_hand_is_copied_chunk_by_chunk() -> None:
    """R36: tensors that are ready early are bounded by the staging memory, at hand or not."""
    content, _ = model_file({f"t{n}": ("U8", [256 << 10]) for n in range(60)})
    source = MemorySource({"m.safetensors": content}, share_bytes=8 * MIB, at_hand=True)
    with stream_of(source, chunk_bytes=256 << 10, in_flight=1) as stream:
        next(stream)
        assert stream._pipeline is not None
        assert len(stream._pipeline._building) <= 2


def test_tensors_are_written_to_like_any_others() -> None:
    """A read-only mapping would end the process here."""
    files, contents = model()
    loaded = dict(stream_of(MemorySource(files, share_bytes=MIB)))
    loaded["a"][0] = 0
    loaded["e"] += 1
    assert not loaded["a"][0].any()
    assert loaded["a"][1:].tobytes() == contents["a"][MIB + 12_344 :]


def test_tensors_may_be_kept_after_everything_is_closed() -> None:
    """R35, L13: their memory is theirs, whatever becomes of the stream and the source."""
    files, contents = model()
    stream = stream_of(MemorySource(files, share_bytes=MIB))
    kept = [array for name, array in stream if name == "a"]
    stream.close()
    del stream
    gc.collect()
    assert kept[0].tobytes() == contents["a"]


def test_dropped_tensors_leave_nothing_mapped() -> None:
    """R36: the autouse fixture sees mappings and descriptors; here while the stream runs."""
    files, _ = model()
    with stream_of(MemorySource(files, share_bytes=MIB), in_flight=1) as stream:
        for name, _ in stream:
            if name == "zf":
                break
        maps = Path("/proc/self/maps").read_text()
        assert maps.count("memfd:share") <= 4, "what was dropped before is still mapped"


def test_closing_early_ends_everything() -> None:
    files, _ = model()
    source = MemorySource(files, share_bytes=MIB)
    stream = stream_of(source)
    next(stream)
    stream.close()
    assert source.events[-1] == "source closed"


def test_a_filter_asks_for_no_piece_that_nobody_wants() -> None:
    files, contents = model()
    source = MemorySource(files, share_bytes=MIB)
    loaded = dict(stream_of(source, filter=lambda name: name == "zd"))
    assert {name: array.tobytes() for name, array in loaded.items()} == {"zd": contents["zd"]}
    assert {name for name, _ in source.shared} == {"m-2.safetensors"}
    assert len(source.shared) <= 10


@pytest.mark.parametrize(
    ("rungs", "wanted", "expected"),
    [
        ({"memory": 10}, 10, {"memory": 10}),
        ({"memory": 10}, 4, {"memory": 4}),
        ({"memory": 2, "disk": 1}, 2, {"memory": 2, "disk": 0}),
        ({}, 5, {}),
    ],
)
def test_rungs_of_a_part(rungs: dict[str, int], wanted: int, expected: dict[str, int]) -> None:
    assert share_of(rungs, wanted) == expected


def test_tensors_of_one_piece_share_a_mapping_and_no_storage() -> None:
    """One mapping for what lies in one piece; whoever saves or copies a tensor gets it alone."""
    content, contents = model_file({name: ("U8", [MIB]) for name in "abcd"}, seed=3)
    source = MemorySource({"m.safetensors": content}, share_bytes=8 * MIB)
    loaded = dict(stream_of(source, chunk_bytes=8 * MIB))
    assert {name: array.tobytes() for name, array in loaded.items()} == contents
    assert Path("/proc/self/maps").read_text().count("memfd:share") == 1
    loaded["b"][:] = 0
    assert loaded["a"].tobytes() + loaded["c"].tobytes() == contents["a"] + contents["c"]
    del loaded["a"], loaded["c"], loaded["d"]
    gc.collect()
    assert not loaded["b"].any()
    del loaded
    gc.collect()
    assert "memfd:share" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_each_piece_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, in_flight: int, at_hand: bool
) -> None:
    """However many chunks have a part of it, and however many threads are at it."""
    monkeypatch.setattr("racer.loading.pipeline._RUN_BYTES", 4 * MIB)
    files, contents = model()
    source = MemorySource(files, share_bytes=4 * MIB, at_hand=at_hand)
    loaded = {}
    for name, array in stream_of(source, chunk_bytes=256 << 10, in_flight=in_flight):
        loaded[name] = array.tobytes()
        assert source.open_shares <= in_flight + 1, "a piece is closed with its last chunk"
    assert loaded == contents
    assert len(source.shared) == len(set(source.shared))
    assert not source.open_shares


@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize("cut_bytes", [MIB, 3 * MIB, 8 * MIB])
def test_pieces_that_are_cut_otherwise_than_was_said(at_hand: bool, cut_bytes: int) -> None:
    """Another daemon may answer by now: its bytes are right, and nothing of it stays open."""
    files, contents = model()
    source = MemorySource(files, share_bytes=4 * MIB, at_hand=at_hand, cut_bytes=cut_bytes)
    stream = stream_of(source, chunk_bytes=2 * MIB)
    assert {name: array.tobytes() for name, array in stream} == contents
    assert not source.open_shares


def test_what_one_chunk_uses_is_not_closed_by_another() -> None:
    """L41: a descriptor that is closed under a reader may be another file's in the next moment. Two
    steps of one chunk in one piece, because it is cut otherwise, are one chunk of it all the same.
    """
    files, _ = model()
    source = MemorySource(files, share_bytes=4 * MIB, cut_bytes=3 * MIB)
    file = source.find("m-1.safetensors")
    assert file is not None
    chunks = (
        Chunk(file, 0, 2 * MIB, (), range(0)),
        Chunk(file, 2 * MIB, 4 * MIB, (), range(0)),
        Chunk(file, 4 * MIB, 5 * MIB, (), range(0)),
    )
    sharing = Sharing(source, "auto")
    sharing.expect(LoadPlan((), chunks))
    held = sharing.piece(file, 0)
    assert held is not None and held.stop == 3 * MIB
    for at, stop in ((2 * MIB, 3 * MIB), (3 * MIB, 4 * MIB)):
        share = sharing.piece(file, at)
        assert share is not None
        sharing.put_back(file, at, share)
        sharing.through(chunks[1], at, stop)
        assert held.fileno() >= 0
    assert source.open_shares == 1
    sharing.put_back(file, 0, held)
    assert source.open_shares == 1  # Chunk 0 may come for it again.
    assert sharing.piece(file, 0) is held
    sharing.through(chunks[0], 0, 2 * MIB)  # It says so before it puts the piece back.
    assert held.fileno() >= 0
    sharing.put_back(file, 0, held)
    assert not source.open_shares


@pytest.mark.parametrize("at_hand", [True, False])
def test_what_is_kept_for_chunks_to_come_is_closed_with_the_stream(
    monkeypatch: pytest.MonkeyPatch, at_hand: bool
) -> None:
    """At once, and not when the garbage is collected."""
    monkeypatch.setattr("racer.loading.pipeline._RUN_BYTES", 256 << 10)
    files, _ = model()
    source = MemorySource(files, share_bytes=8 * MIB, at_hand=at_hand)
    stream = stream_of(source, chunk_bytes=256 << 10, in_flight=1)
    next(stream)
    assert source.open_shares == 1
    stream.close()
    assert not source.open_shares


INTERRUPTED = """
import gc, os
from pathlib import Path
from racer.loading import TensorStream
from racer.window import windows_count
from tests.support.interrupts import count, interrupted, start
from tests.support.memory_source import MemorySource
from tests.support.safetensors_bytes import model_file

MIB = 1 << 20
content, contents = model_file({f"t{n}": ("U8", [MIB + 4096 * n]) for n in range(12)})

def one_round():
    source = MemorySource({"m.safetensors": content}, share_bytes=4 * MIB, at_hand=True)
    with TensorStream(source, framework="numpy", chunk_bytes=2 * MIB) as stream:
        for name, array in stream:
            assert array[-9:].tobytes() == contents[name][-9:]

def left_behind():
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:share"), windows_count()

start(spared="memory_source")
one_round()
before = left_behind()
assert before[1:] == (0, 0)
for number in range(150):
    interrupted(one_round, number, 0.03)
    assert left_behind() == before, (number, left_behind(), before)
print(count())
"""


def test_interrupts_while_the_consumer_maps() -> None:
    """R36: wherever Ctrl-C hits, again and again, no descriptor, mapping or window is left, and no
    lock is held for ever: the consumer itself maps what is at hand."""
    run_interrupted(INTERRUPTED)


def test_descriptors_are_closed_as_they_are_mapped() -> None:
    files, _ = model()
    source = MemorySource(files, share_bytes=256 << 10)
    before = len(os.listdir("/proc/self/fd"))
    with stream_of(source, in_flight=1) as stream:
        loaded = dict(stream)
        assert len(loaded) == len(LAYOUT) * 2
        assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_more_tensors_than_windows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R4: what finds no window gets memory of its own, and that is said once."""
    monkeypatch.setattr("racer.window.WINDOWS_MAX", 2)
    monkeypatch.setattr("racer.loading.frameworks._said", threading.Event())
    gc.collect()
    files, contents = model()
    with caplog.at_level(logging.WARNING, "racer.load"):
        loaded = dict(stream_of(MemorySource(files, share_bytes=MIB)))
    assert {name: array.tobytes() for name, array in loaded.items()} == contents
    assert sum("copying" in record.message for record in caplog.records) == 1


def test_a_process_without_descriptors_reads_into_memory_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(file: SourceFile, at: int) -> None:
        raise MemoryUnavailable("the descriptor of an answer could not be taken")

    files, contents = model()
    source = MemorySource(files, share_bytes=MIB, on_share=refuse)
    assert {name: array.tobytes() for name, array in stream_of(source)} == contents

"""`racer.load` over sources in memory and on disk: bytes, order, bounds and ends."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import racer
from racer.errors import ConnectionLost
from racer.loading import TensorStream
from racer.models import SourceFile
from racer.safetensors import SafetensorsError
from tests.support.interrupts import run_interrupted
from tests.support.memory_source import MemorySource
from tests.support.safetensors_bytes import model_file

KIB = 1 << 10
NUMPY = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


def big_model() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Three shards: tensors within, across and over many chunks of 64 KiB, and empty ones."""
    layouts: dict[str, Mapping[str, tuple[str, list[int]]]] = {
        "m-2.safetensors": {"b0": ("U8", [3, 100_000]), "b1": ("F32", [0, 7]), "b2": ("F64", [])},
        "m-10.safetensors": {"c0": ("BOOL", [1000]), "c1": ("I16", [70_000]), "c2": ("U8", [1])},
        "m-1.safetensors": {"a0": ("U64", [0]), "a1": ("U8", [2_000_000]), "a2": ("I8", [50, 2])},
    }
    files, contents = {}, {}
    for seed, (name, tensors) in enumerate(layouts.items()):
        files[name], held = model_file(tensors, seed=seed * 10)
        contents |= held
    return files, contents


ORDER = ["a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1", "c2"]


def stream_of(source: MemorySource, **options: Any) -> TensorStream:
    options = {"framework": "numpy", "chunk_bytes": 64 * KIB, **options}
    return TensorStream(source, **options)


def load_threads() -> list[threading.Thread]:
    """Threads of loads; those that only have to return from their last line get time for it."""
    for thread in threading.enumerate():
        if thread.name.startswith("racer-") and thread.name.endswith("-keeper"):
            thread.join(5)
    return [thread for thread in threading.enumerate() if thread.name.startswith("racer-")]


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """R36: whatever a test did, no thread is left."""
    yield
    gc.collect()
    assert load_threads() == []


# --- bytes and order --------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 4])
def test_every_tensor_in_order(in_flight: int) -> None:
    """R35, L1: natural order, each tensor with its bytes, however chunks cut it."""
    files, contents = big_model()
    for _ in range(3):
        source = MemorySource(files)
        loaded = list(stream_of(source, in_flight=in_flight))
        assert [name for name, _ in loaded] == ORDER
        assert {name: array.tobytes() for name, array in loaded} == contents
    assert {array.shape for name, array in loaded if name in ("a0", "b1", "b2")} == {
        (0,),
        (0, 7),
        (),
    }


@pytest.mark.parametrize("dtype", sorted(NUMPY))
def test_every_dtype_of_numpy(dtype: str) -> None:
    """L41: each dtype, in small memory and in mapped memory, scalar and empty."""
    shapes = {"small": (dtype, [3, 2]), "large": (dtype, [1 << 20]), "one": (dtype, [])}
    content, contents = model_file({**shapes, "none": (dtype, [2, 0])})
    loaded = dict(stream_of(MemorySource({"m.safetensors": content})))
    assert {name: array.tobytes() for name, array in loaded.items()} == contents
    for name, array in loaded.items():
        assert array.dtype == np.dtype(NUMPY[dtype])
        assert list(array.shape) == {**shapes, "none": (dtype, [2, 0])}[name][1]
        assert array.flags.writeable and array.flags.c_contiguous


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E5M2FNUZ"])
def test_dtypes_of_ml_dtypes(dtype: str) -> None:
    """L41: with ml_dtypes they are loaded; without, refused by name before a byte is read."""
    content, contents = model_file({"a": ("U8", [5]), "t": (dtype, [4])})
    source = MemorySource({"m.safetensors": content})
    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(SafetensorsError, match=dtype) as caught:
            list(stream_of(source))
        assert caught.value.unsupported and caught.value.tensor == "t"
        assert source.bulk_reads == []
    else:
        loaded = dict(stream_of(source))
        assert loaded["t"].tobytes() == contents["t"]
        assert loaded["t"].dtype.type.__module__ == ml_dtypes.__name__


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [
        ("F4", [2, 2], "F4"),
        ("U8", [1] * 65, "shape"),
        ("F64", [2**63 - 1, 0], "shape"),
        ("U8", [0, 2**64 - 1], "shape"),
    ],
)
def test_legal_but_not_in_numpy(dtype: str, shape: list[int], reason: str) -> None:
    """L41, R37: what numpy cannot hold is told as that, before a payload byte is read."""
    content, _ = model_file({"a": ("U8", [5]), "t": (dtype, shape)})
    source = MemorySource({"m.safetensors": content})
    with pytest.raises(SafetensorsError, match=reason) as caught:
        list(stream_of(source))
    assert caught.value.unsupported
    assert (caught.value.tensor, caught.value.file) == ("t", "memory/m.safetensors")
    assert source.bulk_reads == []


def test_unsupported_tensors_can_be_left_out() -> None:
    """L41: only what is wanted has to be loadable."""
    content, _ = model_file({"a": ("U8", [5]), "t": ("F4", [2])})
    source = MemorySource({"m.safetensors": content})
    assert [name for name, _ in stream_of(source, filter=lambda name: name == "a")] == ["a"]


def test_empty_tensors_cost_no_read() -> None:
    """L1: a model of empty tensors is delivered without I/O or memory."""
    content, _ = model_file({"x": ("F32", [0]), "y": ("U8", [3, 0, 2])})
    source = MemorySource({"m.safetensors": content})
    assert [(name, array.shape) for name, array in stream_of(source)] == [
        ("x", (0,)),
        ("y", (3, 0, 2)),
    ]
    assert source.bulk_reads == [] and source.landing_bytes == []


def test_tensors_are_kept_for_ever() -> None:
    """L13, L38: no tensor shares memory with another, with a landing or with what comes later."""
    layout = {f"t{n}": ("U8", [3 << 19 if n % 2 else 5_000]) for n in range(8)}
    content, contents = model_file(layout)
    kept: dict[str, Any] = {}
    for name, array in stream_of(MemorySource({"m.safetensors": content}), in_flight=2):
        for other in kept.values():
            assert not np.shares_memory(array, other)
        kept[name] = array
    assert {name: array.tobytes() for name, array in kept.items()} == contents
    kept["t3"][:] = 7
    assert {n: a.tobytes() for n, a in kept.items() if n != "t3"} == {
        n: c for n, c in contents.items() if n != "t3"
    }


def test_filter_reads_only_what_is_wanted() -> None:
    """R35: unwanted tensors are skipped in the reads, too."""
    content, contents = model_file({n: ("U8", [400 * KIB]) for n in ("a", "b", "c", "d")})
    source = MemorySource({"m.safetensors": content})
    loaded = dict(stream_of(source, filter=lambda name: name in ("a", "d")))
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        name: contents[name] for name in ("a", "d")
    }
    assert sum(stop - start for _, start, stop in source.bulk_reads) == 800 * KIB


def test_nothing_wanted() -> None:
    """R35: a filter may refuse everything."""
    files, _ = big_model()
    source = MemorySource(files)
    assert list(stream_of(source, filter=lambda name: False)) == []
    assert source.bulk_reads == []


# --- bounds -----------------------------------------------------------------------------------


def test_memory_is_bounded_by_staging() -> None:
    """L9, L27, R35: landings and what is read ahead do not grow with tensors or files."""
    content, _ = model_file({f"t{n}": ("U8", [100 * KIB]) for n in range(40)})
    source = MemorySource({"m.safetensors": content})
    stream = stream_of(source, in_flight=4)
    taken = 0
    for _ in stream:
        taken += 100 * KIB
        ahead = sum(stop - start for _, start, stop in list(source.bulk_reads)) - taken
        assert ahead <= 4 * 64 * KIB
    assert set(source.landing_bytes) == {64 * KIB}
    assert len(source.landing_bytes) <= 4
    assert source.reading_max <= 4


def test_four_reads_run_at_a_time() -> None:
    """R35: the reads wait for each other here, so that fewer in flight would never end."""
    meeting = threading.Barrier(4, timeout=30)
    content, contents = model_file({"t": ("U8", [6 * 64 * KIB])})
    starts: set[int] = set()

    def meet(file: SourceFile, start: int, stop: int) -> None:
        if start in starts:
            meeting.wait()

    source = MemorySource({"m.safetensors": content}, on_read=meet)
    stream = stream_of(source, in_flight=4)
    plan = stream.open()
    starts |= {chunk.start for chunk in plan.chunks[:4]}
    ((_, array),) = stream
    assert array.tobytes() == contents["t"]
    assert source.reading_max == 4


def test_a_slow_consumer_holds_the_reads() -> None:
    """L50, L9: without a consumer at most `in_flight` chunks are started."""
    content, _ = model_file({f"t{n}": ("U8", [64 * KIB]) for n in range(30)})
    started = threading.Semaphore(0)
    source = MemorySource(
        {"m.safetensors": content}, on_read=lambda file, start, stop: started.release()
    )
    with stream_of(source, in_flight=3) as stream:
        next(stream)
        for _ in range(3):
            assert started.acquire(timeout=30)
        assert not started.acquire(blocking=False)
        assert len(source.bulk_reads) == 3


def test_peak_memory_of_a_process(tmp_path: Path) -> None:
    """L9, L27, L54: a model of 96 MiB with one tensor of 48 MiB, loaded three times with 16 MiB of
    staging by a consumer that drops tensors: the peak stays near the largest tensor."""
    tensors = {"big": ("U8", [48 << 20])} | {f"t{n}": ("U8", [3 << 20]) for n in range(16)}
    content, _ = model_file(tensors)
    (tmp_path / "m.safetensors").write_bytes(content)
    program = """
import sys, numpy, racer
from pathlib import Path
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
list(racer.load(sys.argv[1], framework="numpy", staging_bytes=16 << 20, filter=lambda n: n == "t1"))
before = peak()
for _ in range(3):
    for name, tensor in racer.load(sys.argv[1], framework="numpy", staging_bytes=16 << 20):
        del tensor
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= (48 << 20) + (16 << 20) + (8 << 20)


# --- ends -------------------------------------------------------------------------------------


class Held:
    """Reads of chunk `first` and later wait until they are cancelled; tells when one waits."""

    def __init__(self, first: int) -> None:
        self.source: MemorySource | None = None
        self.waiting = threading.Event()
        self._first = first

    def __call__(self, file: SourceFile, start: int, stop: int) -> None:
        if start // (64 * KIB) >= self._first:
            assert self.source is not None
            self.waiting.set()
            assert self.source.cancelled.wait(30), "nobody cancelled the read"


def held_stream(first: int = 2) -> tuple[TensorStream, MemorySource, Held]:
    """A stream whose first tensor lies in the chunks 0 and 1, with four reads in flight."""
    content, _ = model_file({f"t{n}": ("U8", [64 * KIB]) for n in range(20)})
    held = Held(first)
    source = MemorySource({"m.safetensors": content}, on_read=held)
    held.source = source
    return stream_of(source, in_flight=4), source, held


def check_ended(source: MemorySource) -> None:
    """Reads were cancelled; landings and then the source were closed, with no read running."""
    assert load_threads() == []
    assert source.reading == 0
    landings = len(source.landing_bytes)
    assert source.events == ["cancel"] + ["landing closed"] * landings + ["source closed"]


def test_closing_early_cancels_reads() -> None:
    """R36: reads that would never end are cancelled, then landings, then the source are closed."""
    stream, source, held = held_stream()
    next(stream)
    assert held.waiting.wait(30)
    stream.close()
    check_ended(source)
    stream.close()
    assert list(stream) == []


def test_a_consumer_that_raises() -> None:
    """R36: leaving the with block by an exception ends everything before it is seen outside."""
    stream, source, held = held_stream()

    def consume() -> None:
        with stream:
            for _ in stream:
                assert held.waiting.wait(30)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    check_ended(source)


def test_a_stream_that_is_dropped() -> None:
    """R36: `break` without a with block is enough, once the stream is gone."""
    stream, source, held = held_stream()
    for _ in stream:
        assert held.waiting.wait(30)
        break
    del stream
    gc.collect()
    check_ended(source)


def test_a_destructor_that_an_interrupt_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """R36: Ctrl-C in a dropped stream's destructor, before its first step: its threads end."""
    stream, source, held = held_stream()
    next(stream)
    assert held.waiting.wait(30)
    monkeypatch.setattr(TensorStream, "__del__", lambda stream: None)
    del stream
    assert load_threads() == []
    assert source.reading == 0
    assert source.events == ["cancel"] + ["landing closed"] * len(source.landing_bytes)


def test_interrupt_while_waiting() -> None:
    """R36: Ctrl-C in the middle of a load ends it, and stays a KeyboardInterrupt."""
    stream, source, held = held_stream(first=0)

    def interrupt() -> None:
        held.waiting.wait(30)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    thread.join()
    check_ended(source)


INTERRUPTED = """
import threading
from racer.loading import TensorStream
from tests.support.interrupts import count, interrupted, start
from tests.support.memory_source import MemorySource
from tests.support.safetensors_bytes import model_file

content, contents = model_file({f"t{n}": ("U8", [90_000]) for n in range(30)})

def one_round():
    with TensorStream(source, framework="numpy", chunk_bytes=65536) as stream:
        for name, array in stream:
            assert array.tobytes() == contents[name]

start()
source = MemorySource({"m.safetensors": content})
one_round()  # Imports, which interrupts may break.
for number in range(150):
    source = MemorySource({"m.safetensors": content})
    interrupted(one_round, number, 0.02)
    assert len(threading.enumerate()) == 1, (number, threading.enumerate())
    assert source.reading == 0, number
    assert source.events.count("landing closed") == len(source.landing_bytes), number
print(count())
"""


def test_interrupts_at_any_moment() -> None:
    """R36: wherever Ctrl-C hits, again and again, no thread, read or landing is left."""
    run_interrupted(INTERRUPTED)


def test_a_failed_read_ends_the_others() -> None:
    """R36, L22, L34: the daemon's error comes out as it is, with file and range; others end."""
    stream, source, held = held_stream(first=1)

    def fail_last(file: SourceFile, start: int, stop: int) -> None:
        if start // (64 * KIB) == 3:
            raise ConnectionLost("the daemon died")
        held(file, start, stop)

    source.on_read = fail_last
    with pytest.raises(ConnectionLost, match="the daemon died") as caught:
        list(stream)
    assert any("memory/m.safetensors" in note for note in caught.value.__notes__)
    assert source.events.count("landing closed") == 4 and source.events[-1] == "source closed"


def test_memory_that_is_not_there() -> None:
    """R36: a landing that cannot be made is an error, not a wait."""
    files, _ = big_model()
    source = MemorySource(files)

    def refuse(nbytes: int) -> Any:
        raise racer.MemoryUnavailable("no room")

    source.landing = refuse  # type: ignore[method-assign]
    with pytest.raises(racer.MemoryUnavailable):
        list(stream_of(source))
    assert source.events[-1] == "source closed"


def test_a_bad_model_closes_the_source() -> None:
    """R37, R36: refused before any payload is fetched, and nothing stays open."""
    files, _ = big_model()
    files["m-10.safetensors"] += b"\0"
    source = MemorySource(files)
    with pytest.raises(SafetensorsError, match="belong to no tensor"):
        list(stream_of(source))
    assert source.bulk_reads == [] and source.events[-1] == "source closed"


def test_a_filter_that_raises() -> None:
    """R36: also code of the caller that runs while the load is planned."""
    source = MemorySource(big_model()[0])
    with pytest.raises(ZeroDivisionError):
        list(stream_of(source, filter=lambda name: bool(1 / 0)))
    assert source.events == ["source closed"]


def test_never_started() -> None:
    """R36: a load that nobody iterates opens nothing, and closes what it was given."""
    source = MemorySource(big_model()[0])
    stream = stream_of(source)
    stream.close()
    assert list(stream) == [] and source.bulk_reads == []
    with pytest.raises(racer.Closed):
        stream.open()


# --- telling ----------------------------------------------------------------------------------


def test_progress_is_told_in_bytes() -> None:
    """R35: a callback sees every step up to the whole."""
    files, contents = big_model()
    told: list[tuple[int, int]] = []
    list(stream_of(MemorySource(files), progress=lambda done, total: told.append((done, total))))
    whole = sum(map(len, contents.values()))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (whole, whole) and {total for _, total in told} == {whole}


def test_a_callback_that_raises() -> None:
    """R36: it ends the load like any exception of the consumer."""
    source = MemorySource(big_model()[0])
    with pytest.raises(ZeroDivisionError):
        list(stream_of(source, progress=lambda done, total: 1 / 0))
    assert source.events[-1] == "source closed"


def test_one_line_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """L7, L11: bytes, seconds, rate, waits, and bytes by rung, once."""
    files, contents = big_model()
    stream = stream_of(MemorySource(files))
    with caplog.at_level(logging.INFO, "racer.load"):
        list(stream)
    (record,) = [r for r in caplog.records if r.name == "racer.load"]
    whole = sum(map(len, contents.values()))
    assert stream.report.complete and stream.report.tensors == 9
    assert stream.report.tensor_bytes == stream.report.read_bytes == whole
    assert stream.report.rungs == {"memory": whole}
    assert "loaded 9 tensors, 2.33 MiB" in record.message and "memory 2.33 MiB" in record.message
    assert "GiB/s" in record.message and racer.__version__ in record.message


def test_a_load_that_stops_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """L7: the line tells how far it came."""
    with caplog.at_level(logging.INFO, "racer.load"):
        with stream_of(MemorySource(big_model()[0])) as stream:
            next(stream)
            next(stream)
    assert "stopped after 2 tensors" in caplog.text and not stream.report.complete


def test_no_bar_without_tqdm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """L7: asked for a bar that cannot be shown, it says why, once, and loads."""
    for module in ("tqdm", "tqdm.auto"):
        monkeypatch.setitem(sys.modules, module, None)
    list(stream_of(MemorySource(big_model()[0]), progress=True))
    assert caplog.text.count("tqdm is not installed") == 1


def test_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: a bar counts bytes and is closed at the end."""
    made: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            self.options, self.n, self.closed = options, 0, False
            made.append(self)

        def update(self, count: int) -> None:
            self.n += count

        def close(self) -> None:
            self.closed = True

    fake = type(sys)("tqdm.auto")
    fake.tqdm = Bar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", type(sys)("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", fake)
    files, contents = big_model()
    list(stream_of(MemorySource(files), progress=True))
    (bar,) = made
    whole = sum(map(len, contents.values()))
    assert bar.n == bar.options["total"] == whole and bar.closed and bar.options["unit"] == "B"


# --- the function -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"staging_bytes": 1 << 10}, "staging_bytes"),
        ({"staging_bytes": 1e9}, "staging_bytes"),
        ({"staging_bytes": "1GiB"}, "staging_bytes"),
        ({"in_flight": 0}, "in_flight"),
        ({"in_flight": 2.0}, "in_flight"),
        ({"in_flight": True}, "in_flight"),
        ({"filter": "model.*"}, "filter"),
        ({"in_flight": 65, "staging_bytes": 1 << 30}, "in_flight"),
        ({"framework": "jax"}, "framework"),
        ({"device": "cuda"}, "device"),
        ({"extra_shards": "maybe"}, "extra_shards"),
    ],
)
def test_arguments_are_checked_at_once(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    """L15: what cannot be is refused before anything is opened, by its name."""
    with pytest.raises(ValueError, match=reason):
        racer.load(tmp_path / "missing", **{"framework": "numpy", **options})


@pytest.mark.parametrize("url", ["s3://bucket/llama", "file:///llama", "Racer://hub/b/m"])
def test_urls_of_others(url: str) -> None:
    """L23: not taken for paths, of which the system would say that they are not there."""
    with pytest.raises(racer.BadUrl, match="neither a racer:// URL nor a path"):
        racer.load(url, framework="numpy")


@pytest.mark.parametrize(
    ("framework", "module", "remedy"),
    [
        ("pt", "torch", "install torch, or pass framework='numpy'"),
        ("numpy", "numpy", "install numpy, or pass framework='pt'"),
    ],
)
def test_a_framework_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: Any, module: str, remedy: str
) -> None:
    """Still an ImportError, for those who try one after the other."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=remedy) as caught:
        racer.load(tmp_path, framework=framework)
    assert caught.value.name == module
    with pytest.raises(ImportError, match=remedy):
        racer.safe_open(tmp_path, framework)


def test_load_from_disk(tmp_path: Path) -> None:
    """R35: a directory, one file of it, and `report` through the public function."""
    files, contents = big_model()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    stream = racer.load(tmp_path, framework="numpy", staging_bytes=1 << 20)
    assert {name: array.tobytes() for name, array in stream} == contents
    assert stream.report.rungs == {"file": sum(map(len, contents.values()))}
    one = racer.load(tmp_path / "m-10.safetensors", framework="numpy")
    assert [name for name, _ in one] == ["c0", "c1", "c2"]


@pytest.mark.parametrize("damage", ["shorter", "replaced"])
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, damage: str) -> None:
    """L39, L49, L51: an error of the one read that met it: never wrong bytes, never a signal."""
    content, _ = model_file({f"t{n}": ("U8", [1 << 20]) for n in range(16)})
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    stream = racer.load(tmp_path, framework="numpy", staging_bytes=2 << 20, in_flight=1)
    next(stream)
    if damage == "shorter":
        with path.open("r+b") as file:
            file.truncate(5 << 20)
    else:
        (tmp_path / "new").write_bytes(bytes(len(content)))
        (tmp_path / "new").rename(path)
    with pytest.raises(racer.VersionChanged, match="changed while"):
        list(stream)


def test_importing_needs_no_framework() -> None:
    """R33, L2: `racer.load` is there without numpy or torch; what is missing is named."""
    program = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
import racer, racer.safetensors, racer.loading
for framework, module in (("pt", "torch"), ("numpy", "numpy")):
    try:
        racer.load("/missing", framework=framework)
    except ImportError as error:
        assert module in str(error), error
    else:
        raise SystemExit(1)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_local_files_are_read_in_sequence_and_large_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L29, L30: no file is mapped, so that no slow volume sees faults of 4 KiB in any order."""
    content, contents = model_file({"a": ("U8", [3_000_000]), "b": ("U8", [2_000_000])})
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def recorded(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append((offset, sum(map(len, buffers))))
        assert os.fspath(path) not in Path("/proc/self/maps").read_text()
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", recorded)
    stream = racer.load(path, framework="numpy", staging_bytes=2 << 20, in_flight=1)
    assert {name: array.tobytes() for name, array in stream} == contents
    payload = [read for read in reads if read[1] >= 64 * KIB]
    assert payload == sorted(payload)
    assert sum(size for _, size in payload) == 5_000_000
    assert len(payload) <= 6

"""What one question brings of a file that others share: used once, given up in the end."""

from __future__ import annotations

import asyncio
import json
import os
import threading

import pytest

import racer
from clients.python.racer.tests.fake_daemon import FakeDaemon, Reply, Seen, error
from clients.python.racer.tests.patterns import MIB, pattern
from racer.answers import read_shared_parts
from racer.loading import load
from racer.models import stock
from racer.models.prefix import RacerSource
from racer.models.source import SourceFile
from racer.results import Front
from racer.window import Window
from racer.wire import ResponseHead
from tests.support.safetensors_bytes import model_file


def open_source(daemon: FakeDaemon) -> RacerSource:
    return RacerSource("racer://local/llama/m", run_dir=daemon.run_dir, share=True)


def found(source: RacerSource, name: str = "w") -> SourceFile:
    file = source.find(name)
    assert file is not None
    return file


def asked(daemon: FakeDaemon) -> list[str]:
    """Method and operation of each request."""
    return [line.replace("/v1/", "").partition("/")[0] for line in daemon.lines()]


def test_one_question_brings_version_header_and_memory(daemon: FakeDaemon) -> None:
    data = pattern(3 * MIB + 5)
    daemon.put("llama", "m/w", data)
    daemon.shared_already = True
    source = open_source(daemon)
    file = found(source)
    assert (file.size, source.read(file, 10, 100)) == (len(data), data[10:100])
    share = source.shared_already(file, 0)
    assert share is not None
    assert bytes(share.view) == data
    assert dict(share.rungs) == {"shared": len(data)}
    share.close()
    assert source.shared_already(file, 0) is None, "each piece is given once"
    source.close()
    assert asked(daemon) == ["GET share"]


def test_where_nothing_is_shared_yet_it_costs_what_a_version_costs(daemon: FakeDaemon) -> None:
    daemon.put("llama", "m/w", pattern(MIB))
    source = open_source(daemon)
    file = found(source)
    assert source.shared_already(file, 0) is None
    assert source.shared_already(file, 0) is None
    assert asked(daemon) == ["GET share"]
    with_memory = source.share(file, 0)
    assert bytes(with_memory.view) == pattern(MIB)
    with_memory.close()
    source.close()


def test_what_nobody_took_is_given_up(daemon: FakeDaemon) -> None:
    """At once, and not when the garbage is collected."""
    daemon.put("llama", "m/w", pattern(MIB))
    daemon.shared_already = True
    source = open_source(daemon)
    found(source)
    (chunk,) = next(iter(source._stock._chunks.values()))  # type: ignore[union-attr]
    assert chunk.fileno() >= 0
    source.close()
    with pytest.raises(racer.Closed):
        chunk.fileno()


def test_files_behind_a_full_stock_are_asked_about_when_they_are_loaded(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece in stock is a descriptor of the process that loads, which may have few."""
    monkeypatch.setattr(stock, "_PIECES_MAX", 1)
    for name in "vw":
        daemon.put("llama", f"m/{name}", pattern(MIB))
    daemon.shared_already = True
    source = open_source(daemon)
    found(source, "v")
    file = found(source, "w")
    assert source.read(file, 0, 10) == pattern(MIB)[:10]
    assert asked(daemon) == ["GET share", "HEAD objects", "GET objects"]
    share = source.shared_already(file, 0)
    assert share is not None
    assert bytes(share.view) == pattern(MIB)
    share.close()
    assert asked(daemon)[3:] == ["GET share"]
    source.close()


def put_model(daemon: FakeDaemon) -> tuple[list[str], dict[str, bytes]]:
    """Two shards with an index; large tensors, several of them in one piece and across pieces."""
    contents: dict[str, bytes] = {}
    mapped: dict[str, str] = {}
    names = ["model.safetensors.index.json"]
    for seed in (1, 2):
        name = f"m-{seed}.safetensors"
        layout = {f"{key}{seed}": ("U8", [MIB + 4096 * seed]) for key in "abcdef"}
        data, held = model_file({**layout, f"z{seed}": ("F32", [10])}, seed=seed)
        daemon.put("llama", f"m/{name}", data)
        contents |= held
        mapped |= dict.fromkeys(held, name)
        names.append(name)
    index = json.dumps({"weight_map": mapped}).encode()
    daemon.put("llama", f"m/{names[0]}", index)
    return names, contents


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the client's threads that were started, in order."""
    names: list[str] = []
    start = threading.Thread.start

    def noting(thread: threading.Thread) -> None:
        if thread.name.startswith("racer-"):
            names.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noting)
    return names


def test_the_next_rank_asks_once_for_each_file_and_starts_no_thread_to_load(
    daemon: FakeDaemon, started: list[str]
) -> None:
    """The index comes in one exchange, and each shard's size, version, header and memory in
    another; nothing else is asked. What is at hand is mapped by the consumer."""
    names, contents = put_model(daemon)
    daemon.shared_already, daemon.share_chunk_bytes = True, 4 * MIB
    stream = load("racer://local/llama/m", framework="numpy", socket=daemon.path, names=names)
    loaded = dict(stream)
    assert {name: array.tobytes() for name, array in loaded.items()} == contents
    assert set(stream.report.rungs) == {"shared"}
    assert daemon.lines() == [
        "GET /v1/objects/llama/m/model.safetensors.index.json",
        "GET /v1/share/llama/m/m-1.safetensors",
        "GET /v1/share/llama/m/m-2.safetensors",
    ]
    assert daemon.connections == 1
    assert started == ["racer-model-keeper", "racer-model-0"]


@pytest.mark.parametrize(
    ("pieces_max", "piece_bytes", "questions"),
    [(1, 4 * MIB, [1, 1]), (64, 256 << 10, [2, 2]), (8, 128 << 10, [4, 4])],
)
def test_the_next_rank_asks_for_what_it_had_no_room_for_or_one_answer_did_not_hold(
    daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    started: list[str],
    pieces_max: int,
    piece_bytes: int,
    questions: list[int],
) -> None:
    """R35: models of many files, or of large ones. One thread asks, the consumer maps; every byte
    is right, and no piece is asked for twice."""
    monkeypatch.setattr(stock, "_PIECES_MAX", pieces_max)
    names, contents = put_model(daemon)
    daemon.shared_already, daemon.share_chunk_bytes = True, piece_bytes
    mapping: set[int] = set()
    real = Window.map_shared

    def noting(self: Window, *where: int) -> None:
        mapping.add(threading.get_ident())
        real(self, *where)

    monkeypatch.setattr(Window, "map_shared", noting)
    stream = load("racer://local/llama/m", framework="numpy", socket=daemon.path, names=names)
    assert {name: array.tobytes() for name, array in stream} == contents
    assert set(stream.report.rungs) == {"shared"}
    asked = [daemon.count(f"GET /v1/share/llama/m/m-{number}") for number in (1, 2)]
    assert asked == questions
    assert daemon.count("POST /v1/share") == 0
    assert mapping == {threading.get_ident()}
    loading = [name for name in started if name.startswith("racer-load")]
    assert loading == ["racer-load-keeper", "racer-load-0"]


def test_what_nobody_shares_yet_is_known_at_once_and_loaded_in_threads(
    daemon: FakeDaemon, started: list[str]
) -> None:
    """R35: the answer with the version told that there is nothing."""
    names, contents = put_model(daemon)
    daemon.share_chunk_bytes = 4 * MIB
    stream = load("racer://local/llama/m", framework="numpy", socket=daemon.path, names=names)
    assert {name: array.tobytes() for name, array in stream} == contents
    assert daemon.count("GET /v1/share") == 2
    assert daemon.count("POST /v1/share") == 4
    assert "racer-load-1" in started


@pytest.mark.parametrize("code", [(503, "draining"), (500, "internal")])
def test_a_question_in_the_middle_that_fails_ends_the_load(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, code: tuple[int, str]
) -> None:
    """R36: what the thread that asks meets is raised where the consumer waits."""
    monkeypatch.setattr(stock, "_PIECES_MAX", 1)
    names, _ = put_model(daemon)
    daemon.shared_already, daemon.share_chunk_bytes = True, 4 * MIB

    def refuse(_: Seen) -> Reply:
        return error(*code)

    daemon.always("GET /v1/share/llama/m/m-2", refuse)
    stream = load(
        "racer://local/llama/m", framework="numpy", socket=daemon.path, names=names, timeout=1
    )
    with pytest.raises(racer.RacerError) as caught:
        dict(stream)
    assert "who shares bytes" in "".join(caught.value.__notes__)
    assert stream._closed


def test_the_first_rank_asks_for_each_piece_once(daemon: FakeDaemon) -> None:
    """However small the chunks are that the pieces are used in, and however many at a time."""
    names, contents = put_model(daemon)
    daemon.share_chunk_bytes = 4 * MIB
    stream = load(
        "racer://local/llama/m",
        framework="numpy",
        socket=daemon.path,
        names=names,
        staging_bytes=16 * MIB,
        in_flight=8,
    )
    assert {name: array.tobytes() for name, array in stream} == contents
    asked_for = [
        (seen.path, int(seen.fields["range"][6:-1]) // (4 * MIB))
        for seen in daemon.seen
        if seen.method == "POST"
    ]
    assert len(asked_for) == len(set(asked_for)) == 4


def test_a_whole_file_in_one_exchange(daemon: FakeDaemon) -> None:
    daemon.put("llama", "m/index", b"{}")
    daemon.put("llama", "m/empty", b"")
    daemon.put("llama", "m/large", pattern(MIB))
    source = open_source(daemon)
    file, text = source.read_whole("index", 10) or (None, None)
    assert (file, text) == (SourceFile("index", "racer://local/llama/m/index", 2, '"v1"'), b"{}")
    assert asked(daemon) == ["GET objects"]
    _, text = source.read_whole("empty", 10) or (None, None)
    assert text == b""
    _, text = source.read_whole("large", MIB) or (None, None)
    assert text == pattern(MIB)
    file, text = source.read_whole("large", MIB - 1) or (None, None)
    assert (file and file.size, text) == (MIB, None)
    assert source.read_whole("none", 10) is None
    source.close()


def test_the_front_of_an_object(daemon: FakeDaemon) -> None:
    """Size, version and first bytes in one exchange; empty objects and errors as in all reads."""
    url = daemon.put("llama", "large", pattern(MIB))
    short = daemon.put("llama", "short", b"abc")
    empty = daemon.put("llama", "empty", b"")

    async def both(target: str, length: int, etag: str | None = None) -> Front:
        with racer.Client(run_dir=daemon.run_dir) as client:
            front = client.read_front(target, length, etag=etag)
        async with racer.AsyncClient(run_dir=daemon.run_dir) as client:
            assert await client.read_front(target, length, etag=etag) == front
        return front

    def asked_for(target: str, length: int, etag: str | None = None) -> Front:
        return asyncio.run(both(target, length, etag))

    assert asked_for(url, 10) == (MIB, '"v1"', pattern(MIB)[:10])
    assert asked_for(short, 10, '"v1"') == (3, '"v1"', b"abc")
    assert asked(daemon) == ["GET objects"] * 4
    assert asked_for(empty, 10) == (0, '"v1"', b"")
    with pytest.raises(racer.VersionChanged):
        asked_for(url, 10, '"v0"')
    with pytest.raises(racer.NotFound):
        asked_for("racer://local/llama/none", 10)


def test_a_file_that_is_missing(daemon: FakeDaemon) -> None:
    source = open_source(daemon)
    assert source.find("w") is None
    source.close()


@pytest.mark.parametrize("code", [(422, "share_off"), (404, "unknown_operation")])
def test_a_daemon_that_shares_nothing_is_asked_once(
    daemon: FakeDaemon, code: tuple[int, str]
) -> None:
    """An older daemon does not know the question; the version is asked for as before."""
    for name in "vw":
        daemon.put("llama", f"m/{name}", pattern(MIB))

    def refuse(_: Seen) -> Reply:
        return error(*code)

    daemon.always("GET /v1/share", refuse)
    source = open_source(daemon)
    assert found(source).size == MIB
    file = found(source, "v")
    assert source.read(file, 0, 10) == pattern(MIB)[:10]
    assert source.shared_already(file, 0) is None
    source.close()
    assert asked(daemon) == ["GET share", "HEAD objects", "HEAD objects", "GET objects"]


def test_pieces_that_do_not_agree_with_their_descriptors(daemon: FakeDaemon) -> None:
    """Nothing of it is used, and no descriptor is left: the fixture looks."""
    daemon.put("llama", "m/w", pattern(MIB))
    daemon.shared_already = True

    def another(_: Seen) -> Reply:
        body = b'{"size":10,"pieces":[]}'
        reply = Reply(200, {"ETag": '"v1"', "Content-Type": "application/json"}, body)
        reply.descriptors = [os.memfd_create("odd", os.MFD_CLOEXEC)]
        return reply

    daemon.on("GET /v1/share", another)
    source = open_source(daemon)
    with pytest.raises(racer.ProtocolError, match="0 pieces"):
        source.find("w")
    source.close()


@pytest.mark.parametrize(
    "pieces",
    [
        [{"offset": 0, "bytes": 8192, "rungs": {}}, {"offset": 4096, "bytes": 4096, "rungs": {}}],
        [{"offset": 4096, "bytes": 4096, "rungs": {}}, {"offset": 0, "bytes": 4096, "rungs": {}}],
        [{"offset": 0, "bytes": 1 << 40, "rungs": {}}],
        ["piece"],
    ],
)
def test_pieces_out_of_order_are_refused(pieces: list[object]) -> None:
    body = json.dumps({"size": 1 << 20, "pieces": pieces}).encode()
    head = ResponseHead(200, {"etag": '"v"', "content-length": str(len(body))})
    with pytest.raises(racer.ProtocolError):
        read_shared_parts(head, body, None)


def test_both_clients(daemon: FakeDaemon) -> None:
    url = daemon.put("llama", "m/w", pattern(MIB))
    daemon.shared_already = True
    with racer.Client(run_dir=daemon.run_dir) as client, client.shared(url) as pieces:
        assert [bytes(chunk.view) for chunk in pieces.chunks] == [pattern(MIB)]
        etag = pieces.etag
        assert pieces.chunks[0].read(10, 20) == pattern(MIB)[10:20]
    with racer.Client(run_dir=daemon.run_dir) as client, pytest.raises(racer.VersionChanged):
        client.shared(url, etag='"other"')

    async def main() -> None:
        async with racer.AsyncClient(run_dir=daemon.run_dir) as client:
            with await client.shared(url, etag=etag) as pieces:
                assert (pieces.size, len(pieces.chunks)) == (MIB, 1)

    asyncio.run(main())

"""What one question brings of a file that others share: used once, given up in the end."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

import racer
from clients.python.racer.tests.fake_daemon import FakeDaemon, Reply, Seen, error
from clients.python.racer.tests.patterns import MIB, pattern
from racer.answers import read_shared_parts
from racer.models import stock
from racer.models.prefix import RacerSource
from racer.models.source import SourceFile
from racer.wire import ResponseHead


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
    with racer.Client(run_dir=daemon.run_dir) as client, pytest.raises(racer.VersionChanged):
        client.shared(url, etag='"other"')

    async def main() -> None:
        async with racer.AsyncClient(run_dir=daemon.run_dir) as client:
            with await client.shared(url, etag=etag) as pieces:
                assert (pieces.size, len(pieces.chunks)) == (MIB, 1)

    asyncio.run(main())

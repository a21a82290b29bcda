"""Every golden transcript against the daemon's side: the socket with both readers, and sans-IO."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from racerd.errors import (
    DeviceError,
    IntegrityError,
    RacerError,
    RequestError,
    ResourceError,
    Retry,
    SourceError,
)
from racerd.ids import PageId
from racerd.wire.connection import Refused, Request, ServerConnection
from racerd.wire.errors import STATUS_OF_CODE
from racerd.wire.heads import ResponseHead
from racerd.wire.messages import deadline_seconds, parse_message
from tests.support.golden_wire import (
    Player,
    Transcript,
    body_of,
    play,
    text_of,
    transcripts,
    world,
)
from tests.support.memory_reader import MemoryReader
from tests.support.socket_rig import RawClient, SocketRig

ALL = transcripts()
CODES_OF_THE_WIRE = {"bad_request", "head_too_large", "unknown_operation", "method_not_allowed"}
KINDS = {
    "forbidden": RequestError,
    "corrupt": IntegrityError,
    "overloaded": ResourceError,
    "deadline_exceeded": ResourceError,
}


def names(transcript: Transcript) -> str:
    return transcript.name


def failing(given: Any) -> Callable[[PageId], None]:
    """What a transcript's `given` makes of page reads."""
    left = given.get("after_pages", 0)

    def on_page(page: PageId) -> None:
        nonlocal left
        left -= 1
        code = given["error"]
        if left >= 0:
            return
        if code == "internal":
            raise LookupError("plaintext that must not be told")
        retry = Retry.NEVER if code in ("forbidden", "origin_protocol", "share_off") else Retry.SAME
        kind: type[RacerError] = KINDS.get(code, SourceError)
        after = given.get("retry_after_seconds")
        raise kind(code, "it failed", hint="a hint", retry=retry, retry_after_seconds=after)

    return on_page


async def play_on_socket(folder: Path, transcript: Transcript, memory: MemoryReader | None) -> None:
    cache, objects = world()
    given = dict(transcript.given)
    limits = {k: v for k, v in given.items() if k == "targets_per_connection_max"}
    async with SocketRig(folder, memory, cache=cache, gpus=given.get("gpus", 0), **limits) as rig:
        if "gpu_error" in given:
            failure = DeviceError(given["gpu_error"], "it failed", native=1, hint="a hint")
            rig.node.gpus[0].failures += [failure] * 64
        for entry in objects:
            source = rig.origin if memory is None else memory
            source.put(entry.key, entry.content, etag=entry.etag, bucket=entry.bucket)
        if memory is not None and given.get("error") == "pin_refused":
            memory.pins.limit_bytes = -1
        elif memory is not None and "error" in given:
            memory.on_page = failing(given)
        if given.get("draining"):
            await play_while_draining(rig, transcript)
        else:
            await asyncio.to_thread(play, rig.path, transcript)


async def play_while_draining(rig: SocketRig, transcript: Transcript) -> None:
    """A drained socket lets nobody in: connect first."""
    with RawClient(rig.path) as client, ExitStack() as stack:
        await asyncio.to_thread(client.ask, "GET /v1/info")
        await rig.socket.drain(0)
        await asyncio.to_thread(Player(client, stack).play, transcript.exchange)


@pytest.mark.parametrize("transcript", [t for t in ALL if "gpus" not in t.given], ids=names)
def test_the_socket_answers_as_written(tmp_path: Path, transcript: Transcript) -> None:
    """R3, R5, R6, R8: the driver and every operation, over the tests' own reader."""

    async def main() -> None:
        await play_on_socket(tmp_path, transcript, MemoryReader())

    uvloop.run(main())


@pytest.mark.parametrize("transcript", [t for t in ALL if "error" not in t.given], ids=names)
def test_the_real_reader_answers_as_written(tmp_path: Path, transcript: Transcript) -> None:
    """R1, R2, R3: the same over the real read path; GPUs are stood for by the host."""
    uvloop.run(play_on_socket(tmp_path, transcript, None))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("transcript", ALL, ids=names)
def test_the_protocol_without_a_socket_agrees(transcript: Transcript, split: bool) -> None:
    """R5, R6: heads, descriptors and framing, whole or byte by byte."""
    wire: ServerConnection[str] = ServerConnection()
    steps = iter(transcript.exchange)
    for step in steps:
        if "client" not in step:
            continue
        data = step["client"].replace("${id}", "0123456789abcdef" * 2).encode("latin-1")
        tokens = [str(spec) for spec in step.get("descriptors", ())]
        events = receive(wire, data, tokens, split)
        answer = next((s for s in steps if "server" in s or "end" in s), {})
        if "server" not in answer:
            return
        work = next(event for event in events if isinstance(event, Request | Refused))
        check(work, answer["server"])
        respond(wire, answer["server"])


def receive(
    wire: ServerConnection[str], data: bytes, tokens: list[str], split: bool
) -> list[object]:
    if not split:
        return list(wire.receive(data, tokens))
    events: list[object] = []
    for index in range(len(data)):
        events += wire.receive(data[index : index + 1], tokens if index == 0 else [])
    return events


def check(work: object, answer: Any) -> None:
    """What is known of an answer before anything is carried out."""
    code = answer["fields"].get("Racer-Error") if isinstance(answer, dict) else None
    error = refusal(work)
    if error is not None:
        assert error.code == code
        assert STATUS_OF_CODE[error.code] == answer["status"]
    else:
        # Which kinds of target there are is not known to the wire.
        assert code not in CODES_OF_THE_WIRE or "kind" in answer["json"]["error"]["message"]


def refusal(work: object) -> RacerError | None:
    if isinstance(work, Refused):
        return work.error
    assert isinstance(work, Request)
    try:
        deadline_seconds(work.head)
        parse_message(work.head, "golden")
    except RacerError as error:
        return error
    return None


def respond(wire: ServerConnection[str], answer: Any) -> None:
    """The head that is written is the one that the transcript stands for."""
    if isinstance(answer, str):
        return
    body = body_of(answer)
    fields = dict(answer["fields"])
    if "json" in answer:
        fields.setdefault("Content-Type", "application/json")
    length = int(fields.pop("Content-Length", len(body)))
    closes = fields.pop("Connection", None) == "close"
    if closes and not answer.get("cut"):
        wire.close_after_response = True
    head = wire.respond(ResponseHead(answer["status"], tuple(fields.items()), length))
    expected = text_of(answer)[: len(text_of(answer)) - len(body)]
    assert sorted(head.split(b"\r\n")) == sorted(expected.split(b"\r\n"))
    if not answer.get("head_only"):
        wire.send_body(len(body))
    if not answer.get("cut"):
        wire.end_response()


def test_every_code_has_a_transcript() -> None:
    """A code that clients may meet is shown to them."""
    shown = {
        step["server"]["fields"].get("Racer-Error")
        for transcript in ALL
        for step in transcript.exchange
        if isinstance(step.get("server"), dict)
    }
    assert set(STATUS_OF_CODE) - shown == set()


def test_transcripts_say_why() -> None:
    assert len({transcript.name for transcript in ALL}) == len(ALL)
    assert all(len(transcript.why) > 15 for transcript in ALL)

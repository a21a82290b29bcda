"""A fuzz target for the wire: bytes and descriptors in any order, through the sans-IO server.

    python tests/fuzz/wire_target.py [corpus folder] [-max_total_time=60 …]     with atheris

`exercise` is the target itself, and needs no fuzzer: `test_fuzz_wire.py` feeds it what the golden
transcripts say, mutated.

An input is a list of steps. A step is a control byte and a length byte: the low three bits are how
many descriptors come along, bit 3 says MSG_CTRUNC, bit 4 answers what is owed first, bit 5 gives up
on the head, bit 6 ends the stream; the length says how many of the following bytes are received,
0 being 4096. The same input is also taken as one stream, received whole and in pieces.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from racerd.errors import RacerError
from racerd.wire.connection import Dropped, Event, Refused, Request, ServerConnection, State
from racerd.wire.errors import STATUS_OF_CODE, error_body, error_fields
from racerd.wire.heads import FIELDS_MAX, HEAD_BYTES_MAX, ResponseHead
from racerd.wire.messages import deadline_seconds, parse_message


def exercise(data: bytes) -> None:
    """Raises AssertionError, or anything that is not declared, if the wire has a defect."""
    exercise_steps(data)
    exercise_splits(data)


def exercise_steps(data: bytes) -> None:
    """`data` as steps: only declared errors come, and every descriptor leaves exactly once."""
    wire: ServerConnection[int] = ServerConnection()
    came = 0
    left: list[int] = []
    position = 0
    while position + 2 < len(data) and wire.state is not State.CLOSED:
        control, length = data[position], data[position + 1] or 4096
        chunk = data[position + 2 : position + 2 + length]
        position += 2 + length
        if control & 16:
            answer(wire)
        if wire.state is State.CLOSED:
            break
        if control & 32 and wire.state is State.HEAD:
            left += account(wire.give_up_on_head("slow"))
        tokens = range(came, came + (control & 7))
        came += len(tokens)
        left += account(wire.receive(chunk, tokens, truncated=bool(control & 8)))
        if control & 64:
            left += account(wire.receive_eof())
    left += account(wire.close())
    assert sorted(left) == list(range(came)), f"{came} descriptors came, {left} left"


def exercise_splits(data: bytes) -> None:
    """`data` as one stream: however the kernel cuts it, the same comes out of it.

    Its first two bytes seed the cuts, its third says how many descriptors come with the first
    byte. What arrives behind the end of a head belongs to the next one by the kernel's rule, so
    whose the descriptors are is compared where nothing does.
    """
    stream = data[3:]
    if not stream:
        return
    chance = random.Random(data[:2])
    tokens = range(data[2] % 7)
    edges = sorted({0, len(stream), *(chance.randrange(len(stream)) for _ in range(8))})
    whole: ServerConnection[int] = ServerConnection()
    events = [whole.receive(stream, tokens)]
    split: ServerConnection[int] = ServerConnection()
    pieces = [
        split.receive(stream[start:stop], tokens if start == 0 else ())
        for start, stop in itertools.pairwise(edges)
        if split.state is not State.CLOSED
    ]
    owned = not whole.close_after_response
    assert outline(events, owned=owned) == outline(pieces, owned=owned)
    assert split.state is whole.state
    if whole.state is State.BUSY:
        assert split.close_after_response == whole.close_after_response
    for wire, received in ((whole, events), (split, pieces)):
        left = [token for some in (*received, wire.close()) for token in account(some)]
        assert sorted(left) == list(tokens), f"{len(tokens)} descriptors came, {left} left"


def outline(received: Sequence[Sequence[Event[int]]], *, owned: bool) -> list[object]:
    """What of some events must not depend on how the stream was cut."""
    shown: list[object] = []
    for event in itertools.chain.from_iterable(received):
        if isinstance(event, Request):
            shown.append((event.head, event.descriptors if owned else ()))
        elif isinstance(event, Refused):
            shown.append(event.error.code)
        elif not isinstance(event, Dropped):
            shown.append(event)
    return shown


def answer(wire: ServerConnection[int]) -> None:
    if wire.state is State.BUSY:
        wire.respond(ResponseHead(200, (), 0))
        wire.end_response()


def account(events: Sequence[Event[int]]) -> list[int]:
    """Checks events and returns the descriptors that they hand out."""
    handed: list[int] = []
    for event in events:
        if isinstance(event, Request):
            handed += event.descriptors
            check_request(event)
        elif isinstance(event, Dropped):
            handed += event.descriptors
        elif isinstance(event, Refused):
            check_error(event.error)
    return handed


def check_request(request: Request[int]) -> None:
    assert len(request.descriptors) <= 4
    head = request.head
    assert len(head.target) < HEAD_BYTES_MAX and len(head.fields) <= FIELDS_MAX
    try:
        assert 0 < deadline_seconds(head) <= 86_400
        message = parse_message(head, "cache")
    except RacerError as error:
        check_error(error)
    else:
        assert message.operation


def check_error(error: RacerError) -> None:
    fields = tuple(error_fields(error))
    ResponseHead(STATUS_OF_CODE[error.code], fields, len(error_body(error))).serialise(close=True)


def main() -> None:
    import atheris  # type: ignore[import-not-found]  # optional: see the module

    atheris.instrument_all()
    atheris.Setup(sys.argv, exercise)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

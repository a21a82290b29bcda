"""A fuzz target for the wire: bytes and descriptors in any order, through the sans-IO server.

    python tests/fuzz/wire_target.py [corpus folder] [-max_total_time=60 …]     with atheris

`exercise` is the target itself, and needs no fuzzer: `test_fuzz_wire.py` feeds it what the golden
transcripts say, mutated.

An input is a list of steps. A step is a control byte and a length byte: the low three bits are how
many descriptors come along, bit 3 says MSG_CTRUNC, bit 4 answers what is owed first, bit 5 gives up
on the head, bit 6 ends the stream; the length says how many of the following bytes are received,
0 being 4096.
"""

from __future__ import annotations

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
    wire: ServerConnection[int] = ServerConnection()
    came, left = 0, 0
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
    assert left == came, f"{came} descriptors came, {left} left"


def answer(wire: ServerConnection[int]) -> None:
    if wire.state is State.BUSY:
        wire.respond(ResponseHead(200, (), 0))
        wire.end_response()


def account(events: Sequence[Event[int]]) -> int:
    """Checks events and returns how many descriptors they hand out."""
    count = 0
    for event in events:
        if isinstance(event, Request):
            count += len(event.descriptors)
            check_request(event)
        elif isinstance(event, Dropped):
            count += len(event.descriptors)
        elif isinstance(event, Refused):
            check_error(event.error)
    return count


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

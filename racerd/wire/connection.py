"""The server's side of one client connection, without the connection.

Layer: wire, pure: bytes and descriptor tokens in, events out; the driver owns the socket.

    IDLE --head byte--> HEAD --head end--> BUSY --response head--> BODY --response end--> IDLE
                          \\--refusal-----/                            \\--last response--> CLOSED
    any --peer closed--> CLOSED

BUSY and BODY are one exchange. What arrives during an exchange is pipelining, which is refused
(R6): the exchange is completed with `Connection: close`, and what came early is dropped. A peer
that goes on sending past `EXCESS_BYTES_MAX` does not wait for an answer, and is cut off.

Every token that came in leaves exactly once: in a `Request`, or in a `Dropped` to be closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from racerd.errors import ProtocolError, RacerError
from racerd.wire.descriptors import DescriptorLedger
from racerd.wire.heads import RequestHead, ResponseHead, head_length, parse_request_head

D = TypeVar("D")

EXCESS_BYTES_MAX = 1 << 20
FLOOD = "sent on and on without waiting for the answer"


class State(Enum):
    """Where a connection stands. See the module's diagram, which is `TRANSITIONS` in words."""

    IDLE = "idle"  # Between two exchanges; no byte of a head has come.
    HEAD = "head"  # Part of a head has come.
    BUSY = "busy"  # A response is owed.
    BODY = "body"  # Its head was handed out; the body may be under way.
    CLOSED = "closed"  # Nothing may be received or sent any more.


class Step(Enum):
    """What moves a connection from one state to the next."""

    HEAD_BYTE = "head byte"
    HEAD_END = "head end"
    REFUSAL = "refusal"
    EXCESS = "excess"
    RESPONSE_HEAD = "response head"
    RESPONSE_END = "response end"
    LAST_RESPONSE_END = "last response end"
    PEER_CLOSED = "peer closed"


TRANSITIONS: Mapping[State, Mapping[Step, State]] = {
    State.IDLE: {
        Step.HEAD_BYTE: State.HEAD,
        Step.PEER_CLOSED: State.CLOSED,
    },
    State.HEAD: {
        Step.HEAD_BYTE: State.HEAD,
        Step.HEAD_END: State.BUSY,
        Step.REFUSAL: State.BUSY,
        Step.PEER_CLOSED: State.CLOSED,
    },
    State.BUSY: {
        Step.EXCESS: State.BUSY,
        Step.RESPONSE_HEAD: State.BODY,
        Step.PEER_CLOSED: State.CLOSED,
    },
    State.BODY: {
        Step.EXCESS: State.BODY,
        Step.RESPONSE_END: State.IDLE,
        Step.LAST_RESPONSE_END: State.CLOSED,
        Step.PEER_CLOSED: State.CLOSED,
    },
    State.CLOSED: {},
}


class LocalProtocolError(Exception):
    """The driver of this state machine did what it must not: a defect of racerd, not of a peer."""


@dataclass(frozen=True, slots=True)
class Request(Generic[D]):
    """A whole head arrived, with its descriptors, which the receiver owns now."""

    head: RequestHead
    descriptors: tuple[D, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """What arrived is not a request. Answer with `error`; the connection ends after that."""

    error: RacerError


@dataclass(frozen=True, slots=True)
class Dropped(Generic[D]):
    """Descriptors that no request takes: close them now."""

    descriptors: tuple[D, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The peer is gone, or is cut off. Cancel what runs for it; nothing can be answered."""

    reason: str


Event = Request[D] | Refused | Dropped[D] | Ended


class ServerConnection(Generic[D]):
    """Follows one connection. `receive…` for what comes in, `respond…` for what goes out."""

    __slots__ = (
        "_body_left",
        "_buffer",
        "_excess_bytes",
        "_head_only",
        "_ledger",
        "close_after_response",
        "state",
    )

    def __init__(self) -> None:
        self.state = State.IDLE
        self.close_after_response = False
        self._buffer = bytearray()
        self._ledger: DescriptorLedger[D] = DescriptorLedger()
        self._excess_bytes = 0
        self._body_left = 0
        self._head_only = False

    # What comes in.

    def receive(
        self, data: bytes, descriptors: Sequence[D] = (), *, truncated: bool = False
    ) -> list[Event[D]]:
        """Takes one receive: its bytes (at least one) and its descriptors.

        `truncated` says that the kernel dropped descriptors (MSG_CTRUNC).
        """
        if self.state in (State.BUSY, State.BODY):
            return self._receive_excess(len(data), descriptors)
        head_starts = self.state is State.IDLE
        self._step(Step.HEAD_BYTE)
        try:
            self._ledger.arrived(descriptors, head_starts=head_starts, truncated=truncated)
            request = self._take_request(data)
        except ProtocolError as error:
            return self._refuse(error)
        return [] if request is None else [request, *self._drop()]

    def receive_eof(self) -> list[Event[D]]:
        """The peer closed its writing side: it waits for no answer (see `docs/protocol.md`)."""
        if self.state is State.CLOSED:
            return []
        reason = "closed in the middle of a head" if self.state is State.HEAD else "closed"
        return [*self.close(), Ended(reason)]

    def give_up_on_head(self, reason: str) -> list[Event[D]]:
        """The driver waited long enough for the rest of a head."""
        error = ProtocolError("bad_request", reason, hint="send a request's head in one go")
        return self._refuse(error)

    def close(self) -> list[Event[D]]:
        """Ends the connection from this side. Returns what is left to be closed."""
        if self.state is not State.CLOSED:
            self._step(Step.PEER_CLOSED)
        self._buffer.clear()
        return self._drop()

    # What goes out.

    def respond(self, head: ResponseHead) -> bytes:
        """Starts the answer that is owed and returns the bytes of its head."""
        # Serialised first: a head that cannot be written leaves the connection owing an answer.
        data = head.serialise(close=self.close_after_response)
        self._step(Step.RESPONSE_HEAD)
        self._body_left = 0 if self._head_only else head.content_length
        return data

    def send_body(self, count: int) -> int:
        """Allows `count` more bytes of the body to go out, and returns `count`."""
        if self.state is not State.BODY or count > self._body_left:
            raise LocalProtocolError(f"{count} bytes of body, {self._body_left} are announced")
        self._body_left -= count
        return count

    def end_response(self) -> bool:
        """Ends the exchange after the last byte went out. Returns whether another may follow.

        Call it before anything else can be received: what comes next is the next request.
        """
        if self._body_left:
            raise LocalProtocolError(f"the body is {self._body_left} bytes short")
        self._step(Step.LAST_RESPONSE_END if self.close_after_response else Step.RESPONSE_END)
        return self.state is State.IDLE

    # Inside.

    def _take_request(self, data: bytes) -> Request[D] | None:
        searched = len(self._buffer)
        whole: bytes | bytearray = data
        if searched:
            self._buffer += data
            whole = self._buffer
        length = head_length(whole, searched)
        if length is None:
            if not searched:
                self._buffer += data
            self._ledger.settle()
            return None
        head = parse_request_head(bytes(whole[:length]))
        remain = len(whole) - length
        owned = self._ledger.head_ended(bytes_remain=remain > 0)
        self._buffer.clear()
        self._step(Step.HEAD_END)
        self._head_only = head.method == "HEAD"
        self._excess_bytes = remain
        self.close_after_response = remain > 0 or head.wants_close
        return Request(head, owned)

    def _refuse(self, error: ProtocolError) -> list[Event[D]]:
        self._step(Step.REFUSAL)
        self._buffer.clear()
        self.close_after_response = True
        self._head_only = False
        return [*self._drop(), Refused(error)]

    def _receive_excess(self, count: int, descriptors: Sequence[D]) -> list[Event[D]]:
        self._step(Step.EXCESS)
        self.close_after_response = True
        self._excess_bytes += count
        events: list[Event[D]] = [Dropped(tuple(descriptors))] if descriptors else []
        if self._excess_bytes > EXCESS_BYTES_MAX:
            events += [*self.close(), Ended(FLOOD)]
        return events

    def _drop(self) -> list[Event[D]]:
        left = self._ledger.release()
        return [Dropped(left)] if left else []

    def _step(self, step: Step) -> None:
        following = TRANSITIONS[self.state].get(step)
        if following is None:
            raise LocalProtocolError(f"{step.value!r} cannot happen while {self.state.value}")
        self.state = following

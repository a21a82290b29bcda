"""Small questions: what asks each one, what its answer gives, and what its errors are about.

Layer: sans-IO, on `requests` and `answers`. What is answered in one exchange without bytes of an
object is a question; `Client` and `AsyncClient` ask the same ones, each on its own connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from racer import answers, requests
from racer.errors import ProtocolError
from racer.exchange import Answer
from racer.ranges import stop_of
from racer.results import Evicted, Explanation, Listing, Pinned, Pins, Prefetched, Stat, Unpinned
from racer.urls import RacerUrl
from racer.wire import Request

T = TypeVar("T")

Url = str | RacerUrl
_LISTING_LINES_MAX = 1000


class Question(NamedTuple, Generic[T]):
    """`read` takes an answer of a status below 400; where that cannot be had, the error is told
    to be about `about`. What is not `idempotent` is not sent again once it may have been seen."""

    cache: str
    request: Request
    about: str
    read: Callable[[Answer], T]
    idempotent: bool = True


def stat(url: Url, etag: str | None) -> Question[Stat]:
    parsed = RacerUrl.parse_object(url)
    return Question(
        parsed.cache,
        requests.stat_request(parsed, etag),
        str(parsed),
        lambda answer: answers.read_stat(parsed, answer.head),
    )


def listing(url: Url, *, recursive: bool, after: str | None) -> Question[Listing]:
    """The lines from `after` on, as the answer before gave it; None asks for the first ones."""
    parsed = RacerUrl.parse(url)

    def read(answer: Answer) -> Listing:
        found = answers.read_listing(parsed, answer.body)
        if found.after is not None and found.after == after:
            raise ProtocolError(f"the listing of {parsed} does not get further")
        return found

    delimiter = None if recursive else b"/"
    request = requests.list_request(
        parsed, delimiter=delimiter, after=after, limit=_LISTING_LINES_MAX
    )
    return Question(parsed.cache, request, f"listing {parsed}", read)


def prefetch(url: Url, offset: int, length: int | None, etag: str | None) -> Question[Prefetched]:
    parsed = RacerUrl.parse_object(url)
    return Question(
        parsed.cache,
        requests.prefetch_request(parsed, offset, stop_of(offset, length), etag),
        f"prefetching {parsed}",
        lambda answer: answers.read_prefetched(answer.body),
    )


def evict(url: Url, *, prefix: bool) -> Question[Evicted]:
    parsed = _selected(url, prefix=prefix)
    return Question(
        parsed.cache,
        requests.evict_request(parsed, prefix=prefix),
        f"evicting {parsed}",
        lambda answer: answers.read_evicted(answer.body),
        idempotent=False,
    )


def pin(url: Url, *, prefix: bool) -> Question[Pinned]:
    parsed = _selected(url, prefix=prefix)
    return Question(
        parsed.cache,
        requests.pin_request(parsed, prefix=prefix),
        f"pinning {parsed}",
        lambda answer: answers.read_pinned(answer.body),
    )


def unpin(url: Url, *, prefix: bool) -> Question[Unpinned]:
    parsed = _selected(url, prefix=prefix)
    return Question(
        parsed.cache,
        requests.unpin_request(parsed, prefix=prefix),
        f"unpinning {parsed}",
        lambda answer: answers.read_unpinned(answer.body),
        idempotent=False,
    )


def _selected(url: Url, *, prefix: bool) -> RacerUrl:
    """One object or, with `prefix`, whatever lies under the URL."""
    return RacerUrl.parse(url) if prefix else RacerUrl.parse_object(url)


def pins(cache: str) -> Question[Pins]:
    RacerUrl(cache)  # Raises BadUrl for what is no name of a cache.
    return Question(
        cache,
        requests.pins_request(),
        f"the pins of {cache}",
        lambda answer: answers.read_pins(cache, answer.body),
    )


def explain(url: Url, offset: int, length: int | None) -> Question[Explanation]:
    parsed = RacerUrl.parse_object(url)
    return Question(
        parsed.cache,
        requests.explain_request(parsed, offset, stop_of(offset, length)),
        f"explaining {parsed}",
        lambda answer: answers.read_explanation(parsed, answer.body),
    )

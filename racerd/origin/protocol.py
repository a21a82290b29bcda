"""What a cache needs of an origin.

Layer: origin. Methods block and run on the daemon's origin threads, never on the loop. Every
implementation, real or scripted, passes `tests/contract/origin_contract.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from racerd.ids import ObjectId, ObjectVersion
from racerd.runtime.deadline import Deadline


class CancelToken:
    """Asks a running origin call to stop, from any thread.

    The call looks at it between chunks; one that is blocked in the kernel registers what wakes it
    (`on_cancel`), so that cancelling takes effect at once and not after an idle time-out.
    """

    __slots__ = ("_event", "_lock", "_wakers")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    def cancel(self) -> None:
        with self._lock:
            self._event.set()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleeps up to `seconds`; returns whether it was cancelled."""
        return self._event.wait(seconds)

    @contextmanager
    def on_cancel(self, wake: Callable[[], None]) -> Iterator[None]:
        """Calls `wake` once if cancelled inside the block, at once if it already is.

        `wake` runs on the cancelling thread: it must not block and must not raise.
        """
        with self._lock:
            late = self._event.is_set()
            if not late:
                self._wakers.append(wake)
        if late:
            wake()
        try:
            yield
        finally:
            with self._lock:
                if wake in self._wakers:
                    self._wakers.remove(wake)


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An entry of a listing. `key` is the whole key, not relative to the prefix."""

    key: bytes
    size: int
    etag: str | None


@dataclass(frozen=True, slots=True)
class ListedPrefix:
    """A common prefix of a delimited listing, its trailing delimiter included."""

    key: bytes


class Origin(Protocol):
    """One cache's source of objects. Thread-safe.

    Raises: RequestError `not_found`, `forbidden`, `version_changed`, `bad_request`;
    SourceError `origin_unavailable` (retry same, may carry retry_after_seconds),
    `origin_protocol` (the origin answered what it must not), `origin_cancelled`;
    ResourceError `deadline_exceeded`. Messages name the origin without credentials.
    """

    @property
    def description(self) -> str:
        """The origin as shown to people: a URL without credentials."""

    def head(self, object_id: ObjectId, *, deadline: Deadline) -> ObjectVersion:
        """Returns the object's current version. An object without any validator is refused."""

    def fetch(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        *,
        deadline: Deadline,
        cancel: CancelToken,
        room: memoryview | None = None,
    ) -> memoryview:
        """Returns exactly bytes [start, stop) of exactly `version`, as one contiguous view.

        Conditional on the version; 0 <= start < stop <= version.size. A broken transfer is
        resumed under the same validator. The view owns its memory; the caller drops it.

        `room`: writable memory of at least stop - start bytes that the result may lie in, which
        spares touching fresh memory. Nobody writes to it any more when this returns or raises.
        """

    def list_objects(
        self,
        bucket: str,
        prefix: bytes,
        *,
        delimiter: bytes | None,
        after: bytes | None,
        deadline: Deadline,
    ) -> Iterator[ListedObject | ListedPrefix]:
        """Yields entries whose key starts with `prefix`, in byte order of the key.

        `delimiter` is b"/" or None (recursive). `after` skips keys up to and including it.
        """

    def list_buckets(self, *, deadline: Deadline) -> list[str] | None:
        """The buckets that can be named, sorted, or None where the origin cannot say."""

    def close(self) -> None:
        """Releases connections and descriptors. No call may be running."""

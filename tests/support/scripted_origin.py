"""An origin in memory that does what a test tells it: hold, fail, change, lie about lengths.

Calls block on the thread that makes them, as those of a real origin do. A test holds them at a
gate and learns that they arrived from a semaphore: nothing sleeps.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby

from racerd.errors import RacerError, RequestError, Retry, SourceError
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.protocol import CancelToken, ListedObject, ListedPrefix
from racerd.runtime.deadline import Deadline


class ScriptedOrigin:
    """`put` gives it objects; `fetches` and `heads` count what was asked of it."""

    description = "scripted://origin"

    def __init__(self) -> None:
        self.objects: dict[tuple[str, bytes], tuple[bytes, str]] = {}
        self.fetches: Counter[tuple[bytes, int]] = Counter()
        self.heads: Counter[bytes] = Counter()
        self.arrived = threading.Semaphore(0)  # Released by every call since `hold`.
        self.running = 0
        self.running_max = 0
        self.cancelled = 0
        self.on_fetch: Callable[[ObjectVersion, int, int], None] | None = None
        self.on_head: Callable[[ObjectId], None] | None = None
        self.short_by = 0
        self.uses_rooms = True  # Off, it answers with memory of its own, as obstore does.
        self.closed = False
        self._gate = threading.Event()
        self._gate.set()
        self._obeys_cancel = True
        self._lock = threading.Lock()

    def put(self, key: bytes, content: bytes, *, etag: str = '"v1"', bucket: str = "b") -> None:
        self.objects[bucket, key] = (content, etag)

    def hold(self, *, obeys_cancel: bool = True) -> None:
        """Lets calls arrive and not go on until `release`. `obeys_cancel` False: a stuck one."""
        self._obeys_cancel = obeys_cancel
        self.arrived = threading.Semaphore(0)
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    # --- the protocol -----------------------------------------------------------------------

    def head(self, object_id: ObjectId, *, deadline: Deadline) -> ObjectVersion:
        with self._lock:
            self.heads[object_id.key] += 1
        self._pass_gate(None)
        if self.on_head is not None:
            self.on_head(object_id)
        content, etag = self._object(object_id)
        return ObjectVersion(object_id, etag, len(content))

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
        assert 0 <= start < stop <= version.size
        with self._lock:
            self.fetches[version.object_id.key, start] += 1
            self.running += 1
            self.running_max = max(self.running, self.running_max)
        try:
            self._pass_gate(cancel)
            if self.on_fetch is not None:
                self.on_fetch(version, start, stop)
            content, etag = self._object(version.object_id)
            if etag != version.etag:
                raise version_changed(version)
            part = memoryview(content)[start : stop - self.short_by]
            if room is None or not self.uses_rooms:
                return part
            room[: len(part)] = part
            return room[: len(part)]
        finally:
            with self._lock:
                self.running -= 1

    def _pass_gate(self, cancel: CancelToken | None) -> None:
        self.arrived.release()
        while not self._gate.wait(0.005):
            if cancel is not None and cancel.cancelled and self._obeys_cancel:
                with self._lock:
                    self.cancelled += 1
                raise SourceError("origin_cancelled", "the fetch was cancelled", retry=Retry.SAME)

    def _object(self, object_id: ObjectId) -> tuple[bytes, str]:
        found = self.objects.get((object_id.bucket, object_id.key))
        if found is None:
            raise RequestError("not_found", f"{object_id.text} does not exist")
        return found

    def list_objects(
        self,
        bucket: str,
        prefix: bytes,
        *,
        delimiter: bytes | None,
        after: bytes | None,
        deadline: Deadline,
    ) -> Iterator[ListedObject | ListedPrefix]:
        keys = sorted(
            key
            for (name, key) in self.objects
            if name == bucket and key.startswith(prefix) and (after is None or key > after)
        )

        def group(key: bytes) -> bytes:
            head, found, _ = key[len(prefix) :].partition(delimiter or b"\0")
            return prefix + head + delimiter if found and delimiter else key

        for name, members in groupby(keys, group):
            if name in keys:
                content, etag = self.objects[bucket, name]
                yield ListedObject(name, len(content), etag)
            else:
                assert list(members)
                yield ListedPrefix(name)

    def list_buckets(self, *, deadline: Deadline) -> list[str] | None:
        self._pass_gate(None)
        return sorted({bucket for bucket, _ in self.objects})

    def close(self) -> None:
        assert self.running == 0, "closed while a call runs"
        self.closed = True


def version_changed(version: ObjectVersion) -> RequestError:
    return RequestError("version_changed", f"{version.object_id.text} changed")


def unavailable() -> RacerError:
    return SourceError("origin_unavailable", "the origin is down", retry=Retry.SAME)

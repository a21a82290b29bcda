"""Versions: which version of an object is current, and which ones are known.

Layer: read; loop thread, HEADs on the `origin` threads. An object's current version is asked for
once in `version_seconds`; there is one HEAD in flight per object, and it belongs to all who wait
for it. A pinned ETag that is known, from an earlier answer or from the store, needs no origin at
all: a version never changes. `not_found` and `forbidden` are remembered for `absence_seconds`,
other failures not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from racerd.errors import RacerError, RequestError, Retry
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.protocol import Origin
from racerd.read.flight import twin
from racerd.read.settings import ReadSettings
from racerd.runtime.deadline import Deadline, deadline_exceeded
from racerd.runtime.threads import Job, WorkerThreads, settled
from racerd.store import Store

_ABSENT = ("not_found", "forbidden")


@dataclass(frozen=True, slots=True)
class Resolution:
    """The version that a request reads, and how long it is answered without asking the origin."""

    version: ObjectVersion
    expires_in_seconds: float


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the origin said last: a version, or that there is none to be had."""

    outcome: ObjectVersion | RequestError
    expires_at: float


class _Question:
    """A HEAD in flight and how many wait for it."""

    __slots__ = ("job", "waiters")

    def __init__(self, job: Job[ObjectVersion]) -> None:
        self.job = job
        self.waiters = 0


class Versions:
    """The versions of one cache's objects. Bounded by `versions_max`, oldest first out."""

    def __init__(
        self, origin: Origin, threads: WorkerThreads, store: Store, settings: ReadSettings
    ) -> None:
        self._origin = origin
        self._threads = threads
        self._store = store
        self._settings = settings
        self._answers: OrderedDict[ObjectId, _Answer] = OrderedDict()
        self._known: OrderedDict[tuple[ObjectId, str], ObjectVersion] = OrderedDict()
        self._questions: dict[ObjectId, _Question] = {}

    async def resolve(
        self, object_id: ObjectId, *, if_match: str | None, deadline: Deadline
    ) -> Resolution:
        """Returns the current version, or the one called `if_match`.

        Raises RequestError `version_changed` (with `current_etag`) where `if_match` is neither
        known nor current; what the origin's `head` raises; ResourceError `deadline_exceeded`.
        Cancelling leaves the HEAD to the others, or drops it if it has not started.
        """
        if if_match is not None:
            known = self._find(object_id, if_match)
            if known is not None:
                return Resolution(known, self._seconds_left(known))
            return self._pinned(await self._ask(object_id, deadline), if_match)
        answer = self._answers.get(object_id)
        if answer is not None and answer.expires_at > time.monotonic():
            if isinstance(answer.outcome, RequestError):
                raise twin(answer.outcome) from answer.outcome
            return Resolution(answer.outcome, self._seconds_left(answer.outcome))
        version = await self._ask(object_id, deadline)
        return Resolution(version, self._seconds_left(version))

    def invalidate(self, version: ObjectVersion) -> None:
        """The origin says that `version` is not current any more: the next reader asks again."""
        answer = self._answers.get(version.object_id)
        if answer is not None and answer.outcome == version:
            del self._answers[version.object_id]

    def current_etag(self, object_id: ObjectId) -> str | None:
        """The ETag of the last answer, if it still holds."""
        answer = self._answers.get(object_id)
        if answer is None or isinstance(answer.outcome, RequestError):
            return None
        return answer.outcome.etag if answer.expires_at > time.monotonic() else None

    def forget(self, matches: Callable[[ObjectId], bool]) -> None:
        """Drops what is remembered of the objects that match."""
        for object_id in [name for name in self._answers if matches(name)]:
            del self._answers[object_id]
        for key in [key for key in self._known if matches(key[0])]:
            del self._known[key]

    async def close(self) -> None:
        """Waits for the HEADs that run."""
        for question in list(self._questions.values()):
            question.job.cancel()
            await settled(question.job.future)

    # --- what is known ----------------------------------------------------------------------

    def _find(self, object_id: ObjectId, etag: str) -> ObjectVersion | None:
        known = self._known.get((object_id, etag))
        if known is not None:
            self._known.move_to_end((object_id, etag))
            return known
        stored = self._store.find_version(object_id, etag)
        if stored is not None:
            self._remember(stored)
        return stored

    def _seconds_left(self, version: ObjectVersion) -> float:
        answer = self._answers.get(version.object_id)
        if answer is None or answer.outcome != version:
            return 0.0
        return max(0.0, answer.expires_at - time.monotonic())

    def _pinned(self, current: ObjectVersion, if_match: str) -> Resolution:
        if current.etag == if_match:
            return Resolution(current, self._seconds_left(current))
        error = RequestError(
            "version_changed",
            f"{current.object_id.text} is version {current.etag}, not {if_match}",
            hint="resolve the object again and read the version that is current",
            retry=Retry.NEVER,
        )
        error.current_etag = current.etag
        raise error

    def _remember(self, version: ObjectVersion) -> None:
        key = (version.object_id, version.etag)
        self._known[key] = version
        self._known.move_to_end(key)
        if len(self._known) > self._settings.versions_max:
            self._known.popitem(last=False)

    # --- asking -----------------------------------------------------------------------------

    async def _ask(self, object_id: ObjectId, deadline: Deadline) -> ObjectVersion:
        """Joins or starts the object's HEAD. It runs under its own time limit, not a reader's."""
        question = self._questions.get(object_id)
        if question is None:
            limit = Deadline.after(self._settings.head_seconds)
            head = partial(self._origin.head, object_id, deadline=limit)
            question = _Question(self._threads.submit(head, urgent=True))
            self._questions[object_id] = question
            question.job.future.add_done_callback(partial(self._answered, object_id))
        question.waiters += 1
        future = question.job.future
        try:
            await asyncio.wait([future], timeout=deadline.remaining_seconds())
        finally:
            question.waiters -= 1
            if not question.waiters and not question.job.started:
                question.job.cancel()
                self._questions.pop(object_id, None)
        if not future.done() or future.cancelled():
            raise deadline_exceeded(f"asking {self._origin.description} for {object_id.text}")
        error = future.exception()
        if error is not None:
            raise twin(error) from error
        return future.result()

    def _answered(self, object_id: ObjectId, future: asyncio.Future[ObjectVersion]) -> None:
        question = self._questions.get(object_id)
        if question is not None and question.job.future is future:
            del self._questions[object_id]
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            version = future.result()
            self._remember(version)
            self._note(object_id, version, self._settings.version_seconds)
        elif isinstance(error, RequestError) and error.code in _ABSENT:
            self._note(object_id, error, self._settings.absence_seconds)
        elif isinstance(error, RacerError):
            self._answers.pop(object_id, None)

    def _note(
        self, object_id: ObjectId, outcome: ObjectVersion | RequestError, seconds: float
    ) -> None:
        self._answers[object_id] = _Answer(outcome, time.monotonic() + seconds)
        self._answers.move_to_end(object_id)
        if len(self._answers) > self._settings.versions_max:
            self._answers.popitem(last=False)

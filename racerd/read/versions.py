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
_VERSIONS_OF_OBJECT_MAX = 16


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
    at: float


class _Question:
    """A HEAD in flight and how many wait for it."""

    __slots__ = ("job", "waiters")

    def __init__(self, job: Job[ObjectVersion]) -> None:
        self.job = job
        self.waiters = 0


class Versions:
    """The versions of one cache's objects. Remembers `versions_max` objects, oldest first out."""

    def __init__(
        self, origin: Origin, threads: WorkerThreads, store: Store, settings: ReadSettings
    ) -> None:
        self._origin = origin
        self._threads = threads
        self._store = store
        self._settings = settings
        self._answers: OrderedDict[ObjectId, _Answer] = OrderedDict()
        self._known: OrderedDict[ObjectId, OrderedDict[str, ObjectVersion]] = OrderedDict()
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
            # Who pins a version that is not known may know a newer one than the last answer.
            seconds = min(self._settings.absence_seconds, self._settings.version_seconds)
            return self._pinned(await self._current(object_id, seconds, deadline), if_match)
        version = await self._current(object_id, self._settings.version_seconds, deadline)
        return Resolution(version, self._seconds_left(version))

    async def _current(
        self, object_id: ObjectId, age_seconds_max: float, deadline: Deadline
    ) -> ObjectVersion:
        """The last answer if it holds and is young enough, else the origin's."""
        answer, now = self._answers.get(object_id), time.monotonic()
        if answer is None or answer.expires_at <= now or answer.at + age_seconds_max <= now:
            return await self._ask(object_id, deadline)
        if isinstance(answer.outcome, RequestError):
            raise twin(answer.outcome) from answer.outcome
        return answer.outcome

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

    def objects(self) -> list[ObjectId]:
        """The objects of which anything is remembered."""
        return [*self._answers, *(name for name in self._known if name not in self._answers)]

    def forget(self, object_id: ObjectId) -> None:
        """Drops what is remembered of an object: the next reader asks the origin."""
        self._answers.pop(object_id, None)
        self._known.pop(object_id, None)

    async def close(self) -> None:
        """Waits for the HEADs that run."""
        for question in list(self._questions.values()):
            question.job.cancel()
            await settled(question.job.future)

    # --- what is known ----------------------------------------------------------------------

    def _find(self, object_id: ObjectId, etag: str) -> ObjectVersion | None:
        versions = self._known.get(object_id)
        if versions is not None and etag in versions:
            self._known.move_to_end(object_id)
            return versions[etag]
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
        versions = self._known.setdefault(version.object_id, OrderedDict())
        versions[version.etag] = version
        versions.move_to_end(version.etag)
        self._known.move_to_end(version.object_id)
        if len(versions) > _VERSIONS_OF_OBJECT_MAX:
            versions.popitem(last=False)
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
        now = time.monotonic()
        self._answers[object_id] = _Answer(outcome, now + seconds, now)
        self._answers.move_to_end(object_id)
        if len(self._answers) > self._settings.versions_max:
            self._answers.popitem(last=False)

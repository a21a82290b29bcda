"""Delivery: from a source of a page to the reader's destination.

Layer: read. The loop cuts a part into pieces of about `run_bytes`, twice that where there is much
to do; the `open` threads do them side by side. Sealed frames are opened straight into the
destination, cut ones through a scratch frame that belongs to the thread and is wiped after each
use. Plaintext is copied.

A part of a few KiB is opened by the loop itself: one frame takes 50 us, whereas handing it to a
thread and taking the result back takes the loop more than twice that, and the reader far more.

Invariants: `deliver` returns, raises or is cancelled only when no thread touches the destination
any more, and no view of it is left behind. What a failed delivery leaves in the destination is
verified bytes, zeros, or what lay there before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np

from racerd.crypto.epoch_key import EpochKey
from racerd.crypto.keyring import Keyring
from racerd.crypto.sealing import PageOpener, wipe
from racerd.errors import IntegrityError, Retry
from racerd.ids import PageId
from racerd.pages import TAG_BYTES, PageGeometry, Seal
from racerd.read.admission import Admission
from racerd.read.memory import MemoryPage, PageLease
from racerd.read.plan import FrameCut, FrameRun, PagePart, frame_span, plan_frames
from racerd.read.settings import ReadSettings
from racerd.read.sources import Source
from racerd.runtime.deadline import Deadline
from racerd.runtime.threads import Job, WorkerThreads, finished, without_frames
from racerd.telemetry import Metrics

Piece = Callable[[], None]

# What the loop may open itself: parts of up to so many bytes, from frames of so many in all.
ON_LOOP_BYTES = 16 * 1024
_ON_LOOP_FRAME_BYTES = 512 * 1024

# In bulk, one turn of a thread is so many runs. Between turns threads need the interpreter lock for
# longer than between frames, and keep each other from it.
_BULK_RUNS = 2


class Delivery:
    """Delivers parts of pages on the `open` threads, in turn between connections."""

    def __init__(
        self,
        threads: WorkerThreads,
        admission: Admission,
        keyring: Keyring,
        geometry: PageGeometry,
        settings: ReadSettings,
        metrics: Metrics,
    ) -> None:
        self._threads = threads
        self._admission = admission
        self._keyring = keyring
        self._geometry = geometry
        self._settings = settings
        self._run_frames = max(1, settings.run_bytes // geometry.frame_bytes)
        # So much is done in longer turns: each thread has two of them, so that none ends early.
        self._bulk_bytes = 2 * threads.count * _BULK_RUNS * settings.run_bytes
        self._scratch = _ScratchFrames(geometry.frame_bytes)
        self._queue_seconds = metrics.stage_seconds.labels("queue")
        self._open_seconds = metrics.stage_seconds.labels("open")

    async def deliver(
        self,
        source: Source,
        part: PagePart,
        destination: memoryview,
        *,
        connection: Hashable,
        deadline: Deadline,
    ) -> None:
        """Writes `part` to `destination[part.offset : part.offset + part.length]`.

        Raises IntegrityError when the source's bytes do not verify, or its key is gone;
        ResourceError `overloaded` or `deadline_exceeded` while it waits for its turn. The caller
        keeps the source until this ends. Cancelling: what runs is waited for.
        """
        if self._is_small(source, part):
            started_at = time.perf_counter()
            self._deliver_here(source, part, destination)
            self._queue_seconds.observe(0.0)
            self._open_seconds.observe(time.perf_counter() - started_at)
            return
        with await self._admission.take(
            self._admission.opening, part.length, connection=connection, deadline=deadline
        ):
            await self._finish(self._submit(((source, part),), destination))

    async def deliver_batch(
        self, sources: Sequence[tuple[Source, PagePart]], destination: memoryview
    ) -> None:
        """Delivers several parts as one job, for a caller that has its turn (`opening`) already.

        Raises IntegrityError as `deliver`; then any of the parts may be there, or zeros, or what
        lay there before. The caller keeps the sources until this ends. Cancelling: as `deliver`.
        """
        if sources:
            await self._finish(self._submit(sources, destination))

    async def _finish(self, job: Job[None]) -> None:
        await finished(job)
        self._queue_seconds.observe(job.queued_seconds)
        self._open_seconds.observe(time.perf_counter() - job.submitted_at)

    def _is_small(self, source: Source, part: PagePart) -> bool:
        """Whether handing the part to a thread would cost more than delivering it."""
        if part.length > ON_LOOP_BYTES:
            return False
        if not isinstance(source, PageLease):
            return True
        frame_bytes = self._geometry.frame_bytes
        one_tag = source.page.seal.frame_count == 1 and part.page_length > frame_bytes
        first, stop = frame_span(part, frame_bytes)
        return not one_tag and (stop - first) * frame_bytes <= _ON_LOOP_FRAME_BYTES

    def _deliver_here(self, source: Source, part: PagePart, destination: memoryview) -> None:
        pieces = self._pieces(source, part, destination, self._run_frames)
        try:
            while pieces:
                pieces.pop(0)()
        except BaseException as error:
            pieces.clear()
            without_frames(error)  # They hold views of the arena and of the reader's memory.
            raise

    def _submit(
        self, sources: Sequence[tuple[Source, PagePart]], destination: memoryview
    ) -> Job[None]:
        """Hands the pieces to the threads. Only the job has them: it drops them at its end, whereas
        a frame that waits would keep them, and their views, in the traceback of an error."""
        length = sum(part.length for _, part in sources)
        run_frames = self._run_frames * (_BULK_RUNS if length >= self._bulk_bytes else 1)
        pieces: list[Piece] = []
        for source, part in sources:
            pieces += self._pieces(source, part, destination, run_frames)
        return self._threads.submit_pieces(pieces, urgent=len(pieces) == 1)

    def _pieces(
        self, source: Source, part: PagePart, destination: memoryview, run_frames: int
    ) -> list[Piece]:
        if isinstance(source, PageLease):
            return self._opening_pieces(source.page, part, destination, run_frames)
        return [
            partial(
                _copy,
                source.view,
                part.start + at,
                destination,
                part.offset + at,
                min(self._settings.run_bytes, part.length - at),
            )
            for at in range(0, part.length, self._settings.run_bytes)
        ]

    def _opening_pieces(
        self, page: MemoryPage, part: PagePart, destination: memoryview, run_frames: int
    ) -> list[Piece]:
        opener = self.opener(page)
        if opener.single_frame:
            return [partial(_open_single, opener, page, part, destination)]
        runs, cuts = plan_frames(part, self._geometry.frame_bytes, run_frames)
        frames, first = page.slots.frames, page.slots.first
        pieces: list[Piece] = [
            partial(
                _open_run, opener, run, frames[run.first - first : run.stop - first], destination
            )
            for run in runs
        ]
        pieces += [
            partial(_open_cut, opener, cut, frames[cut.frame - first], destination, self._scratch)
            for cut in cuts
        ]
        return pieces

    def opener(self, page: MemoryPage) -> PageOpener:
        """The page's opener, made on its first use. Raises IntegrityError if its key is gone."""
        key = page_key(self._keyring, page.id, page.seal)
        if page.opener is None:
            page.opener = PageOpener(page.id, page.seal, self._geometry, key)
        return page.opener


def page_key(keyring: Keyring, page: PageId, seal: Seal) -> EpochKey:
    """The key that `page` is sealed under. Raises IntegrityError `key_retired` if it is gone."""
    key = keyring.get(seal.epoch)
    if key is None:
        raise IntegrityError(
            "key_retired",
            f"{page.text} is sealed under key epoch {seal.epoch}, which was removed",
            retry=Retry.ELSEWHERE,
        )
    return key


class _ScratchFrames(threading.local):
    """One frame of scratch for each thread."""

    def __init__(self, frame_bytes: int) -> None:
        self.frame = memoryview(bytearray(frame_bytes))
        self.zeros = bytes(frame_bytes)


def _open_run(
    opener: PageOpener, run: FrameRun, frames: list[memoryview], destination: memoryview
) -> None:
    with destination[run.offset : run.offset + run.length] as out:
        opener.open_frames(run.first, frames, out)


def _open_cut(
    opener: PageOpener,
    cut: FrameCut,
    frame: memoryview,
    destination: memoryview,
    scratch: _ScratchFrames,
) -> None:
    length = len(frame) - TAG_BYTES
    plain = scratch.frame[:length]
    try:
        opener.open_frame(cut.frame, frame, plain)
        with destination[cut.offset : cut.offset + cut.stop - cut.start] as out:
            out[:] = plain[cut.start : cut.stop]
    finally:
        plain[:] = scratch.zeros[:length]


def _open_single(
    opener: PageOpener, page: MemoryPage, part: PagePart, destination: memoryview
) -> None:
    """Opens a page of store format v1, which has one tag for all of it.

    A part of it needs the whole page opened first: into a scratch page that lives for this call.
    """
    frames = page.slots.frames
    if part.whole:
        with destination[part.offset : part.offset + part.length] as out:
            opener.open_frames(0, frames, out)
        return
    with memoryview(bytearray(part.page_length)) as plain:
        try:
            opener.open_frames(0, frames, plain)
            with destination[part.offset : part.offset + part.length] as out:
                out[:] = plain[part.start : part.stop]
        finally:
            wipe(plain)


def _copy(view: memoryview, start: int, destination: memoryview, offset: int, length: int) -> None:
    """Copies without holding the interpreter lock, which assigning a slice would."""
    with destination[offset : offset + length] as out:
        np.copyto(
            np.frombuffer(out, dtype=np.uint8),
            np.frombuffer(view[start : start + length], dtype=np.uint8),
        )

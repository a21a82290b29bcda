"""Recovery: what is on a slab, after any way of stopping.

Layer: store; runs once per slab, on the disk's own thread, while reads are served already. First
the segments' headers tell each one's generation; a checkpoint's pages are taken over where the
generation is still the same; everything else, and what was being filled at the checkpoint, is
scanned by the records' own headers. Only headers are read: what they promise is checked at every
read. A segment is not used for writing before it was settled here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from racerd.errors import IntegrityError
from racerd.store.buffers import aligned_buffer
from racerd.store.checkpoint import Checkpoint
from racerd.store.claims import Dropped
from racerd.store.codec import peek_untrusted
from racerd.store.columns import Array
from racerd.store.device import DiskError
from racerd.store.engine import Engine
from racerd.store.geometry import BLOCK_BYTES, SEGMENT_HEADER_BYTES
from racerd.store.index import PageIndex
from racerd.store.record import (
    FORMAT_V1,
    HEADER_BYTES_MAX,
    RECORD_MAGIC,
    TOMBSTONE_MAGIC,
    RecordHeader,
    Tombstone,
)
from racerd.store.segments import SegmentState
from racerd.store.slab import Slab
from racerd.store.superblock import decode_segment_header_untrusted
from racerd.units import MIB

_SEARCH_BYTES = MIB
_ATTEMPTS = 3


@dataclass(slots=True)
class Progress:
    """How far recovery is; read by other threads, written by one. `state` is for people."""

    state: str = "the slab is not open"
    segments_total: int = 0
    segments_done: int = 0
    pages_from_checkpoint: int = 0
    pages_from_scan: int = 0
    segments_unreadable: int = 0
    done: bool = False


@dataclass(slots=True)
class Scan:
    """What a segment holds. `used` is where its last record ends."""

    generation: int
    used: int = SEGMENT_HEADER_BYTES
    records: list[RecordHeader] = field(default_factory=list)


class Recovery:
    """Fills `engine`, whose lock is `lock`. `losers` gets records that need a tombstone.

    What `fences` name was dropped before it was found, and is dropped when it is found. More may
    be added while recovery runs, with the lock held.
    """

    def __init__(self, slab: Slab, engine: Engine, lock: AbstractContextManager[object]) -> None:
        self._device = slab.device
        self._slab = slab.id
        self._engine = engine
        self._lock = lock
        self.fences = list(slab.notes.fences)
        self.progress = Progress("reading the checkpoint", segments_total=len(engine.segments))
        self.losers: list[Dropped] = []
        self.headless: set[int] = set()  # Segments in use whose header is lost.

    def run(self, checkpoint: Checkpoint | None, stopped: Callable[[], bool]) -> None:
        """Returns when every segment is settled, or as soon as `stopped`, which is asked often.

        A segment that cannot be read three times over stays unknown: neither read nor written
        until the next start. Raises DiskError only when no segment at all can be read.
        """
        self.progress.state = "reading segment headers"
        generations = self._read_generations(stopped)
        if stopped():
            return
        known = self._known_segments(checkpoint, generations)
        index = self._index_of(checkpoint, known) if checkpoint is not None else None
        with self._lock:
            if index is not None:
                self._engine.adopt(index)
            todo = self._install(checkpoint, known, generations)
            self.losers += self._engine.drop_fenced(self.fences)
        self.progress.segments_done = len(generations) - len(todo)
        self.progress.state = "scanning segments"
        for segment, start, generation in todo:
            if stopped():
                return
            self._scan_and_add(segment, start, generation)
            self.progress.segments_done += 1
        with self._lock:
            self._engine.recovered()
        self.progress.state = "complete"
        self.progress.done = True

    def _read_generations(self, stopped: Callable[[], bool]) -> list[int | None]:
        """Per segment its generation, 0 if it never had one, None if it cannot be read."""
        found: list[int | None] = []
        blocks = aligned_buffer(2 * BLOCK_BYTES)
        failure: DiskError | None = None
        for segment in range(len(self._engine.segments)):
            if stopped():
                break
            try:
                found.append(self._generation(segment, blocks))
            except DiskError as error:
                failure = error
                self.progress.segments_unreadable += 1
                found.append(None)
        if failure is not None and all(generation is None for generation in found):
            raise failure
        return found

    def _generation(self, segment: int, blocks: memoryview) -> int:
        offset = self._engine.geometry.segment_offset(segment)
        self._read(offset, blocks)
        try:
            return decode_segment_header_untrusted(
                blocks[:BLOCK_BYTES], slab=self._slab, segment=segment, offset=offset
            )
        except IntegrityError:
            pass  # Never used, or its header is lost: then a record or a checkpoint may tell.
        try:
            first = peek_untrusted(blocks[BLOCK_BYTES:], self._slab, offset + SEGMENT_HEADER_BYTES)
        except IntegrityError:
            return 0
        self.headless.add(segment)
        return first.place.generation

    def _read(self, offset: int, buffer: memoryview) -> None:
        """Reads with a few attempts; what the medium does not have reads as zeros."""
        for attempt in range(_ATTEMPTS):
            try:
                got = self._device.read(offset, [buffer])
            except DiskError:
                if attempt + 1 == _ATTEMPTS:
                    raise
            else:
                buffer[got:] = bytes(len(buffer) - got)
                return

    def _install(
        self, checkpoint: Checkpoint | None, known: Array, generations: list[int | None]
    ) -> list[tuple[int, int, int]]:
        """Settles what needs no scan. Returns (segment, start, generation) of what does."""
        latest = max((generation or 0 for generation in generations), default=0)
        if checkpoint is not None:
            latest = max(latest, checkpoint.next_generation - 1)
            self._engine.next_sequence = max(self._engine.next_sequence, checkpoint.next_sequence)
        self._engine.next_generation = max(self._engine.next_generation, latest + 1)
        todo = []
        for segment, generation in enumerate(generations):
            if generation is None:
                continue
            if generation == 0:
                self._engine.settle(segment, SegmentState.FRESH, 0, 0)
            elif checkpoint is None or not known[segment]:
                todo.append((segment, SEGMENT_HEADER_BYTES, generation))
            else:
                used = int(checkpoint.segments["used"][segment]) * BLOCK_BYTES
                if checkpoint.segments["state"][segment] == SegmentState.SEALED:
                    size = self._engine.geometry.segment_size(segment)
                    self._engine.settle(segment, SegmentState.SEALED, generation, min(used, size))
                else:
                    # What the checkpoint has of it is served before it is scanned.
                    self._engine.segments.expect(segment, generation)
                    todo.append((segment, used, generation))
        return todo

    def _known_segments(
        self, checkpoint: Checkpoint | None, generations: list[int | None]
    ) -> Array:
        """Which segments are as the checkpoint saw them.

        Where a header is lost, the checkpoint's word is taken, and noted in `generations`.
        """
        known = np.zeros(len(generations), dtype=bool)
        if checkpoint is None:
            return known
        seen = checkpoint.segments["generation"].tolist()
        states = checkpoint.segments["state"].tolist()
        for segment, (then, state) in enumerate(zip(seen, states, strict=True)):
            if segment == len(generations):
                break
            if generations[segment] == 0 and state in (SegmentState.OPEN, SegmentState.SEALED):
                generations[segment] = then
                self.headless.add(segment)
            usable = state in (SegmentState.OPEN, SegmentState.SEALED, SegmentState.FREE)
            known[segment] = usable and generations[segment] == then
        return known

    def _index_of(self, checkpoint: Checkpoint, known: Array) -> PageIndex:
        """The checkpoint's pages in segments that are `known` to be as they were."""
        geometry = self._engine.geometry
        pages = checkpoint.pages
        segments = np.minimum(pages["segment"], len(known) - 1)
        keep = known[segments] & (pages["segment"] < len(known))
        # The last segment of a slab that was made smaller may have lost its end.
        sizes = np.array([geometry.segment_size(segment) for segment in range(len(known))])
        stop = pages["block"].astype(np.int64) * BLOCK_BYTES + pages["length"]
        keep &= stop + geometry.header_bytes <= sizes[segments]
        kept = {name: values[keep] for name, values in pages.items()}
        used, kept["version"] = np.unique(kept["version"], return_inverse=True)
        versions = {name: values[used] for name, values in checkpoint.versions.items()}
        index = PageIndex(len(known))
        index.catalog.load(versions, checkpoint.names, checkpoint.caches)
        index.load(kept)
        self.progress.pages_from_checkpoint = len(index)
        return index

    def _scan_and_add(self, segment: int, start: int, generation: int) -> None:
        geometry = self._engine.geometry
        try:
            scan = self.scan(segment, start, generation)
        except DiskError:
            self.progress.segments_unreadable += 1
            return
        pages = [(header, header.page()) for header in scan.records if self._belongs(header)]
        with self._lock:
            state = SegmentState.SEALED if scan.used > SEGMENT_HEADER_BYTES else SegmentState.FREE
            used = min(scan.used, geometry.segment_size(segment))
            self._engine.settle(segment, state, scan.generation, used)
            for header, page in pages:
                if any(fence.matches(page.version.object_id) for fence in self.fences):
                    self.losers.append(self._engine.reject_recovered(segment, header))
                    continue
                loser = self._engine.add_recovered(segment, header, page)
                if loser is not None:
                    self.losers.append(loser)
        self.progress.pages_from_scan += len(pages)

    def _belongs(self, header: RecordHeader) -> bool:
        """Whether the record's sizes are those of this store; other pages are other ranges."""
        page = self._engine.geometry.page
        try:
            found = header.page()
        except IntegrityError:
            return False
        if header.version != FORMAT_V1 and (header.page_bytes, header.frame_bytes) != (
            page.page_bytes, page.frame_bytes,
        ):  # fmt: skip
            return False
        return header.seal.length == page.page_length(found.version.size, found.index)

    def scan(self, segment: int, start: int, generation: int) -> Scan:
        """Reads the headers of `segment` from `start` on.

        Records of older generations are passed over block by block, because a younger one may
        begin within; those of a younger generation show that the segment's own header was lost.
        """
        geometry = self._engine.geometry
        base, size = geometry.segment_offset(segment), geometry.segment_size(segment)
        scan = Scan(generation, used=start)
        window = aligned_buffer(max(geometry.header_bytes, HEADER_BYTES_MAX))
        at = start
        while at + BLOCK_BYTES <= size:
            self._read(base + at, window[: min(len(window), size - at)])
            found = self._record_at(window[: size - at], base + at, size - at)
            if found is None or found.place.generation < scan.generation:
                at = self._next_candidate(base, at + BLOCK_BYTES, size)
                continue
            if found.place.generation > scan.generation:
                scan = Scan(found.place.generation)
            at += found.record_bytes
            scan.used = at
            if isinstance(found, RecordHeader):
                scan.records.append(found)
        return scan

    def _record_at(
        self, window: memoryview, offset: int, room: int
    ) -> RecordHeader | Tombstone | None:
        try:
            found = peek_untrusted(window, self._slab, offset)
        except IntegrityError:
            return None  # A hole: a write that did not happen, or rot. What follows may be whole.
        return found if found.record_bytes <= room else None

    def _next_candidate(self, base: int, at: int, size: int) -> int:
        """The next block that starts like a record, or `size`."""
        window = aligned_buffer(_SEARCH_BYTES)
        magics = (RECORD_MAGIC, TOMBSTONE_MAGIC)
        while at + BLOCK_BYTES <= size:
            part = window[: min(len(window), size - at)]
            self._read(base + at, part)
            for start in range(0, len(part), BLOCK_BYTES):
                if part[start : start + len(RECORD_MAGIC)] in magics:
                    return at + start
            at += len(part)
        return size

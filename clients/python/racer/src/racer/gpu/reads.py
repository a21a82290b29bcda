"""A client's reads into GPU memory: `GpuSide`.

Layer: gpu, on `filling`, `staging` and `transfer`; thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing

from racer import bulk
from racer.bulk import BulkRead
from racer.cuda.device import Device, Stream
from racer.deadline import Deadline
from racer.errors import Closed, ConnectionLost, GpuError, GpuUnavailable, MemoryLost, RacerError
from racer.gpu.filling import Filling
from racer.gpu.place import GpuPlace
from racer.gpu.staging import StagingRing, StagingSlot
from racer.gpu.target import GpuTarget
from racer.gpu_rung import is_gpu_refusal
from racer.host_memory import address_of
from racer.landing import Ring
from racer.results import HostRead, add_rungs
from racer.transfer import PART_BYTES, HostReads, Part, Place, Slots, Spread


class GpuReads(HostReads):
    """Parts that the GPU rung refuses are handed out unread, and no further ones are started."""

    refusal: RacerError | None = None

    def passes_over(self, error: RacerError) -> bool:
        if not is_gpu_refusal(error):
            return False
        self.refusal = error
        return True

    def until_refused(self, parts: Iterator[Part]) -> Iterator[Part]:
        while self.refusal is None:
            part = next(parts, None)
            if part is None:
                return
            yield part


class GpuSide:
    """A client's staging rings, by GPU, and its reads into GPU memory."""

    def __init__(self, host_ring: Ring) -> None:
        self._host_ring = host_ring
        self._lock = threading.Lock()
        self._rings: dict[str, StagingRing] = {}
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            rings, self._rings = self._rings, {}
        for ring in rings.values():
            ring.close()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        rings, self._rings = self._rings, {}
        for ring in rings.values():
            ring.after_fork_in_child()

    def _ring_for(self, device: Device) -> StagingRing:
        with self._lock:
            if self._closed:
                raise Closed("the client was closed")
            ring = self._rings.get(device.uuid)
            if ring is None:
                ring = self._rings[device.uuid] = StagingRing(device)
            return ring

    def fill(self, read: BulkRead, place: GpuPlace) -> dict[str, int]:
        """Reads the range to the front of `place`; returns the bytes by rung."""
        filling = Filling(read, place)
        if filling.wants_gpu(read.endpoint.info(Deadline.after(read.seconds))):
            self._by_gpu(read, filling)
        for part in filling.left():
            self._by_host(read, filling, part)
        return filling.rungs

    def _by_gpu(self, read: BulkRead, filling: Filling) -> None:
        """The first rung, as often as a lost connection may be followed by another one."""
        target = filling.place.target
        retries, deadline = read.endpoint.retries(), Deadline.after(read.seconds)
        while filling.goes_on():
            position = filling.position
            try:
                if target is not None:
                    _direct(read, filling, target)
                else:
                    ring = self._ring_for(filling.place.device)
                    with ring.enter(deadline) as hold:
                        _staged(read, filling, hold, ring.slot_bytes)
                continue
            except (ConnectionLost, MemoryLost) as error:
                if target is not None and target.lost:
                    raise
                if filling.position > position:
                    retries, deadline = read.endpoint.retries(), Deadline.after(read.seconds)
                pause = retries.pause_after(error, deadline)
            except (GpuError, GpuUnavailable) as error:
                filling.refused(error)
                return
            time.sleep(pause)

    def _by_host(self, read: BulkRead, filling: Filling, part: Part) -> None:
        """The host rung, and below it the stream, which `bulk` takes by itself."""
        chunks = bulk.in_order(read._replace(start=part.start, stop=part.stop), self._host_ring)
        with closing(Stream(filling.place.device)) as stream, closing(chunks):
            for chunk in chunks:
                copy_in(stream, filling.address_of(chunk.start), chunk.view)
        add_rungs(filling.rungs, {"host": part.length})


def copy_in(stream: Stream, address: int, view: memoryview) -> None:
    """Copies writable host memory to the GPU, and returns when it is there."""
    stream.copy_from_host(address, address_of(view), len(view))
    stream.synchronize()


def _direct(read: BulkRead, filling: Filling, target: GpuTarget) -> None:
    """The daemon writes into the destination itself."""
    target.check()
    base = filling.address_of(filling.position) - target.memory.address
    places = Spread(target, filling.position, base)
    try:
        with closing(_parts(read, filling, places, PART_BYTES)) as parts:
            for part, _, done in parts:
                filling.came(part, done)
    finally:
        target.regain()


def _staged(read: BulkRead, filling: Filling, slots: Slots, slot_bytes: int) -> None:
    """The daemon writes into slots, and they are copied; all copies have ended on return."""
    with closing(Stream(filling.place.device)) as stream:
        with closing(_parts(read, filling, slots, slot_bytes)) as parts:
            for part, place, done in parts:
                if done is not None:
                    assert isinstance(place.target, StagingSlot)
                    place.target.copy_to(filling.address_of(part.start), part.length, stream)
                filling.came(part, done)


def _parts(
    read: BulkRead, filling: Filling, slots: Slots, part_bytes: int
) -> Generator[tuple[Part, Place, HostRead | None]]:
    """Yields the parts in order, and what the daemon said of each that it wrote to its place."""
    reads = GpuReads(read.endpoint, read.url, read.etag, seconds=read.seconds)
    parts = reads.until_refused(read.parts(filling.position, part_bytes))
    with closing(reads.run(parts, slots)) as running:
        for part, place, done in running:
            yield part, place, done if done.bytes else None
    if reads.refusal is not None:
        filling.refused(reads.refusal)

"""Reads into GPU memory: what is lent to users, staging for what is not, and the ladder.

Layer: on `bulk`, `landing` and `cuda`; thread-safe. Imported when the first GPU memory is read into
or asked for. The ladder (R4 in the requirements), for each range of a read:

    gpu     the daemon writes plaintext into exported memory of the destination's GPU: the
            destination itself where it is a `GpuBuffer` (or an array made from one), else slots of
            a bounded ring on the same GPU, from where it is copied
    host    the daemon writes into shared memory, and the bytes are copied to the GPU
    stream  the bytes come over the socket, and are copied to the GPU

A step down is taken for the parts that the step above did not bring, and said once per reason. The
destination is always where the caller wants it. It is written to by nobody any more when a call
ends, however it ends: queued copies are waited for, reads in flight were answered, or else the
daemon said that it let go of the memory; where it did not, the memory is lost (`MemoryLost`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, ClassVar

from racer import bulk, messages
from racer.bulk import SMALL_BYTES, BulkRead
from racer.cuda import dlpack
from racer.cuda.arrays import Destination, is_cuda
from racer.cuda.device import Device, Event, Stream, plain_uuid
from racer.cuda.memory import DeviceMemory
from racer.deadline import Deadline
from racer.endpoint import Endpoint
from racer.errors import (
    Closed,
    ConnectionLost,
    GpuError,
    GpuUnavailable,
    MemoryLost,
    RacerError,
)
from racer.gpu_rung import is_gpu_refusal
from racer.host_memory import address_of
from racer.landing import Ring, SharedSlots
from racer.messages import Info, add_rungs
from racer.target import Registered
from racer.transfer import PART_BYTES, HostReads, Part, Place, Slots, Spread
from racer.wire import Request

STAGING_PART_BYTES = 16 << 20
STAGING_SLOTS = 4


class GpuTarget(Registered[DeviceMemory]):
    """Exported memory and its registrations. Freed with the last reference to it: consumers of
    capsules and arrays hold it, reads in flight do, a `GpuBuffer` does until it is closed."""

    operation: ClassVar[str] = messages.GPU_READ

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory)
        self.lent = False  # Then others may have queued work on it.
        _TARGETS[memory.address] = self

    def _register_request(self) -> Request:
        return messages.register_gpu_request(self.memory.device.uuid, self.memory.target_bytes)

    def regain(self) -> None:
        """After reads that were given up: the daemon's word that it let go makes the memory good
        again. Without it the memory stays lost."""
        if self._lost and self.release():
            self._lost = False

    def close(self) -> None:
        """Has the daemons let go (they answer when nothing of theirs touches it any more), then
        frees the memory. One that does not answer keeps the physical memory for as long as it has
        it mapped: what it writes late, it writes to nobody's memory."""
        super().close()

    def __del__(self) -> None:
        if not self.memory.closed:
            self.close()


_TARGETS: weakref.WeakValueDictionary[int, GpuTarget] = weakref.WeakValueDictionary()


def target_holding(address: int, nbytes: int) -> GpuTarget | None:
    """The exported memory of this process that [address, address + nbytes) lies in, if any."""
    for target in list(_TARGETS.values()):
        memory = target.memory
        if memory.address <= address and address + nbytes <= memory.address + memory.size:
            return target
    return None


class GpuBuffer:
    """`nbytes` of GPU memory that racerd writes into; made by `Client.gpu_alloc`.

    torch, cupy and numba take it as it is, as bytes, without a copy: `torch.from_dlpack(buffer)`,
    `cupy.from_dlpack(buffer)`, `numba.cuda.as_cuda_array(buffer)`. What was made from it keeps the
    memory, also after `close`; the memory is freed when nobody holds it any more and the daemon has
    said that it let go. Close it when no read into it is running.
    """

    def __init__(self, target: GpuTarget) -> None:
        self._target: GpuTarget | None = target
        self._lent: GpuTarget | None = None
        self.nbytes = target.memory.size
        self.device_id = target.memory.device.ordinal
        self.gpu = target.memory.device.uuid

    @property
    def target(self) -> GpuTarget:
        if self._target is None:
            raise Closed("this GPU memory was closed")
        return self._target

    @property
    def address(self) -> int:
        """The device pointer. Raises Closed after `close`."""
        return self.target.memory.address

    @property
    def closed(self) -> bool:
        return self._target is None

    @property
    def lost(self) -> bool:
        """Whether a read was not answered and the daemon did not say that it let go, so that this
        memory is not read into any more."""
        return self._target is not None and self._target.lost

    # --- lending ----------------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. Whoever takes it holds this object, and so the memory."""
        self._lent = self.target  # Kept beyond `close`: nobody tells when the array is gone.
        self._lent.lent = True
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device_id

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the bytes, for DLPack 1 where `max_version` allows it.

        `stream` needs nothing: between reads nothing is queued on this memory. Raises BufferError
        for a copy or another device.
        """
        if copy:
            raise BufferError("this memory is lent, not copied")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"this memory is on cuda:{self.device_id}")
        versioned = max_version is not None and max_version[0] >= 1
        target = self.target
        target.lent = True
        return dlpack.lend(target, self.address, self.nbytes, self.device_id, versioned=versioned)

    # --- lifetime ---------------------------------------------------------------------------

    def close(self) -> None:
        """Has the daemons let go, and gives the memory up: it is freed as soon as nothing that was
        made from it is left. Done twice it does nothing."""
        target, self._target = self._target, None
        if target is not None:
            target.release()

    def __enter__(self) -> GpuBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def alloc(nbytes: int, device: object) -> GpuBuffer:
    """See `Client.gpu_alloc`."""
    return GpuBuffer(GpuTarget(DeviceMemory(Device.find(device), nbytes)))


# --- destinations -------------------------------------------------------------------------------


class GpuPlace:
    """Where a call's bytes go: `nbytes` at `address`, and the exported memory that they lie in, or
    None. A context manager: nothing that was queued for the place before still runs in it."""

    def __init__(self, destination: Any) -> None:
        self._opened: Destination | None = None
        if isinstance(destination, GpuBuffer):
            self.target: GpuTarget | None = destination.target
            memory = self.target.memory
            self.device, self.address, self.nbytes = memory.device, memory.address, memory.size
            if self.target.lent:
                self.device.synchronize()
            return
        self._opened = opened = Destination.open(destination)
        self.device, self.address, self.nbytes = opened.device, opened.address, opened.nbytes
        self.target = target_holding(self.address, self.nbytes) if self.nbytes else None

    def __enter__(self) -> GpuPlace:
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            self._opened.close()


def is_gpu_destination(value: object) -> bool:
    return isinstance(value, GpuBuffer) or is_cuda(value)


# --- staging ------------------------------------------------------------------------------------


class StagingSlot(GpuTarget):
    """Exported memory that parts are copied out of, and the end of the last such copy."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory)
        self._copied = Event(memory.device)

    def id_for(self, endpoint: Endpoint, deadline: Deadline) -> str:
        """Asked for when the daemon is about to write here: what is still being copied out of the
        slot is waited for."""
        self._copied.wait()
        return super().id_for(endpoint, deadline)

    def copy_to(self, address: int, nbytes: int, stream: Stream) -> None:
        """Queues a copy of the first `nbytes`."""
        stream.copy_from_device(address, self.memory.address, nbytes)
        self._copied.record(stream)

    def close(self) -> None:
        super().close()
        self._copied.close()


class StagingRing(SharedSlots[StagingSlot]):
    """Of one GPU, bounded whatever is read."""

    def __init__(self, device: Device) -> None:
        super().__init__(STAGING_PART_BYTES, STAGING_SLOTS)
        self._device = device

    def make(self) -> StagingSlot | None:
        """Raises GpuError, GpuUnavailable where not even one slot can be had."""
        try:
            memory = DeviceMemory(self._device, self.slot_bytes)
            try:
                return StagingSlot(memory)
            except BaseException:
                memory.close()
                raise
        except GpuError as error:
            if error.code != "gpu_out_of_memory" or not self._made:
                raise
            return None  # Fewer slots are slower, and enough.


# --- reads --------------------------------------------------------------------------------------


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
        if filling.wants_gpu():
            self._by_gpu(filling)
        for part in filling.left():
            self._by_host(filling, part)
        return filling.rungs

    def _by_gpu(self, filling: Filling) -> None:
        retries, deadline = filling.read.endpoint.retries(), Deadline.after(filling.read.seconds)
        while filling.goes_on():
            position = filling.position
            try:
                if filling.place.target is not None:
                    filling.run_direct(filling.place.target)
                else:
                    with self._ring_for(filling.place.device).enter(deadline) as hold:
                        filling.run_staged(hold, STAGING_PART_BYTES)
            except (ConnectionLost, MemoryLost) as error:
                if filling.place.target is not None and filling.place.target.lost:
                    raise
                if filling.position > position:
                    retries = filling.read.endpoint.retries()
                    deadline = Deadline.after(filling.read.seconds)
                pause = retries.pause_after(error, deadline)
            except (GpuError, GpuUnavailable) as error:
                filling.refused(error)
                return
            else:
                continue
            time.sleep(pause)

    def _by_host(self, filling: Filling, part: Part) -> None:
        """The host rung, and below it the stream, which `bulk` takes by itself."""
        read, place = filling.read, filling.place
        chunks = bulk.in_order(read._replace(start=part.start, stop=part.stop), self._host_ring)
        with closing(Stream(place.device)) as stream, closing(chunks):
            for chunk in chunks:
                to = filling.address_of(chunk.start)
                stream.copy_from_host(to, address_of(chunk.view), len(chunk.view))
                stream.synchronize()
        add_rungs(filling.rungs, {"host": part.length})


class Filling:
    """One read on its way: what was brought, up to `position`, and what other rungs have to."""

    def __init__(self, read: BulkRead, place: GpuPlace) -> None:
        self.read = read
        self.place = place
        self.position = read.start
        self.rungs: dict[str, int] = {}
        self._refused: list[Part] = []
        self._stopped = False

    def wants_gpu(self) -> bool:
        """Whether the first rung is to be tried; says why not where it is the first time."""
        endpoint, uuid = self.read.endpoint, self.place.device.uuid
        if self.place.target is None and self.read.stop - self.read.start <= SMALL_BYTES:
            return False  # Two copies of little: the socket is quicker.
        if not endpoint.gpu_rung.is_open(uuid):
            return False
        lack = why_no_gpu(endpoint.info(Deadline.after(self.read.seconds)), uuid)
        if lack is not None:
            endpoint.gpu_rung.step_down(uuid, lack)
        return lack is None

    def goes_on(self) -> bool:
        return self.position < self.read.stop and not self._stopped

    def left(self) -> list[Part]:
        """What the host rung has to bring."""
        rest = [Part(self.position, self.read.stop)] if self.position < self.read.stop else []
        return [*self._refused, *rest]

    def address_of(self, start: int) -> int:
        """Where the object's byte `start` goes."""
        return self.place.address + start - self.read.start

    def refused(self, error: RacerError) -> None:
        self._stopped = True
        self.read.endpoint.gpu_rung.step_down(self.place.device.uuid, error)

    def run_direct(self, target: GpuTarget) -> None:
        """The daemon writes into the destination itself."""
        base = self.address_of(self.position) - target.memory.address
        try:
            with closing(self._run(Spread(target, self.position, base), PART_BYTES)) as running:
                for _ in running:
                    continue
        finally:
            target.regain()

    def run_staged(self, slots: Slots, slot_bytes: int) -> None:
        """The daemon writes into slots, and they are copied; all copies have ended on return."""
        with closing(Stream(self.place.device)) as stream:
            with closing(self._run(slots, slot_bytes)) as running:
                for part, place in running:
                    assert isinstance(place.target, StagingSlot)
                    place.target.copy_to(self.address_of(part.start), part.length, stream)

    def _run(self, slots: Slots, part_bytes: int) -> Generator[tuple[Part, Place]]:
        """Yields the parts that are in their places."""
        read = self.read
        reads = GpuReads(read.endpoint, read.url, read.etag, seconds=read.seconds)
        parts = reads.until_refused(read.parts(self.position, part_bytes))
        with closing(reads.run(parts, slots)) as running:
            for part, place, done in running:
                if done.bytes:
                    yield part, place
                    add_rungs(self.rungs, done.rungs)
                else:
                    self._refused.append(part)
                self.position = part.stop
        if reads.refusal is not None:
            self.refused(reads.refusal)


def why_no_gpu(info: Info, uuid: str) -> GpuUnavailable | None:
    """Why the daemon does not write into the GPU `uuid`, by what it says about itself, or None."""
    if info.gpu == "off":
        return GpuUnavailable(
            f"racerd {info.version} serves this cache without GPUs",
            code="gpu_off",
            hint="see `racerd doctor`, and start it with --gpu=auto",
            retry="never",
        )
    if info.gpus and plain_uuid(uuid) not in map(plain_uuid, info.gpus):
        return GpuUnavailable(
            f"racerd does not see this GPU (it sees {', '.join(info.gpus)})",
            code="gpu_unknown",
            hint="give the daemon all GPUs of the node",
            retry="never",
        )
    return None

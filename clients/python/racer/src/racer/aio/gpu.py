"""Reads into GPU memory for asyncio: the counterpart of `racer.gpu.reads`, with the same ladder.

Layer: on `aio.reads`; one event loop's. What waits for the GPU runs on a thread, and a cancelled
call waits for it: when a call has ended, nothing writes to the caller's memory any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import NamedTuple

from racer import answers, requests
from racer.aio.endpoint import AsyncEndpoint
from racer.aio.reads import AsyncRead, host_read, in_flight, in_order
from racer.aio.target import AsyncRing
from racer.aio.threads import to_end
from racer.cuda.device import Device, Stream
from racer.cuda.memory import DeviceMemory
from racer.deadline import Deadline
from racer.errors import Closed, ConnectionLost, GpuError, GpuUnavailable, MemoryLost, RacerError
from racer.gpu.buffer import GpuBuffer, alloc
from racer.gpu.filling import Filling
from racer.gpu.place import GpuPlace
from racer.gpu.reads import copy_in
from racer.gpu.staging import STAGING_SLOTS, StagingRing, StagingSlot
from racer.gpu.target import GpuTarget
from racer.gpu_rung import is_gpu_refusal
from racer.refusals import error_of
from racer.results import HostRead, add_rungs
from racer.transfer import PART_BYTES, Part


class AsyncGpuBuffer(GpuBuffer):
    """A `GpuBuffer` of an `AsyncClient`: an async context manager, or `await aclose()`."""

    async def aclose(self) -> None:
        """`close`, without holding up the loop for the daemon's answer."""
        await to_end(self.close)

    async def __aenter__(self) -> AsyncGpuBuffer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def async_alloc(nbytes: int, device: object) -> AsyncGpuBuffer:
    """See `AsyncClient.gpu_alloc`."""
    # Starting the driver takes seconds.
    target = await to_end(partial(alloc, nbytes, device), GpuTarget.close)
    return AsyncGpuBuffer(target)


class AsyncGpuTarget:
    """A `GpuTarget` for one call: registered by awaiting, released by whoever frees the memory."""

    operation = requests.GPU_READ

    def __init__(self, target: GpuTarget) -> None:
        self.target = target
        self._registering = asyncio.Lock()

    @property
    def memory(self) -> DeviceMemory:
        return self.target.memory

    @property
    def lost(self) -> bool:
        return self.target.lost

    def check(self) -> None:
        self.target.check()

    def give_up(self) -> None:
        self.target.give_up()

    def can_be_touched(self, error: RacerError) -> bool:
        return False

    def forget(self, endpoint: AsyncEndpoint, target_id: str) -> None:
        self.target.forget(endpoint, target_id)

    async def id_for(self, endpoint: AsyncEndpoint, deadline: Deadline) -> str:
        """The id under which `endpoint` knows this memory; registers it where it does not."""
        async with self._registering:
            known = self.target.known_id(endpoint)
            if known is not None:
                return known
            await endpoint.check_name(deadline)
            connection = endpoint.pool.dedicated()
            try:
                request = self.target.register_request()
                answer = await connection.exchange(request, deadline, [self.memory.fd])
                if answer.head.status >= 400:
                    raise error_of(answer.head, answer.body, about="registering memory")
                target_id = answers.read_target_id(answer.body, self.memory.target_bytes)
                return self.target.adopt(endpoint, connection.into_blocking(), target_id)
            except BaseException:
                connection.close()
                raise


class AsyncStagingRing:
    """The slots on one GPU, made when they are needed and kept. First come, first served: the
    first part of a read has a slot before any of its later ones."""

    def __init__(self, device: Device) -> None:
        self._slots = StagingRing(device)
        self._room = asyncio.Semaphore(STAGING_SLOTS)
        self.slot_bytes = self._slots.slot_bytes

    async def take(self, deadline: Deadline) -> StagingSlot:
        """A slot, waiting for it up to `deadline`. Raises GpuError, GpuUnavailable."""
        try:
            async with asyncio.timeout(deadline.remaining):
                await self._room.acquire()
        except TimeoutError as error:
            raise deadline.exceeded() from error
        try:
            return await to_end(self._take_and_wait, self._slots.give_back)
        except BaseException:
            self._room.release()
            raise

    def _take_and_wait(self) -> StagingSlot:
        """On a thread: memory is made, and what is still copied out of a slot is waited for."""
        slot = self._slots.take_nowait()
        if slot is None:
            raise GpuError("the GPU has no room for more staging", code="gpu_out_of_memory")
        try:
            slot.wait_copied()
        except BaseException:
            self._slots.give_back(slot)
            raise
        return slot

    def has_room(self) -> bool:
        """Whether `take` would not wait."""
        return not self._room.locked()

    async def give_back(self, slot: StagingSlot) -> None:
        """A slot that was lost is freed, which asks the daemon first."""
        self._room.release()
        await to_end(partial(self._slots.give_back, slot))

    async def give_all_back(self, slots: Sequence[StagingSlot]) -> None:
        """Also where a cancellation, or an error of one, comes in between."""
        async with AsyncExitStack() as returning:
            for slot in slots:
                returning.push_async_callback(self.give_back, slot)

    async def aclose(self) -> None:
        """Frees the slots, those in use as they come back."""
        await to_end(self._slots.close)


class _Staged(NamedTuple):
    """A part in its slot; or none of it (None) where the GPU rung refused."""

    part: Part
    slot: StagingSlot | None
    done: HostRead | None


class AsyncGpuSide:
    """An AsyncClient's staging rings, by GPU, and its reads into GPU memory."""

    def __init__(self, host_ring: AsyncRing) -> None:
        self._host_ring = host_ring
        self._rings: dict[str, AsyncStagingRing] = {}
        self._closed = False

    async def aclose(self) -> None:
        self._closed = True
        rings, self._rings = self._rings, {}
        async with AsyncExitStack() as closing:  # All of them, whatever comes of one.
            for ring in rings.values():
                closing.push_async_callback(ring.aclose)

    def _ring_for(self, device: Device) -> AsyncStagingRing:
        if self._closed:
            raise Closed("the client was closed")
        ring = self._rings.get(device.uuid)
        if ring is None:
            ring = self._rings[device.uuid] = AsyncStagingRing(device)
        return ring

    async def fill(self, read: AsyncRead, place: GpuPlace) -> dict[str, int]:
        """Reads the range to the front of `place`; returns the bytes by rung."""
        filling = Filling(read, place)
        if filling.wants_gpu(await read.endpoint.info(Deadline.after(read.seconds))):
            await self._by_gpu(read, filling)
        for part in filling.left():
            await self._by_host(read, filling, part)
        return filling.rungs

    async def _by_gpu(self, read: AsyncRead, filling: Filling) -> None:
        target = filling.place.target
        retries, deadline = read.endpoint.retries(), Deadline.after(read.seconds)
        while filling.goes_on():
            position = filling.position
            try:
                if target is not None:
                    await _direct(read, filling, target)
                else:
                    await _staged(read, filling, self._ring_for(filling.place.device))
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
            await asyncio.sleep(pause)

    async def _by_host(self, read: AsyncRead, filling: Filling, part: Part) -> None:
        """The host rung, and below it the stream, which `in_order` takes by itself."""
        rest = read._replace(start=part.start, stop=part.stop)
        stream = Stream(filling.place.device)
        try:
            async with aclosing(in_order(rest, self._host_ring)) as chunks:
                async for chunk in chunks:
                    to = filling.address_of(chunk.start)
                    await to_end(partial(copy_in, stream, to, chunk.view))
        finally:
            await to_end(stream.close)
        add_rungs(filling.rungs, {"host": part.length})


async def _direct(read: AsyncRead, filling: Filling, target: GpuTarget) -> None:
    """The daemon writes into the destination itself."""
    target.check()
    registered = AsyncGpuTarget(target)

    async def read_part(part: Part) -> _Staged:
        offset = filling.address_of(part.start) - target.memory.address
        return _Staged(part, None, await _unless_refused(read, filling, part, registered, offset))

    parts = _until_refused(filling, await read.parts(filling.position, PART_BYTES))
    try:
        async with aclosing(in_flight(parts, read_part, lambda: True)) as landings:
            async for part, _, done in landings:
                filling.came(part, done)
    finally:
        await to_end(target.regain)


async def _staged(read: AsyncRead, filling: Filling, ring: AsyncStagingRing) -> None:
    """The daemon writes into slots, and they are copied; all copies have ended on return."""
    used: list[StagingSlot] = []

    async def read_part(part: Part) -> _Staged:
        try:
            slot = await ring.take(Deadline.after(read.seconds))
        except (GpuError, GpuUnavailable) as error:
            filling.refused(error)
            return _Staged(part, None, None)
        used.append(slot)
        done = await _unless_refused(read, filling, part, AsyncGpuTarget(slot), 0)
        return _Staged(part, slot, done)

    parts = _until_refused(filling, await read.parts(filling.position, ring.slot_bytes))
    stream = Stream(filling.place.device)
    try:
        async with aclosing(in_flight(parts, read_part, ring.has_room)) as landings:
            async for part, slot, done in landings:
                if slot is not None and done is not None:
                    slot.copy_to(filling.address_of(part.start), part.length, stream)
                filling.came(part, done)
                if slot is not None:
                    used.remove(slot)
                    await ring.give_back(slot)
    finally:
        try:
            await to_end(stream.close)
        finally:
            await ring.give_all_back(used)


async def _unless_refused(
    read: AsyncRead, filling: Filling, part: Part, target: AsyncGpuTarget, offset: int
) -> HostRead | None:
    try:
        return await host_read(read, part, target, offset)
    except RacerError as error:
        if target.lost or not is_gpu_refusal(error):
            raise
        filling.refused(error)
        return None


def _until_refused(filling: Filling, parts: Iterator[Part]) -> Iterator[Part]:
    for part in parts:
        yield part
        if filling.stopped:
            return

"""Large reads for asyncio: parts as tasks, several in flight, handed out in order.

Layer: on `aio.target`; the plan is `racer.transfer.cut`. The counterpart of `racer.transfer`,
`racer.streaming` and `racer.bulk`, with the same rules: one version, bounded memory, and memory of
a read that was not answered is never used again. No task outlives the call that made it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import NamedTuple, TypeVar

from racer import answers, requests
from racer.aio.connection import AsyncConnection
from racer.aio.endpoint import AsyncEndpoint
from racer.aio.target import AsyncRing, AsyncTarget, ReadTarget
from racer.aio.threads import to_end
from racer.bulk import SMALL_BYTES, Chunk
from racer.deadline import Deadline
from racer.endpoint import is_refusal
from racer.errors import ConnectionLost, MemoryLost, ProtocolError, RacerError, TargetRefused
from racer.memory import SharedMemory
from racer.refusals import error_of
from racer.results import Body, HostRead, add_rungs
from racer.transfer import IN_FLIGHT, PART_BYTES, RING_PART_BYTES, Part, cut
from racer.urls import RacerUrl

# Copies of this size are quicker than a thread that would make them.
_COPY_BYTES_ON_LOOP = 512 << 10

T = TypeVar("T")


class AsyncRead(NamedTuple):
    """`[start, stop)` of a version of an object; `etag` None only for a single part.

    `seconds` bounds each part.
    """

    endpoint: AsyncEndpoint
    url: RacerUrl
    etag: str | None
    start: int
    stop: int
    seconds: float

    async def parts(self, start: int, part_bytes: int) -> Iterator[Part]:
        info = await self.endpoint.info(Deadline.after(self.seconds))
        return cut(start, self.stop, part_bytes, info.page_bytes)


class Landed(NamedTuple):
    """A part in its memory: the first bytes from `offset` of the target's."""

    part: Part
    target: AsyncTarget
    offset: int
    done: HostRead


# --- single exchanges ---------------------------------------------------------------------------


async def get(read: AsyncRead) -> tuple[Body, bytes]:
    """Returns the range over the socket, cut at the object's end."""
    deadline = Deadline.after(read.seconds)
    request = requests.body_request(read.url, read.start, read.stop, read.etag)
    answer = await read.endpoint.call(request, deadline, about=str(read.url))
    return answers.read_body_head(answer.head, read.start, read.stop, read.etag), answer.body


async def get_into(read: AsyncRead, start: int, view: memoryview) -> Body:
    """Fills the front of `view` from the object's `start` on, over the socket."""
    deadline = Deadline.after(read.seconds)
    stop = start + len(view)

    async def exchange(connection: AsyncConnection) -> Body:
        await connection.send(requests.body_request(read.url, start, stop, read.etag), deadline)
        head = await connection.receive_head(deadline)
        if head.status >= 400:
            body = await connection.receive_body(deadline)
            raise error_of(head, body, about=str(read.url))
        try:
            served = answers.read_body_head(head, start, stop, read.etag)
        except BaseException:
            connection.close()  # What follows cannot be told from anything else.
            raise
        with view[: served.stop - start] as wanted:
            await connection.receive_body_into(wanted, deadline)
        return served

    return await read.endpoint.attempt(exchange, deadline)


async def host_read(
    read: AsyncRead, part: Part, target: ReadTarget, offset: int, *, one_shot: bool = False
) -> HostRead:
    """Has the daemon write a part to `offset` of the target.

    Raises ConnectionLost, without another try, where the read was not answered: the target is
    given up then, as it is when the call is cancelled.
    """
    deadline = Deadline.after(read.seconds)
    retries = read.endpoint.retries()
    while True:
        try:
            return await _host_read_once(read, part, target, offset, one_shot, deadline)
        except RacerError as error:
            if target.lost:
                raise
            if one_shot and target.can_be_touched(error):
                await to_end(target.memory.touch)
                continue
            pause = retries.pause_after(error, deadline)
        await asyncio.sleep(pause)


async def _host_read_once(
    read: AsyncRead,
    part: Part,
    target: ReadTarget,
    offset: int,
    one_shot: bool,
    deadline: Deadline,
) -> HostRead:
    endpoint, span = read.endpoint, (part.start, part.stop)
    target_id = None
    if one_shot:
        await endpoint.check_name(deadline)
    else:
        target_id = await target.id_for(endpoint, deadline)
    async with endpoint.pool.lease(deadline) as connection:
        endpoint.ever_connected = True
        target.check()
        request = requests.host_read_request(
            read.url,
            span,
            read.etag,
            target=target_id,
            target_offset=offset,
            operation=target.operation,
        )
        try:
            descriptors = [target.memory.fd] if one_shot else ()
            head, body = await connection.exchange(request, deadline, descriptors)
        except BaseException as failure:
            unsent = isinstance(failure, ConnectionLost) and failure.unsent
            if not (unsent or connection.idle):
                target.give_up()
            raise
    if head.status >= 400:
        error = error_of(head, body, about=str(read.url))
        if isinstance(error, TargetRefused) and error.code == "target_unknown" and target_id:
            # The daemon restarted, or its end of the registration went first.
            target.forget(endpoint, target_id)
            lost = ConnectionLost(error.message, hint=error.hint)
            lost.unsent = True
            raise lost
        raise error
    return answers.read_host_read(head, body, span, read.etag)


# --- many parts ---------------------------------------------------------------------------------


async def in_flight(
    parts: Iterator[Part], read_part: Callable[[Part], Awaitable[T]], more: Callable[[], bool]
) -> AsyncGenerator[T]:
    """Runs `read_part` for each part, several at a time, and yields the results in order.

    `more` says whether another one may start now (the first always may). Ends with every task
    awaited, whichever way it ends.
    """
    tasks: deque[asyncio.Task[T]] = deque()
    following = next(parts, None)
    try:
        while following is not None or tasks:
            while following is not None and (not tasks or (len(tasks) < IN_FLIGHT and more())):
                tasks.append(asyncio.ensure_future(_awaited(read_part, following)))
                await asyncio.sleep(0)  # It takes its slot before the next one asks for room.
                following = next(parts, None)
            yield await tasks[0]
            tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _awaited(read_part: Callable[[Part], Awaitable[T]], part: Part) -> T:
    return await read_part(part)


async def in_order(read: AsyncRead, ring: AsyncRing) -> AsyncGenerator[Chunk]:
    """Yields the range in order; a chunk is valid until the next one is asked for."""
    position = read.start
    retries, deadline = read.endpoint.retries(), Deadline.after(read.seconds)
    while position < read.stop and read.endpoint.stream_only is None:
        try:
            async with aclosing(_through_ring(read, position, ring)) as landings:
                async for landed in landings:
                    memory = landed.target.memory
                    with memory.view[: landed.part.length] as view:
                        yield Chunk(landed.part.start, view, memory)
                    position = landed.part.stop
                    retries, deadline = read.endpoint.retries(), Deadline.after(read.seconds)
        except (ConnectionLost, MemoryLost) as error:
            await asyncio.sleep(retries.pause_after(error, deadline))
        except RacerError as error:
            if not is_refusal(error):
                raise
            read.endpoint.fall_back(error)
            break
    while position < read.stop:
        length = min(RING_PART_BYTES, read.stop - position)
        with memoryview(bytearray(length)) as view:
            await get_into(read, position, view)
            yield Chunk(position, view)
        position += length


async def _through_ring(read: AsyncRead, position: int, ring: AsyncRing) -> AsyncGenerator[Landed]:
    used: list[AsyncTarget] = []

    async def read_part(part: Part) -> Landed:
        target = await ring.take(Deadline.after(read.seconds))
        used.append(target)
        return Landed(part, target, 0, await host_read(read, part, target, 0))

    try:
        parts = await read.parts(position, ring.slot_bytes)
        async with aclosing(in_flight(parts, read_part, ring.has_room)) as landings:
            async for landed in landings:
                yield landed
                used.remove(landed.target)
                ring.give_back(landed.target)
    finally:
        for target in used:
            ring.give_back(target)


async def fill(read: AsyncRead, ring: AsyncRing, destination: memoryview) -> None:
    """Fills `destination`, which is as long as the range."""
    if len(destination) <= SMALL_BYTES or read.endpoint.stream_only is not None:
        await stream_into(read, read.start, destination)
        return
    async with aclosing(in_order(read, ring)) as chunks:
        async for chunk in chunks:
            start = chunk.start - read.start
            with destination[start : start + len(chunk.view)] as into:
                if len(into) <= _COPY_BYTES_ON_LOOP:
                    chunk.copy_to(into)
                else:
                    await to_end(partial(chunk.copy_to, into))


async def stream_into(read: AsyncRead, start: int, destination: memoryview) -> None:
    """Fills `destination` from the object's `start` on, over the socket."""
    for at in range(0, len(destination), PART_BYTES):
        with destination[at : at + PART_BYTES] as view:
            body = await get_into(read, start + at, view)
            end = start + at + len(view)
        if body.stop != end:
            raise ProtocolError(f"{read.url} is {body.size:,} bytes long and was longer before")


async def into_fresh_memory(read: AsyncRead) -> tuple[SharedMemory, dict[str, int]]:
    """Returns memory that holds the range, which is not empty, and the bytes by rung.

    Raises MemoryUnavailable where the system has no room for all of it.
    """
    retries, deadline = read.endpoint.retries(), Deadline.after(read.seconds)
    while True:
        target = await AsyncTarget.allocate(read.stop - read.start)
        try:
            rungs = await into_target(read, target, read.start, 0)
            await target.release()
            return target.memory, rungs
        except BaseException as error:
            target.close_now()
            if not isinstance(error, ConnectionLost | MemoryLost):
                raise
            pause = retries.pause_after(error, deadline)
        await asyncio.sleep(pause)


async def into_target(
    read: AsyncRead, target: AsyncTarget, start: int, base: int
) -> dict[str, int]:
    """Reads `[start, read.stop)` to `base` of the target; returns the bytes by rung."""
    rungs: dict[str, int] = {}
    if read.endpoint.stream_only is None:
        parts = list(await read.parts(start, PART_BYTES))
        one_shot = len(parts) == 1 and not target.registered

        async def read_part(part: Part) -> Landed:
            offset = part.start - start + base
            done = await host_read(read, part, target, offset, one_shot=one_shot)
            return Landed(part, target, offset, done)

        try:
            async with aclosing(in_flight(iter(parts), read_part, lambda: True)) as landings:
                async for landed in landings:
                    add_rungs(rungs, landed.done.rungs)
            return rungs
        except RacerError as error:
            if not is_refusal(error):
                raise
            read.endpoint.fall_back(error)
    target.check()
    length = read.stop - start
    with target.memory.view[base : base + length] as view:
        await stream_into(read, start, view)
    return {"stream": length}

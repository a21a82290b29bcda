"""One page of one read into GPU memory: at hand, straight from the disk, or by the host path.

Layer: read; loop thread. The order is: a flight in the air or sealed pages in memory; then cuFile;
then the ladder, whose disk rung reads into the arena. From memory and by the host path the sealed
frames go to the GPU from arena slots, which its worker has pinned, and are verified and decrypted
there (R9, R10, R16): the GPU is never handed plaintext.

A page that has no frames a GPU could open is **sealed for the journey**: what an origin has just
sent and memory did not keep, and records of format v1, which one tag covers. The host opens the
latter first.

What does not verify is dropped, counted and asked for from the next rung. A GPU that calls frames
bad which the host verifies is itself at fault: the copy stays, and the read fails.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from racerd.crypto.sealing import wipe
from racerd.errors import DeviceError, IntegrityError, RacerError, ResourceError, Retry
from racerd.gpu.device import GpuDevice
from racerd.gpu.reads import PageRead
from racerd.ids import ObjectVersion, PageId
from racerd.pages import TAG_BYTES
from racerd.read.flight import FlightKey
from racerd.read.gpu_disk import GpuDestination, sealed_frames
from racerd.read.memory import MemoryPage, PageLease
from racerd.read.page_reader import PageReader
from racerd.read.plan import PagePart, frame_span
from racerd.read.request import ReadReport, RequestContext
from racerd.read.services import ReadServices
from racerd.read.sources import PlainShare, Source
from racerd.runtime.budget import Charge
from racerd.runtime.deadline import Deadline, deadline_exceeded
from racerd.runtime.threads import finished

_LOG = logging.getLogger(__name__)

RUNG = "cufile"
_LOST_RETRY_SECONDS = 1.0


class GpuPageReader:
    """Reads parts of pages of one cache into GPU memory."""

    def __init__(self, services: ReadServices, pages: PageReader) -> None:
        self._services = services
        self._pages = pages

    async def read(
        self,
        version: ObjectVersion,
        part: PagePart,
        destination: GpuDestination,
        context: RequestContext,
        report: ReadReport,
    ) -> str:
        """Writes `part` to its place in `destination`; returns the rung that served it.

        On return every frame was verified. On return, error or cancelling nothing touches the
        memory any more; after an error its range holds verified bytes or zeros, unless the GPU
        was lost. Raises as `PageReader.serve`; ResourceError `gpu_lost`, `gpu_unavailable`,
        `gpu_out_of_memory`; RequestError where the target is gone.
        """
        page = PageId(version, part.index)
        if not self._at_hand(page) and await self._straight(page, part, destination, context):
            report.add(RUNG, part.length)
            return RUNG
        deliver = partial(self._deliver, page, part, destination, context)
        return await self._pages.serve(page, part, context, report, deliver)

    def _at_hand(self, page: PageId) -> bool:
        services = self._services
        return services.memory.contains(page) or services.flights.find(FlightKey(page)) is not None

    async def _straight(
        self, page: PageId, part: PagePart, destination: GpuDestination, context: RequestContext
    ) -> bool:
        """Whether cuFile read it. What it read wrongly the host path reads once more, and judges:
        the disk's copy may be good."""
        services = self._services
        try:
            with await self._turn(destination.device, part, context):
                why = await services.gpu_disk.read(page, part, destination)
        except IntegrityError as error:
            services.metrics.corrupt_pages.labels(RUNG, error.code).inc()
            _LOG.warning("%s, read with cuFile: %s", page.text, error.message)
            return False
        except DeviceError as error:
            raise as_told(destination.device, error) from error
        if why is None:
            self._pages.count(page, RUNG, part.length)
        return why is None

    # ---- from sealed frames in memory ----

    async def _deliver(
        self,
        page: PageId,
        part: PagePart,
        destination: GpuDestination,
        context: RequestContext,
        source: Source,
    ) -> None:
        lease = await self._sealed(page, source, context)
        try:
            await self._open(lease.page, part, destination, context)
            lease.touch(part.start, part.stop)
        finally:
            if lease is not source:
                lease.release()
        self._pages.count(page, source.rung, part.length)

    async def _open(
        self,
        page: MemoryPage,
        part: PagePart,
        destination: GpuDestination,
        context: RequestContext,
    ) -> None:
        """Has the GPU verify and decrypt. The caller keeps the slots until this ends."""
        opener = self._services.delivery.opener(page)
        frame_bytes = self._services.geometry.frame_bytes
        first, stop = frame_span(part, frame_bytes)
        read = PageRead(
            sealed_frames(opener, page.seal, first, stop),
            destination.offset + part.offset,
            part.start - first * frame_bytes,
            part.length,
            slots=page.slots.numbers(first, stop),
        )
        device = destination.device
        with await self._turn(device, part, context):
            [error] = await device.read(destination.target, [read])
        if isinstance(error, IntegrityError) and await self._host_verifies(page, first, stop):
            raise as_told(device, _at_fault(device, page, error)) from error
        if isinstance(error, DeviceError):
            raise as_told(device, error) from error
        if error is not None:
            raise error

    async def _host_verifies(self, page: MemoryPage, first: int, stop: int) -> bool:
        opener = self._services.delivery.opener(page)
        slots = page.slots
        frames = slots.frames[first - slots.first : stop - slots.first]

        def verifies() -> bool:
            plain = memoryview(bytearray(sum(len(frame) - TAG_BYTES for frame in frames)))
            try:
                opener.open_frames(first, frames, plain)
            except IntegrityError:
                return False
            finally:
                wipe(plain)
            return True

        return await finished(self._services.threads.open.submit(verifies))

    # ---- sealed for the journey ----

    async def _sealed(self, page: PageId, source: Source, context: RequestContext) -> PageLease:
        """Frames that a GPU can open: `source` itself, or a lease of our own."""
        if isinstance(source, PlainShare):
            lease = await self._kept(page, context)
            if lease is None:
                lease = await self._seal(page, source.view, source.rung)
            source.release()
            return lease
        if not self._services.delivery.opener(source.page).single_frame:
            return source
        with memoryview(bytearray(source.page.seal.length)) as plain:
            try:
                await self._open_on_host(source, plain, context)
                return await self._seal(page, plain, source.rung)
            finally:
                wipe(plain)

    async def _kept(self, page: PageId, context: RequestContext) -> PageLease | None:
        """The page from memory, once the flight that brought it has sealed it."""
        flight = self._services.flights.find(FlightKey(page))
        if flight is not None and flight.landed:
            await asyncio.wait([flight.sealed], timeout=context.deadline.remaining_seconds())
            if not flight.sealed.done():
                raise deadline_exceeded(f"sealing {page.text}")
        return self._services.memory.lease(page)

    async def _open_on_host(
        self, lease: PageLease, plain: memoryview, context: RequestContext
    ) -> None:
        whole = PagePart(lease.page.id.index, len(plain), 0, len(plain), 0)
        await self._services.delivery.deliver(
            lease, whole, plain, connection=context.connection, deadline=context.deadline
        )

    async def _seal(self, page: PageId, plain: memoryview, rung: str) -> PageLease:
        """Seals a page into slots that nobody else finds; they go with the lease."""
        services = self._services
        count = services.geometry.frame_count(len(plain))
        slots = await services.memory.reserve(
            0, count, len(plain), patience_seconds=services.settings.frames_seconds
        )
        if slots is None:
            raise ResourceError(
                "overloaded",
                f"the memory tier has no room to seal {page.text} for the GPU",
                hint="give racerd more `memory`, or read with fewer connections at a time",
                retry=Retry.SAME,
                retry_after_seconds=1.0,
            )
        try:
            seal = await finished(services.keeper.seal(page, plain, slots))
        except BaseException:
            services.memory.return_slots(slots)
            raise
        return services.memory.hold(page, seal, slots, rung=rung)

    async def _turn(self, device: GpuDevice, part: PagePart, context: RequestContext) -> Charge:
        """Waits until the GPU has room for the ciphertext of `part`, in turn with the others."""
        admission, frame_bytes = self._services.admission, self._services.geometry.frame_bytes
        first, stop = frame_span(part, frame_bytes)
        return await admission.take(
            admission.staging(device.uuid, device.staging_bytes),
            (stop - first) * frame_bytes,
            connection=context.connection,
            deadline=context.deadline,
        )


async def wait_ready(device: GpuDevice, deadline: Deadline) -> None:
    """Waits for a worker that is starting, so that a restart does not fail every read.

    Raises ResourceError `gpu_unavailable` where it failed, and pauses before the next try;
    `deadline_exceeded`.
    """
    try:
        async with asyncio.timeout(deadline.remaining_seconds()):
            await device.wait_ready()
    except TimeoutError as error:
        raise deadline_exceeded(f"waiting for the worker of {device.name}") from error
    except DeviceError as error:
        raise _unavailable(device, error.message, error.hint) from error


def as_told(device: GpuDevice, error: RacerError) -> RacerError:
    """A DeviceError of a GPU as clients are told of it; other errors as they are.

    For what came after `wait_ready`: a GPU that cannot be used by then was lost meanwhile.
    """
    if not isinstance(error, DeviceError) or error.code == "gpu_request":
        return error  # The latter is a defect of ours.
    if error.code == "gpu_out_of_memory":
        return ResourceError(
            error.code,
            f"{device.name} has no memory left for racerd: {error.message}",
            hint=error.hint,
            retry=Retry.SAME,
            retry_after_seconds=_LOST_RETRY_SECONDS,
        )
    return ResourceError(
        "gpu_lost",
        f"{device.name} failed while it was read into: {error.message} ({error.code})",
        hint=f"read it again, or into host memory; for the operator: {error.hint}",
        retry=Retry.SAME,
        retry_after_seconds=max(_LOST_RETRY_SECONDS, device.retry_after_seconds),
    )


def _unavailable(device: GpuDevice, message: str, hint: str) -> ResourceError:
    return ResourceError(
        "gpu_unavailable",
        message if device.name in message else f"{device.name} cannot be used now: {message}",
        hint=f"read into host memory meanwhile; for the operator: {hint}",
        retry=Retry.SAME,
        retry_after_seconds=device.retry_after_seconds,
    )


def _at_fault(device: GpuDevice, page: MemoryPage, error: IntegrityError) -> DeviceError:
    _LOG.error(
        "%s says %s of %s, which the host verifies: the GPU or its link is at fault",
        device.name, error.code, page.id.text,
    )  # fmt: skip
    return DeviceError(
        "gpu_misjudged",
        f"it calls frames of {page.id.text} bad that the host verifies",
        native=0,
        hint="run the GPU's diagnostics (`dcgmi diag -r 3`), and look for Xids in the kernel log",
    )

"""From a slab straight into GPU memory: the rung `cufile`, which only reads for a GPU have.

Layer: read; loop thread only, but for the header of a record, which a `disk` thread reads. The
store lends the record, the GPU's worker reads its ciphertext with cuFile, verifies and decrypts it.
Neither the ciphertext nor the plaintext passes through this process, and memory keeps nothing.

Every page that a disk has and that cannot be read like this takes the host path, and is counted
with its reason (R19): by the device where its worker refused, else here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from functools import partial

from racerd.crypto.keyring import Keyring
from racerd.crypto.sealing import PageOpener
from racerd.errors import DeviceError, IntegrityError
from racerd.gpu.device import GpuDevice, GpuTarget
from racerd.gpu.reads import PageRead, SealedFrames
from racerd.ids import PageId
from racerd.pages import TAG_BYTES, PageGeometry, Seal
from racerd.read.delivery import page_key
from racerd.read.plan import PagePart, frame_span
from racerd.read.settings import ReadSettings
from racerd.read.strays import Strays
from racerd.runtime.threads import Job, WorkerThreads
from racerd.store import NotLent, RecordLoan, Store
from racerd.store.device import DiskError
from racerd.telemetry import Metrics

_LOG = logging.getLogger(__name__)

# Why the store does not lend a page, where that is worth a word to the operator: once each.
_ADVICE = {
    "v1_record": "records of format v1 are not aligned for it; they are rewritten as they are read"
    " from the origin again",
    "not_direct": "the file system of the slab refuses O_DIRECT: put it on ext4, xfs or a block"
    " device",
}


@dataclass(frozen=True, slots=True)
class GpuDestination:
    """`length` bytes from `offset` of a client's GPU memory, which a lease of its target keeps."""

    device: GpuDevice
    target: GpuTarget
    offset: int
    length: int


class GpuDisk:
    """Reads pages from slabs with cuFile."""

    def __init__(
        self,
        store: Store,
        threads: WorkerThreads,
        keyring: Keyring,
        geometry: PageGeometry,
        strays: Strays,
        settings: ReadSettings,
        metrics: Metrics,
    ) -> None:
        """`threads` are those of the disks."""
        self._store = store
        self._threads = threads
        self._keyring = keyring
        self._geometry = geometry
        self._strays = strays
        self._settings = settings
        self._metrics = metrics
        self._seconds = metrics.stage_seconds.labels("cufile")
        self._advised: set[str] = set()

    async def read(self, page: PageId, part: PagePart, destination: GpuDestination) -> str | None:
        """Writes `part` to its place in `destination`; returns None, or why cuFile did not.

        Raises IntegrityError where what cuFile read does not verify: the range then holds
        verified bytes and zeros. Raises DeviceError where the GPU failed. Cancelling: waits until
        nothing of this touches the target any more.
        """
        device = destination.device
        if not self._store.contains(page):
            return "absent"
        if (reason := device.why_not_cufile(-1)) is not None:
            return self._host_path(f"cufile_{reason}")
        loan = await self._borrow(page)
        if isinstance(loan, NotLent):
            return self._host_path(f"cufile_{loan.reason}")
        try:
            if (reason := device.why_not_cufile(loan.slab)) is not None:
                return self._host_path(f"cufile_{reason}")
            if not await self._open_slab(device, loan):
                return self._host_path("cufile_slab_gone")
            return await self._read_lent(page, part, destination, loan)
        finally:
            loan.release()

    async def _read_lent(
        self, page: PageId, part: PagePart, destination: GpuDestination, loan: RecordLoan
    ) -> str | None:
        try:
            key = page_key(self._keyring, page, loan.seal)
        except IntegrityError as error:
            return self._host_path(f"cufile_{error.code}")
        opener = PageOpener(page, loan.seal, self._geometry, key)
        first, stop = frame_span(part, self._geometry.frame_bytes)
        read = PageRead(
            sealed_frames(opener, loan.seal, first, stop),
            destination.offset + part.offset,
            part.start - first * self._geometry.frame_bytes,
            part.length,
            slab=loan.slab,
            slab_offset=loan.data_offset + first * self._geometry.frame_bytes,
        )
        with self._seconds.time():
            [failure] = await destination.device.read(destination.target, [read])
        if failure is None:
            return None
        if isinstance(failure, DeviceError) and failure.code.startswith("cufile_"):
            return failure.code  # Counted by the device.
        raise failure

    async def _borrow(self, page: PageId) -> RecordLoan | NotLent:
        job = self._threads.submit(partial(self._store.lend, page), urgent=True)
        try:
            await asyncio.wait([job.future], timeout=self._settings.disk_seconds)
        except asyncio.CancelledError:
            self._leave(job)
            raise
        if not job.future.done():
            self._leave(job)
            return NotLent("slow")
        return job.future.result()

    def _leave(self, job: Job[RecordLoan | NotLent]) -> None:
        """A loan that nobody waits for any more is given back when it comes."""
        self._strays.watch(job)
        job.future.add_done_callback(_give_back)

    async def _open_slab(self, device: GpuDevice, loan: RecordLoan) -> bool:
        """Sees to it that the device knows the slab. False where it has been closed meanwhile."""
        if loan.slab in device.slabs:
            return True
        for gone in device.slabs - self._store.slab_numbers:
            await device.close_slab(gone)
        try:
            descriptor = loan.open_slab()
        except DiskError as error:
            _LOG.info("a slab cannot be handed to %s: %s", device.name, error.message)
            return False
        try:
            if loan.slab not in device.slabs:  # Another read may have been faster.
                device.open_slab(loan.slab, descriptor)
        finally:
            os.close(descriptor)
        return True

    def _host_path(self, reason: str) -> str:
        if reason != "cufile_absent":
            self._metrics.gpu_host_pages.labels(reason).inc()
        short = reason.removeprefix("cufile_")
        if short in _ADVICE and short not in self._advised:
            self._advised.add(short)
            self._metrics.fallbacks.labels("cufile", short).inc()
            _LOG.warning("pages for a GPU take the host path (%s): %s", short, _ADVICE[short])
        return reason


def sealed_frames(opener: PageOpener, seal: Seal, first: int, stop: int) -> SealedFrames:
    """What a GPU needs to open frames [first, stop) of a page."""
    made = opener.frame_material(first, stop - first)
    return SealedFrames(
        key=made.key,
        nonces=made.nonces,
        tags=seal.tags[first * TAG_BYTES : stop * TAG_BYTES],
        crcs=seal.crcs[first:stop],
        aad_head=made.aad_head,
        aad_tails=made.aad_tails,
        last_bytes=made.last_bytes,
    )


def _give_back(future: asyncio.Future[RecordLoan | NotLent]) -> None:
    if future.cancelled() or future.exception() is not None:
        return
    loan = future.result()
    if isinstance(loan, RecordLoan):
        loan.release()

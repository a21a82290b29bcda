"""Reads into GPU memory through the read layer: which rung, what a failure leads to, what is left.

The GPU is `HostGpu`: it opens frames on the host, from arena slots and from a real slab.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from racerd.crypto.keyring import drop_epoch, rotate_key_file
from racerd.errors import DeviceError, IntegrityError, RacerError, ResourceError
from racerd.gpu.reads import PageRead
from racerd.ids import PageId
from racerd.read.gpu_disk import GpuDestination
from racerd.read.request import ReadReport
from racerd.store import NotLent, RecordLoan
from tests.support.gpu_rig import GpuMemory
from tests.support.host_gpu import HostGpu, HostGpuNode, HostGpuTarget
from tests.support.read_rig import FRAME, PAGE, ReadRig, content, small_settings
from tests.support.scripted_origin import unavailable
from tests.support.scripted_store import ScriptedStore
from tests.support.v1_pages import seal_as_one_frame

DATA = content(2 * PAGE + 100)
SIZE = len(DATA)
PAGES = 3


class Gpu:
    """One GPU of a rig with one target. `read` reads into it and gives bytes and rungs back."""

    def __init__(self, rig: ReadRig, device: HostGpu, target: HostGpuTarget) -> None:
        self.rig = rig
        self.device = device
        self.target = target

    async def report(self, start: int, stop: int, offset: int, **context: object) -> ReadReport:
        destination = GpuDestination(self.device, self.target, offset, stop - start)  # type: ignore[arg-type]
        report = await self.rig.reader.read_into_gpu(
            self.rig.version(),
            start,
            stop,
            destination,
            self.rig.context(**context),  # type: ignore[arg-type]
        )
        assert report.bytes == stop - start == sum(report.rungs.values())
        return report

    async def read(
        self, start: int = 0, stop: int = SIZE, offset: int = 0, **context: object
    ) -> dict[str, int]:
        """Reads, checks the bytes and that none beside them was touched, returns the rungs."""
        mapping = self.target.mapping
        mapping[:] = b"\xee" * self.target.size
        report = await self.report(start, stop, offset, **context)
        end = offset + stop - start
        assert mapping[offset:end] == DATA[start:stop]
        assert not mapping[:offset].strip(b"\xee") and not mapping[end:].strip(b"\xee")
        return report.rungs


def run(
    folder: Path,
    body: Callable[[Gpu], Awaitable[None]],
    *,
    state: str = "disk",
    store: ScriptedStore | None = None,
    **options: object,
) -> None:
    """`state`: what has the pages when `body` begins: `cold`, `memory` or `disk`."""

    async def main() -> None:
        async with ReadRig(folder, store=store, **options) as rig:  # type: ignore[arg-type]
            rig.origin.put(b"k", DATA)
            if state != "cold":
                await rig.read(rig.version())
                await rig.stored()
            if state == "disk":
                rig.forget_memory()
            rig.origin.fetches.clear()
            async with HostGpuNode(rig.arena, rig.metrics) as node:
                with GpuMemory() as memory:
                    device = node.gpus[0]
                    target = await device.import_target(memory.send(), memory.size)
                    try:
                        await body(Gpu(rig, device, target))
                    finally:
                        await device.release_target(target)
            for budget in rig.services.admission._staging.values():
                assert budget.used == 0

    uvloop.run(main())


def page(rig: ReadRig, index: int = 0) -> PageId:
    return PageId(rig.version(), index)


def host_pages(gpu: Gpu, reason: str) -> float:
    return gpu.rig.metric("racer_gpu_host_path_pages_total", reason=reason)


def test_a_disk_page_goes_straight_to_the_gpu(tmp_path: Path) -> None:
    """R10, R19: with cuFile; the arena and the origin are not asked, and memory keeps nothing."""

    async def body(gpu: Gpu) -> None:
        assert await gpu.read() == {"cufile": SIZE}
        assert gpu.device.pages == {"slab": PAGES}
        assert len(gpu.rig.services.memory) == 0 and not gpu.rig.origin.fetches
        assert gpu.rig.metric("racer_rung_pages_total", rung="cufile") == PAGES

    run(tmp_path, body)


def test_memory_comes_before_cufile(tmp_path: Path) -> None:
    """R16: cached ciphertext is sent to the GPU; the disk is left alone."""

    async def body(gpu: Gpu) -> None:
        assert await gpu.read() == {"memory": SIZE}
        assert gpu.device.pages == {"arena": PAGES}

    run(tmp_path, body, state="memory")


def test_a_cold_page_is_fetched_once_for_host_and_gpu(tmp_path: Path) -> None:
    """R16, R32: a GPU read joins the flight in the air, and takes what memory then has sealed."""

    async def body(gpu: Gpu) -> None:
        gpu.rig.origin.hold()
        host = asyncio.ensure_future(gpu.rig.read(gpu.rig.version()))
        await gpu.rig.arrived(PAGES)
        reading = asyncio.ensure_future(gpu.read())
        await asyncio.sleep(0)
        gpu.rig.origin.release()
        assert await reading == {"origin": SIZE}
        assert await host == (DATA, {"origin": SIZE})
        assert len(gpu.rig.origin.fetches) == PAGES
        assert gpu.device.pages == {"arena": PAGES}

    run(tmp_path, body, state="cold")


def test_any_range_at_any_offset(tmp_path: Path) -> None:
    """R9, R10: cut frames, parts of pages and whole ones, from disk and from memory."""

    async def body(gpu: Gpu) -> None:
        chance = random.Random(5)
        for number in range(40):
            start = chance.randrange(SIZE)
            stop = min(SIZE, start + chance.choice((1, 10, FRAME, FRAME + 1, PAGE, 2 * PAGE)))
            rungs = await gpu.read(start, stop, chance.randrange(1000))
            assert set(rungs) == {"cufile" if number < 20 else "memory"}
            if number == 19:
                await gpu.rig.read(gpu.rig.version())

    run(tmp_path, body)


@pytest.mark.parametrize("reason", ["settings", "opening", "platform_not_supported"])
def test_without_cufile_the_host_path_serves(tmp_path: Path, reason: str) -> None:
    """R10, R15, R19: the disk's page goes through the arena; each is counted with the reason."""

    async def body(gpu: Gpu) -> None:
        gpu.device.cufile = reason
        assert await gpu.read() == {"disk": SIZE}
        assert gpu.device.pages == {"arena": PAGES}
        assert host_pages(gpu, f"cufile_{reason}") == PAGES

    run(tmp_path, body)


def test_a_read_that_cufile_refuses_takes_the_host_path(tmp_path: Path) -> None:
    """R10: what the worker answers with `cufile_…` is no failure of the read."""

    async def body(gpu: Gpu) -> None:
        gpu.device.failures += [DeviceError("cufile_io_error", "no", native=5044)] * PAGES
        assert await gpu.read() == {"disk": SIZE}

    run(tmp_path, body)


@pytest.mark.parametrize("state", ["memory", "disk"])
def test_a_bad_copy_falls_to_the_next_rung(tmp_path: Path, state: str) -> None:
    """R9, R22: rot under the GPU's eyes is dropped, counted and fetched again."""

    async def body(gpu: Gpu) -> None:
        rig = gpu.rig
        if state == "memory":
            [kept] = [p for p in rig.services.memory.pages_of(rig.object_id()) if p.id == page(rig)]
            kept.slots.frames[3][7] ^= 1
        else:
            _rot_slab(rig)
        rungs = await gpu.read(0, PAGE)
        # The disk's copy is good where memory's was not.
        assert rungs == ({"disk": PAGE} if state == "memory" else {"origin": PAGE})
        assert rig.metric(
            "racer_corrupt_pages_total",
            rung="memory" if state == "memory" else "cufile",
            reason="corrupt_crc",
        ) == 1  # fmt: skip
        assert await gpu.read() in ({"memory": SIZE}, {"memory": PAGE, "cufile": SIZE - PAGE})

    run(tmp_path, body, state=state)


def _rot_slab(rig: ReadRig) -> None:
    loan = rig.store.lend(page(rig))
    at = loan.data_offset + 3 * FRAME + 7  # type: ignore[union-attr]
    loan.release()  # type: ignore[union-attr]
    with (rig.folder / "slab").open("r+b") as slab:
        slab.seek(at)
        byte = slab.read(1)
        slab.seek(at)
        slab.write(bytes([byte[0] ^ 1]))


def test_corrupt_only_when_every_rung_failed(tmp_path: Path) -> None:
    """R22: with the disk's copy rotten and the origin gone the read is `corrupt`, and what its
    range holds is verified or zeros."""

    async def body(gpu: Gpu) -> None:
        rig = gpu.rig
        gpu.device.cufile = "settings"
        await gpu.read(PAGE, 2 * PAGE)
        _rot_slab(rig)
        rig.origin.on_fetch = lambda *_: (_ for _ in ()).throw(unavailable())
        gpu.target.mapping[:] = bytes(gpu.target.size)
        with pytest.raises(RacerError) as failed:
            await gpu.report(0, PAGE, 0)
        assert failed.value.code == "origin_unavailable"  # No GPU saw the disk's bad copy.
        assert not any(gpu.target.mapping[:PAGE])

    run(tmp_path, body)


def test_a_gpu_that_misjudges_costs_no_good_copy(tmp_path: Path) -> None:
    """R22, F93: frames that the host verifies stay where they are; the GPU is at fault."""

    async def body(gpu: Gpu) -> None:
        gpu.device.failures.append(IntegrityError("corrupt_tag", "frames do not verify"))
        with pytest.raises(ResourceError) as failed:
            await gpu.report(0, PAGE, 0)
        assert failed.value.code == "gpu_lost" and "verifies" in failed.value.message
        assert gpu.rig.services.memory.contains(page(gpu.rig))
        assert gpu.rig.metric("racer_corrupt_pages_total", rung="memory", reason="corrupt_tag") == 0
        assert await gpu.read() == {"memory": SIZE}

    run(tmp_path, body, state="memory")


@pytest.mark.parametrize("state", ["cold", "memory", "disk"])
@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("gpu_lost", "gpu_lost"),
        ("gpu_worker_died", "gpu_lost"),
        ("gpu_unavailable", "gpu_lost"),
        ("gpu_error", "gpu_lost"),
        ("gpu_out_of_memory", "gpu_out_of_memory"),
        ("target_not_gpu_memory", "target_not_gpu_memory"),
    ],
)
def test_a_gpu_that_fails_is_told(tmp_path: Path, state: str, raised: str, told: str) -> None:
    """R9, F93: nothing is dropped or fetched again for it, whatever had the page."""

    async def body(gpu: Gpu) -> None:
        kind = RacerError if raised.startswith("target_") else DeviceError
        more = {} if kind is RacerError else {"native": 700}
        gpu.device.failures += [kind(raised, "it failed", hint="a hint", **more)] * PAGES
        with pytest.raises(RacerError) as failed:
            await gpu.report(0, SIZE, 0)
        assert failed.value.code == told
        if told.startswith("gpu_"):
            assert (failed.value.retry_after_seconds or 0) >= 1 and failed.value.hint
        gpu.device.failures.clear()
        await gpu.rig.stored()
        assert "origin" not in await gpu.read() or state == "cold"

    run(tmp_path, body, state=state)


def test_a_removed_key_is_a_miss(tmp_path: Path) -> None:
    """R22: pages sealed under an epoch that is gone come from the origin."""

    async def body(gpu: Gpu) -> None:
        rig = gpu.rig
        old = rig.keyring.active.epoch
        rotate_key_file(rig.folder / "keys")
        drop_epoch(rig.folder / "keys", old)
        assert rig.keyring.reload()
        assert await gpu.read() == {"origin": SIZE}
        assert host_pages(gpu, "cufile_key_retired") == PAGES
        assert rig.metric("racer_corrupt_pages_total", rung="cufile", reason="key_retired") == 0

    run(tmp_path, body)


@pytest.mark.parametrize("span", [(0, PAGE), (100, PAGE - 100), (3, 5)])
def test_a_record_of_the_old_format_takes_the_host_path(
    tmp_path: Path, span: tuple[int, int]
) -> None:
    """R10, R20: one tag covers the page: the host opens it, and seals it again for the GPU."""
    store = ScriptedStore()

    async def body(gpu: Gpu) -> None:
        seal_as_one_frame(gpu.rig, store, page(gpu.rig), DATA[:PAGE])
        assert await gpu.read(*span) == {"disk": span[1] - span[0]}
        assert host_pages(gpu, "cufile_v1_record") == 1
        assert await gpu.read(*span) == {"memory": span[1] - span[0]}

    run(tmp_path, body, store=store)


def test_what_memory_cannot_keep_is_sealed_for_the_journey(tmp_path: Path) -> None:
    """R9, R16: the GPU is handed sealed frames alone, also of a page that nobody could keep."""

    async def body(gpu: Gpu) -> None:
        rig = gpu.rig
        evicting = asyncio.ensure_future(gpu.read())
        rig.origin.hold()
        await rig.arrived(1)
        rig.services.flights.evicted(lambda _: True)  # From here on nothing of it is kept.
        rig.origin.release()
        assert await evicting == {"origin": SIZE}
        assert all(read.slots for read in gpu.device.reads)
        await rig.stored()
        assert len(rig.services.memory) < PAGES

    run(tmp_path, body, state="cold")


@pytest.mark.parametrize("state", ["cold", "memory", "disk"])
def test_cancelling_waits_for_the_gpu(tmp_path: Path, state: str) -> None:
    """R7: when a read has ended nothing of it runs on the GPU, and no slot or loan is held."""

    async def body(gpu: Gpu) -> None:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def hold(read: PageRead) -> None:
            entered.set()
            await leave.wait()

        gpu.device.on_read = hold
        reading = asyncio.ensure_future(gpu.report(0, SIZE, 0))
        await entered.wait()
        reading.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not reading.done() and gpu.target.reading > 0
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert gpu.target.reading == 0
        gpu.device.on_read = None
        await gpu.rig.stored()
        await gpu.read()

    run(tmp_path, body, state=state)


def test_a_loan_that_comes_late_is_given_back(tmp_path: Path) -> None:
    """R7, F18: a disk that takes too long with a header costs the read its patience, not the slab
    its segment."""

    async def body(gpu: Gpu) -> None:
        rig = gpu.rig
        lend = rig.store.lend
        pause = threading.Event()
        released: list[PageId] = []

        def slow(which: PageId) -> RecordLoan | NotLent:
            loan = lend(which)
            assert isinstance(loan, RecordLoan) and loan._release is not None
            give_back = loan._release

            def counted() -> None:
                released.append(which)
                give_back()

            loan._release = counted
            pause.wait(30)
            return loan

        rig.store.lend = slow  # type: ignore[method-assign]
        rungs = await gpu.read(0, PAGE)
        assert rungs.keys() <= {"disk", "origin"}
        assert host_pages(gpu, "cufile_slow") == 1 and not released
        pause.set()
        await rig.services.strays.close()
        assert released == [page(rig)]

    run(tmp_path, body, settings=small_settings(disk_seconds=0.2))


def test_pages_of_a_request_are_in_flight_together(tmp_path: Path) -> None:
    """R14: a window of pages is on its way at a time, so that reads and decryption overlap."""

    async def body(gpu: Gpu) -> None:
        inside, most = 0, 0
        all_here = asyncio.Event()

        async def count(read: PageRead) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            if inside == PAGES:
                all_here.set()
            await all_here.wait()
            inside -= 1

        gpu.device.on_read = count
        await gpu.read()
        assert most == PAGES

    run(tmp_path, body)


def test_a_slab_is_handed_over_once_and_taken_back(tmp_path: Path) -> None:
    """R12, R14: one descriptor for all reads; a slab that is no longer open is closed there too."""

    async def body(gpu: Gpu) -> None:
        gone = os.open("/dev/null", os.O_RDONLY)
        gpu.device.open_slab(10**9, gone)
        os.close(gone)
        await gpu.read()
        await gpu.read()
        assert gpu.device.slabs == gpu.rig.store.slab_numbers

    run(tmp_path, body)

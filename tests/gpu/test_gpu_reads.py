"""Reads into GPU memory through the supervisor, a real worker process and the stand-in driver."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from racerd.errors import DeviceError, IntegrityError, RequestError
from racerd.gpu.device import GpuTarget
from racerd.units import KIB, MIB
from tests.support.gpu_rig import (
    GEOMETRY,
    TARGET_BYTES,
    GpuMemory,
    GpuRig,
    Hold,
    all_ok,
    driver_calls,
    gpu_rig,
    gpu_uuid,
    settings,
    standin_environment,
    until,
)
from tests.support.standin import StandIn


@pytest.fixture(autouse=True)
def _on_the_standin(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    standin_environment(standin, monkeypatch)


async def _import(rig: GpuRig, memory: GpuMemory) -> GpuTarget:
    return await rig.device.import_target(memory.send(), memory.size)


def test_pages_land_in_the_clients_gpu_memory() -> None:
    """R2, R9, R16: sealed pages from the arena, whole and cut, at any offset, many at once."""

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                memory.fill(0xEE)
                target = await _import(rig, memory)
                pages = [rig.page(length) for length in (64 * KIB, 64 * KIB, 50_001, 1)]
                reads = [
                    pages[0].read(0),
                    pages[1].read(70_003, skip=5, take=40_000),
                    pages[2].read(200_000),
                    pages[3].read(300_001),
                ]
                assert all_ok(await rig.device.read(target, reads))
                for page, read in zip(pages, reads, strict=True):
                    got = memory.bytes(read.offset, read.offset + read.take)
                    assert got == page.plaintext[read.skip : read.skip + read.take]
                    assert memory.bytes(read.offset + read.take, read.offset + read.take + 1) in (
                        b"\xee", b"")  # fmt: skip
                await rig.device.release_target(target)
            assert rig.metric("racer_gpu_pages_total", gpu=gpu_uuid(0), result="ok") == 4

    asyncio.run(main())


def test_a_bad_frame_is_named_and_zeroed_and_the_others_are_served() -> None:
    """R9, R22: rot in memory is found by CRC, a forged tag by GHASH; neighbours do not suffer."""

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                memory.fill(0xEE)
                target = await _import(rig, memory)
                good, rotten, forged = rig.page(), rig.page(), rig.page()
                rotten.frames[1][5] ^= 4
                material = forged.material()
                tags = bytearray(material.tags)
                tags[3 * 16] ^= 1
                reads = [good.read(0), rotten.read(64 * KIB), forged.read(128 * KIB)]
                reads[2] = replace(reads[2], frames=replace(material, tags=bytes(tags)))
                ok, crc, tag = await rig.device.read(target, reads)
                assert ok is None
                assert isinstance(crc, IntegrityError) and crc.code == "corrupt_crc"
                assert isinstance(tag, IntegrityError) and tag.code == "corrupt_tag"
                assert memory.bytes(0, 64 * KIB) == good.plaintext
                start = 64 * KIB + GEOMETRY.frame_bytes
                assert memory.bytes(start, start + GEOMETRY.frame_bytes) == bytes(16 * KIB)
                start = 128 * KIB + 3 * GEOMETRY.frame_bytes
                assert memory.bytes(start, start + GEOMETRY.frame_bytes) == bytes(16 * KIB)
                await rig.device.release_target(target)

    asyncio.run(main())


def test_pinned_memory_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L45, F81: ten times what staging holds is read with what the first read allocated, and all
    of it is given back."""
    log = tmp_path / "calls"
    monkeypatch.setenv("FAKECUDA_LOG", str(log))

    async def main() -> list[int]:
        counts = []
        async with gpu_rig(settings(staging_bytes=2 * 80 * KIB)) as rig:
            with GpuMemory() as memory:
                target = await _import(rig, memory)
                page = rig.page()
                for rounds in (1, 20):
                    reads = [page.read(i % 30 * 64 * KIB) for i in range(rounds)]
                    assert all_ok(await rig.device.read(target, reads))
                    names = [name for name, _ in driver_calls(log)]
                    counts.append(names.count("cuMemHostAlloc") + names.count("cuMemAlloc"))
                await rig.device.release_target(target)
        return counts

    first, later = asyncio.run(main())
    assert first == later
    names = [name for name, _ in driver_calls(log)]
    assert names.count("cuMemHostAlloc") == names.count("cuMemFreeHost")
    assert names.count("cuMemAlloc") == names.count("cuMemFree")


def test_more_pages_than_staging_and_lanes_hold() -> None:
    """F81: a staging of two pages serves any number of reads, and nothing waits for ever."""

    async def main() -> None:
        async with gpu_rig(settings(staging_bytes=2 * 80 * KIB)) as rig:
            with GpuMemory() as memory:
                target = await _import(rig, memory)
                page = rig.page()
                reads = [page.read(i * 64 * KIB) for i in range(30)]
                assert all_ok(await rig.device.read(target, reads))
                for read in reads:
                    assert memory.bytes(read.offset, read.offset + 64 * KIB) == page.plaintext
                await rig.device.release_target(target)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("make", "size", "code"),
    [
        (lambda: GpuMemory(name="ordinary"), TARGET_BYTES, "target_not_gpu_memory"),
        (lambda: GpuMemory(), TARGET_BYTES + 4096, "target_misaligned"),
        (lambda: GpuMemory(), 2 * TARGET_BYTES, "target_too_small"),
        (lambda: GpuMemory(), 0, "target_misaligned"),
        (lambda: GpuMemory(index=1), TARGET_BYTES, "target_wrong_gpu"),
    ],
)
def test_hostile_targets_are_refused(
    make: object, size: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8, R18: foreign descriptors, wrong sizes and the wrong GPU; the worker lives on."""
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")

    async def main() -> None:
        async with gpu_rig() as rig:
            with make() as memory:  # type: ignore[operator]
                with pytest.raises(RequestError) as refused:
                    await rig.device.import_target(memory.send(), size)
                assert refused.value.code == code
            with GpuMemory() as memory:
                target = await _import(rig, memory)
                assert all_ok(await rig.device.read(target, [rig.page().read(0)]))
                await rig.device.release_target(target)
            assert rig.device.restarts == 0

    asyncio.run(main())


def test_a_range_outside_the_target_is_never_launched() -> None:
    """R8: what does not fit behind the offset is refused before anything is copied."""

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                target = await _import(rig, memory)
                [result] = await rig.device.read(target, [rig.page().read(TARGET_BYTES - 1)])
                assert isinstance(result, DeviceError) and result.code == "gpu_request"
                await rig.device.release_target(target)

    asyncio.run(main())


def test_only_the_targets_gpu_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18, F95, L26: with GPU 0 gone everything happens on the GPU of the UUID, under another
    ordinal in this process than in the client's."""
    log = tmp_path / "calls"
    monkeypatch.setenv("FAKECUDA_DEVICES", "3")
    monkeypatch.setenv("FAKECUDA_BROKEN", "0,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,1")
    monkeypatch.setenv("FAKECUDA_LOG", str(log))

    async def main() -> None:
        async with gpu_rig(gpu=2) as rig:
            with GpuMemory(index=2) as memory:
                target = await _import(rig, memory)
                page = rig.page()
                assert all_ok(await rig.device.read(target, [page.read(0)]))
                assert memory.bytes(0, 64 * KIB) == page.plaintext
                await rig.device.release_target(target)

    asyncio.run(main())
    devices = {device for _, device in driver_calls(log)}
    assert devices == {"-", "2"}


def test_nothing_is_reported_before_its_verdict_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R9: while the kernel is held back the read has no answer, and the target no plaintext."""
    hold = Hold(tmp_path, monkeypatch)

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                memory.fill(0xEE)
                target = await _import(rig, memory)
                page = rig.page()
                reading = asyncio.ensure_future(rig.device.read(target, [page.read(0)]))
                await hold.reached()
                # The worker is alive and answers other questions, but not this one.
                with GpuMemory() as other:
                    second = await _import(rig, other)
                    await rig.device.release_target(second)
                assert not reading.done()
                assert memory.bytes(0, 64 * KIB) == b"\xee" * (64 * KIB)
                hold.lift()
                assert all_ok(await reading)
                assert memory.bytes(0, 64 * KIB) == page.plaintext
                await rig.device.release_target(target)

    asyncio.run(main())


def test_a_release_waits_for_the_reads_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F89, F90, F91: an exporter may free once the release was acknowledged, and not before; the
    mapping is closed with the context current, also on a pipeline thread."""
    hold = Hold(tmp_path, monkeypatch)

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                target = await _import(rig, memory)
                page = rig.page()
                reading = asyncio.ensure_future(rig.device.read(target, [page.read(0)]))
                await hold.reached()
                releasing = asyncio.ensure_future(rig.device.release_target(target))
                # A third party's round trip: the worker has seen the release by then.
                with GpuMemory() as other:
                    await rig.device.release_target(await _import(rig, other))
                assert not releasing.done()
                hold.lift()
                await releasing
                assert reading.done() or all_ok(await reading)
                [late] = await rig.device.read(target, [page.read(0)])
                assert isinstance(late, RequestError) and late.code == "target_unknown"

    asyncio.run(main())


def test_cancelling_waits_until_the_gpu_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7: a client that left does not free what the GPU still reads and writes."""
    hold = Hold(tmp_path, monkeypatch)

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                target = await _import(rig, memory)
                page = rig.page()
                reading = asyncio.ensure_future(rig.device.read(target, [page.read(0)]))
                await hold.reached()
                reading.cancel()
                with GpuMemory() as other:
                    await rig.device.release_target(await _import(rig, other))
                assert not reading.done()
                hold.lift()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                await rig.device.release_target(target)

    asyncio.run(main())


def test_two_clients_share_a_gpu_and_one_leaves() -> None:
    """L33: each has its own import; releasing one leaves the other's memory alone."""

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as first, GpuMemory() as second:
                a, b = await asyncio.gather(_import(rig, first), _import(rig, second))
                page = rig.page()
                results = await asyncio.gather(
                    *(rig.device.read(t, [page.read(i * MIB // 4)]) for t in (a, b) for i in (0, 1))
                )
                assert all(all_ok(result) for result in results)
                await rig.device.release_target(a)
                second.fill(0)
                assert all_ok(await rig.device.read(b, [page.read(0)]))
                assert second.bytes(0, 64 * KIB) == page.plaintext
                await rig.device.release_target(b)

    asyncio.run(main())


def _all_freed(log: Path) -> bool:
    names = [name for name, _ in driver_calls(log)]
    return names.count("cuMemFree") == names.count("cuMemAlloc") > 0


def test_an_idle_worker_gives_its_gpu_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7: staging and lanes go when nobody reads, and come again with the next read."""
    log = tmp_path / "calls"
    monkeypatch.setenv("FAKECUDA_LOG", str(log))

    async def main() -> None:
        async with gpu_rig(settings(idle_seconds=0.05)) as rig:
            with GpuMemory() as memory:
                target = await _import(rig, memory)
                page = rig.page()
                assert all_ok(await rig.device.read(target, [page.read(0)]))
                await until(lambda: _all_freed(log))
                assert all_ok(await rig.device.read(target, [page.read(0)]))
                await rig.device.release_target(target)

    asyncio.run(main())


def test_no_gpu_is_said_clearly_and_does_not_stop_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R17: without a GPU the device says why, at once, and asks for the host path."""
    monkeypatch.setenv("FAKECUDA_DEVICES", "0")

    async def main() -> None:
        async with gpu_rig(ready=False) as rig:
            with pytest.raises(DeviceError) as refused:
                await rig.device.wait_ready()
            assert refused.value.native == 100
            assert "CUDA_VISIBLE_DEVICES" in refused.value.hint
            with GpuMemory() as memory, pytest.raises(DeviceError) as unavailable:
                await _import(rig, memory)
            assert unavailable.value.code == "gpu_unavailable"

    asyncio.run(main())


def test_staging_that_cannot_be_had_fails_the_read_not_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R10: a full GPU means the host path, with what to do; later reads try again."""
    monkeypatch.setenv("FAKECUDA_MEM_MB", "4")

    async def main() -> None:
        async with gpu_rig(settings(staging_bytes=16 * MIB)) as rig:
            with GpuMemory() as memory:
                target = await _import(rig, memory)
                [result] = await rig.device.read(target, [rig.page().read(0)])
                assert isinstance(result, DeviceError) and result.native == 2
                assert "gpu_staging_bytes" in result.hint
                await rig.device.release_target(target)
            assert rig.device.restarts == 0 and rig.device.why_not is None

    asyncio.run(main())

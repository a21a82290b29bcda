"""cuFile: pages from a slab on disk straight into GPU memory, and every way it can refuse."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from racerd.errors import DeviceError, RacerError
from racerd.gpu.settings import GpuSettings
from racerd.gpu.worker.cufile_errors import MEANINGS, UNKNOWN, Remedy, meaning
from racerd.units import KIB
from tests.support.gpu_rig import (
    GpuMemory,
    GpuRig,
    SealedPageInArena,
    driver_calls,
    gpu_rig,
    gpu_uuid,
    settings,
    standin_environment,
    until,
)
from tests.support.standin import StandIn

_PAGES = 4


@pytest.fixture(autouse=True)
def log(standin: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "calls"
    standin_environment(standin, monkeypatch, FAKECUDA_LOG=str(path))
    return path


class Slab:
    """A file with the ciphertext of some pages, opened as the store opens its slabs."""

    def __init__(self, path: Path, pages: list[SealedPageInArena]) -> None:
        path.write_bytes(b"".join(page.ciphertext.ljust(64 * KIB, b"\0") for page in pages))
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.pages = pages


@pytest.fixture
def slab_path(tmp_path: Path) -> Path:
    return tmp_path / "slab"


def cufile_settings(**changes: object) -> GpuSettings:
    return settings(**({"cufile": "cuda", "staging_bytes": 8 * 80 * KIB} | changes))


async def _read_all(
    rig: GpuRig, path: Path, *, wait_for: str = "on", lengths: tuple[int, ...] = ()
) -> list[RacerError | None]:
    """Reads pages 0 to 3 from a slab once the driver's fate is known; checks the bytes."""
    pages = [rig.page(n) for n in lengths or (64 * KIB,) * _PAGES]
    slab = Slab(path, pages)
    rig.device.open_slab(7, slab.descriptor)
    os.close(slab.descriptor)
    await until(lambda: _state(rig) == wait_for)
    with GpuMemory() as memory:
        target = await rig.device.import_target(memory.send(), memory.size)
        reads = [page.read_from(7, i * 64 * KIB, i * 64 * KIB) for i, page in enumerate(pages)]
        results = await rig.device.read(target, reads)
        for i, (page, result) in enumerate(zip(pages, results, strict=True)):
            if result is None:
                start = i * 64 * KIB
                assert memory.bytes(start, start + len(page.plaintext)) == page.plaintext
        await rig.device.release_target(target)
    await rig.device.close_slab(7)
    return results


def _state(rig: GpuRig) -> str:
    return rig.device.cufile_state.partition(":")[0]


def _codes(results: list[RacerError | None]) -> set[str]:
    return {"ok" if result is None else result.code for result in results}


def test_pages_come_straight_from_the_slab(log: Path, slab_path: Path) -> None:
    """R10, R12, R14, R19, F86, F95: cuFile reads a slab that was opened with O_NOFOLLOW, through
    handles of its own that are deregistered at the end; the pages are counted."""

    async def main() -> None:
        async with gpu_rig(cufile_settings()) as rig:
            assert _codes(await _read_all(rig, slab_path)) == {"ok"}
            assert rig.metric("racer_cufile_pages_total") == _PAGES
            assert rig.metric("racer_cufile_open_seconds", gpu=gpu_uuid(0)) > 0

    asyncio.run(main())
    names = [name for name, _ in driver_calls(log)]
    assert names.count("cuFileRead") == _PAGES
    assert 1 <= names.count("cuFileHandleRegister") <= 4
    assert names.count("cuFileHandleRegister") == names.count("cuFileHandleDeregister")
    assert names.count("cuFileBufRegister") == names.count("cuFileBufDeregister") == 1
    assert names.count("cuFileDriverOpen") == names.count("cuFileDriverClose") == 1
    last_read = len(names) - names[::-1].index("cuFileRead")
    assert "cuFileHandleDeregister" not in names[:last_read]


def test_a_page_of_any_length(slab_path: Path) -> None:
    """R10: the last page of an object is read up to its padding, whatever its length."""

    async def main() -> None:
        async with gpu_rig(cufile_settings()) as rig:
            lengths = (1, 4097, 16 * KIB, 50_001)
            assert _codes(await _read_all(rig, slab_path, lengths=lengths)) == {"ok"}

    asyncio.run(main())


def test_short_reads_are_continued(slab_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: a read that stops early goes on where it stopped."""
    monkeypatch.setenv("FAKECUFILE_SHORT", str(20 * KIB))

    async def main() -> None:
        async with gpu_rig(cufile_settings()) as rig:
            assert _codes(await _read_all(rig, slab_path)) == {"ok"}

    asyncio.run(main())


def test_a_slab_that_ends_early_is_left_to_the_host(slab_path: Path) -> None:
    """R10: a record that is cut is no reason to turn cuFile off."""

    async def main() -> None:
        async with gpu_rig(cufile_settings()) as rig:
            pages = [rig.page()]
            slab = Slab(slab_path, pages)
            rig.device.open_slab(1, slab.descriptor)
            os.close(slab.descriptor)
            await until(lambda: _state(rig) == "on")
            with GpuMemory() as memory:
                target = await rig.device.import_target(memory.send(), memory.size)
                results = await rig.device.read(target, [pages[0].read_from(1, 48 * KIB, 0)])
                assert _codes(results) == {"cufile_short_read"}
                results = await rig.device.read(target, [pages[0].read_from(1, 0, 0)])
                assert _codes(results) == {"ok"}
                await rig.device.release_target(target)
            await rig.device.close_slab(1)
            reason = "cufile_short_read"
            assert rig.metric("racer_gpu_host_path_pages_total", reason=reason) == 1

    asyncio.run(main())


def test_staging_is_not_read_into_before_the_gpu_has_done_with_it(
    slab_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F85: cuFile knows no streams: with one staging slot and a slow GPU every page is right."""
    monkeypatch.setenv("FAKECUDA_DELAY_US", "3000")

    async def main() -> None:
        small = cufile_settings(staging_bytes=80 * KIB)
        async with gpu_rig(small) as rig:
            assert _codes(await _read_all(rig, slab_path, lengths=(64 * KIB,) * 8)) == {"ok"}

    asyncio.run(main())


def test_rot_on_the_slab_is_found(slab_path: Path) -> None:
    """R9, R22: what cuFile read is verified like everything else."""

    async def main() -> None:
        async with gpu_rig(cufile_settings()) as rig:
            page = rig.page()
            page.frames[2][9] ^= 1
            slab = Slab(slab_path, [page])
            page.frames[2][9] ^= 1
            rig.device.open_slab(1, slab.descriptor)
            os.close(slab.descriptor)
            await until(lambda: _state(rig) == "on")
            with GpuMemory() as memory:
                target = await rig.device.import_target(memory.send(), memory.size)
                [result] = await rig.device.read(target, [page.read_from(1, 0, 0)])
                assert result is not None and result.code == "corrupt_crc"
                await rig.device.release_target(target)
            await rig.device.close_slab(1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("cuFileDriverOpen:5007:1", "cufile_platform_not_supported"),
        ("cuFileDriverOpen:5001:1", "cufile_driver_not_initialized"),
        ("cuFileSetParameterBool:5002:1", "cufile_driver_invalid_props"),
        ("cuFileDriverOpen:5099:1", "cufile_unknown"),
    ],
)
def test_a_driver_that_does_not_open_turns_cufile_off(
    fault: str, code: str, slab_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R15, F82: a failed open turns cuFile off for good; it is counted and said once."""
    monkeypatch.setenv("FAKECUDA_FAIL", fault)

    async def main() -> None:
        async with gpu_rig(cufile_settings()) as rig:
            results = await _read_all(rig, slab_path, wait_for="off")
            assert _codes(results) == {code}
            assert all(isinstance(result, DeviceError) and result.hint for result in results)
            assert rig.metric("racer_gpu_host_path_pages_total", reason=code) == _PAGES
            step = {"step": "cufile", "reason": code.removeprefix("cufile_")}
            assert rig.metric("racer_fallbacks_total", **step) == 1

    asyncio.run(main())


def test_a_driver_that_never_opens_is_given_up(
    slab_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R15, F83: opening is bounded in time, on a thread of its own; reads meanwhile and after take
    the host path, and the worker stops all the same."""
    hang = tmp_path / "hang"
    hang.touch()
    monkeypatch.setenv("FAKECUFILE_HANG", str(hang))

    async def main() -> None:
        async with gpu_rig(cufile_settings(cufile_open_seconds_max=0.5)) as rig:
            early = await _read_all(rig, slab_path, wait_for="opening")
            assert _codes(early) <= {"cufile_driver_opening", "cufile_driver_open_timeout"}
            late = await _read_all(rig, slab_path, wait_for="off")
            assert _codes(late) == {"cufile_driver_open_timeout"}

    asyncio.run(main())


def test_a_kernel_without_modules_is_never_asked(
    slab_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    """F79: where /proc/modules is missing the real driver loops for ever: it is not opened."""
    monkeypatch.setenv("FAKECUFILE_PROC_MODULES", str(tmp_path / "missing"))

    async def main() -> None:
        async with gpu_rig(cufile_settings()) as rig:
            results = await _read_all(rig, slab_path, wait_for="off")
            assert _codes(results) == {"cufile_no_proc_modules"}

    asyncio.run(main())
    assert "cuFileDriverOpen" not in {name for name, _ in driver_calls(log)}


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("5030", "cufile_device_not_classified"),
        ("5027", "cufile_handle_not_registered"),
        ("5019", "cufile_open_flags"),
    ],
)
def test_a_slab_that_cannot_be_registered_is_left_to_the_host(
    fault: str, code: str, slab_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R13, F79, F95: a disk that udev does not know turns cuFile off for that slab alone."""
    fails = ",".join(f"cuFileHandleRegister:{fault}:{i}" for i in range(1, 9))
    monkeypatch.setenv("FAKECUDA_FAIL", fails)

    async def main() -> None:
        async with gpu_rig(cufile_settings()) as rig:
            results = await _read_all(rig, slab_path)
            assert _codes(results) == {code}
            assert rig.device.cufile_state == "on"
            step = {"step": "cufile", "reason": code.removeprefix("cufile_")}
            assert rig.metric("racer_fallbacks_total", **step) == 1

    asyncio.run(main())


def test_a_first_read_that_fails_turns_cufile_off(
    slab_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R15, L43: a device error on the first reads will come again; the host path serves."""
    fails = ",".join(f"cuFileRead:5010:{i}" for i in range(1, 9))
    monkeypatch.setenv("FAKECUDA_FAIL", fails)

    async def main() -> None:
        async with gpu_rig(cufile_settings()) as rig:
            results = await _read_all(rig, slab_path)
            assert _codes(results) == {"cufile_nvfs_driver_error"}
            assert rig.device.cufile_state == "off: nvfs_driver_error"

    asyncio.run(main())


def test_an_io_error_is_tried_once_more(slab_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: errno 5 once is not the end."""
    monkeypatch.setenv("FAKECUDA_FAIL", "cuFileRead:5:1")

    async def main() -> None:
        async with gpu_rig(cufile_settings()) as rig:
            assert _codes(await _read_all(rig, slab_path)) == {"ok"}

    asyncio.run(main())


def test_memory_that_cannot_be_registered_is_only_slower(
    slab_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L43, F81: without registration cuFile uses buffers of its own, and the bytes are right."""
    monkeypatch.setenv("FAKECUDA_FAIL", "cuFileBufRegister:5016:1")

    async def main() -> None:
        async with gpu_rig(cufile_settings()) as rig:
            assert _codes(await _read_all(rig, slab_path)) == {"ok"}

    asyncio.run(main())


def test_every_code_has_a_meaning() -> None:
    """R13, F82: 5001 to 5050 each say what happens next and what to do; others turn cuFile off."""
    unassigned = {5021, 5032}
    assert set(MEANINGS) == set(range(5001, 5051)) - unassigned
    assert all(m.text and m.reason.isidentifier() for m in MEANINGS.values())
    assert len({m.reason for m in MEANINGS.values()}) == len(MEANINGS)
    assert meaning(5099) is UNKNOWN and UNKNOWN.remedy is Remedy.OFF
    assert meaning(5).remedy is Remedy.RETRY
    assert "udev" in meaning(5030).text and "udev" in meaning(5027).text

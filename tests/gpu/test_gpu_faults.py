"""Faults of the driver, deaths of the worker: the right answer or a clear error, never a leak."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from racerd.errors import DeviceError, RacerError
from racerd.gpu.device import GpuTarget
from racerd.units import KIB
from tests.support.gpu_rig import (
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


async def _healthy(rig: GpuRig) -> None:
    """Waits, starting again at once where it must, until the GPU serves."""
    for _ in range(5):
        try:
            await rig.device.wait_ready()
            return
        except DeviceError:
            rig.device.retry_now()
    await rig.device.wait_ready()


async def _one_read(rig: GpuRig, memory: GpuMemory) -> RacerError | None:
    """Import, read, release: None where the bytes are right, else the error that was raised."""
    page = rig.page()
    try:
        target = await rig.device.import_target(memory.send(), memory.size)
    except RacerError as error:
        return error
    try:
        [result] = await rig.device.read(target, [page.read(0)])
        if result is None:
            assert memory.bytes(0, 64 * KIB) == page.plaintext
        return result
    finally:
        await rig.device.release_target(target)


# What a whole life of a worker calls: start, import, read, release, stop.
CALLS = (
    "cuInit", "cuDeviceGetCount", "cuDeviceGetUuid", "cuDeviceGetAttribute", "cuDeviceGetName",
    "cuDeviceTotalMem", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease",
    "cuCtxSetCurrent", "cuMemHostRegister", "cuMemHostUnregister", "cuModuleLoadData",
    "cuModuleGetFunction", "cuModuleUnload", "cuFuncSetAttribute", "cuMemAlloc", "cuMemFree",
    "cuMemHostAlloc", "cuMemFreeHost", "cuStreamCreate", "cuStreamDestroy", "cuEventCreate",
    "cuEventDestroy", "cuEventRecord", "cuEventSynchronize", "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync", "cuMemsetD8Async", "cuLaunchKernel", "cuMemGetAllocationGranularity",
    "cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle",
    "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemAddressFree",
    "cuMemRelease",
)  # fmt: skip


def test_the_list_of_calls_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F93: faults are injected at every call that a worker makes, and at no other."""
    log = tmp_path / "calls"
    monkeypatch.setenv("FAKECUDA_LOG", str(log))

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                assert await _one_read(rig, memory) is None

    asyncio.run(main())
    assert {name for name, _ in driver_calls(log)} == set(CALLS)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_at_any_call(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F93, R9, R17: the first call of each kind fails once; then the GPU serves again.

    A read has the right bytes or an error with a code; no descriptor, process or mapping stays.
    """
    monkeypatch.setenv("FAKECUDA_FAIL", f"{call}:1:1")

    async def main() -> None:
        async with gpu_rig(ready=False) as rig:
            with GpuMemory() as memory:
                try:
                    await rig.device.wait_ready()
                    first = await _one_read(rig, memory)
                except DeviceError as error:
                    first = error
                if first is not None:
                    assert first.code and first.message
                monkeypatch.delenv("FAKECUDA_FAIL")
                await _healthy(rig)
                second = await _one_read(rig, memory)
                if second is not None:  # It died in between, of the first fault's aftermath.
                    await _healthy(rig)
                    second = await _one_read(rig, memory)
                assert second is None

    asyncio.run(main())


def test_a_defect_in_one_read_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7: whatever one read raises, memory is not free as long as the GPU reads for another."""
    hold = Hold(tmp_path, monkeypatch)

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                target = await rig.device.import_target(memory.send(), memory.size)
                page = rig.page()
                good = page.read(0)
                defect = replace(good, frames=replace(good.frames, crcs=(1 << 64,)))
                reading = asyncio.ensure_future(rig.device.read(target, [good, defect]))
                await hold.reached()
                assert not reading.done()
                hold.lift()
                with pytest.raises(OverflowError):
                    await reading
                assert memory.bytes(0, 64 * KIB) == page.plaintext
                await rig.device.release_target(target)

    asyncio.run(main())


def test_a_descriptor_that_cannot_be_handed_over_fails_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F93: at the limit of open files the worker is not blamed, and serves on."""

    def at_the_limit(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                descriptor = memory.send()
                with monkeypatch.context() as limited:
                    limited.setattr("racerd.gpu.link.os.dup", at_the_limit)
                    with pytest.raises(DeviceError, match="cannot be handed") as caught:
                        await rig.device.import_target(descriptor, memory.size)
                assert caught.value.code == "gpu_unavailable"
                pid = rig.device.worker_pid
                assert await _one_read(rig, memory) is None
                assert rig.device.worker_pid == pid

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["kernel:700:2", "kernel:719:1", "copy:702:1"])
def test_a_sticky_error_fails_reads_and_restarts_the_worker(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F93, F94: an error that comes with the device's work poisons it: nothing is believed any
    more, reads in flight fail with the code, a fresh process serves the same target again."""
    monkeypatch.setenv("FAKECUDA_FAIL", fault)

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                target = await rig.device.import_target(memory.send(), memory.size)
                page = rig.page()
                results = await rig.device.read(target, [page.read(0), page.read(64 * KIB)])
                assert not any(result is None for result in results)
                native = int(fault.split(":")[1])
                for result in results:
                    assert isinstance(result, DeviceError)
                    assert (result.code, result.native) == ("gpu_lost", native)
                monkeypatch.delenv("FAKECUDA_FAIL")
                await _healthy(rig)
                assert all_ok(await rig.device.read(target, [page.read(0)]))
                assert memory.bytes(0, 64 * KIB) == page.plaintext
                await rig.device.release_target(target)
                assert rig.metric("racer_gpu_worker_deaths_total", gpu=gpu_uuid(0),
                                  reason="gpu_lost") == 1  # fmt: skip

    asyncio.run(main())


async def _serves_again(rig: GpuRig, target: GpuTarget, memory: GpuMemory) -> None:
    await _healthy(rig)
    page = rig.page()
    memory.fill(0)
    assert all_ok(await rig.device.read(target, [page.read(0)]))
    assert memory.bytes(0, 64 * KIB) == page.plaintext


def test_a_worker_that_dies_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """F93: killed before it is ready; the next one serves."""

    async def main() -> None:
        async with gpu_rig(ready=False) as rig:
            await until(lambda: rig.device.worker_pid is not None)
            os.kill(rig.device.worker_pid or 0, signal.SIGKILL)
            with pytest.raises(DeviceError) as died:
                await rig.device.wait_ready()
            assert died.value.code == "gpu_worker_died"
            await _healthy(rig)
            with GpuMemory() as memory:
                assert await _one_read(rig, memory) is None

    asyncio.run(main())


def test_a_worker_that_dies_idle() -> None:
    """F91, F93: killed between reads; the target is imported again by itself."""

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                target = await rig.device.import_target(memory.send(), memory.size)
                os.kill(rig.device.worker_pid or 0, signal.SIGKILL)
                await until(lambda: rig.device.why_not is not None)
                await _serves_again(rig, target, memory)
                await rig.device.release_target(target)

    asyncio.run(main())


def test_a_worker_that_dies_in_the_middle_of_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F93, R7: the read fails once the process is gone, so that its buffers are free."""
    hold = Hold(tmp_path, monkeypatch)

    async def main() -> None:
        async with gpu_rig() as rig:
            with GpuMemory() as memory:
                target = await rig.device.import_target(memory.send(), memory.size)
                page = rig.page()
                reading = asyncio.ensure_future(rig.device.read(target, [page.read(0)]))
                await hold.reached()
                pid = rig.device.worker_pid or 0
                os.kill(pid, signal.SIGKILL)
                [result] = await reading
                assert isinstance(result, DeviceError) and result.code == "gpu_worker_died"
                assert not os.path.exists(f"/proc/{pid}")  # noqa: ASYNC240
                hold.lift()
                await _serves_again(rig, target, memory)
                await rig.device.release_target(target)

    asyncio.run(main())


def test_a_worker_that_hangs_is_killed() -> None:
    """F66, F83: a worker that owes an answer too long is ended; no read is stuck."""

    async def main() -> None:
        async with gpu_rig(settings(answer_seconds_max=0.5)) as rig:
            with GpuMemory() as memory:
                target = await rig.device.import_target(memory.send(), memory.size)
                os.kill(rig.device.worker_pid or 0, signal.SIGSTOP)
                [result] = await rig.device.read(target, [rig.page().read(0)])
                assert isinstance(result, DeviceError) and result.code == "gpu_worker_died"
                await _serves_again(rig, target, memory)
                await rig.device.release_target(target)

    asyncio.run(main())


def test_stopping_finishes_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R7: leaving the device waits for the worker, which answers what it was asked."""
    hold = Hold(tmp_path, monkeypatch)

    async def main() -> None:
        with GpuMemory() as memory:
            async with gpu_rig() as rig:
                target = await rig.device.import_target(memory.send(), memory.size)
                page = rig.page()
                reading = asyncio.ensure_future(rig.device.read(target, [page.read(0)]))
                await hold.reached()
                asyncio.get_running_loop().call_later(0.1, hold.lift)
            assert all_ok(await reading)
            assert memory.bytes(0, 64 * KIB) == page.plaintext
            await rig.device.release_target(target)

    asyncio.run(main())

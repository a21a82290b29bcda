"""The supervision of a GPU's worker, where not even a process can be made."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from racerd.errors import DeviceError
from racerd.gpu.link import WorkerLink
from racerd.gpu.settings import GpuSettings
from racerd.gpu.supervisor import Supervisor
from racerd.telemetry import Metrics

UUID = "00" * 16


class Nobody:
    """Who is told of no worker, because none ever starts."""

    def worker_spawned(self, worker: WorkerLink) -> None:
        raise AssertionError("there is none")

    def worker_ready(self, worker: WorkerLink) -> None:
        raise AssertionError("there is none")


def test_a_worker_that_cannot_be_spawned_is_tried_again() -> None:
    """F93: it is told why, at once, and supervision goes on."""
    tries: list[int] = []

    def spawn() -> WorkerLink:
        tries.append(len(tries))
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def main() -> None:
        metrics = Metrics()
        async with Supervisor(UUID, GpuSettings(), metrics, Nobody(), spawn=spawn) as supervisor:
            for _ in range(3):
                with pytest.raises(DeviceError, match="cannot be started: Resource temp") as died:
                    await supervisor.wait_ready()
                assert died.value.code == "gpu_worker_not_started" and died.value.hint
                with pytest.raises(DeviceError, match="cannot be used now"):
                    supervisor.working()
                supervisor.retry_now()
            deaths = metrics.registry.get_sample_value(
                "racer_gpu_worker_deaths_total",
                {"gpu": UUID, "reason": "gpu_worker_not_started"},
            )
            assert deaths == len(tries) == 3

    asyncio.run(asyncio.wait_for(main(), 30))

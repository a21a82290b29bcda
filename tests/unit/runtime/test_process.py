"""Facts about this process that the metrics show."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import time

import pytest

from racerd.runtime.loop_lag import watch_loop_lag
from racerd.runtime.process import allow_many_descriptors, open_descriptors, resident_bytes
from racerd.units import MIB


def test_descriptors_are_counted() -> None:
    """F26: the gauge that shows a leak must not show itself."""
    before = open_descriptors()
    assert open_descriptors() == before
    pipe = os.pipe()
    assert open_descriptors() == before + 2
    for descriptor in pipe:
        os.close(descriptor)
    assert open_descriptors() == before


def test_resident_memory_grows_with_what_is_touched() -> None:
    # Not from the allocator, which may have kept as much from before.
    with mmap.mmap(-1, 64 * MIB) as held:
        before = resident_bytes()
        for at in range(0, len(held), mmap.PAGESIZE):
            held[at] = 1
        assert resident_bytes() - before > 32 * MIB


def test_a_callback_that_holds_the_loop_is_seen() -> None:
    async def main() -> None:
        lags: list[float] = []
        seen = asyncio.Event()

        def report(seconds: float) -> None:
            lags.append(seconds)
            if seconds > 0.05:
                seen.set()

        task = asyncio.create_task(watch_loop_lag(report))
        await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251  what is measured
        await asyncio.wait_for(seen.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert min(lags) >= 0

    asyncio.run(main())


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert allow_many_descriptors() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

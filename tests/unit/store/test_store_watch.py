"""The watch over a disk's operations, and the thread that does its chores."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path

import pytest

from racerd.store.device import DiskError
from racerd.store.housekeeper import Housekeeper
from racerd.store.watch import DiskWatch
from racerd.telemetry import Metrics
from tests.support.store_pages import counted

PATH = Path("/some/slab")


def watch(metrics: Metrics) -> DiskWatch:
    return DiskWatch(PATH, metrics, hang_seconds=5.0, clock=lambda: 0.0)


def test_failures_are_counted_by_operation_and_errno() -> None:
    """F22."""
    metrics = Metrics()
    watched = watch(metrics)
    for number in (errno.EIO, errno.ENOSPC, errno.EIO):
        with pytest.raises(DiskError), watched.operation():
            raise DiskError("write", PATH, number)
    count = counted(metrics, "racer_store_device_errors_total", operation="write", errno="EIO")
    assert count == 2
    assert watched.writable, "being full is not a failure, and two failures are not yet trouble"
    watched.publish()
    assert counted(metrics, "racer_store_state", state="normal") == 1
    assert counted(metrics, "racer_store_state") == 1


def test_a_device_is_closed_only_when_nothing_runs_on_it() -> None:
    """F30: after `shut` no operation begins, so the answer stays true."""
    watched = watch(Metrics())
    with watched.operation():
        assert not watched.shut()
        with pytest.raises(DiskError, match="closed"), watched.operation():
            raise AssertionError("an operation began on a device that is being closed")
    assert watched.shut()
    watched.unshut()
    with watched.operation():
        pass


class Chores:
    """Work that writes down what it did."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.ticked = threading.Event()

    def begin(self) -> None:
        self.done.append("begin")

    def tick(self) -> None:
        self.done.append("tick")
        self.ticked.set()
        if self.done.count("tick") == 1:
            raise RuntimeError("a defect")

    def end(self) -> None:
        self.done.append("end")


def test_the_housekeeper_survives_a_defect_and_tells_it(caplog) -> None:
    chores = Chores()
    keeper = Housekeeper("store test", chores, tick_seconds=60.0)
    assert not keeper.ask(lambda: None, 1.0), "not started yet"
    with caplog.at_level(logging.ERROR):
        keeper.start()
        keeper.nudge()
        assert chores.ticked.wait(5.0)
        assert keeper.ask(lambda: chores.done.append("asked"), 5.0)
    assert "defect of racerd" in caplog.text and "a defect" in caplog.text
    assert keeper.stop(5.0) and keeper.stopping
    assert chores.done[0] == "begin" and chores.done[-1] == "end" and "asked" in chores.done
    assert not keeper.ask(lambda: None, 1.0)


def test_whoever_asks_waits_a_bounded_time() -> None:
    """F18."""
    chores, release = Chores(), threading.Event()
    keeper = Housekeeper("store test", chores, tick_seconds=60.0)
    keeper.start()
    assert not keeper.ask(lambda: release.wait() and None, 0.01)
    assert not keeper.stop(0.01)
    release.set()
    assert keeper.stop(5.0)

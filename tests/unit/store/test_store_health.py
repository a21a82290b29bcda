"""The health of a disk: every line of the table in `racerd.store.health`."""

from __future__ import annotations

from racerd.store.health import (
    PAUSE_SECONDS_MAX,
    PROBES_WANTED,
    QUIET_SECONDS,
    DiskHealth,
    DiskState,
)


def operate(health: DiskHealth, now: float, *outcomes: bool) -> None:
    for ok in outcomes:
        health.finished(health.started(now), now, None if ok else "EIO")


def unstable(now: float = 0.0) -> DiskHealth:
    health = DiskHealth(5.0)
    operate(health, now, False, False, False)
    assert health.state(now) is DiskState.UNSTABLE
    return health


def down(now: float = 0.0) -> DiskHealth:
    health = unstable(now)
    operate(health, now, *[False] * 8)
    assert health.state(now) is DiskState.DOWN
    return health


def probe(health: DiskHealth, now: float, failure: str | None) -> None:
    assert health.probe_due(now) and health.state(now) is DiskState.PROBING
    health.probed(now, failure)


def test_single_failures_are_nothing() -> None:
    health = DiskHealth(5.0)
    for minute in range(10):
        operate(health, minute * 60.0, False, True, False)
        assert health.state(minute * 60.0) is DiskState.NORMAL


def test_three_failures_make_it_unstable_read_only() -> None:
    """F18: a disk with 10 % EIO serves the other 90 %; nothing is written to it."""
    health = unstable()
    assert health.readable(0.0) and not health.writable(0.0)
    for second in range(9):
        operate(health, float(second), *[True] * 9, False)
    assert health.state(9.0) is DiskState.UNSTABLE


def test_quiet_makes_it_normal_again() -> None:
    health = unstable()
    assert health.state(QUIET_SECONDS - 0.1) is DiskState.UNSTABLE
    assert health.state(QUIET_SECONDS) is DiskState.NORMAL
    assert health.reason == ""


def test_a_failure_in_between_prolongs_it() -> None:
    health = unstable()
    operate(health, 20.0, False)
    assert health.state(QUIET_SECONDS + 1) is DiskState.UNSTABLE


def test_a_disk_that_mostly_fails_goes_down() -> None:
    health = down()
    assert not health.readable(0.0) and not health.writable(0.0)
    assert health.reason == "EIO"


def test_a_hang_takes_it_down_at_once_and_while_it_lasts() -> None:
    """F18: nobody else waits for a disk that does not answer."""
    health = DiskHealth(5.0)
    token = health.started(0.0)
    assert health.readable(4.9)
    assert not health.readable(5.0) and health.state(5.0) is DiskState.DOWN
    assert not health.probe_due(100.0)
    health.finished(token, 100.0, None)
    assert health.probe_due(106.0)


def test_a_device_that_is_gone_takes_it_down_at_once() -> None:
    health = DiskHealth(5.0)
    health.finished(health.started(0.0), 0.0, "ENODEV", gone=True)
    assert health.state(0.0) is DiskState.DOWN


def test_it_comes_back_after_probes() -> None:
    """F17: a short overload does not end a disk for good."""
    health = down()
    assert not health.probe_due(0.5)
    for _ in range(PROBES_WANTED):
        assert not health.readable(1.0)
        probe(health, 1.0, None)
    assert health.state(1.0) is DiskState.NORMAL
    operate(health, 1.0, False, False)
    assert health.state(1.0) is DiskState.NORMAL


def test_failed_probes_come_more_and_more_seldom() -> None:
    health = down()
    now, pauses = 0.0, []
    for _ in range(9):
        start = now
        while not health.probe_due(now):
            now += 0.5
        pauses.append(now - start)
        health.probed(now, "EIO")
    assert pauses == sorted(pauses) and pauses[0] == 1.0
    assert pauses[-1] == PAUSE_SECONDS_MAX


def test_being_full_is_not_a_failure_but_a_probe_of_a_normal_disk_is_nothing() -> None:
    health = DiskHealth(5.0)
    operate(health, 0.0, *[True] * 20)
    health.probed(0.0, "EIO")
    assert health.state(0.0) is DiskState.NORMAL and not health.probe_due(0.0)
    assert health.idle

"""Deadlines: they shrink, never grow, and follow no wall clock."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racerd.errors import ResourceError, Retry
from racerd.runtime.deadline import Deadline


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_what_remains_counts_down_to_zero(clock: Clock) -> None:
    deadline = Deadline.after(3)
    assert deadline.remaining_seconds() == 3
    clock.now += 2
    assert deadline.remaining_seconds() == 1
    clock.now += 5
    assert deadline.remaining_seconds() == 0


def test_within_only_shrinks(clock: Clock) -> None:
    deadline = Deadline.after(3)
    assert deadline.within(1).remaining_seconds() == 1
    assert deadline.within(100) == deadline
    clock.now += 2.5
    assert deadline.within(1) == deadline


@given(st.floats(0, 1e6), st.lists(st.floats(0, 1e6), max_size=5))
def test_no_chain_of_steps_outlives_the_first(seconds: float, steps: list[float]) -> None:
    first = deadline = Deadline.after(seconds)
    for step in steps:
        deadline = deadline.within(step)
    assert deadline.at <= first.at


def test_the_error_says_what_was_going_on(clock: Clock) -> None:
    deadline = Deadline.after(3)
    deadline.check("reading the disk")
    clock.now += 3
    with pytest.raises(ResourceError, match="while reading the disk") as caught:
        deadline.check("reading the disk")
    assert (caught.value.code, caught.value.retry) == ("deadline_exceeded", Retry.SAME)
    assert caught.value.hint


def test_the_wall_clock_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline.after(60)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    deadline.check("waiting")
    assert 0 < deadline.remaining_seconds() <= 60

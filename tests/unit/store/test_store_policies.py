"""Budgets, admission, settings, scrubbing: the small policies of the store."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.store import DiskSettings, StoreSettings
from racerd.store.admission import EverythingAtFirstSight, OthersAtSecondSight
from racerd.store.budget import WriteBudget
from racerd.store.notes import Selector
from racerd.store.scrub import Scrubber


def page(index: int) -> PageId:
    return PageId(ObjectVersion(ObjectId("c", "b", b"k"), '"1"', 1 << 50), index)


def test_a_write_budget_is_spent_and_fills_by_time() -> None:
    budget = WriteBudget(86_400)
    assert budget.take(100.0, 86_000)
    assert not budget.take(100.0, 401)
    assert budget.take(100.0, 400)
    assert not budget.take(109.0, 10)
    assert budget.take(110.0, 10)
    assert budget.take(1e9, 86_400) and not budget.take(1e9, 1)


def test_a_write_budget_ignores_a_clock_that_stands_still_and_may_be_absent() -> None:
    budget = WriteBudget(1000)
    assert budget.take(5.0, 1000)
    assert not budget.take(4.0, 1)
    assert WriteBudget(None).take(0.0, 1 << 60)


def test_what_was_spent_beyond_a_budget_is_made_up_for() -> None:
    budget = WriteBudget(86_400)
    budget.spend(0.0, 86_410)
    assert budget.left(0.0) == 0.0 and not budget.take(10.0, 1)
    assert budget.take(15.0, 5) and not budget.take(15.0, 1)
    budget.give_back(15.0, 5)
    assert budget.take(15.0, 5)
    budget.give_back(15.0, 1 << 40)
    assert budget.left(15.0) == 86_400
    unlimited = WriteBudget(None)
    unlimited.spend(0.0, 1 << 60)
    unlimited.give_back(0.0, 1 << 60)
    assert unlimited.left(0.0) is None and unlimited.take(0.0, 1)


def test_own_pages_are_kept_at_first_sight_others_at_second() -> None:
    admission = OthersAtSecondSight(lambda each: each.index % 2 == 0)
    assert admission.admit(page(0)) and admission.admit(page(2))
    assert not admission.admit(page(1))
    assert not admission.admit(page(3))
    assert admission.admit(page(1)) and admission.admit(page(3))
    assert EverythingAtFirstSight().admit(page(1))


def test_a_scan_of_many_pages_is_not_admitted() -> None:
    """R24: what is seen once is not worth a write."""
    admission = OthersAtSecondSight(lambda _: False)
    assert sum(admission.admit(page(index)) for index in range(20_000)) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"free_floor_ratio": 1.0}, "free_floor_ratio"),
        ({"free_floor_ratio": -0.1}, "free_floor_ratio"),
        ({"write_bytes_per_day": 0}, "write_bytes_per_day"),
        ({"quotas": {"c": -1}}, "quota"),
        ({"hang_seconds": 0}, "hang_seconds"),
        ({"scrub_bytes_per_second": -1}, "scrub_bytes_per_second"),
        ({"disks": (DiskSettings(Path("/a")), DiskSettings(Path("/a"), 5))}, "same path"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    """F13: limits are validated together, before anything starts."""
    with pytest.raises(ValueError, match=message):
        StoreSettings(**{"disks": (), **changes})


def test_the_default_floor_leaves_what_kubelet_wants() -> None:
    """F23: 15 %, above kubelet's own eviction threshold of 10 %."""
    assert StoreSettings(()).free_floor_ratio == 0.15


def test_selectors() -> None:
    name = ObjectId("c", "b", b"llama/one")
    assert Selector("c", "b", b"llama/", exact=False).matches(name)
    assert Selector("c", "b", b"", exact=False).matches(name)
    assert not Selector("c", "b", b"llama/", exact=True).matches(name)
    assert not Selector("d", "b", b"llama/", exact=False).matches(name)
    assert not Selector("c", "x", b"llama/", exact=False).matches(name)


class Shelf:
    """A disk with records of the given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.at = 0

    def scrub_next(self) -> int | None:
        if self.at == len(self.sizes):
            self.at = 0
            return None
        self.at += 1
        return self.sizes[self.at - 1]


def run_scrubber(disks: list[Shelf], rate: int, pauses: int) -> list[float]:
    waited: list[float] = []
    stop = threading.Event()

    def pause(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == pauses:
            stop.set()

    Scrubber(disks, rate).run(stop, pause)
    return waited


def test_the_scrubber_keeps_its_rate_and_goes_round() -> None:
    assert run_scrubber([Shelf([100, 50]), Shelf([200])], 100, 6) == [1.0, 0.5, 2.0, 1.0, 0.5, 2.0]


def test_the_scrubber_rests_where_there_is_nothing() -> None:
    assert run_scrubber([Shelf([]), Shelf([])], 100, 2) == [5.0, 5.0]
    assert run_scrubber([Shelf([1])], 0, 1) == []

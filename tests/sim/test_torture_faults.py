"""The fault campaign in short, and that it would notice: see docs/reliability.md."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from racerd.ids import PageId
from racerd.pages import Seal
from racerd.store import Store
from tools.torture.faults import run_campaign, table


def test_a_few_rounds_of_every_fault() -> None:
    """R22, R23, F5, F18, F29, F37, F38: right bytes or a miss, and nothing kept is lost."""
    tally = run_campaign(first=2, rounds=4)
    assert tally.failures == []
    assert tally.looked["right"] > 1000 < tally.looked["missed"]
    assert tally.injected["kills"] and tally.injected["power losses"]
    assert sum(count > 0 for count in tally.injected.values()) >= 8, table(tally, 0)


def test_the_same_seed_meets_the_same_faults() -> None:
    first, second = (run_campaign(first=4, rounds=1) for _ in range(2))
    assert first.injected == second.injected and first.looked == second.looked


@pytest.mark.parametrize("kind", ["wrong read", "lost page"])
def test_a_store_that_is_wrong_is_found_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign can fail: a flipped bit and a forgotten page are each told, with the seed."""
    honest = Store.read

    def read(self: Store, page: PageId, first: int, frames: Sequence[memoryview]) -> Seal | None:
        seal = honest(self, page, first, frames)
        if seal is not None and page.index == 1:
            if kind == "lost page":
                return None
            frames[0][7] ^= 1
        return seal

    monkeypatch.setattr(Store, "read", read)
    tally = run_campaign(first=1, rounds=1)
    assert tally.count(kind) == 1
    assert "of seed 1" in tally.failures[0]

"""A short kill campaign: what `make torture` runs long, see docs/reliability.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.torture.kills import SCENARIOS, Result, run_scenario, shares, table


def survived(scenario: str, kills: int, seed: str) -> Result:
    result = run_scenario(scenario, kills, seed, Path("/var/tmp"))
    assert result.broken == [], table([result])
    assert result.kills.total() == kills
    assert result.tally["wrong bytes"] == 0 < result.tally["bytes compared"]
    return result


@pytest.mark.slow
def test_kills_without_a_checkpoint_lose_nothing() -> None:
    """R7, R23, F2, F26, F37, F42: also during recovery, which serves meanwhile; what was kept is
    served without the origin, and nothing is left behind."""
    result = survived("scan", 4, "2")
    assert result.kills["recovering"] > 0 < result.tally["reads answered during recovery"]
    assert result.tally["untouched pages found"] == SCENARIOS["scan"].ballast
    assert result.tally["origin requests for promised pages"] == 0


@pytest.mark.slow
def test_kills_of_a_full_disk_never_give_a_wrong_byte() -> None:
    """R22, R23, F1, F29, F37: segments are emptied and filled again all the time."""
    survived("small", 3, "1")


def test_every_kill_belongs_to_a_scenario() -> None:
    assert sum(shares(200).values()) == 200
    assert sum(shares(7).values()) == 7
    assert shares(200).keys() == SCENARIOS.keys()

"""Clients that mean harm, against a real daemon in its own process: a short run of the campaign."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tools.torture.clients import ALIKE, ALONE, ELSEWHERE, HOSTILE, Campaign

SEED = 20_260
CONNECTIONS = 400


@pytest.mark.slow
def test_hostile_clients_leave_nothing_behind_and_disturb_nobody() -> None:
    """R5, R6, R7, R8, F67, F69, F70, F71, F73, F91: whatever connections do and wherever they end,
    descriptors, threads, mappings, tasks, memory and charges are back at the start, answers are
    the protocol's, and a well-behaved client beside them gets nothing but right bytes."""
    with tempfile.TemporaryDirectory(prefix="racer-clients-", dir="/var/tmp") as folder:
        found = Campaign(Path(folder), SEED).run(CONNECTIONS, alone_seconds=1.0)
    assert not found.broken, "\n".join(found.lines())
    assert sum(found.told.values()) >= CONNECTIONS
    acts = {told.partition(":")[0] for told in found.told}
    assert len(acts) >= 19, f"the seed leaves acts out: {acts}"
    assert set(found.looks) == {ALONE, HOSTILE, ELSEWHERE, ALIKE}

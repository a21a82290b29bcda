"""More clients and reads than a daemon has room for: a short run of the campaign."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from racerd.units import MIB
from tools.torture.overload import Overload

SEED = 20_261
CLIENTS, REQUESTS, DEAF = 160, 3, 40


@pytest.mark.slow
def test_overload_is_refused_in_time_and_everybody_gets_through() -> None:
    """R7, F26, L9: under a hard limit of memory, with fewer connections than clients and budgets
    far below what is asked for: only 503 with Retry-After, no budget over its limit, nothing left
    behind, and every client that waits as it is told gets everything."""
    with tempfile.TemporaryDirectory(prefix="racer-overload-", dir="/var/tmp") as folder:
        campaign = Overload(Path(folder), SEED, connections_max=140, limit_bytes=256 * MIB)
        found = campaign.run(CLIENTS, REQUESTS, DEAF)
    assert not found.broken, "\n".join(found.lines())
    assert found.refused > 0, "nothing was too much: the test proves nothing"
    assert max(found.fullest["plaintext"], found.fullest["streams"]) > 0
    assert 0 < found.peak_bytes <= found.limit_bytes
    assert len(found.finished) == CLIENTS

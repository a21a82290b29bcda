"""The store's eviction against LRU, on a short version of the measured traces."""

from __future__ import annotations

from itertools import islice

import pytest

from tools.eviction_traces import rollouts, run_by_page, run_engine, scans, zipf


@pytest.mark.parametrize(("trace", "margin"), [(zipf, 1.0), (scans, 1.5), (rollouts, 0.97)])
def test_it_is_not_worse_than_lru_and_much_better_under_scans(trace, margin: float) -> None:
    """R24: `python -m tools.eviction_traces` has the whole of it, docs/store.md the figures."""
    part = 120_000 if trace is scans else 40_000
    ours = run_engine(islice(trace(), part))
    lru = run_by_page(islice(trace(), part), refresh=True)
    assert ours.hit_ratio >= margin * lru.hit_ratio
    assert ours.copied <= 0.05 * (ours.accesses - ours.hits)

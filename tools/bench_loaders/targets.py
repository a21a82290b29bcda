"""What racer's loader is held to, and whether the results meet it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from racerd.units import MIB
from tools.bench_loaders.lanes import LANES, Group
from tools.bench_loaders.results import Results

EXTRA_BYTES_MAX = 100 * MIB


@dataclass(frozen=True)
class Target:
    """`value` in words, and whether it is what was aimed at."""

    name: str
    goal: str
    value: str
    met: bool


def targets(results: Results) -> list[Target]:
    """Those of which the lanes were measured."""
    return [*_ratios(results), *_memory(results)]


def _ratio(results: Results, ours: str, theirs: str) -> float | None:
    left, right = results.lane(ours), results.lane(theirs)
    return right.seconds / left.seconds if left and right else None


def _ratios(results: Results) -> Iterator[Target]:
    for name, ours, theirs, goal in (
        ("memory tier / runai + clone", "racer-first", "runai-clone-memory", 1.5),
        ("cold from S3 / runai from the same server", "racer-s3", "runai-s3", 1.0),
    ):
        value = _ratio(results, ours, theirs)
        if value is not None:
            yield Target(name, f">= {goal:g}", f"{value:.2f}", value >= goal)
    shared = results.lane("racer-shared")
    others = [
        lane.seconds
        for known in LANES
        if known.group is Group.MEMORY and not known.is_ours
        if (lane := results.lane(known.key)) is not None
    ]
    if shared and others:
        value = min(others) / shared.seconds
        touched = min(others) / shared.touched_seconds
        text = f"{value:.1f}; {touched:.1f} with every page read once"
        yield Target(
            "shared, next rank / the fastest of the other loaders", ">= 10", text, value >= 10
        )


def _memory(results: Results) -> Iterator[Target]:
    ours = [lane for known in LANES if known.is_ours and (lane := results.lane(known.key))]
    if ours:
        most = max(lane.extra_bytes for lane in ours)
        bound = results.staging_bytes + EXTRA_BYTES_MAX
        yield Target(
            "peak memory beyond the tensors",
            f"<= {bound / MIB:.0f} MiB",
            f"{most / MIB:.0f} MiB",
            most <= bound,
        )

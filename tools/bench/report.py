"""One measured figure, and medians of paired runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """`value` in `unit`. `goal` is shown beside it; `note` says what was compared."""

    name: str
    value: float
    unit: str = ""
    goal: str = ""
    note: str = ""

    def __str__(self) -> str:
        goal = f"goal {self.goal}" if self.goal else ""
        return f"{self.name:<44} {self.value:>9.3f} {self.unit:<6} {goal:<12} {self.note}".rstrip()


def paired(
    ours: Callable[[], float], bare: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """Runs both in turn and returns their medians (bytes per second each)."""
    left, right = [], []
    for _ in range(rounds):
        right.append(bare())
        left.append(ours())
    return statistics.median(left), statistics.median(right)


def ratio(name: str, ours: float, bare: float, goal: str, what: str) -> Figure:
    """The ratio of two speeds in bytes per second."""
    return Figure(name, ours / bare, "x", goal, f"{ours / 1e9:.2f} of {bare / 1e9:.2f} GB/s {what}")

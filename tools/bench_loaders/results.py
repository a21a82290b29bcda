"""What was measured: runs, the lanes that they belong to, and all of it as JSON.

Pure. Times are in seconds, sizes in bytes; a lane's figure is the median of its runs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FORMAT = 1


@dataclass(frozen=True)
class Run:
    """One load.

    `touch_seconds` is what reading a byte of each page cost afterwards. `extra_bytes` is the most
    that was resident in the client beyond what it began with and the tensors themselves.
    `daemon_cpu_seconds` is None where no racerd took part; of a cold load it includes what is
    written to the disk after the load.
    """

    seconds: float
    touch_seconds: float
    extra_bytes: int
    client_cpu_seconds: float
    daemon_cpu_seconds: float | None


@dataclass(frozen=True)
class LaneResult:
    """All runs of one lane; `key` is that of `lanes.Lane`."""

    key: str
    version: str
    runs: tuple[Run, ...]

    def median(self, value: Callable[[Run], float]) -> float:
        return statistics.median(value(run) for run in self.runs)

    @property
    def seconds(self) -> float:
        return self.median(lambda run: run.seconds)

    @property
    def seconds_min(self) -> float:
        return min(run.seconds for run in self.runs)

    @property
    def seconds_max(self) -> float:
        return max(run.seconds for run in self.runs)

    @property
    def seconds_middle(self) -> tuple[float, float]:
        """Between these lies the middle half of the runs."""
        if len(self.runs) < 2:
            return self.seconds, self.seconds
        first, _, last = statistics.quantiles(
            [run.seconds for run in self.runs], n=4, method="inclusive"
        )
        return first, last

    @property
    def touched_seconds(self) -> float:
        """The load and a read of each page."""
        return self.median(lambda run: run.seconds + run.touch_seconds)

    @property
    def extra_bytes(self) -> int:
        """The most of all runs."""
        return max(run.extra_bytes for run in self.runs)

    @property
    def client_cpu_seconds(self) -> float:
        return self.median(lambda run: run.client_cpu_seconds)

    @property
    def daemon_cpu_seconds(self) -> float | None:
        spent = [run.daemon_cpu_seconds for run in self.runs if run.daemon_cpu_seconds is not None]
        return statistics.median(spent) if spent else None


@dataclass(frozen=True)
class Results:
    """A whole benchmark. `machine` is a line for readers; `staging_bytes` is the loader's bound.

    `load` is the load average when it began: with other work on the machine, figures are worse.
    """

    date: str
    machine: str
    load: float
    tensor_bytes: int
    tensors: int
    staging_bytes: int
    lanes: tuple[LaneResult, ...]

    def lane(self, key: str) -> LaneResult | None:
        return next((lane for lane in self.lanes if lane.key == key), None)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        fields: dict[str, Any] = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise ValueError("these results were written by another version: measure anew")
        lanes = tuple(
            LaneResult(lane["key"], lane["version"], tuple(Run(**run) for run in lane["runs"]))
            for lane in fields.pop("lanes")
        )
        return cls(**fields, lanes=lanes)

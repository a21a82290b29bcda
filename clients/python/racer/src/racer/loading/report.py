"""What a load did, as one line.

Layer: loading, pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from racer import __version__

_GIB = 1 << 30


@dataclass(slots=True)
class LoadReport:
    """`tensor_bytes` were delivered, for which `rungs` gave bytes, by where they came from.

    `seconds` from the start of reading; of them the consumer waited `wait_seconds`. `copy_seconds`
    is the threads' time in copies to the tensors, of all threads together.
    """

    location: str
    tensors: int = 0
    tensor_bytes: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    copy_seconds: float = 0.0
    rungs: dict[str, int] = field(default_factory=dict)
    complete: bool = False

    def add(self, rungs: Mapping[str, int], copy_seconds: float) -> None:
        """Another chunk came."""
        self.copy_seconds += copy_seconds
        for rung, nbytes in rungs.items():
            self.rungs[rung] = self.rungs.get(rung, 0) + nbytes

    @property
    def read_bytes(self) -> int:
        return sum(self.rungs.values())

    def __str__(self) -> str:
        rate = self.tensor_bytes / _GIB / self.seconds if self.seconds else 0.0
        sources = ", ".join(
            f"{rung} {_size(nbytes)}" for rung, nbytes in sorted(self.rungs.items()) if nbytes
        )
        return (
            f"{'loaded' if self.complete else 'stopped after'} {self.tensors} tensors, "
            f"{_size(self.tensor_bytes)} in {self.seconds:.2f} s ({rate:.2f} GiB/s) "
            f"from {self.location}: {sources or 'no bytes read'}; "
            f"waited {self.wait_seconds:.2f} s, copied {self.copy_seconds:.2f} thread-s; "
            f"racer {__version__}"
        )


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << scale:
            return f"{nbytes / (1 << scale):.2f} {unit}"
    return f"{nbytes} B"

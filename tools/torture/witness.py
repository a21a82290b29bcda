"""A well-behaved client beside a campaign: reads, checks every byte, and says how much came.

`Witness` runs it in a process of its own, so that it competes with nobody but racerd.
"""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import racer
from tools.torture.slow_origin import content

_SMALL_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Witnessed:
    """What came between two looks. `failed` are the errors that calls raised."""

    reads: int
    bytes: int
    seconds: float
    wrong: int
    failed: list[str]

    def __add__(self, other: Witnessed) -> Witnessed:
        return Witnessed(
            self.reads + other.reads,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
            self.wrong + other.wrong,
            self.failed + other.failed,
        )

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


class Witness:
    """`with Witness(...) as witness:` reads all the time; `look` tells what came since the last."""

    def __init__(self, path: Path, object_bytes: int, keys: list[str], seed: int) -> None:
        arguments = [str(path), str(object_bytes), ",".join(keys), str(seed)]
        self._command = [sys.executable, "-m", "tools.torture.witness", *arguments]

    def __enter__(self) -> Witness:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.look()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def look(self) -> Witnessed:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("look\n")
        self._process.stdin.flush()
        return Witnessed(**json.loads(self._process.stdout.readline()))


def main(path: str, object_bytes: str, keys: str, seed: str) -> None:
    size, names, rng = int(object_bytes), keys.split(","), random.Random(seed)
    reads = count = wrong = 0
    failed: list[str] = []
    since = time.monotonic()
    with racer.Client(socket=path, timeout=60) as client, client.landing(size) as landing:
        while True:
            if select.select([sys.stdin], [], [], 0)[0]:
                if not sys.stdin.readline():
                    return
                now = time.monotonic()
                told = Witnessed(reads, count, now - since, wrong, failed)
                print(json.dumps(asdict(told)), flush=True)
                reads = count = wrong = 0
                failed, since = [], now
            key = rng.choice(names)
            length = rng.choice([_SMALL_BYTES, size // 2])
            start = rng.randrange(size - length)
            wanted = content(key, size, start, start + length)
            try:
                if length == _SMALL_BYTES:
                    found = client.read(f"racer://cache{key}", start, length)
                    right = found == wanted
                else:
                    landing.read(f"racer://cache{key}", start, length)
                    right = landing.view[:length] == wanted
            except racer.RacerError as error:
                failed.append(f"{error.code}: {error}")
                continue
            reads += 1
            count += length
            wrong += not right


if __name__ == "__main__":
    main(*sys.argv[1:])

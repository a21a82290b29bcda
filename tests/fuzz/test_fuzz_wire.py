"""The wire's fuzz target on golden transcripts, on mutations of them, and under atheris."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import wire_target
from tests.fuzz.wire_target import exercise
from tests.support.golden_wire import transcripts


def steps(data: bytes, cut: random.Random) -> bytes:
    """`data` as an input of the target, cut at random places."""
    packed = b""
    while data:
        length = cut.randrange(1, 256)
        chunk, data = data[:length], data[length:]
        control = cut.choice([0, 0, 0, 1, 4, 5, 8, 16, 17, 32, 64])
        packed += bytes([control, len(chunk) % 256]) + chunk
    return packed


def seeds() -> list[bytes]:
    texts = [
        step["client"].encode("latin-1")
        for transcript in transcripts()
        for step in transcript.exchange
        if "client" in step
    ]
    return [steps(text, random.Random(index)) for index, text in enumerate(texts)]


def mutated(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(changed))
        match chance.randrange(4):
            case 0:
                changed[at] = chance.randrange(256)
            case 1:
                del changed[at : at + chance.randrange(1, 9)]
            case 2:
                changed[at:at] = chance.choice([b"\r\n", b"\r", b"\n", b" ", b"%", b"\x00", b":"])
            case _:
                changed[at:at] = changed[: chance.randrange(40)]
        if not changed:
            return b"\x00"
    return bytes(changed)


def test_golden_inputs_and_their_mutations() -> None:
    """R5, R6: no input makes an undeclared error or loses a descriptor."""
    for number, seed in enumerate(seeds()):
        exercise(seed)
        chance = random.Random(number)
        for _ in range(30):
            exercise(mutated(seed, chance))


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="NOT FUZZED WITH COVERAGE: atheris is not installed (pip install atheris)",
)
def test_under_atheris(tmp_path: Path) -> None:
    """A short run with coverage; a long one is a command (see `wire_target`)."""
    for number, seed in enumerate(seeds()):
        (tmp_path / f"{number}").write_bytes(seed)
    command = [sys.executable, wire_target.__file__, str(tmp_path), "-runs=20000", "-max_len=5000"]
    done = subprocess.run(command, capture_output=True, timeout=120, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]

"""KeyboardInterrupt at random moments, in a process of its own: for programs that tests run.

The program calls `interrupted` for each of its rounds, and prints `count()` at its end; the test
calls `run_interrupted`. The moments are random, from a seed; what has to hold afterwards is not.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType

from tests.support.threads import join_others

_ENOUGH = 10  # So many interrupts at least make a test.

_armed = False
_left = 0
_count = 0
_moment = random.Random(0)
_spared = ""


def run_interrupted(program: str, *arguments: str) -> None:
    """Runs `program`, which has to end well and to have been interrupted."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > _ENOUGH


def start(*, spared: str = "") -> None:
    """Before the first round. No interrupt comes where a function of a file named so runs: of a
    test's own, whose memory has no owner for a moment, say."""
    global _spared
    _spared = spared
    signal.signal(signal.SIGALRM, _interrupt)


def interrupted(once: Callable[[], None], seed: int, within_seconds: float) -> None:
    """Runs `once` with two interrupts, the first within so long; returns when no thread is left."""
    global _armed, _left, _moment
    _moment = random.Random(seed)
    _left, _armed = 2, True
    try:
        signal.setitimer(signal.ITIMER_REAL, _moment.random() * within_seconds + 1e-5)
        _survive(once, 4)
        _armed = False
    except KeyboardInterrupt:
        _armed = False
    join_others()


def count() -> int:
    """How many interrupts came in all. None comes any more."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    return _count


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _left, _count
    if not _armed:
        return
    while _spared and frame is not None:
        if _spared in frame.f_code.co_filename:
            # Later, and not so soon that it comes before this has returned, over and over on a
            # busy machine.
            signal.setitimer(signal.ITIMER_REAL, 1e-3)
            return
        frame = frame.f_back
    _left -= 1
    _count += 1
    if _left:
        signal.setitimer(signal.ITIMER_REAL, _moment.random() * 1e-3 + 1e-6)
    raise KeyboardInterrupt


def _survive(once: Callable[[], None], depth: int) -> None:
    """As a program would that goes on after Ctrl-C, again and again."""
    try:
        if depth:
            _survive(once, depth - 1)
        else:
            once()
    except KeyboardInterrupt:
        pass

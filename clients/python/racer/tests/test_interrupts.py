"""Ctrl-C at any moment, in the thread that uses the client: what is there afterwards can be closed,
and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from clients.python.racer.tests.fake_daemon import FakeDaemon
from clients.python.racer.tests.patterns import MIB, pattern
from tests.support.safetensors_bytes import model_file

# The moments are random; what has to hold is not. Each round ends with everything closed: a lock
# that an interrupt left locked would keep it from that for ever.
INTERRUPTED = """
import faulthandler, gc, os, random, signal, sys
from pathlib import Path
import racer
from racer.loading import load
from racer.window import windows_count
from tests.support.threads import join_others

socket, what, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
faulthandler.dump_traceback_later(100, exit=True)
armed, interrupts = False, 0

def interrupt(number, frame):
    global left, interrupts
    if not armed:
        return
    left -= 1
    interrupts += 1
    if left:
        signal.setitimer(signal.ITIMER_REAL, moment.random() * 1e-3 + 1e-6)
    raise KeyboardInterrupt

def loading():
    with load("racer://local/llama/m", framework="numpy", socket=socket) as stream:
        for name, array in stream:
            assert array[-1] is not None

def reading():
    with racer.Client(socket=socket) as client:
        for _ in range(20):
            assert len(client.read("racer://local/llama/w")) == 3 << 20
            assert client.stat("racer://local/llama/w").size == 3 << 20

def keeping():
    for _ in range(10):
        assert len(kept.read("racer://local/llama/w")) == 3 << 20
        assert kept.stat("racer://local/llama/w").size == 3 << 20

one_round = {"loading": loading, "reading": reading, "keeping": keeping}[what]

def survive(depth):
    try:
        if depth:
            survive(depth - 1)
        else:
            one_round()
    except KeyboardInterrupt:
        pass

def left_behind():
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:"), windows_count()

signal.signal(signal.SIGALRM, interrupt)
empty = left_behind()
kept = racer.Client(socket=socket, connections_max=2, timeout=10)
one_round()
before = left_behind()
for number in range(rounds):
    moment = random.Random(number)
    left, armed = 2, True
    try:
        signal.setitimer(signal.ITIMER_REAL, moment.random() * 0.03 + 1e-5)
        survive(4)
        armed = False
    except KeyboardInterrupt:
        armed = False
    join_others()
    if what == "keeping":
        one_round()  # However much was interrupted, it goes on with what it had.
    assert left_behind() == before, (number, left_behind(), before)
signal.setitimer(signal.ITIMER_REAL, 0)
kept.close()
assert left_behind() == empty, (left_behind(), empty)
print(interrupts)
"""


@pytest.mark.parametrize("what", ["loading", "reading", "keeping"])
def test_interrupts_at_any_moment(daemon: FakeDaemon, what: str) -> None:
    """R36: no lock is held for ever, no descriptor or mapping is left, wherever Ctrl-C hits."""
    daemon.put("llama", "w", pattern(3 * MIB))
    for number in (1, 2):
        layout = {f"t{number}.{n}": ("U8", [MIB + 4096 * n]) for n in range(12)}
        daemon.put("llama", f"m/m-{number}.safetensors", model_file(layout, seed=number)[0])
    # More pieces than one answer holds: the load asks in between, too.
    daemon.shared_already, daemon.share_chunk_bytes = True, MIB // 2
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            INTERRUPTED,
            str(daemon.path),
            what,
            "150",
        ],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10

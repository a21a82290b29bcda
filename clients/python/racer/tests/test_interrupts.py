"""Ctrl-C at any moment, in the thread that uses the client: what is there afterwards can be closed,
and nothing is left."""

from __future__ import annotations

import pytest

from clients.python.racer.tests.fake_daemon import FakeDaemon
from clients.python.racer.tests.patterns import MIB, pattern
from tests.support.interrupts import run_interrupted
from tests.support.safetensors_bytes import model_file

# Each round ends with everything closed, or used again: a lock that an interrupt left locked would
# keep it from that for ever.
INTERRUPTED = """
import faulthandler, gc, os, sys
from pathlib import Path
import racer
from racer.loading import load
from racer.window import windows_count
from tests.support.interrupts import count, interrupted, start

socket, what = sys.argv[1:]
faulthandler.dump_traceback_later(100, exit=True)

def loading():
    with load("racer://local/llama/m", framework="numpy", socket=socket) as stream:
        for name, array in stream:
            assert array[-1] is not None

def reading():
    with racer.Client(socket=socket) as client:
        read_with(client, 20)

def keeping():
    read_with(kept, 10)

def read_with(client, times):
    for _ in range(times):
        assert len(client.read("racer://local/llama/w")) == 3 << 20
        assert client.stat("racer://local/llama/w").size == 3 << 20

def left_behind():
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:"), windows_count()

one_round = {"loading": loading, "reading": reading, "keeping": keeping}[what]
start()
empty = left_behind()
kept = racer.Client(socket=socket, connections_max=2, timeout=10)
one_round()
before = left_behind()
for number in range(150):
    interrupted(one_round, number, 0.03)
    if what == "keeping":
        one_round()  # However much was interrupted, it goes on with what it had.
    assert left_behind() == before, (number, left_behind(), before)
interrupts = count()
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
    run_interrupted(INTERRUPTED, str(daemon.path), what)

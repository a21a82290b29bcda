"""The process's memory stays out of dumps. Run in a process of its own: it cannot be undone."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, resource
from racerd.runtime.hardening import dumpable, forbid_core_dumps
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
assert dumpable()
forbid_core_dumps()
assert not dumpable()
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
assert os.stat("/proc/self/mem").st_uid == 0
print("hardened")
"""


def test_no_core_no_ptrace() -> None:
    """R20: keys and plaintext are in this process's memory; no dump may take them along."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "hardened\n"), done.stderr

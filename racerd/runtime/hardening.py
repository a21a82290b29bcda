"""Keeps this process's memory, which holds keys and plaintext, out of dumps.

Layer: bottom; called once at start, before keys are read. What CPython and OpenSSL copy on their
heaps cannot be marked page by page from Python; these two settings cover the whole process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

_PR_GET_DUMPABLE = 3
_PR_SET_DUMPABLE = 4


def forbid_core_dumps() -> None:
    """No core file, no ptrace and no /proc/<pid>/mem for other processes of the same user.

    Linux: RLIMIT_CORE 0 stops core files but not a core pipe (`|` in core_pattern), which
    PR_SET_DUMPABLE 0 stops too (prctl(2), core(5)). /proc/<pid> then belongs to root. A process
    that is allowed to trace any process (CAP_SYS_PTRACE) still can. Children that are started with
    execve are dumpable again, but keep the limit. Raises OSError if the kernel refuses.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_DUMPABLE): {os.strerror(number)}")


def ignore_lease_breaks() -> None:
    """Whoever opens shared memory in the instant in which we ask whether somebody has it breaks
    our lease on it; the signal that says so would end the process (fcntl(2), F_SETLEASE)."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)


def dumpable() -> bool:
    """Whether the kernel would let this process's memory be dumped."""
    return bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0))

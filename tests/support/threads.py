"""Threads of the program that a test runs."""

from __future__ import annotations

import threading
import time


def join_others(seconds: float = 5) -> None:
    """Waits for every thread but the main one, `seconds` for all of them.

    One may be listed that is only about to start, where nobody waits for its start any more: an
    interrupt ended that wait. It cannot be joined yet.
    """
    until = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread is threading.main_thread():
            continue
        while not thread.is_alive() and thread in threading.enumerate():
            if time.monotonic() > until:
                break
            time.sleep(0)
        if thread.is_alive():
            thread.join(max(0.0, until - time.monotonic()))

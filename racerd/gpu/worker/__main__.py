"""`python -m racerd.gpu.worker --socket N`: started by the supervisor, never by hand."""

from __future__ import annotations

import argparse
import ctypes
import logging
import signal
import socket
import sys

from racerd.errors import DeviceError
from racerd.gpu.worker.session import EXIT_LOST, Session

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m racerd.gpu.worker")
    parser.add_argument("--socket", type=int, required=True, help="a seqpacket socket")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    # Keys pass through this process: no core dump, no ptrace by others. And it does not outlive
    # the daemon, which alone knows what the memory is for. SIGINT is the daemon's to handle.
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=options.socket) as connection:
        try:
            Session(connection).run()
        except DeviceError as error:
            logging.getLogger("racerd.gpu.worker").error("%s (%s)", error.message, error.hint)
            return EXIT_LOST
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

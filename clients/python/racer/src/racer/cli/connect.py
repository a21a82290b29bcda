"""The client that a command's options ask for."""

from __future__ import annotations

import argparse
import sys

from racer.cli.exits import USAGE
from racer.client import Client


def open_client(options: argparse.Namespace, *, connections_max: int = 16) -> Client:
    """A client for `--socket`, `--run-dir` and `--timeout`."""
    try:
        return Client(
            socket=options.socket,
            run_dir=options.run_dir,
            timeout=options.timeout,
            connections_max=connections_max,
        )
    except ValueError as error:
        print(f"racer: {error}", file=sys.stderr)
        raise SystemExit(USAGE) from error

"""The client that a command's options ask for."""

from __future__ import annotations

import argparse
import sys

from racer.cli.exits import USAGE
from racer.client import Client


def open_client(options: argparse.Namespace, *, connections_max: int = 16) -> Client:
    """A client for `--socket`, `--run-dir` and `--timeout`."""
    try:
        client = Client(
            socket=options.socket,
            run_dir=options.run_dir,
            timeout=options.timeout,
            connections_max=connections_max,
        )
    except ValueError as error:
        print(f"racer: {error}", file=sys.stderr)
        raise SystemExit(USAGE) from error
    name_options(client)
    return client


_OPTIONS = {"socket=": "--socket", "run_dir=": "--run-dir"}


def name_options(client: Client) -> None:
    """Has the messages of a client that is not yet used call its arguments by the names of the
    options that they came from."""
    source = client.place.source
    client.place = client.place._replace(source=_OPTIONS.get(source, source))

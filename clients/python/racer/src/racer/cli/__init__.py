"""The command `racer`: look at, copy, load and measure what racerd serves.

Layer: top, on the client. `main` parses (`arguments`), runs one module of `commands` and turns
what went wrong into an exit status (`exits`). Modules are imported when a command needs them:
`racer --help` has to be quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from racer.cli.arguments import build_parser
from racer.cli.exits import INTERRUPTED, PIPE_CLOSED, report
from racer.errors import RacerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = build_parser().parse_args(arguments)
    try:
        status = _run(options.command, options)
        sys.stdout.flush()
        return status
    except RacerError as error:
        return report(error, as_json=options.json)
    except BrokenPipeError:
        # Who reads our output has enough: nothing to say, and nothing more to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        return report(error, as_json=options.json)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print("", file=sys.stderr)
        return INTERRUPTED


def _run(command: str, options: object) -> int:
    from importlib import import_module

    module, function = {
        "stat": ("look", "run_stat"),
        "ls": ("look", "run_ls"),
        "explain": ("look", "run_explain"),
        "caches": ("look", "run_caches"),
        "prefetch": ("keep", "run_prefetch"),
        "evict": ("keep", "run_evict"),
        "pin": ("keep", "run_pin"),
        "unpin": ("keep", "run_unpin"),
        "pins": ("keep", "run_pins"),
        "cat": ("copy", "run_cat"),
        "cp": ("copy", "run_cp"),
        "load": ("measure", "run_load"),
        "bench": ("measure", "run_bench"),
    }[command]
    status: int = getattr(import_module(f"racer.cli.{module}"), function)(options)
    return status

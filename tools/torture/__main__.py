"""`python -m tools.torture CAMPAIGN`: long trials of a real racerd, from a printed seed.

Each campaign is a module beside this one, with `add_arguments(parser)` and `run(arguments) -> int`
(the exit status: 0 where every promise was kept). See docs/reliability.md for their last figures.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys

CAMPAIGNS = ("kills", "faults", "clients", "overload")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.torture", description=__doc__)
    commands = parser.add_subparsers(dest="campaign", required=True, metavar="CAMPAIGN")
    for name in CAMPAIGNS:
        if importlib.util.find_spec(f"tools.torture.{name}") is None:
            continue
        module = importlib.import_module(f"tools.torture.{name}")
        summary = (module.__doc__ or name).partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args()
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())

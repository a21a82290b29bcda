"""The `racerd` command: flags, `check-config`, and the way into the app.

Layer: above app. Everything is validated before anything starts; all problems are printed at once.
Exit status: 0 ended as asked, 1 could not serve, 2 settings or usage are wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from racerd import __version__
from racerd.config import Loaded, load_settings
from racerd.config.declarations import SETTINGS, Declared
from racerd.errors import ConfigError, RacerError

_USAGE = 2


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Flags by the name of their setting; `command` is `serve` or `check-config`."""
    parser = argparse.ArgumentParser(
        prog="racerd",
        description="Serves model files into client memory: memory, then disk, then origin.",
        epilog="Settings come from flags, then RACER_* variables, then --config FILE.",
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?", choices=("serve", "check-config"), default="serve")
    parser.add_argument("--version", action="version", version=f"racerd {__version__}")
    parser.add_argument("--config", metavar="FILE", help="settings in TOML")
    parser.add_argument(
        "--cache", action="append", metavar="NAME=URL", help="a cache and its origin (repeatable)"
    )
    parser.add_argument(
        "--disk", action="append", metavar="PATH[:BYTES]", help="a slab (repeatable)"
    )
    for declared in SETTINGS:
        _add_flag(parser, declared)
    return vars(parser.parse_args(arguments))


def _add_flag(parser: argparse.ArgumentParser, declared: Declared) -> None:
    text = f"{declared.help} (default: {declared.shown_default})"
    kind = declared.kind.name.upper().replace(" ", "-")
    parser.add_argument(declared.flag, metavar=kind, help=text.replace("%", "%%"))


def describe(loaded: Loaded) -> str:
    """The effective settings and where each came from, a line each."""
    lines = []
    for declared in SETTINGS:
        value = getattr(loaded.settings, declared.name)
        shown = f"{value:04o}" if declared.name == "socket_mode" else str(value)
        lines.append(f"{declared.name:<24} {shown:<40} {loaded.sources[declared.name]}")
    for disk in loaded.settings.disks:
        lines.append(
            f"{'disk':<24} {f'{disk.path}:{disk.size_bytes}':<40} {loaded.sources['disks']}"
        )
    for cache in loaded.settings.caches.values():
        source = loaded.sources.get("caches", "default")
        lines.append(f"{'cache ' + cache.name:<24} {cache.origin:<40} {source}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    flags = parse_flags(sys.argv[1:] if arguments is None else arguments)
    try:
        loaded = load_settings(flags, os.environ)
        if flags["command"] == "check-config":
            print(describe(loaded))
            return 0
        # Importing the app costs more than reading settings: not before they are known to be good.
        from racerd.app import run

        config = flags["config"] or os.environ.get("RACER_CONFIG")
        return run(
            loaded.settings,
            lambda: load_settings(flags, os.environ).settings,
            [Path(config)] if config else [],
        )
    except ConfigError as error:
        for problem in error.problems:
            print(f"racerd: {problem}", file=sys.stderr)
        return _USAGE
    except RacerError as error:
        print(f"racerd: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"racerd: {error.hint}", file=sys.stderr)
        return 1

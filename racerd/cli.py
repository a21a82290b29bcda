"""The `racerd` command: flags, `check-config`, `doctor`, and the way into the app.

Layer: above app. Everything is validated before anything starts; all problems are printed at once.
Exit status: 0 ended as asked, 1 could not serve (`doctor`: something failed), 2 settings or usage
are wrong, 141 whoever read the output closed it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from racerd import __version__
from racerd.config import CacheSettings, Loaded, load_settings
from racerd.config.caches import OPTIONS
from racerd.config.declarations import SETTINGS, Declared
from racerd.config.nearest import unknown
from racerd.errors import ConfigError, RacerError
from racerd.units import format_bytes

_USAGE = 2
_PIPE_CLOSED = 141  # What a shell makes of SIGPIPE.
_COMMANDS = ("serve", "check-config", "doctor")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message}; see racerd --help"])

    def _print_message(self, message: str, file: Any = None) -> None:
        """What --help and --version say."""
        _say(message, end="")


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Flags by the name of their setting, as text; nothing is validated yet.

    `command` is `serve`, `check-config` or `doctor`; `problems` tells of arguments that nobody
    knows. Raises ConfigError for a flag without its value.
    """
    parser = _Parser(
        prog="racerd",
        description="Serves model files into client memory: memory, then disk, then origin.",
        epilog="Settings come from flags, then RACER_* variables, then --config FILE.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "command",
        nargs="?",
        metavar="check-config|doctor",
        default="serve",
        help="check-config prints the settings that hold, and where each came from; doctor examines"
        " this node and says what to do",
    )
    parser.add_argument("--json", action="store_true", help="doctor prints JSON")
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
    flags, strange = parser.parse_known_args(arguments)
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    problems = [unknown(text, text.partition("=")[0], known) for text in strange]
    if flags.command not in _COMMANDS:
        problems.append(unknown(flags.command, flags.command, _COMMANDS))
    if flags.json and flags.command != "doctor":
        problems.append("--json: only `racerd doctor` prints JSON")
    return {**vars(flags), "problems": problems}


def _add_flag(parser: argparse.ArgumentParser, declared: Declared) -> None:
    text = f"{declared.help} ({declared.kind.text}; default: {declared.shown_default})"
    kind = declared.kind.name.partition(" or ")[0].upper().replace(" ", "-")
    parser.add_argument(declared.flag, metavar=kind, help=text.replace("%", "%%"))


def describe(loaded: Loaded) -> str:
    """The effective settings and where each came from, a line each. Secrets show as `***`."""
    settings, sources = loaded.settings, loaded.sources
    rows = [(s.name, s.kind.shown(getattr(settings, s.name)), sources[s.name]) for s in SETTINGS]
    for disk in settings.disks:
        size = "all there is room for" if disk.size_bytes is None else format_bytes(disk.size_bytes)
        rows.append(("disk", f"{disk.path}: {size}", sources["disks"]))
    for cache in settings.caches.values():
        name = f"caches.{cache.name}"
        rows.append((name, cache.origin, sources[name]))
        options = {**_options(cache), "quota_bytes": cache.quota_bytes}
        for option, value in options.items():
            if value is not None:
                shown = OPTIONS[option].kind.shown(value)
                rows.append((f"{name}.{option}", shown, sources[name]))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {at}" for name, value, at in rows]
    return "\n".join([*lines, *(f"warning: {text}" for text in loaded.warnings)])


def _options(cache: CacheSettings) -> dict[str, Any]:
    """Every option that applies to the cache's origin, defaults included."""
    scheme = cache.origin.partition(":")[0]
    return {
        name: getattr(cache.options, name)
        for name, option in OPTIONS.items()
        if name != "quota_bytes" and scheme in option.schemes
    }


def _doctor(loaded: Loaded, *, as_json: bool) -> int:
    from racerd.doctor import report
    from racerd.doctor.examine import examine
    from racerd.doctor.finding import exit_status

    findings = examine(loaded.settings)
    _say(report.as_json(findings) if as_json else report.as_text(findings))
    return exit_status(findings)


def _say(text: str, *, end: str = "\n") -> None:
    """Prints, all of it at once. Ends the process where nobody reads it any more (`… | head`)."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        # Nothing is left to say, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_PIPE_CLOSED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    try:
        flags = parse_flags(sys.argv[1:] if arguments is None else arguments)
        loaded = load_settings(flags, os.environ)
        if flags["command"] == "check-config":
            _say(describe(loaded))
            return 0
        if flags["command"] == "doctor":
            return _doctor(loaded, as_json=flags["json"])
        for text in loaded.warnings:
            print(f"racerd: warning: {text}", file=sys.stderr)
        # Importing the app costs more than reading settings: not before they are known to be good.
        from racerd.app import run

        config = flags["config"] or os.environ.get("RACER_CONFIG")
        return run(
            loaded.settings,
            lambda: load_settings(flags, os.environ, previous=loaded).settings,
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

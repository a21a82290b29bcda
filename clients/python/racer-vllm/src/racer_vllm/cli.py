"""The commands `racer-vllm` and `racer-vllm-fetch`.

Layer: top. Exit statuses are those of the command `racer`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from racer.cli.exits import FAILED, INTERRUPTED, USAGE, status_of
from racer.cli.units import counted, format_bytes
from racer.errors import RacerError
from racer_vllm import __version__

_ENVIRONMENT = """\
environment:
  RACER_SOCKET    the socket of one cache (set in pods that asked for one)
  RACER_RUN_DIR   the directory with all sockets
  XDG_CACHE_HOME  `serve` keeps its directories of models in racer-vllm below it
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """`racer-vllm fetch URL DIR` and `racer-vllm serve URL [vllm arguments]`."""
    parser = argparse.ArgumentParser(
        prog="racer-vllm",
        description="Serves models with vLLM, whose weights come through racerd.",
        epilog=_ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"racer-vllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_fetch(commands.add_parser("fetch", help="prepare a directory for vLLM"))
    serve = commands.add_parser(
        "serve",
        help="prepare a directory, and run `vllm serve` on it",
        usage="racer-vllm serve [--dir DIR] [--socket PATH | --run-dir DIR] [--also PATTERN]"
        " URL [arguments of vllm serve]",
        epilog="What follows the URL is vLLM's.",
    )
    _add_common(serve)
    serve.add_argument("--dir", type=_folder, help="the directory (default: in the user's cache)")
    rest = serve.add_argument("vllm_arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # Else they are named as missing where the URL is.
    options = parser.parse_args(arguments)
    return _run(_serve if options.command == "serve" else _fetch, options)


def main_fetch(arguments: Sequence[str] | None = None) -> int:
    """`racer-vllm-fetch URL DIR`."""
    parser = argparse.ArgumentParser(
        prog="racer-vllm-fetch",
        description="Prepares a directory for vLLM: everything of a model but its weights.",
        epilog=_ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"racer-vllm {__version__}")
    _add_fetch(parser)
    return _run(_fetch, parser.parse_args(arguments))


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="racer://<cache>/<bucket>/<prefix> of the model")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--socket", metavar="PATH", help="racerd's socket")
    place.add_argument("--run-dir", metavar="DIR", help="the directory with all of its sockets")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="PATTERN",
        help="copy objects with such names too, whatever they are (may be repeated)",
    )


def _add_fetch(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("dir", type=_folder, metavar="DIR", help="the directory to make or refresh")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")


def _folder(text: str) -> Path:
    if not text:  # A variable of the shell that is not set: nobody means the current directory.
        raise argparse.ArgumentTypeError("the name of the directory is empty; `.` is this one")
    return Path(text)


def _run(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    try:
        return command(options)
    except RacerError as error:
        _say(str(error))
        return status_of(error)
    except ValueError as error:
        _say(str(error))
        return USAGE
    except OSError as error:
        _say(str(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _fetch(options: argparse.Namespace) -> int:
    from racer_vllm.fetch import fetch

    found, folder, written = fetch(
        options.url,
        lambda _: options.dir,
        socket=options.socket,
        run_dir=options.run_dir,
        also=options.also,
    )
    for warning in found.warnings:
        _say(warning)
    if not options.quiet:
        removed = f", {len(written.removed)} removed" if written.removed else ""
        copied = counted(len(written.copied), "file")
        kept = f"{format_bytes(found.weight_bytes)} of weights in"
        stay = "stay" if len(found.shards) != 1 else "stays"
        print(
            f"{found.location} -> {folder}: {copied} copied,"
            f" {len(written.unchanged)} unchanged{removed};"
            f" {kept} {counted(len(found.shards), 'file')} {stay}"
        )
    return 0


def _serve(options: argparse.Namespace) -> int:
    from racer_vllm.fetch import fetch
    from racer_vllm.serve import (
        become_vllm,
        cache_root,
        engine_environ,
        find_vllm,
        model_folder,
        vllm_command,
    )

    # Everything that can be wrong without looking is looked at before anything is copied.
    vllm_command(Path(), options.url, options.vllm_arguments)
    program = find_vllm(os.environ)
    root = cache_root(os.environ)
    found, folder, _ = fetch(
        options.url,
        lambda survey: options.dir or model_folder(root, survey),
        socket=options.socket,
        run_dir=options.run_dir,
        also=options.also,
    )
    for warning in found.warnings:
        _say(warning)
    _say(f"{found.location} -> {folder}, {format_bytes(found.weight_bytes)} of weights")
    command = vllm_command(folder, options.url, options.vllm_arguments)
    environ = engine_environ(os.environ, socket=options.socket, run_dir=options.run_dir)
    become_vllm(program, command, environ)
    return 0


def _say(text: str) -> None:
    print(f"racer-vllm: {text}", file=sys.stderr)

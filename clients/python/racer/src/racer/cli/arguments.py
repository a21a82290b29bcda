"""The command line's grammar.

Layer: cli; imports nothing that is slow.
"""

from __future__ import annotations

import argparse

from racer import __version__
from racer.cli.units import parse_bytes

_EPILOG = """\
exit status:
  0 done   1 failed   2 wrong usage   3 not found   4 no daemon answers
  5 the object changed   6 not allowed   7 try later   8 corrupt   130 interrupted
  141 the reader of the output is gone

environment:
  RACER_SOCKET    the socket of one cache (set in pods that asked for one)
  RACER_RUN_DIR   the directory with all sockets (default: /run/racer for root,
                  else $XDG_RUNTIME_DIR/racer)
"""


_PREFIX = "the URL is a prefix (as it is when it ends with a slash)"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="racer",
        description="Reads model files through the racerd of this node.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"racer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = _common_options()

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=summary, description=summary, parents=[common])

    _add_looking(add("stat", "show size and version of objects"), nargs="+")
    ls = add("ls", "list what lies under a prefix")
    _add_looking(ls)
    ls.add_argument("-r", "--recursive", action="store_true", help="all levels, not only the next")
    ls.add_argument("-l", "--long", action="store_true", help="sizes and ETags too")

    cat = add("cat", "write objects, or a range of one, to standard output (JSON: standard error)")
    _add_looking(cat, nargs="+")
    _add_range(cat)
    cp = add("cp", "copy an object, or all under a prefix, to files")
    _add_looking(cp)
    cp.add_argument("target", metavar="PATH", help="a file, or a folder (for a prefix: always)")
    cp.add_argument(
        "-r",
        "--recursive",
        action="store_true",
        help=_PREFIX,
    )
    _add_jobs(cp, 4, "objects copied at a time")
    _add_progress(cp)

    load = add("load", "read all bytes under a prefix into memory, and show how fast they came")
    _add_looking(load)
    _add_jobs(load, 2, "files read at a time")
    _add_progress(load)
    bench = add("bench", "read an object again and again, and show throughput and latencies")
    _add_looking(bench)
    bench.add_argument("--size", type=parse_bytes, metavar="BYTES", help="bytes a read (4KiB …)")
    bench.add_argument("--count", type=_positive, default=None, metavar="N", help="reads in all")
    bench.add_argument("--seconds", type=float, default=5.0, help="how long (5), without --count")
    bench.add_argument("--gpu", metavar="GPU", help="read into memory of this GPU (0, GPU-…)")
    _add_jobs(bench, 1, "threads that read")

    prefetch = add("prefetch", "fetch objects, or all under a prefix, into the node's cache")
    _add_looking(prefetch)
    _add_range(prefetch)
    prefetch.add_argument("-r", "--recursive", action="store_true", help=_PREFIX)
    _add_jobs(prefetch, 4, "objects fetched at a time")
    _add_progress(prefetch)
    evict = add("evict", "drop objects, or all under a prefix, from the node's cache")
    _add_looking(evict)
    evict.add_argument("-r", "--recursive", action="store_true", help=_PREFIX)
    pin = add("pin", "spare an object, or all under a prefix, from eviction until it is unpinned")
    _add_looking(pin)
    pin.add_argument("-r", "--recursive", action="store_true", help=_PREFIX)
    unpin = add("unpin", "take back a pin, named as it was made")
    _add_looking(unpin)
    unpin.add_argument("-r", "--recursive", action="store_true", help=_PREFIX)
    pins = add("pins", "show what is pinned, and how much more may be")
    pins.add_argument(
        "caches", nargs="*", metavar="CACHE", help="its name; without one, all caches"
    )
    explain = add("explain", "show which rung would serve each page, and why not an earlier one")
    _add_looking(explain)
    _add_range(explain)
    add("caches", "show the caches that this node serves")
    return parser


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    group = common.add_argument_group("connection")
    place = group.add_mutually_exclusive_group()
    place.add_argument("--socket", metavar="PATH", help="the socket of one cache")
    place.add_argument("--run-dir", metavar="DIR", help="the directory with all sockets")
    group.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="without progress (300)"
    )
    common.add_argument(
        "--json", action="store_true", help="JSON on standard output, and errors as JSON"
    )
    return common


def _add_looking(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    name = "urls" if nargs else "url"
    parser.add_argument(name, nargs=nargs, metavar="URL", help="racer://<cache>/<bucket>/<key>")


def _add_range(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--offset", type=parse_bytes, default=0, metavar="BYTES")
    parser.add_argument("--length", type=parse_bytes, default=None, metavar="BYTES")


def _add_jobs(parser: argparse.ArgumentParser, jobs: int, what: str) -> None:
    parser.add_argument(
        "-j", "--jobs", type=_positive, default=jobs, metavar="N", help=f"{what} ({jobs})"
    )


def _add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value

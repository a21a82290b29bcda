"""`prefetch`, `evict`, `pin`, `unpin`, `pins`: what the node keeps.

Layer: cli commands.
"""

from __future__ import annotations

import argparse
import threading

from racer.cli.connect import open_client
from racer.cli.output import ProgressBar, print_json, print_table, printable, rungs_text
from racer.cli.prefixes import is_prefix, known_size, objects
from racer.cli.units import counted, format_bytes, format_rate
from racer.cli.work import for_each
from racer.client import Client
from racer.errors import NotFound, RacerError
from racer.ranges import stop_of, within
from racer.results import Entry, Pins, add_rungs
from racer.urls import RacerUrl

_STEP_BYTES = 256 << 20


def run_prefetch(options: argparse.Namespace) -> int:
    url = RacerUrl.parse(options.url)
    rungs: dict[str, int] = {}
    pages = 0
    lock = threading.Lock()
    with open_client(options) as client:
        entries = objects(client, url, recursive=options.recursive)
        spans = {entry.url: _span(options, entry, known_size(client, entry)) for entry in entries}
        total = sum(stop - start for start, stop in spans.values())
        shown = not (options.quiet or options.json)
        with ProgressBar("prefetch", total, shown=shown) as bar:

            def fetch(entry: Entry) -> None:
                nonlocal pages
                start, stop = spans[entry.url]
                for at in range(start, stop, _STEP_BYTES):
                    length = min(_STEP_BYTES, stop - at)
                    done = client.prefetch(entry.url, at, length)
                    bar.add(length)
                    with lock:
                        add_rungs(rungs, done.rungs)
                        pages += done.pages

            for_each(entries, fetch, options.jobs, client.abort)
            seconds = bar.seconds
    if options.json:
        told = {"objects": len(entries), "bytes": total, "pages": pages, "rungs": rungs}
        print_json(told | {"seconds": seconds})
    else:
        rate = format_rate(total, seconds)
        print(
            f"{counted(len(entries), 'object')}, {format_bytes(total)} in {seconds:.2f} s ({rate})"
        )
        print(f"  {rungs_text(rungs)}")
    return 0


def _span(options: argparse.Namespace, entry: Entry, size: int) -> tuple[int, int]:
    stop = stop_of(options.offset, options.length)
    return within(RacerUrl.parse(entry.url), options.offset, stop, size)


def run_evict(options: argparse.Namespace) -> int:
    url = RacerUrl.parse(options.url)
    with open_client(options) as client:
        done = client.evict(url, prefix=is_prefix(url, recursive=options.recursive))
    if options.json:
        print_json({"pages": done.pages, "bytes": done.bytes})
    else:
        print(f"{counted(done.pages, 'page')}, {format_bytes(done.bytes)} dropped")
    return 0


def run_pin(options: argparse.Namespace) -> int:
    url = RacerUrl.parse(options.url)
    with open_client(options) as client:
        prefix = is_prefix(url, recursive=options.recursive)
        done = client.pin(url, prefix=prefix)
        missing = not done.pages and not options.json and _is_missing(client, url, prefix=prefix)
    if options.json:
        print_json(done._asdict())
    else:
        print(f"pinned: {counted(done.pages, 'page')}, {format_bytes(done.bytes)} on disk now")
        if missing:
            print("  nothing is there now: the pin waits for what comes under that name")
        print(f"  {format_bytes(done.room_bytes)} more may be pinned")
    return 0


def _is_missing(client: Client, url: RacerUrl, *, prefix: bool) -> bool:
    """Whether it is certain that there is nothing at `url`. The pin is made: an origin that does
    not answer is no error here, and says nothing about what is there."""
    try:
        if prefix:
            return next(client.list(url, recursive=False), None) is None
        client.stat(url)
    except RacerError as error:
        # Of a listing, "not found" may mean that the origin has none to give.
        return isinstance(error, NotFound) and not prefix
    return False


def run_unpin(options: argparse.Namespace) -> int:
    url = RacerUrl.parse(options.url)
    with open_client(options) as client:
        done = client.unpin(url, prefix=is_prefix(url, recursive=options.recursive))
    if options.json:
        print_json(done._asdict())
    else:
        print("unpinned" if done.removed else "it was not pinned (see `racer pins`)")
    return 0


def run_pins(options: argparse.Namespace) -> int:
    with open_client(options) as client:
        for cache in options.caches or client.caches():
            _show_pins(cache, client.pins(cache), as_json=options.json)
    return 0


def _show_pins(cache: str, found: Pins, *, as_json: bool) -> None:
    if as_json:
        pins = [pin._asdict() for pin in found.pins]
        print_json({"cache": cache, "pins": pins, "room_bytes": found.room_bytes})
        return
    rows = [
        ("prefix" if pin.prefix else "object", str(pin.pages), format_bytes(pin.bytes), pin.url)
        for pin in found.pins
    ]
    if rows:
        print_table(("pin of", "pages", "on disk", "url"), rows, " rr")
    room = format_bytes(found.room_bytes)
    print(f"{printable(cache)}: {counted(len(rows), 'pin')}; {room} more may be pinned")

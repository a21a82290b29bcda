"""`stat`, `ls`, `explain`, `caches`: what is there.

Layer: cli commands.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from racer.cli.connect import open_client
from racer.cli.exits import status_of
from racer.cli.output import print_json, print_table, printable
from racer.cli.units import format_bytes
from racer.client import Client
from racer.errors import BadUrl, DaemonUnavailable, NotFound, RacerError
from racer.results import Explanation, PageExplanation
from racer.urls import RacerUrl


def run_stat(options: argparse.Namespace) -> int:
    import time

    with open_client(options) as client:
        for url in options.urls:
            stat = client.stat(url)
            if options.json:
                print_json(stat._asdict())
                continue
            fresh = max(0.0, stat.expires_at - time.time())
            print(f"{printable(stat.url)}")
            print(f"  size     {stat.size} ({format_bytes(stat.size)})")
            print(f"  etag     {printable(stat.etag)}")
            print(f"  fresh    for {fresh:.0f} s")
    return 0


def run_ls(options: argparse.Namespace) -> int:
    with open_client(options) as client:
        for entry in client.list(options.url, recursive=options.recursive):
            if options.json:
                print_json(entry._asdict())
            elif options.long:
                size = "-" if entry.size is None else str(entry.size)
                print(f"{size:>15}  {printable(entry.etag or '-'):<36}  {printable(entry.url)}")
            else:
                print(printable(entry.url))
    return 0


def run_explain(options: argparse.Namespace) -> int:
    with open_client(options) as client:
        explanation = _explained(client, options)
    if options.json:
        pages = [page._asdict() for page in explanation.pages]
        print_json(explanation._asdict() | {"pages": pages})
        return 0
    print(f"{printable(explanation.url)}")
    print(f"  version  {printable(explanation.etag)}, {format_bytes(explanation.size)}")
    print_table(("pages", "rung", "last read", "why"), _rows(explanation), "r")
    if explanation.next_page is not None:
        print(f"and more, from page {explanation.next_page} on: see --offset")
    return 0


def _explained(client: Client, options: argparse.Namespace) -> Explanation:
    """Raises BadUrl, or NotFound that says so, for what is meant as a prefix."""
    url = RacerUrl.parse(options.url)
    hint = f"explain takes one object: `racer ls {url}` shows those under this prefix"
    if not url.key:
        raise BadUrl(f"{url} names no object", hint=hint)
    try:
        return client.explain(url, options.offset, options.length)
    except NotFound as error:
        if url.key.endswith(b"/"):
            error.hint = hint
        raise


def _rows(explanation: Explanation) -> Iterator[tuple[str, str, str, str]]:
    """A row for each run of pages that are told of in the same words."""
    first: PageExplanation | None = None
    last_index = 0
    for page in explanation.pages:
        if first is not None and page.page == last_index + 1 and _told(page) == _told(first):
            last_index = page.page
            continue
        if first is not None:
            yield _row(first, last_index)
        first, last_index = page, page.page
    if first is not None:
        yield _row(first, last_index)


def _told(page: PageExplanation) -> tuple[object, ...]:
    age = None if page.last_age_seconds is None else round(page.last_age_seconds)
    return (page.rung, dict(page.why), page.last_rung, age)


def _row(page: PageExplanation, last_index: int) -> tuple[str, str, str, str]:
    pages = f"{page.page}" if last_index == page.page else f"{page.page}-{last_index}"
    last = "never"
    if page.last_rung is not None:
        last = f"{page.last_rung}, {page.last_age_seconds or 0:.0f} s ago"
    why = "; ".join(f"{rung}: {reason}" for rung, reason in page.why.items())
    return pages, page.rung, last, why


def run_caches(options: argparse.Namespace) -> int:
    with open_client(options) as client:
        names = client.caches()
        if not names:
            raise DaemonUnavailable(
                f"no cache is served in {client.place.run_dir or client.place.socket}",
                hint=f"is racerd running? (the place came from {client.place.source})",
            )
        rows, status = [], 0
        for name in names:
            try:
                info = client.info(name)
            except RacerError as error:
                status = status_of(error)
                told = {"code": error.code, "message": error.message, "hint": error.hint}
                if options.json:
                    print_json({"cache": name, "error": told})
                rows.append((name, error.code, "-", "-", error.message))
                continue
            if options.json:
                print_json(info._asdict())
            pages = format_bytes(info.page_bytes)
            rows.append((name, info.state, info.version, pages, info.origin))
    if not options.json:
        print_table(("cache", "state", "racerd", "page", "origin"), rows)
    return status

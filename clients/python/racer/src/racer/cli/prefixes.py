"""Objects that a command works on: one, or all under a prefix.

Layer: cli.
"""

from __future__ import annotations

from racer.client import Client
from racer.errors import NotFound
from racer.results import Entry
from racer.urls import RacerUrl


def is_prefix(url: RacerUrl, *, recursive: bool) -> bool:
    """Whether `url` stands for all that lies under it: it ends with a slash, or `-r` says so."""
    return recursive or not url.key or url.key.endswith(b"/")


def objects(client: Client, url: RacerUrl, *, recursive: bool) -> list[Entry]:
    """The object, or every object under the prefix. Raises NotFound where there is none."""
    if not is_prefix(url, recursive=recursive):
        stat = client.stat(url)
        return [Entry(stat.url, stat.size, stat.etag)]
    buckets = [url] if url.bucket else [RacerUrl.parse(e.url) for e in client.list(url)]
    found = [e for bucket in buckets for e in client.list(bucket) if not e.is_prefix]
    if not found:
        raise NotFound(f"nothing lies under {url}", hint="`racer ls` shows what there is")
    return found


def known_size(client: Client, entry: Entry) -> int:
    """The size of an entry: from the listing, or asked for where the origin did not list it."""
    return client.stat(entry.url).size if entry.size is None else entry.size

"""`cat` and `cp`: bytes to standard output and to files.

Layer: cli commands.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing

from racer.cli.connect import open_client
from racer.cli.files import (
    check_distinct,
    named_errors,
    opened_folder,
    safe_parts,
    whole_file,
    write_all,
)
from racer.cli.output import ProgressBar, print_json
from racer.cli.prefixes import is_prefix, known_size, objects
from racer.cli.units import counted, format_bytes, format_rate
from racer.cli.work import for_each
from racer.client import Client
from racer.urls import RacerUrl

Name = tuple[bytes, ...]


def run_cat(options: argparse.Namespace) -> int:
    written = 0
    sys.stdout.flush()
    output = sys.stdout.fileno()
    with open_client(options) as client:
        for url in options.urls:
            with closing(client.stream(url, options.offset, options.length)) as chunks:
                for chunk in chunks:
                    rest = chunk
                    while rest:
                        rest = rest[os.write(output, rest) :]
                    written += len(chunk)
    if options.json:
        import json

        # Standard output is the bytes'.
        print(json.dumps({"objects": len(options.urls), "bytes": written}), file=sys.stderr)
    return 0


def run_cp(options: argparse.Namespace) -> int:
    url = RacerUrl.parse(options.url)
    with open_client(options) as client:
        entries = objects(client, url, recursive=options.recursive)
        sizes = {entry.url: known_size(client, entry) for entry in entries}
        if is_prefix(url, recursive=options.recursive):
            folder, names = options.target, _names_below(url, list(sizes))
        else:
            folder, name = _file_target(options.target, url)
            names = {entry.url: (name,) for entry in entries}
        with named_errors(folder):
            os.makedirs(folder, exist_ok=True)
        shown = not (options.quiet or options.json)
        with ProgressBar("cp", sum(sizes.values()), shown=shown) as bar:
            _copy(client, options.jobs, folder, names, bar)
            seconds = bar.seconds
    copied = {"objects": len(entries), "bytes": sum(sizes.values()), "seconds": seconds}
    if options.json:
        print_json(copied | {"files": _paths(folder, names)})
    elif not options.quiet:
        size, rate = format_bytes(bar.done_bytes), format_rate(bar.done_bytes, seconds)
        print(f"{counted(len(entries), 'object')}, {size} to {folder} in {seconds:.2f} s ({rate})")
    return 0


def _copy(client: Client, jobs: int, folder: str, names: dict[str, Name], bar: ProgressBar) -> None:
    with named_errors(folder):
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def copy(url: str) -> None:
        *folders, name = names[url]
        path = os.path.join(os.fsencode(folder), *names[url])
        with named_errors(path), opened_folder(root, tuple(folders)) as parent:
            _copy_object(client, url, parent, name, bar)

    try:
        for_each(names, copy, jobs, client.abort)
    finally:
        os.close(root)


def _copy_object(client: Client, url: str, folder: int, name: bytes, bar: ProgressBar) -> None:
    stat = client.stat(url)
    with whole_file(folder, name, stat.size) as fd:
        at = 0
        with closing(client.stream(url, etag=stat.etag)) as chunks:
            for chunk in chunks:
                write_all(fd, chunk, at)
                at += len(chunk)
                bar.add(len(chunk))


def _names_below(url: RacerUrl, listed: list[str]) -> dict[str, Name]:
    """File names of the listed objects, relative to the prefix's last slash (its bucket, for all
    of a cache). All are checked before anything is written."""
    names = {}
    base = url.key[: url.key.rfind(b"/") + 1]
    for text in listed:
        parsed = RacerUrl.parse(text)
        relative = parsed.key.removeprefix(base)
        whole = relative if url.bucket else parsed.bucket.encode() + b"/" + relative
        names[text] = safe_parts(whole)
    check_distinct(list(names.values()))
    return names


def _file_target(target: str, url: RacerUrl) -> tuple[str, bytes]:
    """Folder and file name for one object: into an existing folder, or to the very path."""
    if os.path.isdir(target) or target.endswith("/"):
        return target, safe_parts(url.key.rpartition(b"/")[2])[0]
    folder, name = os.path.split(target)
    return folder or ".", safe_parts(os.fsencode(name))[0]


def _paths(folder: str, names: dict[str, Name]) -> list[dict[str, str]]:
    return [
        {"url": url, "path": os.path.join(folder, os.fsdecode(b"/".join(name)))}
        for url, name in names.items()
    ]

"""The folders and the key file: may this user use them, and may nobody else.

Layer: doctor.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from racerd.doctor.finding import Finding, failed, not_applicable, ok

_OTHERS_WRITE = 0o022
_OTHERS = 0o077


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder, or the closest one above it that is there (`there`), as the kernel tells of it."""

    path: Path
    there: Path
    mode: int
    owner: int
    is_folder: bool
    writable: bool
    user: int

    @property
    def exists(self) -> bool:
        return self.path == self.there


def probe_folder(path: Path) -> FolderFacts:
    there = next(place for place in (path, *path.parents) if place.exists())
    status = there.stat()
    return FolderFacts(
        path=path,
        there=there,
        mode=stat.S_IMODE(status.st_mode),
        owner=status.st_uid,
        is_folder=stat.S_ISDIR(status.st_mode),
        writable=os.access(there, os.W_OK | os.X_OK),
        user=os.geteuid(),
    )


def judge_folder(check: str, facts: FolderFacts, setting: str) -> Finding:
    """`setting` is the flag that names another folder."""
    if not facts.is_folder:
        return failed(
            check, f"{facts.there} is not a folder", f"remove it, or name a folder with {setting}"
        )
    if not facts.writable:
        return failed(
            check,
            f"user {facts.user} cannot write to {facts.there} (mode {facts.mode:04o},"
            f" owner {facts.owner})",
            f"let user {facts.user} write there, or name another folder with {setting}",
        )
    if not facts.exists:
        return ok(check, f"{facts.path} will be made in {facts.there}")
    if facts.mode & _OTHERS_WRITE and not facts.mode & stat.S_ISVTX:
        return failed(
            check,
            f"others can write to {facts.path} (mode {facts.mode:04o}) and so replace what is in"
            " it",
            f"run `chmod go-w {facts.path}`",
        )
    return ok(check, f"{facts.path} (mode {facts.mode:04o})")


@dataclass(frozen=True, slots=True)
class KeyFileFacts:
    """`mode` is None where there is no file."""

    path: Path
    mode: int | None
    readable: bool
    user: int


def probe_key_file(path: Path) -> KeyFileFacts:
    try:
        mode: int | None = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        mode = None
    return KeyFileFacts(path, mode, os.access(path, os.R_OK), os.geteuid())


def judge_key_file(facts: KeyFileFacts) -> Finding:
    """Whether the keys in it are any good is `racerd`'s to say at its start."""
    if facts.mode is None:
        return not_applicable("key-file", f"{facts.path} is made at the first start")
    if not facts.readable:
        return failed(
            "key-file",
            f"user {facts.user} cannot read {facts.path} (mode {facts.mode:04o})",
            f"run `chown {facts.user} {facts.path}`",
        )
    if facts.mode & _OTHERS:
        return failed(
            "key-file",
            f"others can read {facts.path} (mode {facts.mode:04o}), and racerd will not use it",
            f"run `chmod 0600 {facts.path}`",
        )
    return ok("key-file", f"{facts.path} (mode {facts.mode:04o})")

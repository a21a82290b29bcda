"""The folders and the key file: may this user use them, and may nobody else.

Layer: doctor.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from racerd.config.machine import closest_seen
from racerd.doctor.finding import Finding, failed, not_applicable, ok

_OTHERS_WRITE = 0o022
_OTHERS = 0o077


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder, or the closest one above it that is there (`there`), as the kernel tells of it.

    Where this user may not search a folder, `there` is that one: nothing below it is seen."""

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
    there = closest_seen(path)
    status = there.stat()
    return FolderFacts(
        path=path,
        there=there,
        mode=stat.S_IMODE(status.st_mode),
        owner=status.st_uid,
        is_folder=stat.S_ISDIR(status.st_mode),
        writable=os.access(there, os.W_OK | os.X_OK, effective_ids=True),
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
    """`mode` is None where there is no file, or where it is `hidden`: in a folder that this user
    may not search."""

    path: Path
    mode: int | None
    readable: bool
    user: int
    hidden: bool = False


def probe_key_file(path: Path) -> KeyFileFacts:
    mode, hidden = None, False
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except PermissionError:
        hidden = True
    except OSError:
        pass  # There is none; where it cannot be made either, the folder's line says so.
    readable = os.access(path, os.R_OK, effective_ids=True)
    return KeyFileFacts(path, mode, readable, os.geteuid(), hidden)


def judge_key_file(facts: KeyFileFacts) -> Finding:
    """Whether the keys in it are any good is `racerd`'s to say at its start."""
    if facts.hidden:
        return failed(
            "key-file",
            f"user {facts.user} may not search the folders above {facts.path}",
            f"let user {facts.user} search them, or name another file with --key-file",
        )
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

"""The key file: its format, its rights, and how it is published.

Layer: crypto; blocking. docs/keys.md describes the format for operators. A file is TOML:

    version = 1
    [[epochs]]
    epoch = 1               # 1 to 4294967295, each once
    state = "active"        # exactly one is active; the others are "retiring"
    key = "64 hex digits"   # 32 random bytes

Invariants: a file that others may read is not used; a new file appears whole, synced and with mode
0600 or not at all, whatever crashes; no message and no traceback of this module holds key bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from racerd.crypto.epoch_key import EPOCH_MAX, KEY_BYTES, EpochKey
from racerd.errors import ConfigError
from racerd.units import KIB

FORMAT_VERSION = 1
FILE_BYTES_MAX = 64 * KIB
EPOCHS_MAX = 64

_KEY_TEXT = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
_PLACE_IN_FILE = re.compile(r"\(at (line \d+), column \d+\)")
_DISTINCT_BYTES_MIN = 8  # 32 random bytes have fewer about once in 10**28.
_HEADER = """\
# Keys of this node's page cache (docs/keys.md). Whoever can read this file can read the cached
# pages. Losing it loses the cache and nothing else: pages of a removed epoch are fetched again.
version = 1
"""


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of one reading of a key file. `active` is one of `keys`."""

    active: EpochKey
    keys: tuple[EpochKey, ...]


def read_key_file(path: Path) -> KeyRing:
    """Reads and checks the file. Raises FileNotFoundError if there is none, ConfigError with
    every problem if it cannot be used."""
    return _parse(path, _read(path))


def create_key_file(path: Path) -> None:
    """Publishes a new file with one random key as epoch 1. Raises FileExistsError if there is one,
    ConfigError if it cannot be made. The folder is made too, for this user alone."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        ring = _ring_with_new_key(())
        # A hard link, unlike a rename, never replaces what somebody else put there first.
        with _locked(path), _written_beside(path, _format(ring)) as temporary:
            os.link(temporary, path)
            _sync_folder(path.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError([_os_problem(path, "cannot be created", error)]) from None


def rotate_key_file(path: Path) -> int:
    """Adds a new random key as the active epoch, makes the old one retiring, returns the number.

    The file is replaced whole. Raises ConfigError if it cannot be read or written; then it is as
    it was. Not for a file that something else writes, such as a mounted Secret.
    """
    try:
        with _locked(path):
            ring = _ring_with_new_key(read_key_file(path).keys)
            with _written_beside(path, _format(ring)) as temporary:
                os.rename(temporary, path)
            _sync_folder(path.parent)
    except OSError as error:
        raise ConfigError([_os_problem(path, "cannot be rotated", error)]) from None
    return ring.active.epoch


def drop_epoch(path: Path, epoch: int) -> None:
    """Removes a retiring epoch: its pages become misses. Raises ConfigError as rotating does, and
    where `epoch` is the active one or unknown."""
    try:
        with _locked(path):
            ring = read_key_file(path)
            if epoch == ring.active.epoch:
                raise ConfigError([f"{path}: epoch {epoch} is active: rotate first, drop it later"])
            kept = tuple(key for key in ring.keys if key.epoch != epoch)
            if len(kept) == len(ring.keys):
                raise ConfigError([f"{path}: there is no epoch {epoch} to drop"])
            with _written_beside(path, _format(KeyRing(ring.active, kept))) as temporary:
                os.rename(temporary, path)
            _sync_folder(path.parent)
    except OSError as error:
        raise ConfigError([_os_problem(path, "cannot be rewritten", error)]) from None


def _ring_with_new_key(keys: tuple[EpochKey, ...]) -> KeyRing:
    epoch = max((key.epoch for key in keys), default=0) + 1
    if epoch > EPOCH_MAX or len(keys) >= EPOCHS_MAX:
        raise ConfigError([f"{len(keys)} epochs are in the file: drop retiring ones first"])
    new = EpochKey(epoch, os.urandom(KEY_BYTES))
    return KeyRing(new, (*keys, new))


# ----------------------------------------------------------------------------------- reading


def _read(path: Path) -> bytes:
    """The file's bytes, if its kind, size, owner and mode are right."""
    try:
        # Non-blocking, so that a FIFO put there cannot hold the daemon up. Symlinks are followed:
        # a mounted Secret is one.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            problems = _stat_problems(path, os.fstat(descriptor))
            if problems:
                raise ConfigError(problems)
            return _read_all(descriptor)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError([_os_problem(path, "cannot be read", error)]) from None


def _read_all(descriptor: int) -> bytes:
    content = bytearray()
    while len(content) <= FILE_BYTES_MAX and (part := os.read(descriptor, FILE_BYTES_MAX)):
        content += part
    return bytes(content)


def _stat_problems(path: Path, found: os.stat_result) -> list[str]:
    if not stat.S_ISREG(found.st_mode):
        return [f"key file {path} is not a regular file"]
    problems = []
    if found.st_size > FILE_BYTES_MAX:
        problems.append(f"key file {path} has {found.st_size} bytes, the limit is {FILE_BYTES_MAX}")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        problems.append(
            f"key file {path} has mode {mode:04o}: others than its owner may use it. Do"
            f" `chmod 600 {path}`; for a Secret volume set `defaultMode: 0400`"
        )
    if found.st_uid not in (0, os.geteuid()):
        problems.append(
            f"key file {path} belongs to user {found.st_uid}: it must be root's or user"
            f" {os.geteuid()}'s, who runs racerd"
        )
    return problems


def _parse(path: Path, content: bytes) -> KeyRing:
    try:
        table = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        # The parser's own message may quote the file, so that only the place is told.
        place = _PLACE_IN_FILE.search(str(error))
        where = f" (see {place.group(1)})" if place else ""
        raise ConfigError([f"key file {path} is not TOML in UTF-8{where}"]) from None
    problems: list[str] = []
    if table.get("version") != FORMAT_VERSION:
        problems.append(f"version must be {FORMAT_VERSION}")
    unknown = sorted(table.keys() - {"version", "epochs"})
    if unknown:
        problems.append(f"unknown keys: {len(unknown)}; only version and [[epochs]] are known")
    entries = table.get("epochs")
    if not isinstance(entries, list) or not 1 <= len(entries) <= EPOCHS_MAX:
        problems.append(f"1 to {EPOCHS_MAX} [[epochs]] are needed")
        entries = []
    parsed = [_parse_epoch(n, entry, problems) for n, entry in enumerate(entries, 1)]
    keys = [key for key, _ in parsed if key is not None]
    active = [key for key, is_active in parsed if is_active and key is not None]
    if entries and sum(is_active for _, is_active in parsed) != 1:
        problems.append('exactly one of [[epochs]] must have state = "active"')
    if len({key.epoch for key in keys}) != len(keys):
        problems.append("two [[epochs]] have the same number")
    if len({key.key for key in keys}) != len(keys):
        problems.append("two [[epochs]] have the same key")
    if problems:
        raise ConfigError([f"key file {path}: {problem}" for problem in problems])
    return KeyRing(active[0], tuple(keys))


def _parse_epoch(number: int, entry: object, problems: list[str]) -> tuple[EpochKey | None, bool]:
    """The key of entry `number` (1 is the first) and whether it is active; adds its problems."""
    name = f"[[epochs]] number {number}"
    if not isinstance(entry, dict) or entry.keys() != {"epoch", "state", "key"}:
        problems.append(f"{name}: epoch, state and key are needed, and nothing else")
        return None, False
    epoch, state, text = entry["epoch"], entry["state"], entry["key"]
    before = len(problems)
    if type(epoch) is not int or not 1 <= epoch <= EPOCH_MAX:
        problems.append(f"{name}: epoch must be a whole number, 1 to {EPOCH_MAX}")
    if state not in ("active", "retiring"):
        problems.append(f'{name}: state must be "active" or "retiring"')
    if not isinstance(text, str) or _KEY_TEXT.fullmatch(text) is None:
        problems.append(f"{name}: key must be 64 hex digits, such as `openssl rand -hex 32` prints")
    elif len(set(bytes.fromhex(text))) < _DISTINCT_BYTES_MIN:
        problems.append(f"{name}: key is not random; make one with `openssl rand -hex 32`")
    if len(problems) > before:
        return None, state == "active"
    return EpochKey(epoch, bytes.fromhex(text)), state == "active"


# ----------------------------------------------------------------------------------- writing


def _format(ring: KeyRing) -> bytes:
    parts = [_HEADER]
    for key in ring.keys:
        state = "active" if key is ring.active else "retiring"
        parts.append(
            f'\n[[epochs]]\nepoch = {key.epoch}\nstate = "{state}"\nkey = "{key.key.hex()}"\n'
        )
    return "".join(parts).encode()


@contextmanager
def _written_beside(path: Path, content: bytes) -> Iterator[Path]:
    """A synced file with mode 0600 in the same folder, for the caller to link or rename."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # Whatever the umask left of it.
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time: the file itself is replaced, so that the lock is on its folder.

    What a writer that was killed has left there is removed first: it holds keys.
    """
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for leftover in _leftovers(path):
            leftover.unlink()
        yield
    finally:
        os.close(descriptor)


def _leftovers(path: Path) -> list[Path]:
    """Files of `_written_beside` that are there now; nobody is writing one under the lock."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.new")
    return [each for each in path.parent.iterdir() if ours.fullmatch(each.name)]


def remove_leftovers(path: Path) -> None:
    """Removes copies of keys that a writer of the file left beside it when it was killed.

    Raises ConfigError where there are some that cannot be removed.
    """
    try:
        found = _leftovers(path)
    except FileNotFoundError:
        return  # There is no folder yet.
    except OSError as error:
        raise ConfigError([_os_problem(path, "may have old copies beside it", error)]) from None
    try:
        if found:
            with _locked(path):
                pass  # Taking the lock does it.
    except OSError as error:
        raise ConfigError([_os_problem(path, "has old copies beside it", error)]) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _os_problem(path: Path, what: str, error: OSError) -> str:
    problem = f"key file {path} {what}: {error.strerror or error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        problem += (
            f"; let user {os.geteuid()} use the file and the folders above it, or name another one"
        )
    return problem

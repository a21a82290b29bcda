"""The keyring: which master keys this node has now.

Layer: crypto. Lookups are safe from any thread and cost a dictionary access; `open` and `reload`
block on the disk. The ring changes by being replaced whole, so that a reader sees the old or the
new one, never a mixture. A page sealed under an epoch that is gone is a miss, not an error.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from racerd.crypto.epoch_key import EpochKey
from racerd.crypto.key_file import (
    KeyRing,
    create_key_file,
    drop_epoch,
    read_key_file,
    remove_leftovers,
    rotate_key_file,
)
from racerd.errors import ConfigError

_LOG = logging.getLogger(__name__)

__all__ = ["EpochKey", "Keyring", "drop_epoch", "rotate_key_file"]


class Keyring:
    """The keys of one key file. Use `Keyring.open`, or give it a ring that was read elsewhere."""

    def __init__(self, path: Path, ring: KeyRing) -> None:
        self.path = path
        self._ring = ring
        self._by_epoch = {key.epoch: key for key in ring.keys}

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> Keyring:
        """Loads the file; with `create`, makes it first where there is none.

        Raises ConfigError with every problem of a file that cannot be used.
        """
        ring = _read_or_create(path, create=create)
        # Only now: of a file that cannot be used, its folder is not what there is to tell.
        try:
            remove_leftovers(path)
        except ConfigError as error:
            _LOG.warning("%s; remove .%s.*.new there yourself", error.message, path.name)
        return cls(path, ring)

    @property
    def active(self) -> EpochKey:
        """The key that new pages are sealed with."""
        return self._ring.active

    def get(self, epoch: int) -> EpochKey | None:
        """The key of `epoch`, active or retiring; None where it was removed: a miss."""
        return self._by_epoch.get(epoch)

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs that can be opened, ascending."""
        return tuple(sorted(self._by_epoch))

    def reload(self) -> bool:
        """Reads the file again and returns whether the ring is another one now.

        Raises ConfigError where the file is missing, half-written or not safe to use, or gives a
        known epoch another key; the ring is then the one it was, and the caller says so.
        """
        try:
            ring = read_key_file(self.path)
        except FileNotFoundError:
            raise ConfigError([f"key file {self.path} is gone"]) from None
        for key in ring.keys:
            known = self._by_epoch.get(key.epoch)
            if known is not None and not known.same_key(key):
                raise ConfigError(
                    [f"key file {self.path}: epoch {key.epoch} has another key than before;"
                     " give a new key a new epoch"]
                )  # fmt: skip
        changed = self.active.epoch != ring.active.epoch or self._by_epoch.keys() != {
            key.epoch for key in ring.keys
        }
        if changed:
            # Known keys stay the objects they are: openers made from them go on.
            by_epoch = {key.epoch: self._by_epoch.get(key.epoch, key) for key in ring.keys}
            self._ring = KeyRing(by_epoch[ring.active.epoch], tuple(by_epoch.values()))
            self._by_epoch = by_epoch
        return changed

    def __repr__(self) -> str:
        return f"Keyring({self.path}, active={self.active.epoch}, epochs={self.epochs})"


def _read_or_create(path: Path, *, create: bool) -> KeyRing:
    """Raises ConfigError; see `Keyring.open`."""
    try:
        return read_key_file(path)
    except FileNotFoundError:
        if not create:
            raise ConfigError([f"key file {path} does not exist"]) from None
    with contextlib.suppress(FileExistsError):  # Somebody else's is as good.
        create_key_file(path)
    try:
        return read_key_file(path)
    except FileNotFoundError:
        raise ConfigError([f"key file {path} vanished while it was made"]) from None

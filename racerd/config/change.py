"""What a reload changes, and what it cannot.

Layer: config, pure. Whether a setting can change while the daemon runs is a property of its
declaration; caches can.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from racerd.config.declarations import SETTINGS
from racerd.config.settings import Settings


@dataclass(frozen=True)
class SettingsChange:
    """`settings` holds from now on; `changed` names what is new in it; `restart` what is not,
    though it was asked for."""

    settings: Settings
    changed: tuple[str, ...]
    restart: tuple[str, ...]


def diff(old: Settings, new: Settings) -> SettingsChange:
    """Compares the running settings with those that were read anew."""
    different = [s for s in SETTINGS if getattr(old, s.name) != getattr(new, s.name)]
    now = {s.name: getattr(new, s.name) for s in different if s.reloads}
    restart = [s.name for s in different if not s.reloads]
    if old.disks != new.disks:
        restart.append("disks")
    names = sorted(old.caches.keys() | new.caches.keys())
    changed = [
        *now, *(f"caches.{n}" for n in names if old.caches.get(n) != new.caches.get(n))
    ]  # fmt: skip
    settings = replace(old, **now, caches=new.caches)
    return SettingsChange(settings, tuple(changed), tuple(restart))

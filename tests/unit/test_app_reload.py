"""Reloading while a reload is going on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

from racerd.app import Daemon
from racerd.cli import parse_flags
from racerd.config import Settings, load_settings
from racerd.crypto.keyring import Keyring


def test_reloads_do_not_overtake_each_other(tmp_path: Path) -> None:
    """R31: of two changes of a file, close together, the one that was read first must not be
    applied last: they are read and applied one after the other."""
    flags = parse_flags(
        [f"--state-dir={tmp_path}", f"--run-dir={tmp_path}", f"--disk={tmp_path}/slab:1GiB"]
    )
    settings = load_settings(flags, {}).settings
    both = threading.Barrier(2)
    at_once: list[bool] = []

    def reload() -> Settings:
        try:
            both.wait(0.2)
            at_once.append(True)
        except threading.BrokenBarrierError:
            at_once.append(False)
        return settings

    async def main() -> None:
        daemon = Daemon(settings, reload, ())
        daemon._parts = SimpleNamespace(keyring=Keyring.open(tmp_path / "keys"))  # type: ignore[assignment]
        daemon._status.state = "ready"
        daemon._told_to_reload()
        daemon._told_to_reload()
        await asyncio.gather(*daemon._tasks)
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(main())
    assert at_once == [False, False]

"""Noticing that a file was replaced, also behind the symlinks of a mounted Secret."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from racerd.runtime import watch
from racerd.runtime.watch import signature, watch_files


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PERIOD_SECONDS", 0.001)


def mounted(folder: Path, version: str, content: str) -> Path:
    """What kubelet does: a new folder of files, then `..data` points to it."""
    new = folder / f"..{version}"
    new.mkdir()
    (new / "keys").write_text(content)
    link = folder / "..data_tmp"
    link.symlink_to(new.name)
    link.rename(folder / "..data")
    path = folder / "keys"
    if not path.is_symlink():
        path.symlink_to("..data/keys")
    return path


def test_a_swapped_secret_has_another_signature(tmp_path: Path) -> None:
    path = mounted(tmp_path, "1", "same length A")
    before = signature(path)
    assert before == signature(path)
    mounted(tmp_path, "2", "same length B")
    assert signature(path) != before


def test_every_kind_of_change_is_told_and_nothing_else(tmp_path: Path) -> None:
    """Appearing, replacing, vanishing; a file that stays says nothing."""

    async def main() -> None:
        one, other = tmp_path / "one", tmp_path / "other"
        other.write_text("stays")
        told: list[Path] = []
        event = asyncio.Event()

        def changed(path: Path) -> None:
            told.append(path)
            event.set()

        async def next_change() -> None:
            await asyncio.wait_for(event.wait(), 30)
            event.clear()

        task = asyncio.create_task(watch_files([one, other], changed))
        await asyncio.sleep(0)
        one.write_text("new")
        await next_change()
        replacement = tmp_path / "replacement"
        replacement.write_text("newer")
        replacement.rename(one)
        await next_change()
        one.unlink()
        await next_change()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert set(told) == {one}

    asyncio.run(main())

"""The map of the store's modules in its document."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_map_of_modules_is_complete() -> None:
    """Whoever looks for a behaviour finds each module, once, by what it is about."""
    _, table = (ROOT / "docs" / "store.md").read_text().split("## Where it is")
    named = re.findall(r"`([a-z_0-9]+)`", table.split("| --- | --- |")[1])
    modules = {path.stem for path in (ROOT / "racerd" / "store").glob("*.py")} - {"__init__"}
    # What is no module is a method that a line speaks of.
    assert sorted(name for name in named if name != "explain") == sorted(modules)

"""Unknown names: an error that offers the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(where: str, name: str, known: Iterable[str]) -> str:
    """The problem's sentence for `name` at `where`."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"{where}: unknown" + (f"; did you mean {near[0]}?" if near else "")

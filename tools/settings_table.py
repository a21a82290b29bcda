"""Prints the table of every setting in docs/configuration.md from its declaration.

python -m tools.settings_table [--write]
"""

from __future__ import annotations

import sys
from pathlib import Path

from racerd.config.caches import OPTION_KINDS
from racerd.config.declarations import SETTINGS

DOCUMENT = Path(__file__).parent.parent / "docs" / "configuration.md"
_BEGIN = "<!-- settings: made by `python -m tools.settings_table --write` -->\n"
_END = "<!-- end of settings -->\n"


def table() -> str:
    """The Markdown of both tables: the daemon's settings and a cache's options."""
    lines = ["| setting | kind | limits | default | what |", "| --- | --- | --- | --- | --- |"]
    for s in SETTINGS:
        cells = (f"`{s.name}`", s.kind.name, s.kind.limits, s.shown_default, s.help)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| option of a cache | kind | limits |", "| --- | --- | --- |"]
    for name, kind in OPTION_KINDS.items():
        lines.append(f"| `{name}` | {kind.name} | {kind.limits} |")
    return "\n".join(lines) + "\n"


def updated(text: str) -> str:
    """`text` with the tables between the markers made anew."""
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    return before + _BEGIN + table() + _END + after


def main() -> int:
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(updated(DOCUMENT.read_text()))
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())

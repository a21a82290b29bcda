"""Prints the tables of every setting in docs/configuration.md from their declarations.

python -m tools.settings_table [--write]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from racerd.config.caches import OPTIONS, SCHEMES
from racerd.config.declarations import SETTINGS
from racerd.config.origin_options import OriginOptions

DOCUMENT = Path(__file__).parent.parent / "docs" / "configuration.md"
_BEGIN = "<!-- settings: made by `python -m tools.settings_table --write` -->\n"
_END = "<!-- end of settings -->\n"


def _rows(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _settings() -> Iterator[Sequence[str]]:
    for s in SETTINGS:
        yield (
            f"`{s.name}`", f"`{s.flag}`", f"`{s.variable}`", s.kind.name, s.kind.limits,
            s.shown_default, "yes" if s.reloads else "", s.help,
        )  # fmt: skip


def _options() -> Iterator[Sequence[str]]:
    defaults = OriginOptions()
    for name, option in OPTIONS.items():
        schemes = "all" if option.schemes == SCHEMES else " ".join(option.schemes)
        default = option.kind.shown(getattr(defaults, name, None))
        shown = f"`{name}_file`, `{name}_env`, `{name}`" if option.secret else f"`{name}`"
        yield (shown, schemes, option.kind.name, option.kind.limits, default, option.help)


def table() -> str:
    """The Markdown of both tables: the daemon's settings and a cache's options."""
    lines = _rows(
        ("setting and TOML key", "flag", "variable", "kind", "limits", "default", "reload", "what"),
        _settings(),
    )
    lines += ["", *_rows(("option", "origins", "kind", "limits", "default", "what"), _options())]
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

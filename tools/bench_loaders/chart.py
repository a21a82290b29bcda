"""The results as a picture: bars of seconds, a panel for each group with a scale of its own.

Pure; written by hand as SVG, with text that stays text. The picture brings its background along,
light or dark as the reader's system is, so that it can be read on any page.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from racerd.units import GIB
from tools.bench_loaders.lanes import LANES, Group, Lane
from tools.bench_loaders.results import LaneResult, Results

WIDTH = 860
_MARGIN = 24
_LABELS = 232  # Where bars begin.
_BAR_MAX = 420
_ROW = 26
_BAR = 16
_HEADING = 46
_TOP = 72
_BOTTOM = 34

_STYLE = """
    .page { fill: #ffffff }
    .ink { fill: #1f2328 }
    .faint { fill: #59636e }
    .bar { fill: #8c959f }
    .ours { fill: #0a7d5a }
    .axis { stroke: #d1d9e0 }
    .spread { stroke: #1f2328; stroke-width: 1.5 }
    text { font: 13px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif }
    .title { font-size: 17px; font-weight: 600 }
    .heading { font-weight: 600 }
    .note { font-size: 12px }
    .own { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 }
      .ink { fill: #f0f6fc }
      .faint { fill: #9198a1 }
      .bar { fill: #656c76 }
      .ours { fill: #2fb885 }
      .axis { stroke: #3d444d }
      .spread { stroke: #f0f6fc }
    }
"""


def svg(results: Results) -> str:
    panels = [
        (group, rows)
        for group in Group
        if (rows := [pair for lane in LANES if (pair := _pair(results, lane, group))])
    ]
    height = _TOP + sum(_HEADING + _ROW * len(rows) for _, rows in panels) + _BOTTOM
    body: list[str] = []
    y = _TOP
    for group, rows in panels:
        body += _panel(results, group, rows, y)
        y += _HEADING + _ROW * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        f' width="{WIDTH}" height="{height}" role="img" aria-labelledby="title about">',
        f'  <title id="title">{escape(_title(results))}</title>',
        f'  <desc id="about">{escape(_spoken(results))}</desc>',
        f"  <style>{_STYLE}  </style>",
        f'  <rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
        _text(_MARGIN, 34, _title(results), "ink title"),
        _text(
            _MARGIN, 56, "Seconds, shorter is better; each panel has a scale of its own", "faint"
        ),
        *body,
        _text(
            _MARGIN,
            height - 14,
            f"{results.machine} · {results.date} · medians; lines span the middle half of runs",
            "faint note",
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _pair(results: Results, lane: Lane, group: Group) -> tuple[Lane, LaneResult] | None:
    found = results.lane(lane.key)
    return (lane, found) if found is not None and lane.group is group else None


def _title(results: Results) -> str:
    return f"Loading {results.tensor_bytes / GIB:.2f} GiB of safetensors into CPU tensors"


def _spoken(results: Results) -> str:
    """The whole picture in words."""
    parts = [
        f"{lane.label} {lane.group.value}: {found.seconds:.2f} s"
        for lane in LANES
        if (found := results.lane(lane.key)) is not None
    ]
    return "; ".join(parts) + "."


def _panel(
    results: Results, group: Group, rows: list[tuple[Lane, LaneResult]], top: int
) -> Iterator[str]:
    scale = _BAR_MAX / max(found.seconds_middle[1] for _, found in rows)
    bottom = top + _HEADING - 14 + _ROW * len(rows)
    yield _text(_MARGIN, top + 20, _capital(group.value), "ink heading")
    yield (
        f'  <line class="axis" x1="{_LABELS}" x2="{_LABELS}" y1="{top + _HEADING - 16}"'
        f' y2="{bottom}"/>'
    )
    for number, (lane, found) in enumerate(rows):
        yield from _bar(results, lane, found, top + _HEADING - 12 + _ROW * number, scale)


def _bar(results: Results, lane: Lane, found: LaneResult, y: int, scale: float) -> Iterator[str]:
    middle = y + _BAR / 2
    base = y + 13
    first, last = (_LABELS + scale * end for end in found.seconds_middle)
    rate = results.tensor_bytes / found.seconds / 1e9
    own = " own" if lane.is_ours else ""
    yield _text(_LABELS - 10, base, lane.label, f"ink{own}", anchor="end")
    yield (
        f'  <rect class="{"ours" if lane.is_ours else "bar"}" x="{_LABELS}" y="{y}"'
        f' width="{max(1.0, scale * found.seconds):.1f}" height="{_BAR}" rx="2"/>'
    )
    yield (
        f'  <line class="spread" x1="{first:.1f}" x2="{last:.1f}" y1="{middle:g}" y2="{middle:g}"/>'
    )
    yield _text(
        max(last, _LABELS + scale * found.seconds) + 10,
        base,
        f"{_seconds(found.seconds)} · {_rate(rate)}",
        f"ink{own}",
    )


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def _rate(gigabytes: float) -> str:
    return f"{gigabytes:.0f} GB/s" if gigabytes >= 10 else f"{gigabytes:.2f} GB/s"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _text(x: float, y: float, text: str, names: str, *, anchor: str = "start") -> str:
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'  <text class="{names}" x="{x:g}" y="{y:g}"{placed}>{escape(text)}</text>'

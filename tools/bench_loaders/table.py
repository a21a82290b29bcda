"""The results as Markdown, and their place in a page. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from racerd.units import GIB, MIB
from tools.bench_loaders.lanes import LANES, REFERENCE, Group, Lane
from tools.bench_loaders.results import LaneResult, Results
from tools.bench_loaders.targets import targets

BEGIN = "<!-- loaders: written by `make bench-loaders` -->"
END = "<!-- loaders: end -->"


def markdown(results: Results) -> str:
    """Everything between the markers."""
    return "\n".join([*_intro(results), "", *_lanes(results), "", *_targets(results)])


def put(page: str, text: str) -> str:
    """`page` with `text` between its markers. Raises ValueError where they are not there once."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page needs one line {BEGIN!r} and, below it, one {END!r}")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _intro(results: Results) -> Iterator[str]:
    rounds = min(len(lane.runs) for lane in results.lanes)
    counted = f"medians of {rounds} runs" if rounds > 1 else "one run each"
    yield (
        f"{results.date}, {results.machine}, load average {results.load:.1f} at the start."
        f" {results.tensors} tensors of {results.tensor_bytes / GIB:.2f} GiB together; {counted},"
        " in brackets the fastest and the slowest."
    )
    versions = {_name(lane): lane.version for lane in results.lanes}
    listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    yield f"Versions: {listed}."


def _name(lane: LaneResult) -> str:
    return next((known.loader for known in LANES if known.key == lane.key), lane.key)


def _lanes(results: Results) -> Iterator[str]:
    yield (
        "| loader | seconds | GB/s | speed to the reference | pages read once, seconds |"
        " extra memory, MiB | CPU s/GiB: client | racerd |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for group in Group:
        known = [lane for lane in LANES if lane.group is group and results.lane(lane.key)]
        if known:
            yield f"| **{group.value}** | | | | | | | |"
        for lane in known:
            yield _row(results, lane)


def _row(results: Results, known: Lane) -> str:
    lane = results.lane(known.key)
    assert lane is not None
    gib = results.tensor_bytes / GIB
    reference = results.lane(REFERENCE[known.group])
    ratio = f"{reference.seconds / lane.seconds:.2f}" if reference else ""
    if reference is lane:
        ratio = "1 (reference)"
    daemon = lane.daemon_cpu_seconds
    cells = (
        f"**{known.label}**" if known.is_ours else known.label,
        f"{lane.seconds:.3f} ({lane.seconds_min:.3f} to {lane.seconds_max:.3f})",
        f"{results.tensor_bytes / lane.seconds / 1e9:.2f}",
        ratio,
        f"{lane.median(lambda run: run.touch_seconds):.3f}",
        f"{lane.extra_bytes / MIB:.0f}",
        f"{lane.client_cpu_seconds / gib:.2f}",
        "" if daemon is None else f"{daemon / gib:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def _targets(results: Results) -> Iterator[str]:
    yield "| target | goal | measured |"
    yield "| --- | --- | --- |"
    for target in targets(results):
        verdict = target.value if target.met else f"**{target.value}**, missed"
        yield f"| {target.name} | {target.goal} | {verdict} |"

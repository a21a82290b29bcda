"""What `make bench-loaders` makes of its runs: figures, targets, the table and the picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from racerd.units import GIB, MIB
from tools.bench_loaders import page_cache
from tools.bench_loaders.chart import svg
from tools.bench_loaders.lanes import LANES, REFERENCE, RUNGS, Group
from tools.bench_loaders.results import LaneResult, Results, Run
from tools.bench_loaders.table import BEGIN, END, markdown, put
from tools.bench_loaders.targets import targets

STAGING = 256 * MIB
SVG = "{http://www.w3.org/2000/svg}"


def lane(key: str, *seconds: float, extra: int = MIB, touch: float = 0.0) -> LaneResult:
    ours = key.startswith("racer")
    runs = tuple(Run(each, touch, extra, 0.5, 0.25 if ours else None) for each in seconds)
    return LaneResult(key, "1.2.3", runs)


def results(*lanes: LaneResult) -> Results:
    return Results("2026-01-02", "2 cores <here> & there", 0.5, GIB, 92, STAGING, lanes)


EVERY = results(*(lane(known.key, 1.0, 3.0, 2.0) for known in LANES))


def test_a_figure_is_the_median_and_memory_the_most() -> None:
    found = LaneResult(
        "racer-memory",
        "1",
        (Run(1.0, 0.5, 5, 0.1, 0.3), Run(9.0, 0.5, 7, 0.9, 0.1), Run(2.0, 0.1, 6, 0.2, 0.2)),
    )
    assert (found.seconds, found.seconds_min, found.seconds_max) == (2.0, 1.0, 9.0)
    assert found.seconds_middle == (1.5, 5.5)
    assert lane("runai-memory", 3.0).seconds_middle == (3.0, 3.0)
    assert found.touched_seconds == 2.1
    assert found.extra_bytes == 7
    assert found.client_cpu_seconds == 0.2
    assert found.daemon_cpu_seconds == 0.2
    assert lane("runai-memory", 1.0).daemon_cpu_seconds is None


def test_results_survive_their_file() -> None:
    assert Results.from_json(EVERY.to_json()) == EVERY


def test_results_of_another_format_are_refused() -> None:
    text = EVERY.to_json().replace('"format": 1', '"format": 0')
    with pytest.raises(ValueError, match="measure anew"):
        Results.from_json(text)


def test_targets_are_met_or_missed_by_the_figures() -> None:
    """R36, L31: 1.5 times runai + clone, runai's from S3, 10 times anything, bounded memory."""
    good = results(
        lane("racer-memory", 9.0, extra=STAGING + 100 * MIB),
        lane("racer-first", 1.0),
        lane("runai-clone-memory", 1.5),
        lane("racer-s3", 2.0),
        lane("runai-s3", 2.0),
        lane("racer-shared", 0.125, touch=0.125),
        lane("mmap-memory", 1.25),
    )
    bad = results(
        lane("racer-memory", 0.1, extra=STAGING + 100 * MIB + 1),
        lane("racer-first", 1.0),
        lane("runai-clone-memory", 1.4),
        lane("racer-s3", 2.0),
        lane("runai-s3", 1.9),
        lane("racer-shared", 0.125),
        lane("mmap-memory", 1.24),
    )
    assert [target.met for target in targets(good)] == [True] * 4
    assert [target.met for target in targets(bad)] == [False] * 4
    assert "10.0; 5.0 with every page read once" in [target.value for target in targets(good)]


def test_targets_without_their_lanes_are_left_out() -> None:
    assert targets(results(lane("mmap-disk", 1.0))) == []


def test_the_table_has_every_lane_once_under_its_group() -> None:
    text = markdown(EVERY)
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    labels = [row[0].strip("| *") for row in cells]
    for known in LANES:
        assert labels.count(known.label) == sum(known.label == other.label for other in LANES)
    rows = [row for row in cells if row[0].strip("| *") in {known.label for known in LANES}]
    assert {len(row) for row in rows} == {8}
    groups = [text.index(f"**{group.value}**") for group in Group]
    assert groups == sorted(groups)
    assert text.count("1 (reference)") == len(REFERENCE)
    assert "medians of 3 runs" in text
    assert "load average 0.5 at the start" in text
    assert "one run each" in markdown(results(lane("racer-s3", 1.0)))


def test_the_table_takes_its_place_and_nothing_else() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert put(put(page, "new"), "newer") == put(page, "newer")


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_its_markers_is_left_alone(page: str) -> None:
    with pytest.raises(ValueError, match="the page needs"):
        put(page, "new")


def test_the_picture_is_valid_and_says_everything_in_text() -> None:
    root = ElementTree.fromstring(svg(EVERY))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    for known in LANES:
        assert known.label in texts
    assert any("2 cores <here> & there" in text for text in texts)
    assert any("2.00 s" in text for text in texts)
    for name in ("title", "desc"):
        assert root.find(f"{SVG}{name}") is not None
    style = root.findtext(f"{SVG}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in style
    assert not list(root.iter(f"{SVG}image"))


def test_bars_are_as_long_as_what_they_show_and_stay_inside() -> None:
    shown = results(lane("mmap-memory", 1.0), lane("pread-memory", 4.0), lane("racer-s3", 100.0))
    root = ElementTree.fromstring(svg(shown))
    width = float(root.attrib["width"])
    bars = [
        float(element.attrib["width"])
        for element in root.iter(f"{SVG}rect")
        if element.attrib["class"] in ("bar", "ours")
    ]
    assert bars[1] == pytest.approx(4 * bars[0], abs=0.2)
    assert bars[2] == bars[1]  # The longest of its panel.
    for element in root.iter(f"{SVG}line"):
        assert 0 <= float(element.attrib["x2"]) < width - 100  # Room for the figure.


def test_every_lane_can_be_told_apart_and_compared() -> None:
    assert len({known.key for known in LANES}) == len(LANES)
    assert set(REFERENCE) == {known.group for known in LANES}
    for known in LANES:
        assert known.is_ours == (known.state in RUNGS)


def test_files_that_were_read_are_in_the_page_cache(tmp_path: Path) -> None:
    path, empty = tmp_path / "file", tmp_path / "empty"
    path.write_bytes(b"x" * (3 * MIB + 1))
    empty.touch()
    page_cache.warm([path, empty])
    assert page_cache.resident_share([path, empty]) == 1.0
    assert page_cache.resident_share([empty]) == 1.0
    page_cache.drop([path, empty])
    assert path.read_bytes() == b"x" * (3 * MIB + 1)

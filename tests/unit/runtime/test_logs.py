"""Logs: one line a record, and each reason once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from racerd.runtime.logs import set_up_logs


@pytest.fixture(autouse=True)
def _logger_as_before() -> Iterator[None]:
    root = logging.getLogger("racerd")
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def test_json_is_one_object_a_line_with_the_trace_inside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logs("info", "json")
    log = logging.getLogger("racerd.test")
    log.debug("not shown")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("failed: %s", "x\ny")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert (record["level"], record["logger"]) == ("error", "racerd.test")
    assert record["message"] == "failed: x\ny"
    assert "ValueError: two" in record["trace"]
    assert record["time"].endswith("Z")


def test_text_goes_to_standard_error_once_however_often_it_is_set_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logs("warning", "text")
    set_up_logs("warning", "text")
    logging.getLogger("racerd.test").warning("seen")
    logging.getLogger("racerd.test").info("unseen")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split(": ")[-1] for line in shown.err.splitlines()] == ["seen"]

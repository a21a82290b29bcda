"""Golden headers with verdicts: see golden/safetensors/README.md for where they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from racer.safetensors import SafetensorsError, parse_file, parse_header

CASES = Path(__file__).parent / "golden" / "safetensors"
MANIFEST = json.loads((CASES / "manifest.json").read_text())


@pytest.mark.parametrize("case", MANIFEST, ids=[case["file"] for case in MANIFEST])
def test_verdict(case: dict[str, str]) -> None:
    """R37, L1, L46, L47, L55: each file gets its verdict, from the path and from its bytes."""
    path = CASES / case["file"]
    content = path.read_bytes()
    if case["verdict"] == "accept":
        assert parse_file(path) == parse_header(content, len(content))
        return
    with pytest.raises(SafetensorsError) as from_path:
        parse_file(path)
    assert from_path.value.unsupported == (case["verdict"] == "unsupported")
    assert str(path) in str(from_path.value)
    with pytest.raises(SafetensorsError) as from_bytes:
        parse_header(content, len(content), file=str(path))
    assert str(from_bytes.value) == str(from_path.value)


def test_every_file_has_a_verdict() -> None:
    """No case lies about unjudged."""
    files = {path.name for path in CASES.glob("*.safetensors")}
    assert files == {case["file"] for case in MANIFEST}
    assert len(files) >= 52

"""Fixtures of the store's tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """A folder on a real disk: the default temporary folder may be a tmpfs."""
    path = Path(tempfile.mkdtemp(prefix="racer-test-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)

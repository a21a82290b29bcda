"""Fixtures of the GPU tests: the stand-in driver, built once per change of its sources."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.standin import StandIn, build_standin, missing


@pytest.fixture(scope="session")
def standin() -> StandIn:
    pytest.importorskip("cuda.bindings", reason="install racerd[gpu]")
    if (lack := missing()) is not None:
        pytest.skip(lack)
    return build_standin()


@pytest.fixture
def slab_folder() -> Iterator[Path]:
    """A folder on a real disk, where O_DIRECT works: the default temporary one may be a tmpfs."""
    path = Path(tempfile.mkdtemp(prefix="racer-test-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)

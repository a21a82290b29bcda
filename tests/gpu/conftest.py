"""Fixtures of the GPU tests: the stand-in driver, built once per change of its sources."""

from __future__ import annotations

import pytest

from tests.support.standin import StandIn, build_standin, missing


@pytest.fixture(scope="session")
def standin() -> StandIn:
    pytest.importorskip("cuda.bindings", reason="install racerd[gpu]")
    if (lack := missing()) is not None:
        pytest.skip(lack)
    return build_standin()

"""Which versions of vLLM this package is for, and what it says about others.

Layer: bottom, pure. vLLM's loader interface has no version of its own and moves from release to
release. An older vLLM than the oldest supported one is refused; one that was not tested is allowed,
and named in a warning, so that whoever meets an odd error knows where to look first.
"""

from __future__ import annotations

import re
from typing import Final

from racer_vllm import __version__

# Releases that the tests of this version ran with.
TESTED: Final = ((0, 32),)
OLDEST: Final = (0, 32)

_RELEASE = re.compile(r"v?([0-9]+)\.([0-9]+)")


class VersionMismatch(RuntimeError):
    """This vLLM has no interface that this package knows."""


def check_version(version: str) -> str | None:
    """Returns a warning for a vLLM that was not tested, None for one that was.

    Raises VersionMismatch for one that is too old.
    """
    found = _RELEASE.match(version)
    release = (int(found[1]), int(found[2])) if found is not None else None
    if release in TESTED:
        return None
    if release is not None and release < OLDEST:
        raise VersionMismatch(
            f"{_tested()}; this is vLLM {version}, which is too old: update vLLM,"
            " or use another --load-format"
        )
    return f"{_tested()}; this is vLLM {version}, which may work and was not tried"


def missing_interface(version: str, error: BaseException) -> VersionMismatch:
    """What to raise where vLLM lacks a name that this package needs."""
    return VersionMismatch(
        f"{_tested()}; vLLM {version} lacks what load format racer needs ({error}):"
        " install a vLLM that was tested, or a newer racer-vllm"
    )


def _tested() -> str:
    releases = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
    return f"racer-vllm {__version__} is tested with vLLM {releases}"

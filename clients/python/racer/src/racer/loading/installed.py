"""A framework, or what to do where it is not installed.

Layer: loading, on `frameworks`. torch is the default and no dependency: an environment that has
none of the two is told what it can have.
"""

from __future__ import annotations

from typing import Final

from racer.loading.frameworks import Framework, open_framework

_REMEDIES: Final = {
    "torch": "install torch, or pass framework='numpy'",
    "numpy": "install numpy, or pass framework='pt', which needs torch",
}


def open_installed(name: str, device: object) -> Framework:
    """See `open_framework`. Raises ModuleNotFoundError with what to do."""
    try:
        return open_framework(name, device)
    except ModuleNotFoundError as error:
        # A module that torch itself lacks is told as it is: the installation is broken.
        remedy = _REMEDIES.get(error.name or "")
        if remedy is None:
            raise
        raise ModuleNotFoundError(
            f"framework={name!r} needs {error.name}, which is not installed: {remedy}",
            name=error.name,
        ) from error

"""The entry point of group `vllm.general_plugins`.

Layer: top. vLLM calls `register` in each of its processes: front end, engine and workers.
"""

from __future__ import annotations

import logging

from racer_vllm.guard import missing_interface
from racer_vllm.options import LOAD_FORMAT

# A child of vLLM's own logger, so that its lines come out as vLLM's do.
_log = logging.getLogger("vllm.racer")


def register() -> None:
    """Makes `--load-format racer` known. Opens nothing; done twice it does nothing.

    Never raises: a vLLM without the interface runs on with its other load formats.
    """
    try:
        from racer_vllm.loader import RacerModelLoader
        from racer_vllm.vllm_api import register_loader
    except ImportError as error:
        _log.error("load format racer is not there: %s", missing_interface(_vllm_version(), error))
        return
    register_loader(LOAD_FORMAT, RacerModelLoader)


def _vllm_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm")
    except PackageNotFoundError:
        return "(no version)"

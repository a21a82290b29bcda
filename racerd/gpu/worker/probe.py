"""`python -m racerd.gpu.worker.probe`: which GPUs this machine has, as one line of JSON.

A process of its own, started by `racerd.gpu.probe`: it loads the driver so that the daemon need
not. It makes no context: nothing of any GPU is taken, and one that is broken stops nothing.

It looks for what a worker needs, in order, and stops at the first thing that is missing. Without a
driver it says so in a few milliseconds, before anything heavy is imported.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1

_COMPUTE_MODES = {
    2: ("prohibited", "compute mode Prohibited: `nvidia-smi -c DEFAULT` allows it again"),
    3: (
        "exclusive_process",
        "compute mode Exclusive_Process: its one process would be racerd, and no client could use"
        " it; `nvidia-smi -c DEFAULT` lets them share it",
    ),
}


class _Missing(Exception):
    """Something that was looked for and not found, with what to do about it."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


class _Search:
    """What was looked for so far, and what came of it."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def found(self, what: str) -> None:
        self.steps.append(f"{what}: found")

    def missing(self, what: str, code: str, message: str, hint: str) -> _Missing:
        self.steps.append(f"{what}: missing")
        return _Missing(code, message, hint)


def _driver_library(search: _Search) -> None:
    what = "libcuda.so.1 (the NVIDIA driver)"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise search.missing(
            what,
            "driver_library_missing",
            f"the NVIDIA driver library cannot be loaded: {error}",
            "install the NVIDIA driver; in a container, use the NVIDIA runtime with"
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ) from error
    search.found(what)


def _bindings(search: _Search) -> Any:
    what = "cuda.bindings (Python package)"
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise search.missing(
            what,
            "bindings_missing",
            f"the Python package cuda-bindings cannot be imported: {error}",
            "install racerd's extra gpu (pip install '.[gpu]' in its folder) where racerd runs",
        ) from error
    search.found(what)
    return driver


def _gpus(search: _Search) -> list[dict[str, object]]:
    _driver_library(search)
    cuda = _bindings(search)
    from racerd.gpu.worker.driver import CudaError, call

    try:
        call(cuda.cuInit, 0)
        count = call(cuda.cuDeviceGetCount)
    except CudaError as error:
        what = "cuInit" if error.native != 100 else "a visible GPU"
        raise search.missing(what, "driver_failed", error.message, error.hint) from error
    except RuntimeError as error:
        raise search.missing(
            "the driver's entry points", "driver_failed", str(error), "update the NVIDIA driver"
        ) from error
    search.steps.append(f"cuInit: works, {count} GPU(s) visible")
    return [_gpu(cuda, call, ordinal) for ordinal in range(count)]


def _gpu(cuda: Any, call: Any, ordinal: int) -> dict[str, object]:
    mode = call(
        cuda.cuDeviceGetAttribute,
        cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE,
        ordinal,
    )
    reason, problem = _COMPUTE_MODES.get(mode, ("", ""))
    return {
        "uuid": call(cuda.cuDeviceGetUuid, ordinal).bytes.hex(),
        "name": call(cuda.cuDeviceGetName, 128, ordinal).partition(b"\0")[0].decode(),
        "reason": reason,
        "problem": problem,
    }


def probe() -> dict[str, object]:
    """`gpus`, `looked_for`, and where none can be used `code`, `message` and `hint`."""
    search = _Search()
    gpus: list[dict[str, object]] = []
    told = {"code": "", "message": "", "hint": ""}
    try:
        gpus = _gpus(search)
    except Exception as error:  # noqa: BLE001  whatever it is, the daemon has to be told
        told = {
            "code": getattr(error, "code", "probe_failed"),
            "message": getattr(error, "message", f"{type(error).__name__}: {error}"),
            "hint": getattr(error, "hint", "run `python -m racerd.gpu.worker.probe` by hand"),
        }
    return {"gpus": gpus, "looked_for": search.steps, **told}


if __name__ == "__main__":
    # A driver that hangs must not keep this process after the daemon.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sys.stdout.write(json.dumps(probe()) + "\n")

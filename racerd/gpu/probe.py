"""Which GPUs this node has, found without loading CUDA here.

Layer: gpu; loop thread; imports no CUDA. A child process asks the driver and says what it found.
It may hang where the driver does, so it has a limit, and its death is an answer too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass

from racerd.runtime.threads import settled

PROBE_SECONDS_MAX = 30.0


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """A visible GPU. `problem`, with `reason` as its short word: why racerd will not use it."""

    uuid: str
    name: str
    reason: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class FoundGpus:
    """What a probe found. Without a usable GPU `code`, `message` and `hint` say why."""

    gpus: tuple[FoundGpu, ...]
    looked_for: tuple[str, ...]
    code: str = ""
    message: str = ""
    hint: str = ""


async def find_gpus(seconds_max: float = PROBE_SECONDS_MAX) -> FoundGpus:
    """Asks a child process. Never raises: what goes wrong is what was found.

    Cancelling ends the child.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "racerd.gpu.worker.probe"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        return _failed(
            "probe_not_started",
            f"the process that looks for GPUs cannot be started: {sys.executable}:"
            f" {error.strerror or error}",
            f"let user {os.geteuid()} run that interpreter, and see its limit of processes",
        )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), seconds_max)
    except TimeoutError:
        return _failed(
            "probe_timeout",
            f"the NVIDIA driver did not answer within {seconds_max:g} s",
            "see whether `nvidia-smi` answers; a driver that hangs needs a restart of the node",
        )
    finally:
        if process.returncode is None:
            process.kill()
            await settled(asyncio.ensure_future(process.wait()))
    try:
        return _decoded(output)
    except (ValueError, KeyError, TypeError):
        said = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return _failed(
            "probe_died",
            f"the process that looks for GPUs ended with {process.returncode}: {said[-300:]}",
            "run `python -m racerd.gpu.worker.probe` by hand",
        )


def _decoded(output: bytes) -> FoundGpus:
    told = json.loads(output)
    gpus = tuple(FoundGpu(**gpu) for gpu in told.pop("gpus"))
    return FoundGpus(gpus, tuple(told.pop("looked_for")), **told)


def _failed(code: str, message: str, hint: str) -> FoundGpus:
    return FoundGpus((), ("the NVIDIA driver: no answer",), code, message, hint)

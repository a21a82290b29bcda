"""The GPUs of this node: found at start, each with its worker, looked up by UUID.

Layer: gpu; loop thread; imports no CUDA. The mode is R17's: `off` looks for nothing; `auto` serves
with what there is and says once why a GPU is not used; `on` refuses to start without one.

A GPU that was found stays in the list when its worker fails: its reads say why, and it comes back
by itself. What was not there at start is not looked for again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType

from racerd.errors import ConfigError, DeviceError, RequestError, ResourceError
from racerd.gpu.device import GpuDevice
from racerd.gpu.identity import uuid_digits, uuid_text
from racerd.gpu.probe import FoundGpu, FoundGpus, find_gpus
from racerd.gpu.settings import ArenaShape, GpuSettings
from racerd.telemetry import Metrics

_log = logging.getLogger(__name__)


class GpuNode:
    """An async context manager. Entered, the GPUs have been looked for and their workers start.

    Raises ConfigError on entering where the mode is `on` and no GPU can be used: with everything
    that was looked for, what was missing, and what to do.
    """

    def __init__(
        self,
        mode: str,
        settings: GpuSettings,
        arena: ArenaShape,
        metrics: Metrics,
        *,
        find: Callable[[], Awaitable[FoundGpus]] = find_gpus,
    ) -> None:
        self._mode = mode
        self._settings = settings
        self._arena = arena
        self._metrics = metrics
        self._find = find
        self._devices: dict[str, GpuDevice] = {}
        self._names: dict[str, str] = {}
        self._off = "GPUs are off by settings (--gpu=off)"
        self._hint = ""
        self._refused: dict[str, str] = {}  # UUIDs that are here and not used: why
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> GpuNode:
        if self._mode != "off":
            async with AsyncExitStack() as stack:
                await self._open(await self._find(), stack)
                self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    # ---- what there is ----

    @property
    def devices(self) -> Mapping[str, GpuDevice]:
        """The GPUs that are used, by 32 hex digits."""
        return self._devices

    @property
    def uuids(self) -> list[str]:
        """The GPUs that targets may name, as clients write them."""
        return [device.name for device in self._devices.values()]

    @property
    def state(self) -> str:
        """`off`, `ready`, or `degraded`: a GPU of this node cannot be used now."""
        if not self._devices:
            return "off"
        down = any(device.why_not is not None for device in self._devices.values())
        return "degraded" if down or self._refused else "ready"

    @property
    def why(self) -> str | None:
        """Why the state is not `ready`, in words."""
        if not self._devices:
            return self._off
        why = {device.name: device.why_not for device in self._devices.values()} | self._refused
        told = [f"{name}: {text}" for name, text in why.items() if text is not None]
        return "; ".join(told) or None

    def describe(self) -> str:
        """One line for a person; without GPUs, the reason, which the log does not repeat."""
        if not self._devices:
            return f"off ({self._off}{f'; {self._hint}' if self._hint else ''})"
        gpus = ", ".join(f"{self._names[uuid]} {uuid_text(uuid)}" for uuid in self._devices)
        return f"{len(self._devices)} used: {gpus}"

    def device(self, name: str) -> GpuDevice:
        """The GPU that a client calls `name`.

        Raises RequestError `gpu_unknown`; ResourceError `gpu_unavailable` where none is used at
        all, or not this one.
        """
        device = self._devices.get(uuid_digits(name))
        if device is not None:
            return device
        if name in self._refused:
            raise ResourceError(
                "gpu_unavailable",
                f"{name} is not used by racerd: {self._refused[name]}",
                hint="read into host memory meanwhile, and restart racerd when that has changed",
            )
        if not self._devices:
            raise ResourceError(
                "gpu_unavailable",
                f"racerd uses no GPU on this node: {self._off}",
                hint="read into host memory; `racerd doctor` tells what a GPU would need",
            )
        raise RequestError(
            "gpu_unknown",
            f"this node has no {name}; it has {', '.join(self.uuids)}",
            hint="send the UUID of the device that the memory is on (cuDeviceGetUuid), and let"
            " racerd see every GPU of the node",
        )

    # ---- start ----

    async def _open(self, found: FoundGpus, stack: AsyncExitStack) -> None:
        usable = [gpu for gpu in found.gpus if not gpu.problem]
        self._refused = {uuid_text(gpu.uuid): gpu.problem for gpu in found.gpus if gpu.problem}
        for name, problem in self._refused.items():
            _log.warning("%s is not used: %s", name, problem)
        if not usable:
            self._off = _why_none(found, self._refused)
            if self._mode == "on":
                raise ConfigError(_problems(found, self._refused))
            self._hint = found.hint
            return
        for gpu in usable:
            device = GpuDevice(gpu.uuid, self._settings, self._arena, self._metrics)
            self._devices[gpu.uuid] = await stack.enter_async_context(device)
            self._names[gpu.uuid] = gpu.name
        if self._mode == "on":
            await self._wait_for_one(usable)

    async def _wait_for_one(self, gpus: list[FoundGpu]) -> None:
        """Waits until every worker has started or failed. Raises ConfigError if all failed."""
        outcomes = await asyncio.gather(
            *(self._devices[gpu.uuid].wait_ready() for gpu in gpus), return_exceptions=True
        )
        failures = [
            f"{uuid_text(gpu.uuid)} ({gpu.name}): {error.message} ({error.code}); {error.hint}"
            for gpu, error in zip(gpus, outcomes, strict=True)
            if isinstance(error, DeviceError)
        ]
        if len(failures) == len(gpus):
            raise ConfigError(
                [
                    "gpu: `on` was asked for, and no GPU of this node can be used",
                    *failures,
                    "start with --gpu=auto to serve host memory without it",
                ]
            )


def _why_none(found: FoundGpus, refused: Mapping[str, str]) -> str:
    if refused:
        return "; ".join(f"{name}: {problem}" for name, problem in refused.items())
    return found.message or "the NVIDIA driver sees no GPU"


def _problems(found: FoundGpus, refused: Mapping[str, str]) -> list[str]:
    """What `--gpu=on` says without a GPU: all that was looked for, and what to do."""
    return [
        f"gpu: `on` was asked for, and no GPU can be used: {_why_none(found, refused)}",
        *(f"looked for {step}" for step in found.looked_for),
        *([f"to do: {found.hint}"] if found.hint else []),
        "start with --gpu=auto to serve host memory without a GPU",
    ]

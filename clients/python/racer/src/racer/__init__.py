"""Client of racerd: model files straight into your memory.

    with racer.Client() as client:
        config = client.read("racer://local/llama/config.json")
        with client.map("racer://local/llama/model.safetensors") as view:
            ...

`AsyncClient` is the same, awaitable. Needs neither torch nor CUDA, nor anything but the standard
library. Names are imported when they are first used, so that `import racer` stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from racer.errors import (
    BadRequest,
    BadUrl,
    Closed,
    ConnectionLost,
    Corrupt,
    DaemonUnavailable,
    DeadlineExceeded,
    Draining,
    Forbidden,
    Forked,
    GpuError,
    GpuUnavailable,
    InternalError,
    MemoryLost,
    MemoryUnavailable,
    NotFound,
    OriginUnavailable,
    Overloaded,
    PinRefused,
    ProtocolError,
    RacerError,
    RangeNotSatisfiable,
    ShareRefused,
    TargetRefused,
    VersionChanged,
)
from racer.urls import RacerUrl

if TYPE_CHECKING:
    from racer.aio import AsyncClient, AsyncLanding, AsyncMapping
    from racer.aio.gpu import AsyncGpuBuffer
    from racer.client import Client
    from racer.gpu import GpuBuffer
    from racer.landing import Landing
    from racer.loading import LoadReport, TensorStream, load
    from racer.mapping import MappedObject
    from racer.results import (
        Entry,
        Evicted,
        Explanation,
        HostRead,
        Info,
        PageExplanation,
        Pin,
        Pinned,
        Pins,
        Prefetched,
        SharedPart,
        Stat,
        Unpinned,
    )
    from racer.safetensors import SafetensorsError
    from racer.shared import SharedChunk
    from racer.tensor_file import TensorFile, safe_open

__version__ = "0.1.0"

_LAZY = {
    "AsyncClient": "racer.aio",
    "AsyncGpuBuffer": "racer.aio.gpu",
    "AsyncLanding": "racer.aio",
    "AsyncMapping": "racer.aio",
    "Client": "racer.client",
    "GpuBuffer": "racer.gpu",
    "Landing": "racer.landing",
    "MappedObject": "racer.mapping",
    "Entry": "racer.results",
    "Evicted": "racer.results",
    "Explanation": "racer.results",
    "HostRead": "racer.results",
    "Info": "racer.results",
    "PageExplanation": "racer.results",
    "Pin": "racer.results",
    "Pinned": "racer.results",
    "Pins": "racer.results",
    "Prefetched": "racer.results",
    "SharedChunk": "racer.shared",
    "SharedPart": "racer.results",
    "Stat": "racer.results",
    "Unpinned": "racer.results",
    "LoadReport": "racer.loading",
    "SafetensorsError": "racer.safetensors",
    "TensorFile": "racer.tensor_file",
    "TensorStream": "racer.loading",
    "load": "racer.loading",
    "safe_open": "racer.tensor_file",
}

__all__ = [
    "AsyncClient",
    "AsyncGpuBuffer",
    "AsyncLanding",
    "AsyncMapping",
    "BadRequest",
    "BadUrl",
    "Client",
    "Closed",
    "ConnectionLost",
    "Corrupt",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "Draining",
    "Entry",
    "Evicted",
    "Explanation",
    "Forbidden",
    "Forked",
    "GpuBuffer",
    "GpuError",
    "GpuUnavailable",
    "HostRead",
    "Info",
    "InternalError",
    "Landing",
    "LoadReport",
    "MappedObject",
    "MemoryLost",
    "MemoryUnavailable",
    "NotFound",
    "OriginUnavailable",
    "Overloaded",
    "PageExplanation",
    "Pin",
    "PinRefused",
    "Pinned",
    "Pins",
    "Prefetched",
    "ProtocolError",
    "RacerError",
    "RacerUrl",
    "RangeNotSatisfiable",
    "SafetensorsError",
    "ShareRefused",
    "SharedChunk",
    "SharedPart",
    "Stat",
    "TargetRefused",
    "TensorFile",
    "TensorStream",
    "Unpinned",
    "VersionChanged",
    "__version__",
    "load",
    "safe_open",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'racer' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})

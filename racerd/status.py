"""What people and their monitoring see of a daemon: the diagnostics pages, and the greeting.

Layer: just below `app`; the loop thread only. Looks at the parts and changes none. The pages are
there before the parts are: until then they are empty, and `/readyz` says what it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from racerd import __version__
from racerd.caches import Caches
from racerd.config import Settings
from racerd.crypto.keyring import Keyring
from racerd.gpu.device import GpuDevice
from racerd.gpu.node import GpuNode
from racerd.origin.factory import why_unusable_now
from racerd.read.services import ReadServices
from racerd.runtime.process import open_descriptors, resident_bytes
from racerd.serve.diagnostics import Answer, Page
from racerd.store import Store
from racerd.store.report import DiskReport
from racerd.telemetry import Metrics
from racerd.units import format_bytes


@dataclass(frozen=True, slots=True)
class Parts:
    """What a daemon that has started consists of."""

    keyring: Keyring
    store: Store
    services: ReadServices
    gpus: GpuNode
    caches: Caches


class Status:
    """`state` is starting, ready or draining; who runs the daemon sets it, and `parts`."""

    def __init__(self, metrics: Metrics) -> None:
        self.state = "starting"
        self.parts: Parts | None = None
        self._metrics = metrics
        self._lag_max = 0.0

    def note_lag(self, seconds: float) -> None:
        """The event loop came back so much later than it was asked to."""
        self._metrics.loop_lag_seconds.observe(seconds)
        self._lag_max = max(self._lag_max, seconds)

    def pages(self) -> dict[str, Page]:
        """The pages by path."""
        return {
            "/healthz": lambda: Answer.text("ok\n"),
            "/readyz": self._readiness,
            "/metrics": self._exposition,
            "/debug/disks": self._of_parts(_disks, []),
            "/debug/keys": self._of_parts(_keys, {}),
            "/debug/connections": self._of_parts(lambda at: at.caches.describe_connections(), []),
            "/debug/door": self._of_parts(lambda at: at.caches.describe_door(), {}),
            "/debug/flights": self._of_parts(lambda at: at.services.flights.describe(), []),
            "/debug/shares": self._of_parts(lambda at: at.services.shares.describe(), []),
        }

    def _of_parts(self, look: Callable[[Parts], Any], nothing: Any) -> Page:
        """A page of what `look` finds; `nothing` while there are no parts yet."""
        return lambda: Answer.json(nothing if self.parts is None else look(self.parts))

    def _readiness(self) -> Answer:
        parts = self.parts
        if self.state != "ready" or parts is None:
            return Answer.json({"ready": False, "waiting_for": [self.state]}, 503)
        # A disk that recovers serves what it has found, and one that is down is in nobody's way: it
        # is said, and keeps nobody out.
        disks = [_disk_state(report) for report in parts.store.reports()]
        # The same holds for a GPU: reads into host memory are served without it.
        gpus = [_gpu_state(device) for device in parts.gpus.devices.values()]
        why = {"gpu": parts.gpus.state, "gpu_why": parts.gpus.why}
        return Answer.json({"ready": True, "disks": disks, **why, "gpus": gpus})

    def _exposition(self) -> Answer:
        metrics = self._metrics
        metrics.open_descriptors.set(open_descriptors())
        metrics.resident_bytes.set(resident_bytes())
        metrics.tasks.set(len(asyncio.all_tasks()))
        metrics.loop_lag_max_seconds.set(self._lag_max)
        self._lag_max = 0.0
        body, content_type = metrics.exposition()
        return Answer(200, body, content_type)


def greeting(settings: Settings, parts: Parts, *, diagnostics: str | None) -> str:
    """What a daemon prints when it serves. `diagnostics` is the address of its pages."""
    lines = [f"racerd {__version__}"]
    for cache in settings.caches.values():
        lines.append(f"  cache {cache.name}: {parts.caches.socket_path(cache.name)}")
        why = why_unusable_now(cache.origin)
        lines.append(f"    origin {cache.origin}{f' ({why})' if why else ''}")
    for report in parts.store.reports():
        trouble = f", {report.state}: {report.reason}" if report.reason else ""
        lines.append(f"  disk {report.path}: {format_bytes(report.capacity_bytes)}{trouble}")
    lines.append(f"  memory {format_bytes(settings.memory)}")
    lines.append(f"  gpu {parts.gpus.describe()}")
    if diagnostics is not None:
        lines.append(f"  diagnostics http://{diagnostics}/metrics")
    first = next(iter(settings.caches), None)
    if first is not None:
        lines.append(f"  try: racer ls --run-dir {settings.run_dir} racer://{first}/")
    return "\n".join([*lines, "ready"])


def _disks(parts: Parts) -> list[dict[str, Any]]:
    return [asdict(report) for report in parts.store.reports()]


def _keys(parts: Parts) -> dict[str, Any]:
    return {"active": parts.keyring.active.epoch, "epochs": parts.keyring.epochs}


def _disk_state(report: DiskReport) -> dict[str, object]:
    return {
        "path": report.path,
        "state": report.state,
        "reason": report.reason,
        "direct_io": report.direct,
        "pages": report.pages,
        "recovering": report.recovering,
        "recovery": asdict(report.recovery),
        "troubles": report.troubles,
    }


def _gpu_state(device: GpuDevice) -> dict[str, object]:
    return {
        "gpu": device.name,
        "why_not": device.why_not,
        "cufile": device.cufile_state,
        "worker": device.worker_pid,
        "restarts": device.restarts,
    }

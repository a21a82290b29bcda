"""One read into GPU memory on its way: what was brought, and what other rungs have to.

Layer: gpu, on `place`; no I/O. The blocking and the asyncio reads share it.
"""

from __future__ import annotations

from typing import Protocol

from racer.bulk import SMALL_BYTES
from racer.cuda.device import plain_uuid
from racer.endpoint import EndpointState
from racer.errors import GpuUnavailable, RacerError
from racer.gpu.place import GpuPlace
from racer.results import HostRead, Info, add_rungs
from racer.transfer import Part


class Range(Protocol):
    """`[start, stop)` of an object: a BulkRead or an AsyncRead."""

    @property
    def endpoint(self) -> EndpointState: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


class Filling:
    """`position` is how far the first rung has come; what it refused before is left to others."""

    def __init__(self, read: Range, place: GpuPlace) -> None:
        self.read = read
        self.place = place
        self.position = read.start
        self.rungs: dict[str, int] = {}
        self._refused: list[Part] = []
        self.stopped = False

    def wants_gpu(self, info: Info) -> bool:
        """Whether the first rung is to be tried; says why not where it is the first time."""
        endpoint, uuid = self.read.endpoint, self.place.device.uuid
        if self.place.target is None and self.read.stop - self.read.start <= SMALL_BYTES:
            return False  # Two copies of little: the socket is quicker.
        if not endpoint.gpu_rung.is_open(uuid):
            return False
        lack = why_no_gpu(info, uuid)
        if lack is not None:
            endpoint.gpu_rung.step_down(uuid, lack)
        return lack is None

    def goes_on(self) -> bool:
        return self.position < self.read.stop and not self.stopped

    def left(self) -> list[Part]:
        """What the host rung has to bring."""
        rest = [Part(self.position, self.read.stop)] if self.position < self.read.stop else []
        return [*self._refused, *rest]

    def address_of(self, start: int) -> int:
        """Where the object's byte `start` goes."""
        return self.place.address + start - self.read.start

    def came(self, part: Part, done: HostRead | None) -> None:
        """The next part in order was brought; or it was not (None), and others have to."""
        if done is None:
            self._refused.append(part)
        else:
            add_rungs(self.rungs, done.rungs)
        self.position = part.stop

    def refused(self, error: RacerError) -> None:
        self.stopped = True
        self.read.endpoint.gpu_rung.step_down(self.place.device.uuid, error)


def why_no_gpu(info: Info, uuid: str) -> GpuUnavailable | None:
    """Why the daemon does not write into the GPU `uuid`, by what it says about itself, or None."""
    if info.gpu == "off":
        return GpuUnavailable(
            f"racerd serves this cache without GPUs: {info.gpu_why or 'it does not say why'}",
            code="gpu_off",
            hint="see `racerd doctor`, and start it with --gpu=auto",
            retry="never",
        )
    if info.gpus and plain_uuid(uuid) not in map(plain_uuid, info.gpus):
        return GpuUnavailable(
            f"racerd does not see this GPU (it sees {', '.join(info.gpus)})",
            code="gpu_unknown",
            hint="give the daemon all GPUs of the node",
            retry="never",
        )
    return None

"""What the daemon and a GPU worker say to each other.

Layer: gpu, pure; imports no CUDA. One message is one datagram of a Unix seqpacket socket, so that
descriptors stay with the message they were sent with. A message is a frozen dataclass; on the wire
its name and plain fields are JSON, its `bytes` fields follow as they are.

Every request carries a number and gets exactly one answer with that number, `Done`, `Imported` or
`Failed`; `Ready`, `Notice` and `Fatal` come unasked. Both ends are ours and of one version: a
message that does not parse is a defect, not an attack, and ends the worker.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from struct import Struct
from struct import error as StructError
from typing import Any

MESSAGE_BYTES_MAX = 128 << 10
DESCRIPTORS_MAX = 1

_HEAD_LENGTH = Struct("<I")


@dataclass(frozen=True, slots=True)
class Start:
    """First message, with the arena's descriptor. Sizes in bytes.

    `frames_per_page` and `slot_bytes` are the arena's; `staging_bytes` bounds device memory for
    ciphertext in transit. `cufile`: `off`, `cuda` or `kvikio`, read on `cufile_threads` threads.
    `compat_mode` is R11's setting.
    """

    gpu: str
    arena_bytes: int
    frame_bytes: int
    frames_per_page: int
    slot_bytes: int
    staging_bytes: int
    idle_seconds: float
    kernel_cache: str
    cufile: str
    cufile_threads: int
    compat_mode: bool
    cufile_open_seconds_max: float


@dataclass(frozen=True, slots=True)
class ImportTarget:
    """With the descriptor of an exported allocation of exactly `size` bytes."""

    request: int
    target: int
    size: int


@dataclass(frozen=True, slots=True)
class ReleaseTarget:
    """Answered once nothing of the worker touches the target and its mapping is gone (F89)."""

    request: int
    target: int


@dataclass(frozen=True, slots=True)
class OpenSlab:
    """With a descriptor of the slab, opened as the store opens it. Answered `Done`, also where
    cuFile does not take it: a `Notice` then says why."""

    request: int
    slab: int


@dataclass(frozen=True, slots=True)
class CloseSlab:
    """Answered once no read of the slab runs."""

    request: int
    slab: int


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Frames of one page into a target.

    The frames are consecutive; all but the last have the frame size, the last `last_bytes`. From
    their plaintext the bytes [skip, skip + take) go to `offset` in the target.
    `slots`: the arena slots that hold the ciphertext; or, where empty, it lies at `slab_offset` of
    `slab`, 4 KiB aligned, frames back to back, and cuFile reads it.
    `nonces` has 12 bytes a frame, `tags` 16, `crcs` 8 (little endian); the AAD of frame i is
    `aad_head` and the i-th of the equal parts of `aad_tails`.
    """

    request: int
    target: int
    offset: int
    skip: int
    take: int
    last_bytes: int
    slots: tuple[int, ...]
    slab: int
    slab_offset: int
    key: bytes
    nonces: bytes
    tags: bytes
    crcs: bytes
    aad_head: bytes
    aad_tails: bytes

    @property
    def frame_count(self) -> int:
        return len(self.tags) // 16


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what runs, give everything back, exit."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has its context and its kernels. `name` is the GPU's."""

    name: str
    architecture: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out; for a ReadPage every frame was verified and decrypted."""

    request: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request was not carried out, and nothing of it still runs.

    `code` is `corrupt_crc` or `corrupt_tag` with the `frames` that failed (indices in the request;
    their range holds zeros, that of the others verified plaintext), `cufile_*` where the host path
    is left, or the code of a DeviceError with its `native` number.
    """

    request: int
    code: str
    message: str
    hint: str
    native: int
    frames: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """News about cuFile: `scope` is `driver` or `slab`; `state` is `on` or `off`, with a reason."""

    scope: str
    slab: int
    state: str
    reason: str
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Fatal:
    """The device or its context is lost; the worker exits. Reads in flight have failed."""

    code: str
    message: str
    hint: str
    native: int


Request = ImportTarget | ReleaseTarget | OpenSlab | CloseSlab | ReadPage
Message = Start | Request | Stop | Ready | Done | Failed | Notice | Fatal

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Start, ImportTarget, ReleaseTarget, OpenSlab, CloseSlab, ReadPage, Stop,
        Ready, Done, Failed, Notice, Fatal,
    )
}  # fmt: skip
_BYTES_FIELDS = {
    name: tuple(f.name for f in fields(kind) if f.type in (bytes, "bytes"))
    for name, kind in _KINDS.items()
}
_TUPLE_FIELDS = {
    name: tuple(f.name for f in fields(kind) if str(f.type).startswith("tuple"))
    for name, kind in _KINDS.items()
}


def encode(message: Message) -> bytes:
    """Returns the datagram of `message`. Raises ValueError for one that is too large."""
    kind = type(message).__name__
    tails = [getattr(message, name) for name in _BYTES_FIELDS[kind]]
    plain = {
        f.name: getattr(message, f.name)
        for f in fields(message)
        if f.name not in _BYTES_FIELDS[kind]
    }
    head = json.dumps([kind, plain, [len(tail) for tail in tails]], separators=(",", ":")).encode()
    datagram = b"".join((_HEAD_LENGTH.pack(len(head)), head, *tails))
    if len(datagram) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a {kind} of {len(datagram)} bytes, at most {MESSAGE_BYTES_MAX}")
    return datagram


def decode(datagram: bytes) -> Message:
    """Returns the message in `datagram`. Raises ValueError for what `encode` cannot make."""
    try:
        (head_bytes,) = _HEAD_LENGTH.unpack_from(datagram)
        at = _HEAD_LENGTH.size + head_bytes
        kind, values, lengths = json.loads(datagram[_HEAD_LENGTH.size : at])
        for name in _TUPLE_FIELDS[kind]:
            values[name] = tuple(values[name])
        for name, length in zip(_BYTES_FIELDS[kind], lengths, strict=True):
            values[name] = datagram[at : at + length]
            at += length
        message: Message = _KINDS[kind](**values)
    except (KeyError, TypeError, AttributeError, ValueError, StructError) as error:
        raise ValueError("not a message of this protocol") from error
    if at != len(datagram):
        raise ValueError("not a message of this protocol: bytes left over")
    return message

"""Reads of pages into GPU memory, as values.

Layer: gpu, pure; imports no CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass

from racerd.gpu.protocol import ReadPage


@dataclass(frozen=True, slots=True)
class SealedFrames:
    """What it takes to open consecutive frames of one page: see `protocol.ReadPage`."""

    key: bytes
    nonces: bytes
    tags: bytes
    crcs: tuple[int, ...]
    aad_head: bytes
    aad_tails: bytes
    last_bytes: int


@dataclass(frozen=True, slots=True)
class PageRead:
    """Bytes [skip, skip + take) of `frames`' plaintext, to `offset` in the target.

    The ciphertext lies in arena `slots`, which the caller keeps until the read ends; or, where
    there are none, in `slab` at `slab_offset` (4 KiB aligned), and cuFile reads it.
    """

    frames: SealedFrames
    offset: int
    skip: int
    take: int
    slots: tuple[int, ...] = ()
    slab: int = -1
    slab_offset: int = 0

    def message(self, request: int, target: int) -> ReadPage:
        """This read, as request number `request` into the target with the number `target`."""
        frames = self.frames
        return ReadPage(
            request=request,
            target=target,
            offset=self.offset,
            skip=self.skip,
            take=self.take,
            last_bytes=frames.last_bytes,
            slots=self.slots,
            slab=self.slab,
            slab_offset=self.slab_offset,
            key=frames.key,
            nonces=frames.nonces,
            tags=frames.tags,
            crcs=b"".join(crc.to_bytes(8, "little") for crc in frames.crcs),
            aad_head=frames.aad_head,
            aad_tails=frames.aad_tails,
        )

"""Pages and frames: how an object is cut, and what a sealed page is.

Layer: bottom, pure values. An object is cut into pages of `page_bytes`, a page into frames of
`frame_bytes`. A frame is sealed on its own, so a small read opens only the frames it touches, and
frames are opened side by side.

A sealed frame lies in a buffer of its own with room for the tag right behind the ciphertext,
because that is where `AESGCM.decrypt_into` wants it. Buffers start on 4 KiB boundaries, so that
`preadv` with O_DIRECT can fill one iovec per frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from racerd.ids import PageId
from racerd.units import KIB, MIB

TAG_BYTES = 16
CRC_BYTES = 8
SALT_BYTES = 24
ALIGNMENT_BYTES = 4 * KIB

PAGE_BYTES_DEFAULT = 16 * MIB
PAGE_BYTES_MIN = 64 * KIB
PAGE_BYTES_MAX = 64 * MIB
FRAME_BYTES_DEFAULT = 256 * KIB
FRAME_BYTES_MIN = 4 * KIB
FRAMES_PER_PAGE_MAX = 256


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Sizes of pages and frames, fixed for the life of a store. Both are powers of two."""

    page_bytes: int = PAGE_BYTES_DEFAULT
    frame_bytes: int = FRAME_BYTES_DEFAULT

    def __post_init__(self) -> None:
        for name, value in (("page_bytes", self.page_bytes), ("frame_bytes", self.frame_bytes)):
            if value <= 0 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, not {value}")
        if not PAGE_BYTES_MIN <= self.page_bytes <= PAGE_BYTES_MAX:
            raise ValueError(f"page_bytes must be {PAGE_BYTES_MIN} to {PAGE_BYTES_MAX}")
        if not FRAME_BYTES_MIN <= self.frame_bytes <= self.page_bytes:
            raise ValueError(f"frame_bytes must be {FRAME_BYTES_MIN} to page_bytes")
        if self.page_bytes // self.frame_bytes > FRAMES_PER_PAGE_MAX:
            raise ValueError(f"a page has at most {FRAMES_PER_PAGE_MAX} frames")

    @property
    def frames_per_page(self) -> int:
        return self.page_bytes // self.frame_bytes

    def page_count(self, object_bytes: int) -> int:
        """Pages of an object. An empty object has none."""
        return -(-object_bytes // self.page_bytes)

    def page_length(self, object_bytes: int, index: int) -> int:
        """Plaintext bytes of page `index`; only the last page of an object may be short."""
        return min(self.page_bytes, object_bytes - index * self.page_bytes)

    def frame_count(self, page_length: int) -> int:
        return -(-page_length // self.frame_bytes)

    def frame_length(self, page_length: int, frame: int) -> int:
        """Bytes of frame `frame` of a page of `page_length`; only the last one may be short."""
        return min(self.frame_bytes, page_length - frame * self.frame_bytes)


@dataclass(frozen=True, slots=True)
class Seal:
    """What it takes, beside a key, to open a page's frames: everything but the ciphertext.

    `salt` is 24 random bytes: the record's key is derived from it and its nonces start from it.
    `tags` holds 16 bytes a frame; `crcs` CRC-64/NVME of each frame's ciphertext; `plain_crc`
    CRC-64/NVME of the page's plaintext (page CRCs combine into the object's).
    """

    epoch: int
    salt: bytes
    length: int
    tags: bytes
    crcs: tuple[int, ...]
    plain_crc: int

    def __post_init__(self) -> None:
        if len(self.salt) != SALT_BYTES or len(self.tags) != TAG_BYTES * len(self.crcs):
            raise ValueError("a seal needs 24 bytes of salt and one tag and one CRC per frame")

    @property
    def frame_count(self) -> int:
        return len(self.crcs)

    def tag(self, frame: int) -> bytes:
        return self.tags[frame * TAG_BYTES : (frame + 1) * TAG_BYTES]


@dataclass(frozen=True, slots=True, eq=False)
class SealedPage:
    """A whole page of ciphertext in memory, not verified by anybody yet.

    `frames[i]` is a writable view of exactly `frame_length(i) + TAG_BYTES`: ciphertext, then the
    tag. Whoever made the page owns the memory behind the views; holders keep it alive by a lease
    (see `racerd.read.memory`), never by the views alone.
    """

    page: PageId
    seal: Seal
    frames: Sequence[memoryview]

"""Pages for tests of the store: sealed ones without a key, and how to read them back.

The store never opens a frame, so ciphertext is just bytes; they follow from the page's name, so
that a test can say what must come back.
"""

from __future__ import annotations

import random
from pathlib import Path

from racerd.crc64 import crc64
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import TAG_BYTES, PageGeometry, Seal, SealedPage
from racerd.store import DiskSettings, Store, StoreSettings
from racerd.store.buffers import aligned_buffer
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB

GEOMETRY = PageGeometry(64 * KIB, 16 * KIB)


def version(
    key: bytes = b"model/one.safetensors", *, size: int = 1 << 40, etag: str = '"one"',
    cache: str = "models", bucket: str = "bucket", token: str | None = None,
) -> ObjectVersion:  # fmt: skip
    return ObjectVersion(ObjectId(cache, bucket, key), etag, size, token)


def sealed(page: PageId, geometry: PageGeometry = GEOMETRY) -> SealedPage:
    """A page of ciphertext that follows from the page's name."""
    chance = random.Random(page.version.packed + page.index.to_bytes(8, "big"))
    length = geometry.page_length(page.version.size, page.index)
    frames = []
    for index in range(geometry.frame_count(length)):
        frame = aligned_buffer(geometry.frame_length(length, index) + TAG_BYTES)
        frame[:] = chance.randbytes(len(frame))
        frames.append(frame)
    seal = Seal(
        epoch=chance.randrange(1 << 32),
        salt=chance.randbytes(24),
        length=length,
        tags=b"".join(bytes(frame[-TAG_BYTES:]) for frame in frames),
        crcs=tuple(crc64(frame[:-TAG_BYTES]) for frame in frames),
        plain_crc=chance.getrandbits(64),
    )
    return SealedPage(page, seal, frames)


def buffers(
    page: PageId, geometry: PageGeometry = GEOMETRY, first: int = 0, count: int | None = None
) -> list[memoryview]:
    """Empty buffers for `count` frames of a page from `first` on, all by default."""
    length = geometry.page_length(page.version.size, page.index)
    stop = geometry.frame_count(length) if count is None else first + count
    return [
        aligned_buffer(geometry.frame_length(length, index) + TAG_BYTES)
        for index in range(first, stop)
    ]


def read_back(
    store: Store, page: PageId, geometry: PageGeometry = GEOMETRY,
    first: int = 0, count: int | None = None,
) -> bool:  # fmt: skip
    """Reads a page: True for a hit, False for a miss. Wrong bytes fail the test here."""
    found = buffers(page, geometry, first, count)
    seal = store.read(page, first, found)
    if seal is None:
        return False
    expected = sealed(page, geometry)
    assert seal == expected.seal, f"{page.text}: another seal came back"
    for index, frame in enumerate(found, first):
        assert frame == expected.frames[index], f"{page.text}: frame {index} has wrong bytes"
    return True


def settings(
    *paths: Path, capacity: int | None = 8 * MIB, free_floor_ratio: float = 0.0, **others: object
) -> StoreSettings:
    disks = tuple(DiskSettings(path, capacity) for path in paths)
    return StoreSettings(disks, free_floor_ratio, **others)  # type: ignore[arg-type]


def counted(metrics: Metrics, name: str, **labels: str) -> float:
    """A metric's value, summed over the labels that are not given."""
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )

"""The slab's formats, against bytes that another writer made."""

from __future__ import annotations

from pathlib import Path

import pytest

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import TAG_BYTES, PageGeometry, Seal
from racerd.store import Store
from racerd.store.buffers import aligned_buffer
from racerd.store.claims import Dropped
from racerd.store.codec import peek_untrusted
from racerd.store.geometry import BLOCK_BYTES, NOTES_BYTES, SlabGeometry
from racerd.store.notes import Notes, Selector, decode_notes_untrusted
from racerd.store.record import Place, RecordHeader, Tombstone
from racerd.store.record_v2 import encode_header, encode_tombstone
from racerd.store.superblock import (
    Superblock,
    decode_segment_header_untrusted,
    decode_superblock_untrusted,
    encode_segment_header,
)
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB
from tests.golden.store import independent
from tests.sim.faulty_device import FaultyDevice, Medium
from tests.sim.store_driver import InlineKeeper
from tests.support.store_pages import buffers, counted, settings

GOLDEN = independent.load()
GEOMETRY = PageGeometry(64 * KIB, 4 * KIB)
PLACE = Place(independent.SLAB, 1 << 20, 77)
PAGE = PageId(
    ObjectVersion(ObjectId("models", "bücket", b"llama/\xff one"), '"e-1"', 70_000, "1730"), 1
)
SEAL = Seal(
    5, independent.SALT, 4464, b"A" * 16 + b"B" * 16,
    tuple(independent.crc64(independent.cipher_of(4464)[at : at + 4096]) for at in (0, 4096)),
    0x0123456789ABCDEF,
)  # fmt: skip


def view(name: str) -> memoryview:
    buffer = aligned_buffer(len(GOLDEN[name]))
    buffer[:] = GOLDEN[name]
    return buffer


def test_the_golden_file_is_what_its_writer_writes() -> None:
    assert independent.structures() == GOLDEN


def test_a_superblock() -> None:
    """R20: both ways."""
    superblock = Superblock(2, independent.SLAB, 9, SlabGeometry(GEOMETRY, 8 * MIB, MIB, 32 * KIB))
    assert decode_superblock_untrusted(view("superblock")) == superblock
    target = aligned_buffer(BLOCK_BYTES)
    superblock.encode(target)
    assert target == GOLDEN["superblock"]


def test_a_segment_header() -> None:
    where = {"slab": independent.SLAB, "segment": 3, "offset": 64 * KIB + 3 * MIB}
    assert decode_segment_header_untrusted(view("segment"), **where) == 77
    target = aligned_buffer(BLOCK_BYTES)
    encode_segment_header(target, generation=77, **where)
    assert target == GOLDEN["segment"]


def test_a_v2_record() -> None:
    """R20: the ciphertext starts on a block boundary and is as long as the plaintext."""
    found = peek_untrusted(view("record_v2"), independent.SLAB, 1 << 20)
    assert isinstance(found, RecordHeader)
    assert (found.version, found.sequence, found.place) == (2, 1234, PLACE)
    assert (found.page_bytes, found.frame_bytes) == (64 * KIB, 4 * KIB)
    assert found.page() == PAGE and found.page().version.origin_token == "1730"
    assert found.is_of(PAGE) and found.seal == SEAL
    assert found.data_offset % BLOCK_BYTES == 0
    target = aligned_buffer(4096)
    encode_header(target, PAGE, SEAL, GEOMETRY, place=PLACE, sequence=1234)
    assert target == GOLDEN["record_v2"][:4096]
    assert GOLDEN["record_v2"][4096 : 4096 + 4464] == independent.cipher_of(4464)


def test_a_v1_record() -> None:
    """R20: the old format is still read."""
    found = peek_untrusted(view("record_v1"), independent.SLAB, 1 << 20)
    assert isinstance(found, RecordHeader)
    assert (found.version, found.sequence, found.place) == (1, 1234, PLACE)
    assert found.is_of(PAGE) and found.page().version.origin_token is None
    assert (found.seal.length, found.seal.frame_count, found.seal.epoch) == (4464, 1, 5)
    assert found.record_bytes == len(GOLDEN["record_v1"])


def test_a_tombstone() -> None:
    found = peek_untrusted(view("tombstone"), independent.SLAB, 1 << 20)
    assert found == Tombstone(PLACE, 12288)
    target = aligned_buffer(BLOCK_BYTES)
    dropped = Dropped(3, 1 << 20, 77, 12288)
    encode_tombstone(target, Place(independent.SLAB, dropped.offset, 77), dropped.record_bytes)
    assert target == GOLDEN["tombstone"]


def test_notes() -> None:
    notes = Notes(
        4, 2, (Selector("models", "b", b"llama/", False),),
        (Selector("models", "b", b"x\xff", True),),
    )  # fmt: skip
    assert decode_notes_untrusted(view("notes"), independent.SLAB) == notes
    target = aligned_buffer(NOTES_BYTES)
    notes.encode(target, independent.SLAB)
    assert target == GOLDEN["notes"]


def old_slab(length: int) -> tuple[Medium, PageId, bytes]:
    """A slab of format v1 with one record, made by the other writer."""
    medium = Medium(2 * MIB)
    plan = SlabGeometry.plan(GEOMETRY, 2 * MIB)
    superblock = independent.superblock(
        version=1, sequence=1, capacity=2 * MIB, segment=plan.segment_bytes,
        checkpoint=plan.checkpoint_bytes, page=64 * KIB, frame=4 * KIB,
    )  # fmt: skip
    name = independent.identity("models", "b", b"old", '"v1"', length)
    cipher = independent.cipher_of(length)
    start = plan.segment_offset(0)
    record = independent.record_v1(
        name=name, cipher=cipher, tag=b"T" * 16, epoch=1, offset=start + BLOCK_BYTES,
        generation=5, sequence=1, index=0, plain_crc=7,
    )  # fmt: skip
    medium.write(0, superblock)
    medium.write(start, independent.segment_header(number=0, generation=5, offset=start) + record)
    page = PageId(ObjectVersion(ObjectId("models", "b", b"old"), '"v1"', length), 0)
    return medium, page, cipher


def open_store(medium: Medium, metrics: Metrics) -> Store:
    return Store(
        settings(Path("/old/slab"), capacity=2 * MIB), GEOMETRY, metrics,
        open_device=lambda disk: FaultyDevice(medium), make_keeper=InlineKeeper,
    )  # fmt: skip


@pytest.mark.parametrize("length", [100, 4096, 16 * KIB - 40, 50_000, 64 * KIB])
def test_a_slab_of_the_old_format_is_read(length: int) -> None:
    """R20: a whole page, cut into frames without tags; the seal has the one tag there is."""
    medium, page, cipher = old_slab(length)
    metrics = Metrics()
    with open_store(medium, metrics) as store:
        assert store.contains(page) and store.reads_whole(page)
        frames = buffers(page, GEOMETRY)
        seal = store.read(page, 0, frames)
        assert seal is not None
        assert (seal.tags, seal.frame_count, seal.length) == (b"T" * 16, 1, length)
        assert b"".join(bytes(frame[:-TAG_BYTES]) for frame in frames) == cipher
        if len(frames) > 1:
            assert store.read(page, 1, frames[1:]) is None
            assert counted(metrics, "racer_store_reads_total", result="v1_needs_whole_page") == 1
    # And again by the checkpoint that was written in the new format.
    with open_store(medium, metrics) as store:
        assert store.disks[0].progress.pages_from_checkpoint == 1
        assert store.unproven(page)
        store.confirm(page)
        assert store.contains(page) and not store.unproven(page)
        assert store.read(page, 0, buffers(page, GEOMETRY)) == seal


def test_rot_in_an_old_record_is_found() -> None:
    """R22: the old format has one CRC for the page."""
    medium, page, cipher = old_slab(50_000)
    at = medium.now.index(cipher) + 40_000
    medium.rot(at)
    metrics = Metrics()
    with open_store(medium, metrics) as store:
        assert store.read(page, 0, buffers(page, GEOMETRY)) is None
        assert not store.contains(page)
        assert counted(metrics, "racer_corrupt_pages_total", reason="frame_crc") == 1

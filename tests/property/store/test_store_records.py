"""Codecs of the store: what was written is read; anything else is refused by one declared error."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racerd.errors import IntegrityError
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import PageGeometry, Seal
from racerd.store.buffers import aligned_buffer
from racerd.store.codec import decode_untrusted, peek_untrusted
from racerd.store.geometry import BLOCK_BYTES, NOTES_BYTES, SlabGeometry, header_bytes
from racerd.store.notes import Notes, Selector, decode_notes_untrusted
from racerd.store.record import HEADER_BYTES_MAX, Place, RecordHeader, Tombstone, stamp_crc
from racerd.store.record_v2 import encode_header, encode_tombstone, relocate
from racerd.store.superblock import (
    Superblock,
    decode_segment_header_untrusted,
    decode_superblock_untrusted,
    encode_segment_header,
)
from racerd.units import KIB, MIB

GEOMETRIES = [
    PageGeometry(64 * KIB, 4 * KIB),
    PageGeometry(),
    PageGeometry(64 * MIB, 256 * KIB),
]
u64 = st.integers(0, 2**64 - 1)
places = st.builds(
    Place,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 1 << 50).map(lambda block: block * BLOCK_BYTES % 2**60),
    u64,
)
caches = st.from_regex(r"[a-z][a-z0-9]{0,60}", fullmatch=True)
buckets = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60
)
keys = st.binary(min_size=1, max_size=1024).filter(lambda key: b"\0" not in key)


@st.composite
def pages(draw: st.DrawFn) -> tuple[PageGeometry, PageId, Seal]:
    geometry = draw(st.sampled_from(GEOMETRIES))
    size = draw(st.integers(1, 1 << 40))
    etag = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
    token = draw(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=10))
    version = ObjectVersion(ObjectId(draw(caches), draw(buckets), draw(keys)), etag, size, token)
    index = draw(st.integers(0, geometry.page_count(size) - 1))
    length = geometry.page_length(size, index)
    count = geometry.frame_count(length)
    chance = random.Random(draw(st.integers()))
    seal = Seal(
        draw(st.integers(0, 2**32 - 1)), chance.randbytes(24), length, chance.randbytes(16 * count),
        tuple(chance.getrandbits(64) for _ in range(count)), draw(u64),
    )  # fmt: skip
    return geometry, PageId(version, index), seal


def encoded(geometry: PageGeometry, page: PageId, seal: Seal, place: Place) -> memoryview:
    target = aligned_buffer(header_bytes(geometry))
    target[:] = b"\xee" * len(target)
    encode_header(target, page, seal, geometry, place=place, sequence=3)
    return target


@given(what=pages(), place=places)
def test_a_header_says_what_was_written(
    what: tuple[PageGeometry, PageId, Seal], place: Place
) -> None:
    """R20, F9: tenant, identity and seal are in the record itself."""
    geometry, page, seal = what
    found = decode_untrusted(encoded(geometry, page, seal, place), place)
    assert isinstance(found, RecordHeader)
    assert found.is_of(page) and found.page() == page
    assert found.page().version.origin_token == page.version.origin_token
    assert (found.seal, found.place, found.sequence) == (seal, place, 3)
    assert found.record_bytes == SlabGeometry(geometry, 0, 0, 0).record_bytes(seal.length)


@given(what=pages(), place=places, bit=st.integers(0, HEADER_BYTES_MAX * 8))
def test_no_flipped_bit_of_a_header_goes_unnoticed(
    what: tuple[PageGeometry, PageId, Seal], place: Place, bit: int
) -> None:
    """R22: rot in a header is found by its checksum."""
    block = encoded(*what, place)
    bit %= len(block) * 8
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(IntegrityError):
        decode_untrusted(block, place)


@given(what=pages(), place=places, other=places)
def test_a_record_counts_only_where_it_says_it_stands(
    what: tuple[PageGeometry, PageId, Seal], place: Place, other: Place
) -> None:
    """R22, F14: misplaced, copied, of another slab or of an earlier life of its segment."""
    block = encoded(*what, place)
    if other == place:
        return
    with pytest.raises(IntegrityError) as caught:
        decode_untrusted(block, other)
    assert caught.value.code == "header_place"


@given(what=pages(), place=places, other=places)
def test_a_moved_record_keeps_what_it_says_about_its_page(
    what: tuple[PageGeometry, PageId, Seal], place: Place, other: Place
) -> None:
    header = decode_untrusted(encoded(*what, place), place)
    assert isinstance(header, RecordHeader)
    target = aligned_buffer(header.header_bytes)
    relocate(target, header, other, 9)
    moved = decode_untrusted(target, other)
    assert isinstance(moved, RecordHeader)
    assert (moved.identity, moved.seal, moved.token) == (header.identity, header.seal, header.token)
    assert (moved.place, moved.sequence) == (other, 9)


@given(place=places, blocks=st.integers(1, 1 << 19))
def test_a_tombstone_fits_a_sector(place: Place, blocks: int) -> None:
    """F29: one sector cannot tear; whatever was behind it no longer counts."""
    target = aligned_buffer(BLOCK_BYTES)
    encode_tombstone(target, place, blocks * BLOCK_BYTES)
    torn = aligned_buffer(BLOCK_BYTES)
    torn[:512] = target[:512]
    torn[512:] = b"\xaa" * (BLOCK_BYTES - 512)
    for block in (target, torn):
        assert decode_untrusted(block, place) == Tombstone(place, blocks * BLOCK_BYTES)


@given(
    magic=st.sampled_from([b"RACERREC", b"RACERDEL", b"RACERSEG", b"RACERSLB", b"RACERNTS"]),
    version=st.integers(0, 4),
    body=st.binary(max_size=600),
    stamped=st.sampled_from([0, 128, 512, 4096, NOTES_BYTES]),
)
def test_garbage_raises_nothing_but_integrity_errors(
    magic: bytes, version: int, body: bytes, stamped: int
) -> None:
    """Bytes of a disk are untrusted, also with a valid checksum."""
    block = aligned_buffer(NOTES_BYTES)
    block[: 18 + len(body)] = magic + bytes(8) + version.to_bytes(2, "little") + body
    if stamped:
        stamp_crc(block[:stamped])
    slab = bytes(block[48:64])
    for decode in (
        lambda: peek_untrusted(block, slab, 0),
        lambda: decode_superblock_untrusted(block[:BLOCK_BYTES]),
        lambda: decode_segment_header_untrusted(block, slab=slab, segment=0, offset=0),
        lambda: decode_notes_untrusted(block, bytes(block[24:40])),
    ):
        try:
            decode()
        except IntegrityError:
            continue


def test_names_that_do_not_fit_are_refused() -> None:
    geometry = GEOMETRIES[0]
    version = ObjectVersion(ObjectId("c", "b", b"k" * 1024), '"' + "e" * 3000 + '"', 100)
    seal = Seal(1, bytes(24), 100, bytes(16), (0,), 0)
    with pytest.raises(IntegrityError) as caught:
        encoded(geometry, PageId(version, 0), seal, Place(bytes(16), 0, 1))
    assert caught.value.code == "identity_too_long"


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: str(g.page_bytes))
def test_the_longest_names_fit_every_geometry(geometry: PageGeometry) -> None:
    """A cache of 82, a bucket of 255, a key of 1024 and an ETag of 256 bytes."""
    object_id = ObjectId("c" * 60 + "." + "c" * 21, "b" * 255, b"k" * 1024)
    version = ObjectVersion(object_id, "e" * 256, geometry.page_bytes)
    count = geometry.frames_per_page
    seal = Seal(1, bytes(24), geometry.page_bytes, bytes(16 * count), (0,) * count, 0)
    place = Place(bytes(16), 0, 1)
    assert decode_untrusted(encoded(geometry, PageId(version, 0), seal, place), place)


@given(
    slab=st.binary(min_size=16, max_size=16), sequence=u64, capacity=st.integers(0, 1 << 50),
    segment=st.integers(1, 1 << 40), checkpoint=st.integers(0, 1 << 40),
    page=st.sampled_from(GEOMETRIES), cut=st.integers(1, 511),
)  # fmt: skip
def test_superblocks_and_segment_headers(
    slab: bytes, sequence: int, capacity: int, segment: int, checkpoint: int, page: PageGeometry,
    cut: int,
) -> None:  # fmt: skip
    block = aligned_buffer(BLOCK_BYTES)
    superblock = Superblock(2, slab, sequence, SlabGeometry(page, capacity, segment, checkpoint))
    superblock.encode(block)
    assert decode_superblock_untrusted(block) == superblock
    block[cut] ^= 1
    with pytest.raises(IntegrityError):
        decode_superblock_untrusted(block)
    encode_segment_header(block, slab=slab, segment=7, generation=sequence, offset=capacity)
    where = {"slab": slab, "segment": 7, "offset": capacity}
    assert decode_segment_header_untrusted(block, **where) == sequence
    with pytest.raises(IntegrityError):
        decode_segment_header_untrusted(block, **{**where, "segment": 8})
    block[cut] ^= 1
    with pytest.raises(IntegrityError):
        decode_segment_header_untrusted(block, **where)


selectors = st.builds(Selector, caches, buckets, st.binary(max_size=100), st.booleans())


@given(
    sequence=u64, version=u64, pins=st.lists(selectors, max_size=9),
    fences=st.lists(selectors, max_size=9), cut=st.integers(0, NOTES_BYTES - 1),
)  # fmt: skip
def test_notes(
    sequence: int, version: int, pins: list[Selector], fences: list[Selector], cut: int
) -> None:
    notes = Notes(sequence, version, tuple(pins), tuple(fences))
    assert notes.fits
    block = aligned_buffer(NOTES_BYTES)
    notes.encode(block, bytes(16))
    assert decode_notes_untrusted(block, bytes(16)) == notes
    block[cut] ^= 4
    with pytest.raises(IntegrityError):
        decode_notes_untrusted(block, bytes(16))

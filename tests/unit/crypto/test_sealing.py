"""Sealing and opening pages: round trips, what is bound, and what a failure leaves behind."""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from racerd.crc64 import crc64
from racerd.crypto.epoch_key import EpochKey
from racerd.crypto.sealing import PageOpener, PageSealer
from racerd.errors import IntegrityError, Retry
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import TAG_BYTES, PageGeometry, Seal
from racerd.units import KIB

GEOMETRY = PageGeometry(64 * KIB, 4 * KIB)
WHOLE = PageGeometry(64 * KIB, 64 * KIB)  # One frame a page: how format v1 seals.
KEY = EpochKey(7, bytes(range(32)))
DIRT = 0xAA


def page_of(
    length: int,
    *,
    index: int = 2,
    cache: str = "local",
    bucket: str = "llama",
    key: bytes = b"a/b.safetensors",
    etag: str = '"v1"',
) -> PageId:
    """The last page of an object, `length` bytes long."""
    size = index * GEOMETRY.page_bytes + length
    return PageId(ObjectVersion(ObjectId(cache, bucket, key), etag, size), index)


def buffers(length: int, geometry: PageGeometry = GEOMETRY) -> list[memoryview]:
    count = geometry.frame_count(length)
    return [
        memoryview(bytearray(geometry.frame_length(length, i) + TAG_BYTES)) for i in range(count)
    ]


def sealed(
    page: PageId, plaintext: bytes, geometry: PageGeometry = GEOMETRY, key: EpochKey = KEY
) -> tuple[Seal, list[memoryview]]:
    sealer = PageSealer(page, len(plaintext), geometry, key)
    frames = buffers(len(plaintext), geometry)
    sealer.seal_frames(0, memoryview(plaintext), frames)
    return sealer.finish(), frames


def dirty(length: int) -> memoryview:
    """An output that would show any byte left as it was."""
    return memoryview(bytearray([DIRT]) * length)


def refused(call: Callable[[], None], out: memoryview, code: str = "corrupt_tag") -> None:
    """`call` raises IntegrityError `code` and `out` holds zeros only."""
    with pytest.raises(IntegrityError) as caught:
        call()
    assert (caught.value.code, caught.value.retry) == (code, Retry.ELSEWHERE)
    assert bytes(out) == bytes(len(out))


@given(
    length=st.integers(1, 64 * KIB),
    cuts=st.lists(st.integers(0, 16), max_size=4),
    part=st.tuples(st.integers(0, 15), st.integers(1, 16)),
)
def test_what_was_sealed_in_any_portions_opens_in_any(
    length: int, cuts: list[int], part: tuple[int, int]
) -> None:
    """R20: the same frames and the same page CRC, whichever way a page is cut among workers."""
    plaintext = os.urandom(length)
    page = page_of(length)
    frames = buffers(length)
    sealer = PageSealer(page, length, GEOMETRY, KEY)
    bounds = sorted({0, len(frames), *(cut for cut in cuts if cut < len(frames))})
    for first, stop in reversed(list(itertools.pairwise(bounds))):
        start, end = first * GEOMETRY.frame_bytes, stop * GEOMETRY.frame_bytes
        sealer.seal_frames(first, memoryview(plaintext)[start:end], frames[first:stop])
    seal = sealer.finish()
    assert seal.plain_crc == crc64(plaintext)
    assert seal.crcs == tuple(crc64(frame[:-TAG_BYTES]) for frame in frames)
    assert seal.tags == b"".join(bytes(frame[-TAG_BYTES:]) for frame in frames)

    opener = PageOpener(page, seal, GEOMETRY, KEY)
    out = dirty(length)
    opener.open_frames(0, frames, out)
    assert out == plaintext
    first = min(part[0], len(frames) - 1)
    some = frames[first : first + part[1]]
    out = dirty(sum(len(frame) - TAG_BYTES for frame in some))
    opener.open_frames(first, some, out)
    start = first * GEOMETRY.frame_bytes
    assert out == plaintext[start : start + len(out)]


def test_frames_are_what_the_document_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: key, nonces and AAD written down a second time, and pinned: they cannot drift."""
    salt = bytes(range(200, 224))
    monkeypatch.setattr("racerd.crypto.sealing.os.urandom", lambda count: salt[:count])
    plaintext = bytes(range(256)) * 40  # 2.5 frames
    page = page_of(len(plaintext), bucket="bück", key=b"\xff/..//k")
    seal, frames = sealed(page, plaintext)

    def packed(*parts: bytes) -> bytes:
        return b"".join(struct.pack(">I", len(part)) + part for part in parts)

    size = 2 * GEOMETRY.page_bytes + len(plaintext)
    bound = b"racer page 2\0" + packed(
        b"local", "bück".encode(), b"\xff/..//k", b'"v1"', struct.pack(">Q", size)
    )
    record_key = AESGCM(KEY.record_key(salt))
    for index, frame in enumerate(frames):
        nonce = salt[12:20] + bytes(
            a ^ b for a, b in zip(salt[20:], bytes([0, 0, 0, index]), strict=True)
        )
        aad = bound + struct.pack(">QIIIIII", 2, 65536, 4096, len(plaintext), 7, 3, index)
        part = plaintext[index * 4096 : (index + 1) * 4096]
        assert bytes(frame) == record_key.encrypt(nonce, part, aad)
    assert hashlib.sha256(b"".join(frames)).hexdigest() == (
        "f1566519f4852188b31aee8837e1671c15679bf6833b958ccc5d3310a61fda79"
    )
    assert (seal.epoch, seal.salt, seal.length) == (7, salt, len(plaintext))


PLACES: dict[str, dict[str, Any]] = {
    "cache": {"cache": "other"},
    "bucket": {"bucket": "other"},
    "key": {"key": b"a/b.safetensorz"},
    "split of bucket and key": {"bucket": "llama/a"[:5], "key": b"a/b.safetensors "},
    "version": {"etag": '"v2"'},
    "weak instead of strong": {"etag": 'W/"v1"'},
    "page": {"index": 1},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_a_page_put_elsewhere_does_not_open(place: dict[str, Any]) -> None:
    """R22, F14, F30: swapped, stale and misplaced records fail, whatever the index believed."""
    plaintext = os.urandom(10_000)
    seal, frames = sealed(page_of(10_000), plaintext)
    opener = PageOpener(page_of(10_000, **place), seal, GEOMETRY, KEY)
    out = dirty(10_000)
    refused(lambda: opener.open_frames(0, frames, out), out)


def test_the_object_size_is_bound() -> None:
    """A full page of an object that grew under the same ETag is another page."""
    length = GEOMETRY.page_bytes
    object_id = ObjectId("local", "llama", b"k")
    small = PageId(ObjectVersion(object_id, '"v1"', length), 0)
    large = PageId(ObjectVersion(object_id, '"v1"', 2 * length), 0)
    seal, frames = sealed(small, os.urandom(length))
    out = dirty(length)
    opener = PageOpener(large, seal, GEOMETRY, KEY)
    refused(lambda: opener.open_frames(0, frames, out), out)


def test_the_page_size_is_bound() -> None:
    """Page 1 of 64 KiB pages and page 1 of 128 KiB pages are other ranges of the object."""
    wide = PageGeometry(128 * KIB, 4 * KIB)
    version = ObjectVersion(ObjectId("local", "llama", b"k"), '"v1"', 192 * KIB)
    page = PageId(version, 1)
    seal, frames = sealed(page, os.urandom(64 * KIB))
    opener = PageOpener(page, seal, wide, KEY)  # The last page there, as long as this one.
    out = dirty(64 * KIB)
    refused(lambda: opener.open_frames(0, frames, out), out)


def test_the_epoch_and_the_salt_are_bound() -> None:
    plaintext = os.urandom(10_000)
    page = page_of(10_000)
    seal, frames = sealed(page, plaintext)
    same_key = EpochKey(8, KEY.key)
    other_salt = bytes([seal.salt[0] ^ 1]) + seal.salt[1:]
    other_nonce = seal.salt[:-1] + bytes([seal.salt[-1] ^ 1])
    for changed, key in (
        (replace(seal, epoch=8), same_key),
        (replace(seal, salt=other_salt), KEY),
        (replace(seal, salt=other_nonce), KEY),
    ):
        out = dirty(10_000)
        opener = PageOpener(page, changed, GEOMETRY, key)
        refused(lambda opener=opener, out=out: opener.open_frames(0, frames, out), out)


@given(frame=st.integers(0, 2), position=st.integers(0, 4 * KIB + 15), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_leaves_zeros_everywhere(
    frame: int, position: int, bit: int
) -> None:
    """R22: ciphertext or tag; frames that verified before it are wiped with it."""
    length = 10_000
    page = page_of(length)
    seal, frames = sealed(page, os.urandom(length))
    frames[frame][position % len(frames[frame])] ^= 1 << bit
    opener = PageOpener(page, seal, GEOMETRY, KEY)
    out = dirty(length)
    refused(lambda: opener.open_frames(0, frames, out), out)
    alone = dirty(len(frames[frame]) - TAG_BYTES)
    refused(lambda: opener.open_frame(frame, frames[frame], alone), alone)


def test_frames_change_places_and_zeros_do_not_open() -> None:
    """F38, F39: a hole reads as zeros, and zeros never verify."""
    length = 10_000
    page = page_of(length)
    seal, frames = sealed(page, os.urandom(length))
    opener = PageOpener(page, seal, GEOMETRY, KEY)
    swapped: list[Sequence[memoryview]] = [
        [frames[1], frames[0], frames[2]],
        [frames[0], frames[0], frames[2]],
        [memoryview(bytes(len(frame))) for frame in frames],
    ]
    for wrong in swapped:
        out = dirty(length)
        refused(lambda wrong=wrong, out=out: opener.open_frames(0, wrong, out), out)


def test_an_error_names_the_page_and_no_bytes() -> None:
    plaintext = b"payload-" * 1000
    page = page_of(len(plaintext))
    seal, frames = sealed(page, plaintext)
    frames[1][0] ^= 1
    out = dirty(len(plaintext))
    with pytest.raises(IntegrityError, match=r"llama/a/b\.safetensors page 2 frame 1") as caught:
        PageOpener(page, seal, GEOMETRY, KEY).open_frames(0, frames, out)
    assert caught.value.__cause__ is None
    assert "payload" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "count", "room"),
    [(0, 3, 9_999), (0, 3, 10_001), (0, 2, 10_000), (1, 3, 10_000), (-1, 3, 10_000), (3, 1, 0),
     (0, 0, 0)],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_and_wiped(first: int, count: int, room: int) -> None:
    page = page_of(10_000)
    seal, frames = sealed(page, os.urandom(10_000))
    out = dirty(room)
    given_frames = (frames * 2)[max(first, 0) : max(first, 0) + count]
    with pytest.raises(ValueError, match="frames"):
        PageOpener(page, seal, GEOMETRY, KEY).open_frames(first, given_frames, out)
    assert bytes(out) == bytes(room)


def test_a_frame_of_the_wrong_length_is_refused_and_wiped() -> None:
    page = page_of(10_000)
    seal, frames = sealed(page, os.urandom(10_000))
    for wrong in (frames[1][:-1], frames[1][:8], frames[2]):
        out = dirty(10_000)
        with pytest.raises((ValueError, IntegrityError)):
            PageOpener(page, seal, GEOMETRY, KEY).open_frames(0, [frames[0], wrong, frames[2]], out)
        assert bytes(out) == bytes(10_000)


# ---------- seals that cannot be this page's


def test_a_seal_of_another_length_is_refused_before_any_byte_is_opened() -> None:
    """F5, F11: truncated and lengthened records."""
    page = page_of(10_000)
    seal, _ = sealed(page, os.urandom(10_000))
    wrong = (
        replace(seal, length=9_999),
        replace(seal, length=0),
        replace(seal, tags=seal.tags[:32], crcs=seal.crcs[:2]),
        replace(seal, tags=seal.tags + bytes(16), crcs=(*seal.crcs, 0)),
    )
    for changed in wrong:
        with pytest.raises(IntegrityError) as caught:
            PageOpener(page, changed, GEOMETRY, KEY)
        assert caught.value.code == "corrupt_seal"


def test_a_page_beyond_the_object_is_refused() -> None:
    page = page_of(10_000)
    seal, _ = sealed(page, os.urandom(10_000))
    beyond = PageId(page.version, 5)
    with pytest.raises(IntegrityError):
        PageOpener(beyond, seal, GEOMETRY, KEY)
    with pytest.raises(ValueError, match="bytes"):
        PageSealer(beyond, 10_000, GEOMETRY, KEY)


def test_the_key_must_be_of_the_seals_epoch() -> None:
    page = page_of(10)
    seal, _ = sealed(page, b"0123456789")
    with pytest.raises(ValueError, match="epoch"):
        PageOpener(page, seal, GEOMETRY, EpochKey(8, KEY.key))


# ---------- single-frame seals


@pytest.mark.parametrize("length", [1, 4096, 4097, 10_000, 64 * KIB])
def test_a_page_with_one_tag_opens_from_frames_anywhere(length: int) -> None:
    """R20: what format v1 holds, read into the frames of today's geometry."""
    page = page_of(length)
    plaintext = os.urandom(length)
    seal, (whole,) = sealed(page, plaintext, WHOLE)
    frames = buffers(length)
    for index, frame in enumerate(frames):
        start = index * GEOMETRY.frame_bytes
        frame[:-TAG_BYTES] = whole[start : start + len(frame) - TAG_BYTES]
    frames[-1][-TAG_BYTES:] = seal.tags
    opener = PageOpener(page, seal, GEOMETRY, KEY)
    assert opener.single_frame == (length > GEOMETRY.frame_bytes)
    out = dirty(length)
    opener.open_frames(0, frames, out)
    assert out == plaintext

    frames[-1][0] ^= 1
    out = dirty(length)
    refused(lambda: opener.open_frames(0, frames, out), out)


def test_a_page_with_one_tag_opens_only_whole() -> None:
    page = page_of(10_000)
    seal, _ = sealed(page, os.urandom(10_000), WHOLE)
    opener = PageOpener(page, seal, GEOMETRY, KEY)
    frames = buffers(10_000)
    for first, some in ((0, frames[:2]), (1, frames[1:]), (1, frames)):
        out = dirty(sum(len(frame) - TAG_BYTES for frame in some))
        with pytest.raises(ValueError, match="whole"):
            opener.open_frames(first, some, out)
        assert bytes(out) == bytes(len(out))


def test_a_bad_tag_of_a_whole_page_is_refused() -> None:
    page = page_of(10_000)
    seal, (whole,) = sealed(page, os.urandom(10_000), WHOLE)
    frames = buffers(10_000)
    for index, frame in enumerate(frames):
        frame[:-TAG_BYTES] = whole[index * 4096 : index * 4096 + len(frame) - TAG_BYTES]
    opener = PageOpener(page, replace(seal, tags=bytes(16)), GEOMETRY, KEY)
    out = dirty(10_000)
    refused(lambda: opener.open_frames(0, frames, out), out)


# ---------- nonces and threads


def test_a_frame_is_never_sealed_twice() -> None:
    """A second plaintext under one nonce would give both away."""
    sealer = PageSealer(page_of(10_000), 10_000, GEOMETRY, KEY)
    frames = buffers(10_000)
    sealer.seal_frames(1, memoryview(bytes(4096)), frames[1:2])
    with pytest.raises(RuntimeError, match="frame 1"):
        sealer.seal_frames(0, memoryview(bytes(10_000)), frames)
    with pytest.raises(RuntimeError, match="not sealed"):
        sealer.finish()


def test_two_records_of_one_page_share_nothing() -> None:
    page = page_of(10_000)
    plaintext = bytes(10_000)
    one, first = sealed(page, plaintext)
    other, second = sealed(page, plaintext)
    assert one.salt != other.salt
    assert not {bytes(f[:16]) for f in first} & {bytes(f[:16]) for f in second}


@given(st.integers(0, 2**32 - 1))
def test_nonces_of_a_record_differ(tail: int) -> None:
    """Whatever the salt, no two of the 256 frames that a page may have share a nonce."""
    from racerd.crypto.sealing import _PageCipher

    salt = bytes(20) + tail.to_bytes(4, "big")
    cipher = _PageCipher(page_of(10), 10, (64 * KIB, 4 * KIB), KEY, salt)
    nonces = {cipher.nonce(frame) for frame in range(256)}
    assert len(nonces) == 256
    assert cipher.nonce(0) == salt[12:]


def test_threads_share_a_sealer_and_an_opener() -> None:
    """The AEAD runs without the GIL: eight threads on one page must not disturb each other."""
    length = 64 * KIB
    page = page_of(length)
    plaintext = os.urandom(length)
    frames = buffers(length)
    sealer = PageSealer(page, length, GEOMETRY, KEY)
    out = dirty(length)
    step = GEOMETRY.frame_bytes
    failures: list[BaseException] = []

    def side_by_side(call: Callable[[int], None]) -> None:
        start = threading.Barrier(8)

        def run(number: int) -> None:
            start.wait()
            try:
                call(number * 2)
            except BaseException as error:  # noqa: BLE001  shown by the assertion below
                failures.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def seal(first: int) -> None:
        part = memoryview(plaintext)[first * step : (first + 2) * step]
        sealer.seal_frames(first, part, frames[first : first + 2])

    side_by_side(seal)
    opener = PageOpener(page, sealer.finish(), GEOMETRY, KEY)

    def open_two(first: int) -> None:
        for _ in range(50):
            opener.open_frames(
                first, frames[first : first + 2], out[first * step : (first + 2) * step]
            )

    side_by_side(open_two)
    assert not failures
    assert out == plaintext


def test_plaintext_that_does_not_fit_its_frames_is_refused() -> None:
    sealer = PageSealer(page_of(10_000), 10_000, GEOMETRY, KEY)
    frames = buffers(10_000)
    for first, plain, some in (
        (0, 9_999, frames),
        (0, 10_000, frames[:2]),
        (1, 10_000, frames),
    ):
        with pytest.raises(ValueError, match="frames"):
            sealer.seal_frames(first, memoryview(bytes(plain)), some)
    with pytest.raises(ValueError, match="10000 bytes, not 9999"):
        PageSealer(page_of(10_000), 9_999, GEOMETRY, KEY)


# ---------- material for another device


def test_frame_material_opens_the_same_frames_and_does_not_show() -> None:
    """R9: what the GPU's worker is given is what the host uses."""
    plaintext = os.urandom(10_000)
    page = page_of(10_000)
    seal, frames = sealed(page, plaintext)
    opener = PageOpener(page, seal, GEOMETRY, KEY)
    material = opener.frame_material(1, 2)
    aead = AESGCM(material.key)
    opened = b"".join(
        aead.decrypt(
            material.nonces[i * 12 : (i + 1) * 12],
            bytes(frames[1 + i]),
            material.aad_head + material.aad_tails[i * 4 : (i + 1) * 4],
        )
        for i in range(2)
    )
    assert opened == plaintext[4096:]
    assert material.last_bytes == 10_000 - 2 * 4096
    assert material.key.hex() not in repr(material)
    assert repr(material.key) not in repr(material)
    with pytest.raises(ValueError, match="frames"):
        opener.frame_material(2, 2)


def test_a_page_with_one_tag_has_no_frame_material() -> None:
    page = page_of(10_000)
    seal, _ = sealed(page, os.urandom(10_000), WHOLE)
    with pytest.raises(ValueError, match="single tag"):
        PageOpener(page, seal, GEOMETRY, KEY).frame_material(0, 1)

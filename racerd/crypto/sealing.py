"""Sealing pages and opening them: AES-256-GCM, one frame at a time.

Layer: crypto; blocking and thread-safe, meant for the `open` worker threads. Frames go straight
between the caller's buffers; the AEAD calls release the GIL, and what Python does around each is a
few microseconds beside the 50 of a 256 KiB frame.

Key, nonce and AAD of a frame
    key     derived from the epoch's master key and salt[0:12] (`EpochKey.record_key`)
    nonce   salt[12:20] || (salt[20:24] XOR frame index, 32-bit big endian): frame 0 of a record is
            exactly XAES-256-GCM under the nonce `salt`, and no two frames of a record share one
    AAD     "racer page 2\\0" || cache || bucket || key || ETag || object size, each with its length
            before it || page index (u64) || page bytes || frame bytes || page length || epoch ||
            frame count || frame index (u32 each), big endian. A page that is one frame has its
            page size for the frame size
Everything variable is length-prefixed and everything else has a fixed width, so no two places give
the same AAD: a swapped, stale, truncated, moved or zeroed frame does not verify. The page and frame
sizes are bound because the same index under another page size is another range of the object.

A single-frame seal covers a page of many frames' length with one tag (what format v1 of the store
holds). It is bound like any page that is one frame, and opens only as a whole.

Invariant: after any failure the output range holds zeros, never bytes that were not verified.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from racerd.crc64 import crc64, crc64_combine
from racerd.crypto.epoch_key import EpochKey
from racerd.errors import IntegrityError, Retry
from racerd.ids import PageId
from racerd.pages import SALT_BYTES, TAG_BYTES, PageGeometry, Seal
from racerd.units import KIB

_DOMAIN = b"racer page 2\0"
_PLACE = struct.Struct(">QIIIII")
_FRAME_INDEX = struct.Struct(">I")
_ZEROS = bytes(64 * KIB)


class _PageCipher:
    """Key, nonces and AADs of one record: what sealing and opening share."""

    __slots__ = ("_aad", "_nonce_head", "_nonce_tail", "aead", "frame_bytes", "frame_count",
                 "length", "page")  # fmt: skip

    def __init__(
        self,
        page: PageId,
        length: int,
        sizes: tuple[int, int],
        key: EpochKey,
        salt: bytes,
    ) -> None:
        page_bytes, frame_bytes = sizes
        self.page = page
        self.length = length
        self.frame_bytes = frame_bytes
        self.frame_count = -(-length // frame_bytes)
        self.aead = AESGCM(key.record_key(salt))
        self._nonce_head = salt[12:20]
        self._nonce_tail = int.from_bytes(salt[20:24], "big")
        bound_bytes = frame_bytes if self.frame_count > 1 else page_bytes
        place = _PLACE.pack(
            page.index, page_bytes, bound_bytes, length, key.epoch, self.frame_count
        )
        self._aad = _DOMAIN + page.version.packed + place

    def nonce(self, frame: int) -> bytes:
        return self._nonce_head + _FRAME_INDEX.pack(self._nonce_tail ^ frame)

    def aad(self, frame: int) -> bytes:
        return self._aad + _FRAME_INDEX.pack(frame)

    def span_bytes(self, first: int, count: int) -> int:
        """Plaintext bytes of frames [first, first + count). Raises ValueError outside the page."""
        if first < 0 or count < 1 or first + count > self.frame_count:
            raise ValueError(
                f"frames {first} to {first + count} are not in a page of {self.frame_count}"
            )
        start = first * self.frame_bytes
        return min(start + count * self.frame_bytes, self.length) - start


@dataclass(frozen=True, slots=True, repr=False)
class FrameMaterial:
    """Key, nonces (12 bytes each) and AADs (head and equal tails) of consecutive frames."""

    key: bytes
    nonces: bytes
    aad_head: bytes
    aad_tails: bytes
    last_bytes: int


class PageSealer:
    """Seals one page under a fresh random salt. Make a new one for every record."""

    def __init__(self, page: PageId, length: int, geometry: PageGeometry, key: EpochKey) -> None:
        """`length`: plaintext bytes of the page; must be what the object's size implies."""
        expected = geometry.page_length(page.version.size, page.index)
        if length < 1 or length != expected:
            raise ValueError(f"{page.text} has {expected} bytes, not {length}")
        self._epoch = key.epoch
        self._salt = os.urandom(SALT_BYTES)
        self._cipher = _PageCipher(
            page, length, (geometry.page_bytes, geometry.frame_bytes), key, self._salt
        )
        count = self._cipher.frame_count
        self._unsealed = set(range(count))
        self._tags = [b""] * count
        self._crcs = [0] * count
        self._plain_crcs = [0] * count

    def seal_frames(self, first: int, plaintext: memoryview, frames: Sequence[memoryview]) -> None:
        """Seals frames `first`… from `plaintext`, which holds them back to back.

        `frames[i]` is writable and gets ciphertext and tag: its length is the frame's plus 16.
        The caller owns every buffer throughout. Disjoint frames may be sealed on several threads
        at once. Raises ValueError on sizes that do not fit, RuntimeError for a frame that was
        sealed before: a second plaintext under one nonce would give both away.
        """
        cipher = self._cipher
        if len(plaintext) != cipher.span_bytes(first, len(frames)):
            raise ValueError(f"{len(plaintext)} bytes are not {len(frames)} frames from {first}")
        start = 0
        for index, frame in enumerate(frames, first):
            # Discarding from a set is atomic: of two threads that mean one frame, one loses here.
            try:
                self._unsealed.remove(index)
            except KeyError:
                raise RuntimeError(f"frame {index} was sealed before") from None
            stop = min(start + cipher.frame_bytes, len(plaintext))
            plain = plaintext[start:stop]
            cipher.aead.encrypt_into(cipher.nonce(index), plain, cipher.aad(index), frame)
            self._crcs[index] = crc64(frame[: stop - start])
            self._plain_crcs[index] = crc64(plain)
            self._tags[index] = bytes(frame[stop - start :])
            start = stop

    def finish(self) -> Seal:
        """Returns the seal once every frame was sealed; else raises RuntimeError."""
        missing = self._tags.count(b"")
        if missing:
            raise RuntimeError(f"{missing} frames of the page are not sealed")
        cipher = self._cipher
        plain_crc = self._plain_crcs[0]
        for index in range(1, cipher.frame_count):
            frame_length = min(cipher.frame_bytes, cipher.length - index * cipher.frame_bytes)
            plain_crc = crc64_combine(plain_crc, self._plain_crcs[index], frame_length)
        return Seal(
            epoch=self._epoch,
            salt=self._salt,
            length=cipher.length,
            tags=b"".join(self._tags),
            crcs=tuple(self._crcs),
            plain_crc=plain_crc,
        )


class PageOpener:
    """Opens frames of one sealed page. Derives the record's key once; reusable, thread-safe."""

    def __init__(self, page: PageId, seal: Seal, geometry: PageGeometry, key: EpochKey) -> None:
        """`key` is the keyring's for `seal.epoch`.

        Raises IntegrityError `corrupt_seal` when the seal cannot be this page's: its length or
        its number of tags is not what the object's size and the geometry imply.
        """
        if key.epoch != seal.epoch:
            raise ValueError(f"the seal is of epoch {seal.epoch}, the key of {key.epoch}")
        expected = geometry.page_length(page.version.size, page.index)
        frames_expected = geometry.frame_count(seal.length)
        self.single_frame = seal.frame_count == 1 and frames_expected > 1
        if (
            seal.length < 1
            or seal.length != expected
            or not (self.single_frame or seal.frame_count == frames_expected)
        ):
            raise IntegrityError(
                "corrupt_seal",
                f"the seal of {page.text} has {seal.length} bytes in {seal.frame_count} frames"
                f" where {expected} bytes in {geometry.frame_count(max(expected, 0))} belong",
                retry=Retry.ELSEWHERE,
            )
        frame_bytes = geometry.page_bytes if self.single_frame else geometry.frame_bytes
        self._seal = seal
        self._key = key
        self._cipher = _PageCipher(
            page, seal.length, (geometry.page_bytes, frame_bytes), key, seal.salt
        )

    def open_frame(self, index: int, frame: memoryview, out: memoryview) -> None:
        """Verifies and decrypts frame `index` into `out`, which has exactly the frame's length.

        `frame` is ciphertext with the tag right behind it. Raises IntegrityError `corrupt_tag`
        after wiping `out`; ValueError on sizes that do not fit, `out` wiped too.
        """
        self.open_frames(index, (frame,), out)

    def open_frames(self, first: int, frames: Sequence[memoryview], out: memoryview) -> None:
        """Verifies and decrypts whole frames `first`… back to back into `out`.

        `frames[i]` is ciphertext with the tag right behind it; `out` has exactly the bytes of
        these frames. Where `single_frame` says so, `frames` must be the whole page cut as the
        geometry cuts it; the 16 bytes behind each piece are not looked at.
        Buffers are the caller's throughout and touched by nobody after the return.
        Raises IntegrityError `corrupt_tag` after wiping all of `out`; ValueError on sizes that do
        not fit, `out` wiped too.
        """
        try:
            if self.single_frame:
                self._open_whole(first, frames, out)
            else:
                self._open_each(first, frames, out)
        except BaseException:
            wipe(out)
            raise

    def _open_each(self, first: int, frames: Sequence[memoryview], out: memoryview) -> None:
        cipher = self._cipher
        if len(out) != cipher.span_bytes(first, len(frames)):
            raise ValueError(f"{len(out)} bytes of room for {len(frames)} frames from {first}")
        step = cipher.frame_bytes
        nonce, aad, decrypt_into = cipher.nonce, cipher.aad, cipher.aead.decrypt_into
        # Each frame is prepared when its turn comes. Preparing many at once holds the interpreter
        # lock for as long as another thread takes for a frame, and that one then waits. A frame of
        # the wrong length does not fit its part of `out`: the AEAD says ValueError.
        index, at = first, 0
        try:
            for frame in frames:
                decrypt_into(nonce(index), frame, aad(index), out[at : at + step])
                index += 1
                at += step
        except InvalidTag:
            self._refuse(index)

    def _open_whole(self, first: int, frames: Sequence[memoryview], out: memoryview) -> None:
        """One message under one tag, scattered over buffers: the streaming interface takes it."""
        cipher = self._cipher
        lengths = [len(frame) - TAG_BYTES for frame in frames]
        if first != 0 or not len(out) == cipher.length == sum(lengths):
            raise ValueError(f"a page of one frame opens as a whole: {cipher.length} bytes")
        gcm = modes.GCM(cipher.nonce(0), self._seal.tag(0), min_tag_length=TAG_BYTES)
        context = Cipher(algorithms.AES(self._key.record_key(self._seal.salt)), gcm).decryptor()
        context.authenticate_additional_data(cipher.aad(0))
        start = 0
        for frame, length in zip(frames, lengths, strict=True):
            start += context.update_into(frame[:length], out[start : start + length])
        try:
            context.finalize()
        except InvalidTag:
            self._refuse(0)

    def frame_material(self, first: int, count: int) -> FrameMaterial:
        """What another device needs to open frames [first, first + count): the GPU's worker.

        Raises ValueError outside the page, and for a page with one tag for all of it.
        """
        cipher = self._cipher
        if self.single_frame:
            raise ValueError("a page with a single tag is opened on the host only")
        span = cipher.span_bytes(first, count)
        frames = range(first, first + count)
        return FrameMaterial(
            key=self._key.record_key(self._seal.salt),
            nonces=b"".join(cipher.nonce(frame) for frame in frames),
            aad_head=cipher.aad(first)[: -_FRAME_INDEX.size],
            aad_tails=b"".join(_FRAME_INDEX.pack(frame) for frame in frames),
            last_bytes=span - (count - 1) * cipher.frame_bytes,
        )

    def _refuse(self, frame: int) -> NoReturn:
        raise IntegrityError(
            "corrupt_tag",
            f"{self._cipher.page.text} frame {frame} does not verify",
            hint="the copy is dropped and another source is asked; if it repeats, check the disk",
            retry=Retry.ELSEWHERE,
        ) from None


def wipe(out: memoryview) -> None:
    """Fills `out` with zeros."""
    for start in range(0, len(out), len(_ZEROS)):
        part = out[start : start + len(_ZEROS)]
        part[:] = _ZEROS[: len(part)]

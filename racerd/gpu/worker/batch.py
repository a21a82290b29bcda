"""The job block of a batch: keys, frame jobs and AADs as the kernels read them.

Layer: gpu worker, pure but for the keys module. A block lies in a pinned buffer and goes to the
device in one copy: record keys first, then frame jobs, then AADs. It holds keys and is wiped, here
and on the device, when its batch is done.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from racerd.gpu import keys, layout
from racerd.gpu.protocol import ReadPage
from racerd.units import KIB, round_up

PAGES_MAX = 8
FRAMES_MAX = 1024
AAD_BYTES_MAX = 768 * KIB

_JOBS_AT = PAGES_MAX * layout.RECORD_KEY_BYTES
_AADS_AT = round_up(_JOBS_AT + FRAMES_MAX * layout.FRAME_JOB_BYTES, 16)
BLOCK_BYTES = _AADS_AT + AAD_BYTES_MAX

_BLOCK = keys.BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page's ciphertext lies on the device, and where its plaintext goes."""

    source: int  # address of the first frame
    pitch: int  # from one frame to the next
    destination: int  # address of the first byte that is wanted


class JobBlock:
    """A block that is being filled. `view` is of BLOCK_BYTES; `device` is where it will lie."""

    def __init__(self, view: memoryview, device: int, frame_bytes: int) -> None:
        self._view = view
        self._device = device
        self._frame_bytes = frame_bytes
        self.pages = 0
        self.frames = 0
        self._aads_end = _AADS_AT

    @property
    def keys_address(self) -> int:
        return self._device

    @property
    def jobs_address(self) -> int:
        return self._device + _JOBS_AT

    @property
    def used_bytes(self) -> int:
        """How much of the block must be copied, and wiped."""
        return self._aads_end

    def has_room(self, read: ReadPage) -> bool:
        return (
            self.pages < PAGES_MAX
            and self.frames + read.frame_count <= FRAMES_MAX
            and self._aads_end + _aad_room(read) <= BLOCK_BYTES
        )

    def add(self, read: ReadPage, place: Place) -> None:
        """Adds the frames of `read`. The caller asked `has_room`."""
        count = read.frame_count
        hash_key, masked = keys.hash_key_and_masked_tags(read.key, read.nonces, read.tags)
        layout.RECORD_KEY.pack_into(
            self._view,
            self.pages * layout.RECORD_KEY_BYTES,
            keys.key_schedule(read.key),
            hash_key,
        )
        aad, aad_pitch, aad_bytes = self._add_aads(read)
        # All frames of the page at once: one at a time costs the interpreter 3 us each.
        jobs = np.frombuffer(
            self._view,
            layout.FRAME_JOB,
            count,
            _JOBS_AT + self.frames * layout.FRAME_JOB_BYTES,
        )
        index = np.arange(count, dtype=np.int64)
        start = index * self._frame_bytes
        length = np.full(count, self._frame_bytes, np.int64)
        length[-1] = read.last_bytes
        skip = np.minimum(np.maximum(read.skip - start, 0), length)
        jobs["source"] = place.source + index * place.pitch
        jobs["destination"] = place.destination + np.maximum(start - read.skip, 0)
        jobs["aad"] = aad + index * aad_pitch
        jobs["crc"] = np.frombuffer(read.crcs, "<u8")
        jobs["length"] = length
        jobs["skip"] = skip
        jobs["take"] = np.maximum(np.minimum(length, read.skip + read.take - start) - skip, 0)
        jobs["aad_bytes"] = aad_bytes
        jobs["record"] = self.pages
        jobs["nonce"] = np.frombuffer(read.nonces, "V12")
        jobs["masked_tag"] = np.frombuffer(masked, "V16")
        self.frames += count
        self.pages += 1

    def _add_aads(self, read: ReadPage) -> tuple[int, int, int]:
        """Adds every frame's AAD, zero padded. Returns the first's address, pitch and length."""
        tails, count = read.aad_tails, read.frame_count
        step = len(tails) // count
        length = len(read.aad_head) + step
        padding = bytes(-length % _BLOCK)
        start = self._aads_end
        aads = b"".join(
            part
            for i in range(count)
            for part in (read.aad_head, tails[i * step : (i + 1) * step], padding)
        )
        self._view[start : start + len(aads)] = aads
        self._aads_end += len(aads)
        return self._device + start, length + len(padding), length


def _aad_room(read: ReadPage) -> int:
    count = read.frame_count
    return count * round_up(len(read.aad_head) + len(read.aad_tails) // count, _BLOCK)


def problem_with(read: ReadPage, frame_bytes: int, target_bytes: int) -> str | None:
    """What makes `read` impossible, in words, or None. Nothing is launched that fails this."""
    count = read.frame_count
    if not 1 <= count <= FRAMES_MAX or not 1 <= read.last_bytes <= frame_bytes:
        return f"{count} frames, the last of {read.last_bytes} bytes"
    if len(read.key) != keys.KEY_BYTES or len(read.tags) != 16 * count:
        return "a key of the wrong length, or tags that are cut"
    if (len(read.nonces), len(read.crcs)) != (12 * count, 8 * count):
        return "as many nonces and CRCs as frames are needed"
    if len(read.aad_tails) % count or _aad_room(read) > AAD_BYTES_MAX:
        return "AADs of unequal length, or too long"
    total = (count - 1) * frame_bytes + read.last_bytes
    if read.skip < 0 or read.take < 1 or read.skip + read.take > total:
        return f"bytes {read.skip} to {read.skip + read.take} of {total}"
    if read.offset < 0 or read.offset + read.take > target_bytes:
        return f"{read.take} bytes at {read.offset} of a target of {target_bytes}"
    return None

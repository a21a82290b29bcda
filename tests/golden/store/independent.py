"""A writer of slabs that shares no code with racerd: docs/store-format.md in a second hand.

Provenance of `structures.json`: `python -m tests.golden.store.independent` wrote it. The CRC is
bit by bit; nothing of racerd is imported here.
"""

from __future__ import annotations

import json
from pathlib import Path

GOLDEN = Path(__file__).with_name("structures.json")
SLAB = bytes(range(16))
SALT = bytes(range(100, 124))
BLOCK = 4096


def crc64(data: bytes) -> int:
    crc = (1 << 64) - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ (1 << 64) - 1


def le(size: int, value: int) -> bytes:
    return value.to_bytes(size, "little")


def stamped(structure: bytes, length: int) -> bytes:
    """Pads to `length` and puts the CRC where it belongs."""
    whole = bytearray(structure.ljust(length, b"\0"))
    whole[8:16] = le(8, crc64(bytes(whole[:8] + whole[16:])))
    return bytes(whole)


def identity(cache: str, bucket: str, key: bytes, etag: str, size: int) -> bytes:
    parts = (cache.encode(), bucket.encode(), key, etag.encode(), size.to_bytes(8, "big"))
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def superblock(
    *, version: int, sequence: int, capacity: int, segment: int, checkpoint: int,
    page: int, frame: int,
) -> bytes:  # fmt: skip
    return stamped(
        b"RACERSLB" + bytes(8) + le(2, version) + bytes(2) + le(4, BLOCK) + SLAB
        + le(8, sequence) + le(8, capacity) + le(8, segment) + le(8, checkpoint)
        + le(4, page) + le(4, frame),
        512,
    ).ljust(BLOCK, b"\0")  # fmt: skip


def segment_header(*, number: int, generation: int, offset: int) -> bytes:
    return stamped(
        b"RACERSEG" + bytes(8) + le(2, 2) + bytes(2) + le(4, number) + SLAB
        + le(8, generation) + le(8, offset),
        512,
    ).ljust(BLOCK, b"\0")  # fmt: skip


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def record_v2(
    *, name: bytes, token: bytes | None, cipher: bytes, tags: list[bytes], page: int, frame: int,
    epoch: int, offset: int, generation: int, sequence: int, index: int, plain_crc: int,
    header_bytes: int,
) -> bytes:  # fmt: skip
    frames = [cipher[start : start + frame] for start in range(0, len(cipher), frame)]
    record_bytes = header_bytes + len(padded(cipher))
    header = (
        b"RACERREC" + bytes(8) + le(2, 2) + le(2, len(frames)) + le(4, header_bytes)
        + le(4, record_bytes) + le(4, len(cipher)) + le(4, page) + le(4, frame) + le(4, epoch)
        + le(2, len(name)) + le(2, 65535 if token is None else len(token)) + SLAB
        + le(8, offset) + le(8, generation) + le(8, sequence) + le(8, index) + le(8, plain_crc)
        + SALT + name + (token or b"") + b"".join(tags)
        + b"".join(le(8, crc64(each)) for each in frames)
    )  # fmt: skip
    return stamped(header, header_bytes) + padded(cipher)


def record_v1(
    *, name: bytes, cipher: bytes, tag: bytes, epoch: int, offset: int, generation: int,
    sequence: int, index: int, plain_crc: int,
) -> bytes:  # fmt: skip
    header = (
        b"RACERREC" + bytes(8) + le(2, 1) + le(2, len(name)) + le(4, 120 + len(name))
        + le(4, len(cipher)) + le(4, epoch) + SLAB + le(8, offset) + le(8, generation)
        + le(8, sequence) + le(8, index) + le(8, crc64(cipher)) + le(8, plain_crc) + SALT + name
    )  # fmt: skip
    return padded(stamped(header, len(header)) + cipher + tag)


def tombstone(*, record_bytes: int, offset: int, generation: int) -> bytes:
    return stamped(
        b"RACERDEL" + bytes(8) + le(2, 2) + bytes(2) + le(4, BLOCK) + le(4, record_bytes)
        + bytes(16) + bytes(4) + SLAB + le(8, offset) + le(8, generation),
        512,
    ).ljust(BLOCK, b"\0")  # fmt: skip


def selector(cache: str, bucket: str, key: bytes, exact: bool) -> bytes:
    parts = (cache.encode(), bucket.encode(), key)
    return bytes([exact]) + b"".join(le(2, len(part)) + part for part in parts)


def notes(*, sequence: int, pins_version: int, pins: list[bytes], fences: list[bytes]) -> bytes:
    body = b"".join(pins + fences)
    return stamped(
        b"RACERNTS" + bytes(8) + le(2, 2) + bytes(2) + le(4, len(body)) + SLAB + le(8, sequence)
        + le(8, pins_version) + le(2, len(pins)) + le(2, len(fences)) + body,
        24 * 1024,
    )  # fmt: skip


def cipher_of(length: int) -> bytes:
    """Something that stands for ciphertext."""
    return bytes((index * 37 + index // 251) % 256 for index in range(length))


def structures() -> dict[str, bytes]:
    """One of each, with the values that `test_store_golden` expects."""
    name = identity("models", "bücket", b"llama/\xff one", '"e-1"', 70_000)
    return {
        "superblock": superblock(
            version=2, sequence=9, capacity=8 << 20, segment=1 << 20, checkpoint=32768,
            page=65536, frame=4096,
        ),
        "segment": segment_header(number=3, generation=77, offset=65536 + 3 * (1 << 20)),
        "record_v2": record_v2(
            name=name, token=b"1730", cipher=cipher_of(4464), tags=[b"A" * 16, b"B" * 16],
            page=65536, frame=4096, epoch=5, offset=1 << 20, generation=77, sequence=1234,
            index=1, plain_crc=0x0123456789ABCDEF, header_bytes=4096,
        ),
        "record_v1": record_v1(
            name=name, cipher=cipher_of(4464), tag=b"T" * 16, epoch=5, offset=1 << 20,
            generation=77, sequence=1234, index=1, plain_crc=0x0123456789ABCDEF,
        ),
        "tombstone": tombstone(record_bytes=12288, offset=1 << 20, generation=77),
        "notes": notes(
            sequence=4, pins_version=2, pins=[selector("models", "b", b"llama/", False)],
            fences=[selector("models", "b", b"x\xff", True)],
        ),
    }  # fmt: skip


def load() -> dict[str, bytes]:
    """The golden bytes as they were written once."""
    stored = json.loads(GOLDEN.read_text())
    return {
        name: bytes.fromhex("".join(entry["hex"])).ljust(entry["bytes"], b"\0")
        for name, entry in stored.items()
    }


def _dump() -> None:
    stored = {}
    for name, data in structures().items():
        text = data.rstrip(b"\0").hex()
        lines = [text[start : start + 96] for start in range(0, len(text), 96)]
        stored[name] = {"bytes": len(data), "hex": lines}
    GOLDEN.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    _dump()

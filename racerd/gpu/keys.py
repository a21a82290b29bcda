"""AES-256 key schedules, hash keys and masked tags: what the kernels need of a record's key.

Layer: gpu, pure; runs in the worker process. A record key is derived by `crypto` in the daemon and
is all that the worker learns; master keys never leave the daemon. Every AES block here is computed
by `cryptography`; the schedule itself is FIPS 197, section 5.2.

The results are as secret as the key: they live in the caller's buffers, which it wipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

KEY_BYTES = 32
NONCE_BYTES = 12
BLOCK_BYTES = 16
SCHEDULE_BYTES = 240

_KEY_WORDS = Struct(">8I")
_SCHEDULE_WORDS = Struct(">60I")
_FIRST_COUNTER = (1).to_bytes(4, "big")


def _make_sbox() -> bytes:
    """FIPS 197, section 5.1.1. `p` runs through the powers of 3 and `q` through their inverses."""
    box = bytearray(256)
    box[0] = 0x63
    p = q = 1
    while True:
        p ^= (p << 1) ^ (0x11B if p & 0x80 else 0)
        for shift in (1, 2, 4):
            q ^= q << shift & 0xFF
        if q & 0x80:
            q ^= 0x09
        turned = q * 0x101  # Two copies, so that a shift to the right turns.
        box[p] = (q ^ turned >> 7 ^ turned >> 6 ^ turned >> 5 ^ turned >> 4 ^ 0x63) & 0xFF
        if p == 1:
            return bytes(box)


_SBOX = _make_sbox()


def _substitute(word: int) -> int:
    return int.from_bytes(word.to_bytes(4, "big").translate(_SBOX), "big")


def key_schedule(key: bytes) -> bytes:
    """Returns the 15 round keys of AES-256, 240 bytes in the order of FIPS 197."""
    words = list(_KEY_WORDS.unpack(key))
    constant = 1 << 24
    for i in range(8, 60):
        word = words[-1]
        if i % 8 == 0:
            word = _substitute((word << 8 | word >> 24) & 0xFFFFFFFF) ^ constant
            constant <<= 1
        elif i % 8 == 4:
            word = _substitute(word)
        words.append(words[-8] ^ word)
    return _SCHEDULE_WORDS.pack(*words)


def frame_nonce(salt: bytes, frame: int) -> bytes:
    """The nonce of frame `frame` of the record with this salt (see `racerd.crypto.sealing`)."""
    tail = int.from_bytes(salt[20:24], "big") ^ frame
    return salt[12:20] + tail.to_bytes(4, "big")


def hash_key_and_masked_tags(
    key: bytes, nonces: Sequence[bytes], tags: Sequence[bytes]
) -> tuple[bytes, list[bytes]]:
    """Returns H = E(0), and for each frame its tag XOR E(nonce || 1): what GHASH must come to.

    Source: NIST SP 800-38D, section 7.2, with both sides of the comparison XORed with E(J0).
    """
    blocks = bytes(BLOCK_BYTES) + b"".join(nonce + _FIRST_COUNTER for nonce in nonces)
    encrypted = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks)
    masked = []
    for start, tag in zip(range(BLOCK_BYTES, len(encrypted), BLOCK_BYTES), tags, strict=True):
        mask = int.from_bytes(encrypted[start : start + BLOCK_BYTES], "big")
        masked.append((mask ^ int.from_bytes(tag, "big")).to_bytes(BLOCK_BYTES, "big"))
    return encrypted[:BLOCK_BYTES], masked

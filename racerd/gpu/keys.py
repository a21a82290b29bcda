"""AES-256 key schedules, hash keys and masked tags: what the kernels need of a record's key.

Layer: gpu, pure; runs in the worker process. A record key is derived by `crypto` in the daemon and
is all that the worker learns; master keys never leave the daemon. Every AES block here is computed
by `cryptography`; the schedule itself is FIPS 197, section 5.2.

The results are as secret as the key: they live in the caller's buffers, which it wipes.
"""

from __future__ import annotations

from struct import Struct

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

KEY_BYTES = 32
NONCE_BYTES = 12
BLOCK_BYTES = 16

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


def hash_key_and_masked_tags(key: bytes, nonces: bytes, tags: bytes) -> tuple[bytes, bytes]:
    """Returns H = E(0), and each frame's tag XOR E(nonce || 1): what its GHASH must come to.

    `nonces` has 12 bytes a frame, `tags` and the result 16. Source: NIST SP 800-38D, section 7.2,
    with both sides of the comparison XORed with E(J0).
    """
    first_counters = b"".join(
        nonces[at : at + NONCE_BYTES] + _FIRST_COUNTER for at in range(0, len(nonces), NONCE_BYTES)
    )
    encrypted = (
        Cipher(algorithms.AES(key), modes.ECB())
        .encryptor()
        .update(bytes(BLOCK_BYTES) + first_counters)
    )
    masks = int.from_bytes(encrypted[BLOCK_BYTES:], "big")
    masked = (masks ^ int.from_bytes(tags, "big")).to_bytes(len(tags), "big")
    return encrypted[:BLOCK_BYTES], masked

"""Key schedules, hash keys and masked tags for the kernels."""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from racerd.crypto.epoch_key import EpochKey
from racerd.gpu.keys import hash_key_and_masked_tags, key_schedule


def test_the_key_schedule_of_fips_197() -> None:
    """R9: FIPS 197, appendix A.3."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    schedule = key_schedule(key)
    assert len(schedule) == 240
    assert schedule[:32] == key
    assert schedule[32:48].hex() == "9ba354118e6925afa51a8b5f2067fcde"
    assert schedule[224:].hex() == "fe4890d1e6188d0b046df344706c631e"


@given(st.binary(min_size=32, max_size=32), st.lists(st.binary(min_size=12, max_size=12)))
def test_masked_tags_are_tags_without_their_mask(key: bytes, nonces: list[bytes]) -> None:
    """R9: an empty message's tag is the mask itself, so that it comes to GHASH of nothing: zero."""
    tags = b"".join(AESGCM(key).encrypt(nonce, b"", b"") for nonce in nonces)
    _, masked = hash_key_and_masked_tags(key, b"".join(nonces), tags)
    assert masked == bytes(16 * len(nonces))


def test_the_hash_key_is_the_encrypted_zero_block() -> None:
    """R9: McGrew and Viega, case 13: H for the zero key."""
    hash_key, _ = hash_key_and_masked_tags(bytes(32), b"", b"")
    assert hash_key.hex() == "dc95c078a2408989ad48a21492842087"


def test_a_record_key_is_all_that_is_handed_over() -> None:
    """R9: the worker gets keys that were derived; they tell nothing of each other or the master."""
    key = EpochKey(1, bytes(32))
    first, second = key.record_key(bytes(24)), key.record_key(b"\x01" + bytes(23))
    assert len({first, second, key.key}) == 3

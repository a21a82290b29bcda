"""Record keys against published vectors, and keys that do not show."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from racerd.crypto.epoch_key import EPOCH_MAX, EpochKey

GOLDEN = Path(__file__).parents[2] / "golden" / "crypto"
XAES = json.loads((GOLDEN / "xaes_256_gcm.json").read_text())
NIST = json.loads((GOLDEN / "aes_256_gcm_nist.json").read_text())


def unhex(vector: dict[str, Any]) -> dict[str, bytes]:
    return {name: bytes.fromhex(text) for name, text in vector.items()}


@pytest.mark.parametrize("vector", XAES["vectors"])
def test_record_keys_are_those_of_xaes_256_gcm(vector: dict[str, str]) -> None:
    """R20: the derivation is the published one; both halves of the CMAC subkey are seen."""
    v = unhex(vector)
    record_key = EpochKey(1, v["key"]).record_key(v["nonce"])
    assert record_key == v["derived_key"]
    assert AESGCM(record_key).encrypt(v["nonce"][12:], v["plaintext"], v["aad"]) == v["sealed"]


class Shake:
    """The specification's deterministic RNG: one SHAKE-128 stream."""

    def __init__(self, byte_count: int) -> None:
        self._stream = memoryview(hashlib.shake_128(b"").digest(byte_count))

    def take(self, count: int) -> bytes:
        taken, self._stream = self._stream[:count], self._stream[count:]
        assert len(taken) == count
        return bytes(taken)

    def take_vector(self) -> bytes:
        return self.take(self.take(1)[0])


def test_ten_thousand_accumulated_vectors() -> None:
    iterations = XAES["accumulated"]["iterations"]
    stream = Shake(iterations * (32 + 24 + 2 * 256))
    found = hashlib.shake_128()
    for _ in range(iterations):
        key, nonce = stream.take(32), stream.take(24)
        plaintext, aad = stream.take_vector(), stream.take_vector()
        record_key = EpochKey(1, key).record_key(nonce)
        found.update(AESGCM(record_key).encrypt(nonce[12:], plaintext, aad))
    assert found.hexdigest(32) == XAES["accumulated"]["shake128"]


@pytest.mark.parametrize("vector", NIST["vectors"])
def test_the_aead_is_aes_256_gcm(vector: dict[str, str]) -> None:
    """The interface that frames use, between caller buffers, against NIST's vectors."""
    v = unhex(vector)
    aead = AESGCM(v["key"])
    sealed = memoryview(bytearray(len(v["plaintext"]) + 16))
    aead.encrypt_into(v["nonce"], v["plaintext"], v["aad"], sealed)
    assert bytes(sealed) == v["ciphertext"] + v["tag"]
    opened = memoryview(bytearray(len(v["plaintext"])))
    aead.decrypt_into(v["nonce"], sealed, v["aad"], opened)
    assert bytes(opened) == v["plaintext"]


KEY = bytes(range(100, 132))


def test_a_key_does_not_show() -> None:
    """Not by repr, str, attributes, pickling or copying."""
    key = EpochKey(3, KEY)
    assert repr(key) == str(key) == "EpochKey(epoch=3)"
    assert not hasattr(key, "__dict__")
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError) as caught:
            leak(key)
        shown = "".join(traceback.format_exception(caught.value))
        assert KEY.hex() not in shown
        assert repr(KEY) not in shown


def _flags_of_mapping(address: int) -> str:
    """The VmFlags of the mapping that holds `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, stop = (int(part, 16) for part in head.split("-"))
            inside = start <= address < stop
        elif inside and head == "VmFlags:":
            return line
    raise AssertionError("no such mapping")


def test_key_memory_is_left_out_of_core_dumps_and_wiped() -> None:
    """The mapping has the kernel's `dd` flag; dropping the key leaves zeros."""
    import ctypes

    key = EpochKey(3, KEY)
    mapping = key._mapping
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    assert " dd" in _flags_of_mapping(address)
    assert key.key == KEY
    del key
    gc.collect()
    assert mapping[:32] == bytes(32)


@pytest.mark.parametrize("epoch", [0, -1, EPOCH_MAX + 1])
def test_epochs_are_32_bit_and_not_zero(epoch: int) -> None:
    with pytest.raises(ValueError, match="epoch"):
        EpochKey(epoch, KEY)


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_keys_have_32_bytes(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        EpochKey(1, bytes(length))


def test_the_same_key_is_recognised_whatever_its_epoch() -> None:
    assert EpochKey(1, KEY).same_key(EpochKey(2, KEY))
    assert not EpochKey(1, KEY).same_key(EpochKey(1, KEY[::-1]))

"""The kernels against `cryptography`, an independent CRC and published vectors.

They run through the real cuda.bindings, on the stand-in driver, or on a GPU where there is one.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from crcmod import mkCrcFun
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from racerd.crypto.epoch_key import EpochKey
from racerd.gpu.layout import Verdict
from tests.support.kernel_child import FILL, Case
from tests.support.standin import StandIn

_CRC = mkCrcFun(0x1AD93D23594C93659, initCrc=0, rev=True, xorOut=0xFFFFFFFFFFFFFFFF)


def run(standin: StandIn, batches: list[list[Case]]) -> list[tuple[list[int], list[bytes]]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_child"],
        input=pickle.dumps(batches),
        env=standin.environment(),
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


def seal(plaintext: bytes, rng: random.Random, aad_bytes: int, **window: int) -> Case:
    key, nonce, aad = rng.randbytes(32), rng.randbytes(12), rng.randbytes(aad_bytes)
    sealed = AESGCM(key).encrypt(nonce, plaintext, aad)
    ciphertext, tag = sealed[:-16], sealed[-16:]
    window = {"shift": 0, "skip": 0, "take": len(plaintext)} | window
    return Case(key, nonce, aad, ciphertext, tag, _CRC(ciphertext), **window)


def expected(case: Case, wanted: bytes) -> bytes:
    """The whole destination buffer: what was wanted at its place and nothing touched around it."""
    behind = case.buffer_bytes - case.shift - len(wanted)
    return bytes([FILL]) * case.shift + wanted + bytes([FILL]) * behind


def random_case(rng: random.Random, length: int) -> tuple[Case, bytes]:
    skip = rng.choice((0, 0, rng.randrange(length)))
    take = rng.choice((length - skip, rng.randint(1, length - skip)))
    shift = rng.choice((0, 16, 1, 3, 4, 8, 13))
    plaintext = rng.randbytes(length)
    case = seal(plaintext, rng, rng.randrange(300), shift=shift, skip=skip, take=take)
    return case, plaintext


def test_every_size_offset_and_window_gives_the_plaintext(standin: StandIn) -> None:
    """R9: the kernels agree with OpenSSL on sizes around every boundary, at any alignment."""
    rng = random.Random(20)
    edges = [1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 8191, 8192, 8193, 131072, 262144, 262143]
    lengths = edges + [rng.randint(1, 70_000) for _ in range(24)]
    lengths += [1_048_544, 1_048_576, 1_048_593]  # Where the counter's second half turns.
    pairs = [random_case(rng, length) for length in lengths]
    batches = [[case for case, _ in pairs[i : i + 8]] for i in range(0, len(pairs), 8)]
    for batch, (verdicts, outputs) in zip(batches, run(standin, batches), strict=True):
        assert verdicts == [Verdict.OK] * len(batch)
        for case, output in zip(batch, outputs, strict=True):
            plaintext = next(p for c, p in pairs if c is case)
            wanted = plaintext[case.skip : case.skip + case.take]
            assert output == expected(case, wanted), (len(plaintext), case.shift, case.skip)


def test_a_frame_of_more_than_four_mebibytes(standin: StandIn) -> None:
    """R9: 4 MiB + 5 bytes, unaligned: several counter turns and a cut block."""
    rng = random.Random(5)
    plaintext = rng.randbytes(4 * 2**20 + 5)
    case = seal(plaintext, rng, 40, shift=7)
    [(verdicts, outputs)] = run(standin, [[case]])
    assert verdicts == [Verdict.OK]
    assert outputs[0] == expected(case, plaintext)


def test_an_empty_frame_has_only_a_tag(standin: StandIn) -> None:
    """R9: no ciphertext; CRC zero; the tag covers the AAD alone."""
    rng = random.Random(1)
    good = seal(b"", rng, 33)
    bad = replace(good, aad=good.aad[:-1] + b"\0")
    [(verdicts, outputs)] = run(standin, [[good, bad]])
    assert verdicts == [Verdict.OK, Verdict.TAG]
    assert outputs == [expected(good, b""), expected(bad, b"")]


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("length", [5, 16, 4096, 9001])
def test_what_was_changed_is_refused_and_leaves_zeros(standin: StandIn, length: int) -> None:
    """R9, R22: every kind of change gives its verdict, and zeros in place of the plaintext."""
    rng = random.Random(length)
    good = seal(rng.randbytes(length), rng, 50, shift=3)
    at = rng.randrange(length)
    rotten = _flip(good.ciphertext, at)
    cases = {
        "rot": (replace(good, ciphertext=rotten), Verdict.CRC),
        "CRC": (replace(good, crc=good.crc ^ 1 << 63), Verdict.CRC),
        "forged, CRC right": (
            replace(good, ciphertext=rotten, crc=_CRC(rotten)), Verdict.TAG),
        "tag, first byte": (replace(good, tag=_flip(good.tag, 0)), Verdict.TAG),
        "tag, last byte": (replace(good, tag=_flip(good.tag, 15)), Verdict.TAG),
        "AAD": (replace(good, aad=_flip(good.aad, 49)), Verdict.TAG),
        "nonce": (replace(good, nonce=_flip(good.nonce, 11)), Verdict.TAG),
        "key": (replace(good, key=_flip(good.key, 31)), Verdict.TAG),
    }  # fmt: skip
    [(verdicts, outputs)] = run(standin, [[case for case, _ in cases.values()]])
    for name, verdict, output in zip(cases, verdicts, outputs, strict=True):
        case, wanted = cases[name]
        assert verdict == wanted, name
        assert output == expected(case, bytes(length)), name


# NIST CAVP gcmDecrypt256.rsp and "The Galois/Counter Mode of Operation" (McGrew, Viega), cases
# 13 to 16: key, nonce, AAD, ciphertext, tag, plaintext.
_KEY16 = "feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308"
_PLAIN16 = (
    "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
    "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255"
)
_CIPHER16 = (
    "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
    "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad"
)
_AAD16 = "feedfacedeadbeeffeedfacedeadbeefabaddad2"
_VECTORS = [
    ("00" * 32, "00" * 12, "", "", "530f8afbc74536b9a963b4f1c4cb738b", ""),
    ("00" * 32, "00" * 12, "", "cea7403d4d606b6e074ec5d3baf39d18",
     "d0d1c8a799996bf0265b98b5d48ab919", "00" * 16),
    (_KEY16, "cafebabefacedbaddecaf888", "", _CIPHER16,
     "b094dac5d93471bdec1a502270e3cc6c", _PLAIN16),
    (_KEY16, "cafebabefacedbaddecaf888", _AAD16, _CIPHER16[:120],
     "76fc6ece0f4e1768cddf8853bb2d551b", _PLAIN16[:120]),
]  # fmt: skip


def test_published_gcm_vectors(standin: StandIn) -> None:
    """R9: the words that NIST's vectors demand, right and with the tag changed."""
    good = []
    for key, nonce, aad, ciphertext, tag, _ in _VECTORS:
        data = bytes.fromhex(ciphertext)
        parts = [bytes.fromhex(part) for part in (key, nonce, aad)]
        good.append(Case(*parts, data, bytes.fromhex(tag), _CRC(data), 0, 0, len(data)))
    bad = [replace(case, tag=_flip(case.tag, 7)) for case in good]
    [(verdicts, outputs), (refused, _)] = run(standin, [good, bad])
    assert verdicts == [Verdict.OK] * len(good)
    assert refused == [Verdict.TAG] * len(bad)
    for case, output, vector in zip(good, outputs, _VECTORS, strict=True):
        assert output == expected(case, bytes.fromhex(vector[5]))


def test_a_key_derived_as_xaes_opens_frame_zero(standin: StandIn) -> None:
    """R9: XAES-256-GCM's own vector (C2SP): key 01…, nonce "ABCD…", plaintext "XAES-256-GCM"."""
    salt = b"ABCDEFGHIJKLMNOPQRSTUVWX"
    key = EpochKey(1, b"\x01" * 32).record_key(salt)
    sealed = bytes.fromhex("ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271")
    ciphertext, tag = sealed[:-16], sealed[-16:]
    case = Case(key, salt[12:], b"", ciphertext, tag, _CRC(ciphertext), 0, 0, len(ciphertext))
    [(verdicts, outputs)] = run(standin, [[case]])
    assert verdicts == [Verdict.OK]
    assert outputs[0] == expected(case, b"XAES-256-GCM")


def test_host_code_cannot_touch_device_memory(standin: StandIn) -> None:
    """R9: the stand-in catches what a GPU would: a device pointer used as if it were host's."""
    touch = """
import ctypes
from cuda.bindings import driver as cuda
cuda.cuInit(0)
cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])
address = int(cuda.cuMemAlloc(4096)[1])
print("allocated", flush=True)
ctypes.string_at(address, 1)
print("touched", flush=True)
"""
    done = standin.run(touch)
    assert done.stdout == "allocated\n"
    assert done.returncode == -11
    assert standin.run(touch, FAKECUDA_OPEN="1").returncode == 0
    assert os.environ.get("LD_PRELOAD") is None

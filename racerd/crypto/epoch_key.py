"""One master key of an epoch, and the derivation of record keys from it.

Layer: crypto; values, safe from any thread. A record key is derived as XAES-256-GCM (C2SP) derives
its subkey: two AES-256 blocks over CMAC-padded counters, from the first 96 bits of the record's
salt. No key ever encrypts two records, so the 96-bit nonces of AES-GCM stop being a limit.

The 32 bytes live in an anonymous mapping of their own that is left out of core dumps and is
zeroed when the key is dropped. Copies that CPython and OpenSSL make while they work lie on the
common heap and are out of reach from here; `racerd.runtime.hardening` keeps the whole process from
being dumped, which covers those too.
"""

from __future__ import annotations

import mmap
from typing import NoReturn

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

KEY_BYTES = 32
EPOCH_MAX = 2**32 - 1

_BLOCK_BYTES = 16
_CONTEXT_BYTES = 12
# SP 800-108r1 counter mode with CMAC: [i]16 || "X" || 0x00 || context, for i = 1 and 2.
_COUNTER_1 = b"\x00\x01X\x00"
_COUNTER_2 = b"\x00\x02X\x00"


class EpochKey:
    """The master key numbered `epoch`. Never shown: not by repr, pickling or comparison."""

    __slots__ = ("_cipher", "_k1", "_mapping", "epoch")

    def __init__(self, epoch: int, key: bytes) -> None:
        if not 1 <= epoch <= EPOCH_MAX:
            raise ValueError(f"an epoch is 1 to {EPOCH_MAX}, not {epoch}")
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self.epoch = epoch
        self._mapping = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapping.madvise(mmap.MADV_DONTDUMP)
        self._mapping[:KEY_BYTES] = key
        view = memoryview(self._mapping)[:KEY_BYTES].toreadonly()
        self._cipher = Cipher(algorithms.AES(view), modes.ECB())
        self._k1 = _cmac_k1(self._cipher)

    @property
    def key(self) -> bytes:
        """A copy of the 32 key bytes, on the common heap: for writing a key file, and for tests."""
        return self._mapping[:KEY_BYTES]

    def record_key(self, salt: bytes) -> bytes:
        """Returns the 32-byte AES-256-GCM key of the record whose salt begins with these 12 bytes.

        Source: C2SP XAES-256-GCM, "Detailed key derivation algorithm", steps 3 to 5.
        """
        context = salt[:_CONTEXT_BYTES]
        first = int.from_bytes(_COUNTER_1 + context, "big") ^ self._k1
        second = int.from_bytes(_COUNTER_2 + context, "big") ^ self._k1
        blocks = first.to_bytes(_BLOCK_BYTES, "big") + second.to_bytes(_BLOCK_BYTES, "big")
        return self._cipher.encryptor().update(blocks)

    def same_key(self, other: EpochKey) -> bool:
        """Whether both hold the same bytes, whatever their epochs."""
        return self._mapping[:KEY_BYTES] == other._mapping[:KEY_BYTES]

    def __repr__(self) -> str:
        return f"EpochKey(epoch={self.epoch})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an EpochKey is not pickled: its key would leave this process")

    def __del__(self, _zeros: bytes = bytes(KEY_BYTES)) -> None:
        # Bound early: when the interpreter ends, the names of this module may be gone.
        mapping = getattr(self, "_mapping", None)  # Absent where the constructor refused.
        if mapping is not None:
            mapping.seek(0)
            mapping.write(_zeros)


def _cmac_k1(cipher: Cipher[modes.ECB]) -> int:
    """The first CMAC subkey (SP 800-38B, section 6.1), as a 128-bit integer."""
    zero_block = int.from_bytes(cipher.encryptor().update(bytes(_BLOCK_BYTES)), "big")
    doubled = (zero_block << 1) & (2**128 - 1)
    return doubled ^ 0x87 if zero_block >> 127 else doubled

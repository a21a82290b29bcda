"""CRC-64/NVME: the one door to awscrt.

Layer: bottom. Polynomial 0xAD93D23594C93659 (reflected 0x9A6C9329AC4BC9B5), init and xorout all
ones; check value of b"123456789" is 0xAE8B14860A799888. The same CRC that S3 and Azure publish.
Source: NVM Express NVM Command Set Specification 1.0, section 5.2.1.3.4. Releases the GIL.
"""

from __future__ import annotations

from awscrt import checksums

from racerd.units import BytesLike


def crc64(data: BytesLike, previous: int = 0) -> int:
    """Returns the CRC of what `previous` covers followed by `data`."""
    return checksums.crc64nvme(data, previous)  # type: ignore[arg-type]  # takes any buffer


def crc64_combine(first: int, second: int, second_bytes: int) -> int:
    """Returns the CRC of A + B from the CRCs of A and B and the length of B in bytes."""
    return checksums.combine_crc64nvme(first, second, second_bytes)

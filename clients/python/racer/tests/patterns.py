"""Bytes to read."""

MIB = 1 << 20


def pattern(size: int) -> bytes:
    """Bytes that differ from page to page and from part to part."""
    block = bytes((i * 7 + i // 256) % 251 for i in range(251 * 256))
    return (block * (size // len(block) + 1))[:size]

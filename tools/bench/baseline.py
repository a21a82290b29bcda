"""What the machine can do without us: the numerators of every ratio that `make bench` prints.

Each function does the bare work with nothing around it, on memory that was touched before, and
returns bytes per second.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from obstore.store import HTTPStore

TAG_BYTES = 16
SLOT_EXTRA_BYTES = 4096


def _on_threads(count: int, work: Callable[[int], None]) -> float:
    """Runs `work(0)` … `work(count - 1)` side by side and returns the seconds it took."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


class BareDecrypt:
    """`AESGCM.decrypt_into` of frames that are `size` bytes together, into touched memory.

    `huge` backs source and target with huge pages, which makes it a quarter faster.
    """

    def __init__(self, size: int, frame_bytes: int, threads: int, *, huge: bool = False) -> None:
        self.size = size
        self.frame_bytes = frame_bytes
        self.threads = threads
        self._cipher = AESGCM(os.urandom(32))
        self._slot = frame_bytes + SLOT_EXTRA_BYTES
        self._frames = size // frame_bytes
        self._source = _anonymous(self._frames * self._slot, huge=huge)
        self._target = _anonymous(size, huge=huge)
        plain = os.urandom(frame_bytes)
        for index in range(self._frames):
            self._cipher.encrypt_into(b"\0" * 12, plain, b"aad" * 40, self._sealed(index))
        self.run()

    def _sealed(self, index: int) -> memoryview:
        start = index * self._slot
        return self._source[start : start + self.frame_bytes + TAG_BYTES]

    def run(self) -> float:
        """Bytes per second of one pass over everything."""

        def work(thread: int) -> None:
            for index in range(thread, self._frames, self.threads):
                out = self._target[index * self.frame_bytes : (index + 1) * self.frame_bytes]
                self._cipher.decrypt_into(b"\0" * 12, self._sealed(index), b"aad" * 40, out)

        return self._frames * self.frame_bytes / _on_threads(self.threads, work)


def _anonymous(size: int, *, huge: bool) -> memoryview:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return memoryview(mapping)


def bare_preadv(path: Path, size: int, block_bytes: int, threads: int) -> float:
    """O_DIRECT `preadv` of the first `size` bytes of `path` in blocks, into touched memory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    buffers = [mmap.mmap(-1, block_bytes) for _ in range(threads)]
    for buffer in buffers:
        buffer[::4096] = b"\1" * (block_bytes // 4096)
    blocks = size // block_bytes
    try:

        def work(thread: int) -> None:
            for block in range(thread, blocks, threads):
                os.preadv(descriptor, [buffers[thread]], block * block_bytes)

        return blocks * block_bytes / _on_threads(threads, work)
    finally:
        os.close(descriptor)


def bare_obstore(url: str, key: str, size: int, block_bytes: int, threads: int) -> float:
    """`obstore.get_range` of a whole object in blocks; the bytes are dropped as they come."""
    store = HTTPStore.from_url(url, client_options={"allow_http": True})

    def fetch(start: int) -> int:
        return len(obstore.get_range(store, key, start=start, end=min(size, start + block_bytes)))

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        got = sum(pool.map(fetch, range(0, size, block_bytes)))
        seconds = time.perf_counter() - start
    if got != size:
        raise RuntimeError(f"obstore returned {got} of {size} bytes")
    return size / seconds

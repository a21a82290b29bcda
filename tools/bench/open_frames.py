"""How much of bare `AESGCM.decrypt_into` does `PageOpener.open_frames` keep, on 1 and N threads?

Run: python tools/bench/open_frames.py [--json]. Pairs both in alternation on the same buffers and
prints GB/s and the ratio of the medians; the goal is 0.93. Gates nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from racerd.crypto.epoch_key import EpochKey
from racerd.crypto.sealing import PageOpener, PageSealer
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import TAG_BYTES, PageGeometry

GEOMETRY = PageGeometry()
ROUNDS = 15
PAGES_PER_ROUND = 8


class Lane:
    """One thread's page: sealed frames by racerd, the same frames sealed bare, one output."""

    def __init__(self, number: int) -> None:
        size = GEOMETRY.page_bytes
        key = EpochKey(1, os.urandom(32))
        version = ObjectVersion(
            ObjectId("bench", "models", b"llama/model.safetensors"), '"e"', size
        )
        page = PageId(version, 0)
        plaintext = memoryview(os.urandom(size))
        self.out = memoryview(bytearray(size))
        self.sealed = self._frames()
        sealer = PageSealer(page, size, GEOMETRY, key)
        sealer.seal_frames(0, plaintext, self.sealed)
        self.opener = PageOpener(page, sealer.finish(), GEOMETRY, key)
        self.aead, self.nonce = AESGCM(os.urandom(32)), os.urandom(12)
        self.bare = self._frames()
        step = GEOMETRY.frame_bytes
        self.outs = [self.out[i * step : (i + 1) * step] for i in range(len(self.bare))]
        for index, frame in enumerate(self.bare):
            plain = plaintext[index * step : (index + 1) * step]
            self.aead.encrypt_into(self.nonce, plain, None, frame)

    @staticmethod
    def _frames() -> list[memoryview]:
        room = GEOMETRY.frame_bytes + TAG_BYTES
        return [memoryview(bytearray(room)) for _ in range(GEOMETRY.frames_per_page)]

    def open_racerd(self) -> None:
        for _ in range(PAGES_PER_ROUND):
            self.opener.open_frames(0, self.sealed, self.out)

    def open_bare(self) -> None:
        for _ in range(PAGES_PER_ROUND):
            for frame, out in zip(self.bare, self.outs, strict=True):
                self.aead.decrypt_into(self.nonce, frame, None, out)


def seconds(calls: list[Callable[[], None]]) -> float:
    """Wall time of all calls side by side, a thread each."""
    threads = [threading.Thread(target=call) for call in calls]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def measure(thread_count: int) -> dict[str, float]:
    lanes = [Lane(number) for number in range(thread_count)]
    ours, bare = [], []
    for _ in range(ROUNDS):
        bare.append(seconds([lane.open_bare for lane in lanes]))
        ours.append(seconds([lane.open_racerd for lane in lanes]))
    volume = thread_count * PAGES_PER_ROUND * GEOMETRY.page_bytes
    return {
        "threads": thread_count,
        "open_frames_gb_s": round(volume / statistics.median(ours) / 1e9, 2),
        "decrypt_into_gb_s": round(volume / statistics.median(bare) / 1e9, 2),
        "ratio": round(statistics.median(bare) / statistics.median(ours), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [measure(count) for count in sorted({1, len(os.sched_getaffinity(0))})]
    if options.json:
        print(json.dumps({"open_frames": results}))
        return
    for row in results:
        print(
            f"open_frames, {row['threads']} thread(s): {row['open_frames_gb_s']} GB/s of"
            f" {row['decrypt_into_gb_s']} GB/s bare = {row['ratio']}"
        )


if __name__ == "__main__":
    main()

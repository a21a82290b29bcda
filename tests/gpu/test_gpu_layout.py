"""The structures that host and kernels share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

from racerd.gpu import build, layout
from racerd.gpu.worker import batch
from tests.support.standin import SOURCES, StandIn

_PRINT = """
#include "cuda_host.h"
#include "shared_tables.h"
#include <cstdio>
thread_local u8 shared_bytes[1];
int main() {
  printf("%zu %zu %zu %u %u %u %u %u\\n", sizeof(RecordKey), sizeof(RecordTables), sizeof(FrameJob),
         THREADS, SHARED_BYTES, VERDICT_OK, VERDICT_CRC, VERDICT_TAG);
  FrameJob job = {1, 2, 3, 4, 5, 6, 7, 8, 9, {10, 11, 12}, {13, 14, 15, 16}};
  fwrite(&job, sizeof job, 1, stdout);
}
"""


def test_both_sides_mean_the_same_bytes(standin: StandIn, tmp_path: Path) -> None:
    """R9: sizes, verdicts and the order of a job's fields, as a C++ compiler sees them."""
    source, program = tmp_path / "print.cpp", tmp_path / "print"
    source.write_text(_PRINT)
    host = SOURCES / "host"
    subprocess.run(
        ["g++", "-std=c++17", "-w", f"-I{host}", f"-I{build.SOURCE_FOLDER}", "-o", str(program),
         str(source), str(host / "fibres.cpp"), "-lpthread"],
        check=True,
    )  # fmt: skip
    first, _, job = subprocess.run([program], capture_output=True, check=True).stdout.partition(
        b"\n"
    )
    assert list(map(int, first.split())) == [
        layout.RECORD_KEY_BYTES, layout.RECORD_TABLES_BYTES, layout.FRAME_JOB_BYTES,
        layout.THREADS, layout.SHARED_BYTES,
        layout.Verdict.OK, layout.Verdict.CRC, layout.Verdict.TAG,
    ]  # fmt: skip
    words = b"".join(i.to_bytes(4, "little") for i in range(10, 17))
    expected = np.array((1, 2, 3, 4, 5, 6, 7, 8, 9, words[:12], words[12:]), layout.FRAME_JOB)
    assert job == expected.tobytes()
    assert layout.FRAME_JOB.itemsize == layout.FRAME_JOB_BYTES
    assert layout.RECORD_KEY.size == layout.RECORD_KEY_BYTES
    assert batch.BLOCK_BYTES % 16 == 0

"""The structures of `kernels/layout.h`, byte for byte.

Layer: gpu, pure. A test compiles the header and compares sizes and offsets with these.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

import numpy as np

from racerd.units import KIB

THREADS = 512
SHARED_BYTES = 97 * KIB  # Dynamic shared memory of racer_open_frames.

RECORD_KEY_BYTES = 256
RECORD_TABLES_BYTES = 10_240
FRAME_JOB_BYTES = 80
VERDICT_BYTES = 4

PREPARE_RECORDS = b"racer_prepare_records"
OPEN_FRAMES = b"racer_open_frames"

RECORD_KEY = Struct("<240s16s")
"""Round keys, hash key."""

FRAME_JOB = np.dtype(
    [
        ("source", "<u8"),
        ("destination", "<u8"),
        ("aad", "<u8"),
        ("crc", "<u8"),
        ("length", "<u4"),
        ("skip", "<u4"),
        ("take", "<u4"),
        ("aad_bytes", "<u4"),
        ("record", "<u4"),
        ("nonce", "V12"),
        ("masked_tag", "V16"),
    ]
)
"""One frame to open, as `FrameJob`."""


class Verdict(IntEnum):
    """The kernels' word on a frame. Any other value is a failure too."""

    NONE = 0
    OK = 0x600D600D
    CRC = 0x0BAD0C2C
    TAG = 0x0BAD07A6

"""What a page is answered: by the verdicts of the kernels, or by an error of the driver.

Layer: gpu worker, pure. R9 rests on it: `Done` only where every frame's word says OK, and a word
that the kernels do not write is an error, not a doubt.
"""

from __future__ import annotations

from collections.abc import Sequence

from racerd.errors import DeviceError
from racerd.gpu import layout
from racerd.gpu.protocol import Done, Failed, ReadPage

_CORRUPT: dict[int, str] = {layout.Verdict.CRC: "corrupt_crc", layout.Verdict.TAG: "corrupt_tag"}


def failed(read: ReadPage, error: DeviceError) -> Failed:
    return Failed(read.request, error.code, error.message, error.hint, error.native)


def judge(read: ReadPage, words: Sequence[int]) -> Done | Failed:
    """The answer that a page's verdict words demand: Done only where all of them say OK."""
    bad = tuple(i for i, word in enumerate(words) if word != layout.Verdict.OK)
    if not bad:
        return Done(read.request)
    word = words[bad[0]]
    code = _CORRUPT.get(word)
    if code is None:
        return Failed(
            read.request,
            "gpu_error",
            f"the kernel left {word:#x} where its verdict belongs",
            "report it with the GPU's name and driver version; the host path is taken",
            native=0,
        )
    return Failed(
        read.request,
        code,
        f"{len(bad)} of {len(words)} frames do not verify on the GPU",
        "the copy is dropped and another source is asked; if it repeats, check disk and memory",
        native=0,
        frames=bad,
    )

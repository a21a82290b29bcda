"""Opens frames through cuda.bindings and whatever driver this process has. Run as a child.

Standard input: a pickled list of batches, each a list of `Case`. Standard output: the pickled
list, per batch, of (verdicts, destinations).
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass

from cuda.bindings import driver as cuda

from racerd.gpu import layout
from racerd.gpu.protocol import ReadPage
from racerd.gpu.worker.batch import BLOCK_BYTES, PAGES_MAX, JobBlock, Place
from racerd.gpu.worker.driver import Device, call
from racerd.gpu.worker.kernels import Kernels
from racerd.gpu.worker.memory import DeviceBuffer, PinnedBuffer

MARGIN = 64
FILL = 0xEE


@dataclass(frozen=True)
class Case:
    """One frame. Its plaintext bytes [skip, skip + take) go to `shift` in a buffer of FILL."""

    key: bytes
    nonce: bytes
    aad: bytes
    ciphertext: bytes
    tag: bytes
    crc: int
    shift: int
    skip: int
    take: int

    def request(self) -> ReadPage:
        return ReadPage(
            request=0, target=0, offset=0, skip=self.skip, take=self.take,
            last_bytes=len(self.ciphertext), slots=(), slab=0, slab_offset=0, key=self.key,
            nonces=self.nonce, tags=self.tag, crcs=self.crc.to_bytes(8, "little"),
            aad_head=self.aad, aad_tails=b"",
        )  # fmt: skip

    @property
    def buffer_bytes(self) -> int:
        return len(self.ciphertext) + 2 * MARGIN


def run_batch(kernels: Kernels, cases: list[Case]) -> tuple[list[int], list[bytes]]:
    assert len(cases) <= PAGES_MAX
    sources = [DeviceBuffer(len(case.ciphertext) + 1) for case in cases]
    targets = [DeviceBuffer(case.buffer_bytes) for case in cases]
    host = PinnedBuffer(BLOCK_BYTES)
    secrets = DeviceBuffer(BLOCK_BYTES + PAGES_MAX * layout.RECORD_TABLES_BYTES)
    verdicts = DeviceBuffer(4 * len(cases))
    block = JobBlock(host.view, secrets.address, 1 << 30)
    for case, source, target in zip(cases, sources, targets, strict=True):
        call(cuda.cuMemcpyHtoD, source.address, case.ciphertext + b"\0", len(case.ciphertext) + 1)
        call(cuda.cuMemsetD8, target.address, FILL, case.buffer_bytes)
        assert block.has_room(case.request())
        block.add(case.request(), Place(source.address, 0, target.address + case.shift))
    tables = secrets.address + BLOCK_BYTES
    call(cuda.cuMemcpyHtoD, secrets.address, host.address, block.used_bytes)
    call(cuda.cuMemsetD8, verdicts.address, 0, 4 * len(cases))
    kernels.prepare_records(0, block.pages, block.keys_address, tables)
    kernels.open_frames(
        0, block.frames, jobs=block.jobs_address, keys=block.keys_address, tables=tables,
        verdicts=verdicts.address,
    )  # fmt: skip
    words = bytearray(4 * len(cases))
    call(cuda.cuMemcpyDtoH, words, verdicts.address, len(words))
    outputs = []
    for case, target in zip(cases, targets, strict=True):
        output = bytearray(case.buffer_bytes)
        call(cuda.cuMemcpyDtoH, output, target.address, len(output))
        outputs.append(bytes(output))
    for buffer in (*sources, *targets, host, secrets, verdicts):
        buffer.close()
    return list(memoryview(words).cast("I")), outputs


def main() -> None:
    call(cuda.cuInit, 0)
    device = Device.open(call(cuda.cuDeviceGetUuid, 0).bytes.hex())
    device.make_current()
    from racerd.gpu import build

    kernels = Kernels(build.load_module(device.architecture))
    batches: list[list[Case]] = pickle.load(sys.stdin.buffer)
    results = [run_batch(kernels, cases) for cases in batches]
    kernels.close()
    device.close()
    sys.stdout.buffer.write(pickle.dumps(results))


if __name__ == "__main__":
    # Pickles name this module, not __main__.
    from tests.support import kernel_child

    kernel_child.main()

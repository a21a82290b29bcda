"""GPU memory that racerd writes into: what is lent to users, staging for what is not, the ladder.

Layer: on `bulk`, `landing` and `cuda`; thread-safe; `racer.aio.gpu` is the counterpart for asyncio.
Imported when the first GPU memory is read into or asked for. For each range of a read:

    gpu     the daemon writes plaintext into exported memory of the destination's GPU: the
            destination itself where it is a `GpuBuffer` (or an array made from one), else slots of
            a bounded ring on the same GPU, from where it is copied
    host    the daemon writes into shared memory, and the bytes are copied to the GPU
    stream  the bytes come over the socket, and are copied to the GPU

A step down (R4 in the requirements) is taken for the parts that the step above did not bring, and
said once per reason. The destination is always where the caller wants it. It is written to by
nobody any more when a call ends, however it ends: queued copies are waited for; reads in flight
were answered, or else the daemon said that it let go of the memory; where it did not, the memory
is lost (`MemoryLost`).
"""

from racer.gpu.buffer import GpuBuffer

__all__ = ["GpuBuffer"]

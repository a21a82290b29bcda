"""One load in a process of its own, driven over its standard input and output.

    python tools/bench_loaders/worker.py '{"loader": "safetensors-mmap", "source": "/models/llama"}'

Runs in the loaders' environment, which has no racerd: nothing of the project is imported but
`racer`. It talks in lines of JSON:

1. It imports the loader, and says `{"ready": true}`. On `go` it loads every tensor and keeps all.
2. It says what that took: from the first look at the source (names, headers, connections) to the
   last tensor. Imports and the start of the process are not in it.
3. It reads one byte of each page, so that what a loader left for later shows; then the bytes of all
   tensors, whose checksum has to be the same for all loaders; and says both. With the end of its
   input it ends.

Memory: before `go` it has `warm_bytes` of fresh memory touched and given back, so that the loaders
meet a machine whose free memory is all alike. (A hypervisor takes back what a guest has not used
for seconds, and getting it again costs several times the load, for whoever comes first. What was
given back as private memory is not what the kernel gives as shared memory next, so both are held at
once.)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from racer.huge_pages import back_with_huge_pages

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module of Python 3.11.
_SAFETENSORS_NAMES = {"pt": "pt", "numpy": "np"}

Tensors = dict[str, Any]
Facts = dict[str, Any]
Load = Callable[[], tuple[Tensors, Facts]]


# --- loaders: each imports what it needs, and returns what is to be timed -----------------------


def _shards(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).glob("*.safetensors"))


def safetensors(source: str, *, backend: str, clone: bool, framework: str = "pt") -> Load:
    """The usual way. Over the mapping, tensors are pages of the file, until they are cloned."""
    from safetensors import safe_open

    if framework == "pt":
        import torch  # noqa: F401 - not to be timed

    release = version("safetensors")  # Not to be timed, either.

    def load() -> tuple[Tensors, Facts]:
        tensors = {}
        for path in _shards(source):
            with safe_open(path, _SAFETENSORS_NAMES[framework], backend=backend) as file:
                for name in file.keys():  # noqa: SIM118 - it is no dictionary
                    tensor = file.get_tensor(name)
                    tensors[name] = tensor.clone() if clone else tensor
        return tensors, {"version": release}

    return load


def runai(source: str, *, clone: bool) -> Load:
    """By default the streamer gives its buffers away; where it reuses them, tensors are cloned."""
    from runai_model_streamer import SafetensorsStreamer, list_safetensors

    release = version("runai-model-streamer")  # Not to be timed, either.

    def load() -> tuple[Tensors, Facts]:
        tensors = {}
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(sorted(list_safetensors(source)), owned=not clone)
            for name, tensor in streamer.get_tensors():
                tensors[name] = tensor.clone() if clone else tensor
        return tensors, {"version": release}

    return load


def fastsafetensors(source: str) -> Load:
    """Without GPU Direct Storage. It clones what it yields."""
    import torch  # noqa: F401 - it imports torch where it first needs it: not to be timed
    from fastsafetensors import ParallelLoader

    release = version("fastsafetensors")  # Not to be timed, either.

    def load() -> tuple[Tensors, Facts]:
        loader = ParallelLoader(
            None, _shards(source), device="cpu", nogds=True, use_tqdm_on_load=False
        )
        try:
            tensors = dict(loader.iterate_weights())
        finally:
            loader.close()
        return tensors, {"version": release}

    return load


def racer(source: str, **options: Any) -> Load:
    import racer
    import racer.models.prefix  # It is imported where it is first needed: not to be timed.

    if options.get("framework", "pt") == "pt":
        import torch  # noqa: F401 - not to be timed

    load_model = racer.load  # The same.

    release = version("racer")  # Not to be timed, either.

    def load() -> tuple[Tensors, Facts]:
        with load_model(source, **options) as stream:
            tensors = dict(stream)
        return tensors, {"version": release, "rungs": dict(stream.report.rungs)}

    return load


_LOADERS: dict[str, Callable[..., Load]] = {
    "safetensors": safetensors,
    "runai": runai,
    "fastsafetensors": fastsafetensors,
    "racer": racer,
}


# --- memory -------------------------------------------------------------------------------------


def _status_bytes(field: str) -> int:
    """A line of /proc/self/status, such as VmRSS or VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _restart_peak() -> None:
    """Sets VmHWM, the most that was resident, to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


class WarmMemory:
    """Touches memory in a thread, while imports go on; `wait` until that is done, and `give_back`
    frees it."""

    def __init__(self, nbytes: int) -> None:
        self._memory: mmap.mmap | None = None
        self._shared = os.memfd_create("warm", os.MFD_CLOEXEC)
        self._thread = threading.Thread(target=self._touch, args=(nbytes,))
        self._thread.start()

    def _touch(self, nbytes: int) -> None:
        if not nbytes:
            return
        self._memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # A kernel without huge pages: it has others.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        # A foreign call, which leaves the interpreter to the imports.
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t(nbytes)
        if libc.madvise(ctypes.c_void_p(start), size, _MADV_POPULATE_WRITE) != 0:
            ctypes.memset(start, 1, nbytes)  # A kernel before 5.14.
        shared_bytes = nbytes // 2
        os.ftruncate(self._shared, shared_bytes)
        back_with_huge_pages(self._shared, shared_bytes)
        os.posix_fallocate(self._shared, 0, shared_bytes)  # A kernel before 6.1.

    def wait(self) -> None:
        self._thread.join()

    def give_back(self) -> None:
        os.close(self._shared)
        if self._memory is not None:
            self._memory.close()


def _bytes_of(tensor: Any) -> memoryview:
    """The bytes of a contiguous tensor of torch or numpy, of any dtype."""
    if not tensor.nbytes:
        return memoryview(b"")
    address = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(address)).cast("B")


def touch(tensors: Tensors) -> None:
    """Reads a byte of each page."""
    for tensor in tensors.values():
        bytes(_bytes_of(tensor)[:: mmap.PAGESIZE])


def checksum(tensors: Tensors) -> int:
    """Of names, in order, and bytes."""
    names = sorted(tensors)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sums = pool.map(lambda name: zlib.crc32(_bytes_of(tensors[name])), names)
        text = json.dumps(list(zip(names, sums, strict=True)))
    return zlib.crc32(text.encode())


# --- the conversation ---------------------------------------------------------------------------


def _say(**fields: object) -> None:
    # What libraries print goes where errors go: see main.
    _CONVERSATION.write(json.dumps(fields) + "\n")
    _CONVERSATION.flush()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run(job: dict[str, Any]) -> None:
    warm = WarmMemory(int(job.get("warm_bytes", 0)))
    load = _LOADERS[job["loader"]](job["source"], **job.get("options", {}))
    warm.wait()
    _say(ready=True)
    if sys.stdin.readline() != "go\n":
        raise RuntimeError("the benchmark ended before this load began")
    warm.give_back()
    before = _status_bytes("VmRSS")
    _restart_peak()
    cpu, began = _cpu_seconds(), time.perf_counter()
    tensors, facts = load()
    seconds, cpu = time.perf_counter() - began, _cpu_seconds() - cpu
    resident = _status_bytes("VmRSS") - before
    _say(seconds=seconds, cpu_seconds=cpu, resident_bytes=resident, **facts)

    began = time.perf_counter()
    touch(tensors)
    seconds = time.perf_counter() - began
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    _say(
        touch_seconds=seconds,
        tensors=len(tensors),
        tensor_bytes=nbytes,
        extra_bytes=_status_bytes("VmHWM") - before - nbytes,
        checksum=checksum(tensors),
    )
    sys.stdin.read()


if __name__ == "__main__":
    _CONVERSATION = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run(json.loads(sys.argv[1]))

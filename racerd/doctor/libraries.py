"""`python -m racerd.doctor.libraries`: which libraries of the GPU part can be loaded.

Layer: doctor. Libraries are loaded by a child process that ends at once, never by the caller.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import subprocess
import sys
from dataclasses import dataclass

from racerd.doctor.finding import Finding, ok, slower

_SECONDS_MAX = 30.0


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """Path, or name, of what was found; None where it was not."""

    cufile: str | None
    numa: str | None
    nvrtc: str | None
    bindings: str | None  # The version of cuda-bindings.


def probe_libraries() -> LibraryFacts:
    done = subprocess.run(
        [sys.executable, "-m", "racerd.doctor.libraries"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_SECONDS_MAX,
        check=False,
    )
    if done.returncode:  # A library that crashes the process that loads it is none.
        return LibraryFacts(None, None, None, None)
    return LibraryFacts(**json.loads(done.stdout))


def judge_libraries(facts: LibraryFacts) -> list[Finding]:
    wanted = (
        (
            "libcufile",
            facts.cufile,
            "slabs are not read straight into GPU memory",
            "install racerd's extra gpu, or an image that was built with RACER_NATIVE_CUDA=true",
        ),
        (
            "libnuma",
            facts.numa,
            "cuFile does not know which memory is near a GPU",
            "install libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora, RHEL)",
        ),
        (
            "nvrtc",
            facts.nvrtc,
            "kernels that are not compiled yet cannot be",
            "install racerd's extra gpu, or compile them elsewhere: `python -m racerd.gpu.build`",
        ),
    )
    return [
        ok(check, found) if found else slower(check, f"not found: {lack}", remedy)
        for check, found, lack, remedy in wanted
    ]


def _loaded(name: str) -> str | None:
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    return name


def _nvidia(name: str, soname: str) -> str | None:
    """As cuda.bindings finds it: in the wheels first, then where the system has it."""
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError:
        return _loaded(soname)
    try:
        return str(load_nvidia_dynamic_lib(name).abs_path)
    except (DynamicLibNotFoundError, RuntimeError, OSError):
        return _loaded(soname)


def _bindings() -> str | None:
    try:
        return importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    facts = {
        "cufile": _nvidia("cufile", "libcufile.so.0"),
        "numa": _loaded("libnuma.so.1"),
        "nvrtc": _nvidia("nvrtc", "libnvrtc.so.13"),
        "bindings": _bindings(),
    }
    sys.stdout.write(json.dumps(facts))


if __name__ == "__main__":
    main()

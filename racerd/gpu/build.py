"""Compiles the kernels with NVRTC and keeps the results: `python -m racerd.gpu.build`.

Layer: gpu; runs in the worker process, at image build, or by hand; needs no GPU and no driver.
NVRTC is imported only when something must be compiled (four seconds an architecture).

An entry of the cache is named by the digest of everything that goes in (sources, options) and the
architecture, and begins with the digest of what follows: one that is torn, rotten or of another
source is compiled again, never loaded. The folder is ours alone (0700), because whoever can write
it chooses what runs beside the keys.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from racerd.errors import DeviceError

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
"""Ampere, Ada, Hopper, Blackwell: what `python -m racerd.gpu.build` compiles for."""

SOURCE_FOLDER = Path(__file__).parent / "kernels"
MAIN_SOURCE = "open_frames.cu"
OPTIONS = ("--std=c++17",)

_MAGIC = b"racerk1\n"
_DIGEST_BYTES = 32
_log = logging.getLogger(__name__)


@cache
def source_files() -> dict[str, bytes]:
    """The kernels' sources by file name."""
    files = sorted((*SOURCE_FOLDER.glob("*.cu"), *SOURCE_FOLDER.glob("*.h")))
    return {path.name: path.read_bytes() for path in files}


@cache
def source_digest() -> str:
    """A digest of all that decides what the compiler makes, but for the architecture."""
    digest = hashlib.sha256(repr(OPTIONS).encode())
    for name, text in source_files().items():
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:32]


def default_folder() -> Path:
    """`$RACER_KERNEL_CACHE`, else `racer/kernels` under `$XDG_CACHE_HOME` or `~/.cache`."""
    if folder := os.environ.get("RACER_KERNEL_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "racer" / "kernels"


class KernelCache:
    """Compiled kernels in a folder. Safe against other processes that use it at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, architecture: str) -> Path:
        return self.folder / f"{source_digest()}-{architecture}.cubin"

    def get(self, architecture: str) -> bytes | None:
        """Returns the kernels for `architecture`, or None where there is no sound entry."""
        path = self.path(architecture)
        try:
            self._check_owner()
            entry = path.read_bytes()
        except FileNotFoundError:
            return None
        head = len(_MAGIC) + _DIGEST_BYTES
        image = entry[head:]
        if entry[:head] != _MAGIC + hashlib.sha256(image).digest() or not image:
            _log.warning("%s is damaged; the kernels are compiled again", path)
            return None
        return image

    def put(self, architecture: str, image: bytes) -> Path:
        """Keeps `image`; readers see the old entry or the whole new one. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_owner()
        descriptor, name = tempfile.mkstemp(dir=self.folder, prefix=".new-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(image).digest() + image)
                file.flush()
                os.fsync(file.fileno())
            path = self.path(architecture)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        return path

    def _check_owner(self) -> None:
        status = self.folder.stat()
        if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o022:
            raise DeviceError(
                "kernel_cache_unsafe",
                f"{self.folder} can be written by others: kernels from there are not run",
                native=status.st_mode,
                hint=f"chown it to uid {os.geteuid()} and chmod it 0700, or set RACER_KERNEL_CACHE",
            )


def compile_kernels(architecture: str) -> bytes:
    """Compiles the kernels for `architecture` (`sm_90`) and returns the cubin. About 4 s.

    Raises DeviceError `kernels_not_compiled` without NVRTC, for an architecture that it does not
    know, or with its log where the source does not compile.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise _not_compiled(architecture, str(error), 0) from error

    headers = {name: text for name, text in source_files().items() if name != MAIN_SOURCE}
    try:
        status, program = nvrtc.nvrtcCreateProgram(
            source_files()[MAIN_SOURCE],
            MAIN_SOURCE.encode(),
            len(headers),
            list(headers.values()),
            [name.encode() for name in headers],
        )
    except RuntimeError as error:  # The library itself was not found.
        raise _not_compiled(architecture, str(error), 0) from error
    if status:
        raise _not_compiled(architecture, f"NVRTC says {status.name}", int(status))
    try:
        options = [f"--gpu-architecture={architecture}", *OPTIONS]
        (status,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        if status:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            text = bytearray(size)
            nvrtc.nvrtcGetProgramLog(program, text)
            log = text.rstrip(b"\0\n ").decode(errors="replace")
            raise _not_compiled(architecture, f"{status.name}: {log}", int(status))
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        image = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, image)
        return bytes(image)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _not_compiled(architecture: str, why: str, native: int) -> DeviceError:
    return DeviceError(
        "kernels_not_compiled",
        f"the kernels could not be compiled for {architecture}: {why}",
        native=native,
        hint="install racerd's extra gpu, or run `python -m racerd.gpu.build` where NVRTC is"
        " and keep its folder as RACER_KERNEL_CACHE",
    )


def load_module(architecture: str, kernels: KernelCache | None = None) -> bytes:
    """Returns the cubin for `architecture`: from the cache, else compiled and kept there."""
    kernels = kernels or KernelCache(default_folder())
    image = kernels.get(architecture)
    if image is None:
        image = compile_kernels(architecture)
        try:
            kernels.put(architecture, image)
        except OSError as error:
            _log.warning("compiled kernels are not kept, each start compiles again: %s", error)
    return image


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m racerd.gpu.build",
        description="Compile racerd's GPU kernels ahead of time. Needs no GPU.",
    )
    parser.add_argument("--cache", type=Path, default=None, help="default: $RACER_KERNEL_CACHE")
    parser.add_argument("architectures", nargs="*", metavar="sm_NN", help="default: all known")
    options = parser.parse_args(arguments)
    kernels = KernelCache(options.cache or default_folder())
    for architecture in options.architectures or ARCHITECTURES:
        started = time.monotonic()
        cached = kernels.get(architecture) is not None
        try:
            image = load_module(architecture, kernels)
        except DeviceError as error:
            sys.stderr.write(f"{error.message}\n{error.hint}\n")
            return 1
        how = "cached" if cached else f"compiled in {time.monotonic() - started:.1f} s"
        sys.stdout.write(f"{kernels.path(architecture)}  {len(image)} bytes, {how}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

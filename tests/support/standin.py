"""The stand-in CUDA driver and cuFile, built by the test run, and processes that run on them.

They are never loaded into the test process: a driver cannot be unloaded, and its threads and
faults would outlive the test. Code under test runs in a child with `StandIn.environment()`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from racerd.gpu import build

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "fakecuda"
ARCHITECTURE = "sm_90"  # What the stand-in's devices say they are.

_KEEP_SECONDS = 86_400.0
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class StandIn:
    """A folder with libcuda.so.1, libcufile.so.0 and a kernel cache that holds the host build."""

    folder: Path

    def environment(self, **extra: str) -> dict[str, str]:
        """An environment for a child whose CUDA driver is the stand-in."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FAKECU")}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        environment["LD_LIBRARY_PATH"] = str(self.folder)
        # The wheel's libcufile comes before LD_LIBRARY_PATH; what is loaded comes before both.
        environment["LD_PRELOAD"] = str(self.folder / "libcufile.so.0")
        environment["RACER_KERNEL_CACHE"] = str(self.folder / "kernels")
        paths = (str(self.folder / "python"), str(ROOT), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return environment | extra

    def run(
        self, code: str, *arguments: str, seconds: float = 120, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs Python `code` in a child and returns what it printed and how it ended."""
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


def cuda_include() -> Path | None:
    """The folder of cuda.h: of the nvidia-cuda-runtime wheel or of a toolkit."""
    wheel = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "include"
    named = [Path(os.environ[n]) / "include" for n in ("CUDA_HOME", "CUDA_PATH") if n in os.environ]
    for folder in (wheel, *named, *sorted(Path("/usr/local").glob("cuda*/include"))):
        if (folder / "cuda.h").is_file():
            return folder
    return None


def cufile_include() -> Path:
    """The folder of cufile.h: of the nvidia-cufile wheel."""
    return Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "include"


def missing() -> str | None:
    """What the stand-in lacks on this machine, in words, or None."""
    if shutil.which("g++") is None:
        return "the stand-in CUDA driver needs g++"
    if cuda_include() is None:
        return "the stand-in CUDA driver needs cuda.h: install nvidia-cuda-runtime"
    if not (cufile_include() / "cufile.h").is_file():
        return "the stand-in cuFile needs cufile.h: install nvidia-cufile"
    return None


def _digest() -> str:
    digest = hashlib.sha256(
        repr((_FLAGS, _SITE_CUSTOMIZE)).encode() + build.source_digest().encode()
    )
    for path in sorted((*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(output: Path, sources: list[Path], *flags: str) -> None:
    command = ["g++", *_FLAGS, *flags, "-o", str(output), *map(str, sources), "-lpthread", "-ldl"]
    if output.name == "libcufile.so.0":
        command += [f"-L{output.parent}", "-l:libcuda.so.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


# Machines without loadable modules have no /proc/modules, and the product rightly will not open a
# real driver there. The stand-in does not mind.
_SITE_CUSTOMIZE = """\
import os
import racerd.gpu.worker.cufile as cufile
cufile.PROC_MODULES = os.environ.get("FAKECUFILE_PROC_MODULES", "/proc/version")
"""


def _build_into(folder: Path) -> None:
    (folder / "python").mkdir()
    (folder / "python" / "sitecustomize.py").write_text(_SITE_CUSTOMIZE)
    host, driver = SOURCES / "host", SOURCES / "driver"
    includes = [f"-I{host}", f"-I{driver}", f"-I{cuda_include()}"]
    _compile(folder / "libcuda.so.1", sorted(driver.glob("*.cpp")), *includes,
             "-Wl,-soname,libcuda.so.1")  # fmt: skip
    _compile(folder / "libcufile.so.0", sorted((SOURCES / "cufile").glob("*.cpp")), *includes,
             f"-I{cufile_include()}", "-Wl,-soname,libcufile.so.0")  # fmt: skip
    module = folder / "open_frames.so"
    _compile(module, [host / "open_frames_host.cpp", host / "fibres.cpp"], *includes,
             f"-I{build.SOURCE_FOLDER}", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas")  # fmt: skip
    # Seen from the product this is a cache that somebody filled: it does not know what runs.
    build.KernelCache(folder / "kernels").put(ARCHITECTURE, module.read_bytes())


def build_standin() -> StandIn:
    """Builds the stand-in, or takes what an earlier run built from the same sources."""
    base = Path(tempfile.gettempdir()) / f"racer-standin-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    folder = base / _digest()
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            for old in base.iterdir():  # Another checkout may be using a younger one.
                if old.is_dir() and time.time() - old.stat().st_mtime > _KEEP_SECONDS:
                    shutil.rmtree(old)
            shutil.rmtree(base / "new", ignore_errors=True)
            work = base / "new"
            work.mkdir(mode=0o700)
            _build_into(work)
            work.rename(folder)
    return StandIn(folder)

"""One contract for both cuFile providers, on the stand-in driver."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from tests.support.standin import StandIn

_CONTRACT = """
import os, sys
from cuda.bindings import driver as cuda
from racerd.gpu.worker.cufile import CuFileError, make_provider, reopen
from racerd.gpu.worker.driver import call
name, path = sys.argv[1:]
data = open(path, "rb").read()
call(cuda.cuInit, 0)
call(cuda.cuCtxSetCurrent, call(cuda.cuDevicePrimaryCtxRetain, 0))
memory = int(call(cuda.cuMemAlloc, 1 << 20))
provider = make_provider(name)
provider.open(compat_mode=False)
provider.register_memory(memory, 1 << 20)
descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
own = reopen(descriptor)
handle = provider.register_file(own)

def read(size, offset, at):
    got = provider.read(handle, memory + at, size, offset)
    out = bytearray(max(got, 1))
    call(cuda.cuMemcpyDtoH, out, memory + at, len(out))
    return got, bytes(out[:got])

assert read(8192, 4096, 0) == (8192, data[4096:12288]), "a read at an offset"
assert read(4096, 0, 65536) == (4096, data[:4096]), "into the middle of the memory"
got, part = read(16384, len(data) - 4096, 0)
assert got <= 4096 and part == data[-4096:][:got], "past the end: short, never wrong"
provider.deregister_file(handle)
provider.deregister_memory(memory)
provider.close()
os.close(own)
try:
    make_provider(name).register_file(descriptor)
except CuFileError as error:
    assert error.code > 5000
else:
    assert name == "kvikio", "the driver is closed"
print("kept")
"""


@pytest.mark.parametrize("provider", ["cuda", "kvikio"])
def test_a_provider_keeps_the_contract(provider: str, standin: StandIn, tmp_path: Path) -> None:
    """R10, R11, R12: opened without compatibility mode, registered, read, let go."""
    if provider == "kvikio" and importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed: pip install --no-deps kvikio-cu13 libkvikio-cu13")
    slab = tmp_path / "slab"
    slab.write_bytes(bytes(range(256)) * 256)
    done = standin.run(_CONTRACT, provider, str(slab))
    assert done.stdout == "kept\n", done.stderr


def test_a_provider_that_is_not_installed_says_so(standin: StandIn) -> None:
    """R15: a missing package turns cuFile off with its name in the reason."""
    code = """
import sys
sys.modules["kvikio"] = None
from racerd.gpu.worker.cufile import CuFileError, make_provider
try:
    make_provider("kvikio")
except CuFileError as error:
    print(error.meaning.remedy.name, "kvikio" in str(error))
"""
    assert standin.run(code).stdout == "OFF True\n"


def test_libraries_are_pinned_and_behind_one_door() -> None:
    """F87: what these libraries did between versions is kept out: each has an upper bound, nobody
    but the provider's module knows cuFile, and every call is synchronous on a thread of ours."""
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert len(extras["gpu"]) >= 3
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+,<\d+", wanted) for wanted in extras["gpu"])
    users = [
        path.name
        for path in (root / "racerd").rglob("*.py")
        if re.search(r"^ *(import kvikio|from kvikio|from cuda.bindings import .*cufile)",
                     path.read_text(), re.M)
    ]  # fmt: skip
    assert users == ["cufile.py"]
    source = (root / "racerd" / "gpu" / "worker" / "cufile.py").read_text()
    assert not re.search(r"_async|batch_io|per_thread", source)

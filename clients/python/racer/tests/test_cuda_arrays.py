"""Capsules and arrays of GPU memory, without a driver: who keeps what, until when."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import racer
from clients.python.racer.tests.fake_daemon import FakeDaemon
from racer.cuda import dlpack, driver
from racer.cuda.arrays import Destination, _interface_bytes, is_cuda
from racer.cuda.device import Device, plain_uuid


class Owner:
    """Something that memory belongs to."""


def lend(versioned: bool) -> tuple[Any, weakref.ref[Owner]]:
    owner = Owner()
    return dlpack.lend(owner, 0x7F0000000000, 4096, 3, versioned=versioned), weakref.ref(owner)


# --- DLPack ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("versioned", [False, True])
def test_a_consumer_keeps_the_memory_until_it_calls_the_deleter(versioned: bool) -> None:
    """L33: a reference per consumer."""
    capsule, owner = lend(versioned)
    borrowed = dlpack.Borrowed(capsule)
    tensor = borrowed.tensor
    assert (tensor.data, tensor.device_type, tensor.device_id) == (0x7F0000000000, dlpack.CUDA, 3)
    assert (tensor.ndim, tensor.shape[0], tensor.strides[0]) == (1, 4096, 1)
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (1, 8, 1)
    assert dlpack.nbytes_of(tensor) == 4096 and not borrowed.read_only
    del capsule
    gc.collect()
    assert owner() is not None
    borrowed.close()
    assert owner() is None
    borrowed.close()


@pytest.mark.parametrize("versioned", [False, True])
def test_a_capsule_that_nobody_took_gives_the_memory_back(versioned: bool) -> None:
    capsule, owner = lend(versioned)
    dlpack.sweep()
    assert owner() is not None
    del capsule
    dlpack.sweep()
    assert owner() is None


def test_a_capsule_that_is_dropped_while_something_is_raised() -> None:
    """The consumer's own exception comes through, and the memory is not lost."""
    owners: list[weakref.ref[Owner]] = []

    def lent() -> Any:
        capsule, owner = lend(True)
        owners.append(owner)
        return capsule

    with pytest.raises(ZeroDivisionError):
        _ = (lent(), 1 // 0)
    dlpack.sweep()
    assert owners[0]() is None


@pytest.mark.parametrize("versioned", [False, True])
def test_a_capsule_is_taken_once(versioned: bool) -> None:
    capsule, owner = lend(versioned)
    with pytest.raises(TypeError, match="used before"):
        dlpack.Borrowed(object())
    borrowed = dlpack.Borrowed(capsule)
    with pytest.raises(TypeError, match="used before"):
        dlpack.Borrowed(capsule)
    borrowed.close()
    assert owner() is None


def test_the_names_and_versions_are_the_standard_s() -> None:
    valid = ctypes.pythonapi.PyCapsule_IsValid
    valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
    plain, _ = lend(False)
    versioned, _ = lend(True)
    assert valid(plain, b"dltensor") and valid(versioned, b"dltensor_versioned")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    address = pointer(versioned, b"dltensor_versioned")
    assert list((ctypes.c_uint32 * 2).from_address(address)) == [1, 1]


def test_consumers_that_outlive_the_interpreter_call_nothing_of_it() -> None:
    """Lifetimes cannot dangle at the end either: the deleter is gone from what is still lent."""
    code = """
import atexit, ctypes
def look():  # Registered first, so that it runs last.
    assert managed.deleter is None and managed.tensor.data == 4096
    print("kept")
atexit.register(look)
from racer.cuda import dlpack
capsule = dlpack.lend(object(), 4096, 10, 0, versioned=True)
borrowed = dlpack.Borrowed(capsule)
managed = borrowed._managed
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "kept\n", "")


@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from([(1, 8, 1), (2, 16, 1), (2, 32, 1), (4, 16, 1), (1, 4, 2)]),
    st.booleans(),
)
def test_bytes_of_contiguous_tensors(
    shape: list[int], kind: tuple[int, int, int], told: bool
) -> None:
    """L41: whatever the type."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    extents = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    steps = (ctypes.c_int64 * max(1, len(shape)))(*strides)
    pointer = ctypes.POINTER(ctypes.c_int64)
    tensor = dlpack.Tensor(
        None, dlpack.CUDA, 0, len(shape), kind, ctypes.cast(extents, pointer),
        ctypes.cast(steps, pointer) if told else None, 0,
    )  # fmt: skip
    assert dlpack.nbytes_of(tensor) == -(-step * kind[1] * kind[2] // 8)
    gaps = [i for i, extent in enumerate(shape) if extent > 1 and told and 0 not in shape]
    for axis in gaps:
        steps[axis] += 1
        with pytest.raises(TypeError, match="contiguous"):
            dlpack.nbytes_of(tensor)
        steps[axis] -= 1


class OnTheHost:
    """Lends host memory the way that GPU memory is lent: other libraries check the structures."""

    def __init__(self, *, old: bool) -> None:
        self.memory = (ctypes.c_ubyte * 4096)(*range(200))
        self.old = old
        self.asked: dict[str, Any] = {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> object:
        if self.old and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.asked = options
        address = ctypes.addressof(self.memory)
        return dlpack.lend(self, address, 4096, 0, versioned=not self.old)


@pytest.mark.parametrize("old", [False, True])
def test_numpy_takes_our_capsules(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    """The structures are what another implementation reads, and its deleter comes to us."""
    numpy = pytest.importorskip("numpy")
    monkeypatch.setattr(dlpack, "CUDA", 1)
    lender = OnTheHost(old=old)
    array = numpy.from_dlpack(lender)
    assert (array.shape, array.dtype, array[199]) == ((4096,), numpy.dtype("u1"), 199)
    owner = weakref.ref(lender)
    view = array[100:300]
    del lender, array
    dlpack.sweep()
    assert owner() is not None and view[99] == 199
    del view
    assert owner() is None


def test_we_take_numpy_s_capsules() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(24, dtype="<f4").reshape(4, 6)
    for options in ({}, {"max_version": (1, 1)}):
        borrowed = dlpack.Borrowed(array.__dlpack__(**options))
        assert borrowed.tensor.data == array.ctypes.data
        assert dlpack.nbytes_of(borrowed.tensor) == array.nbytes and not borrowed.read_only
        borrowed.close()
    borrowed = dlpack.Borrowed(array[:, ::2].__dlpack__())
    with pytest.raises(TypeError, match="contiguous"):
        dlpack.nbytes_of(borrowed.tensor)
    borrowed.close()
    array.flags.writeable = False
    borrowed = dlpack.Borrowed(array.__dlpack__(max_version=(1, 1)))
    assert borrowed.read_only
    borrowed.close()


# --- the CUDA array interface ---------------------------------------------------------------------

INTERFACE = {"shape": (3, 4), "typestr": "<f4", "data": (4096, False), "version": 3}


@pytest.mark.parametrize(
    ("changes", "nbytes"),
    [
        ({}, 48),
        ({"strides": None}, 48),
        ({"strides": (16, 4)}, 48),
        ({"shape": (), "typestr": "|u1"}, 1),
        ({"shape": (0, 7)}, 0),
        ({"shape": (1, 4), "strides": (999, 4)}, 16),
    ],
)
def test_bytes_of_interfaces(changes: dict[str, Any], nbytes: int) -> None:
    assert _interface_bytes({**INTERFACE, **changes}) == nbytes


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"strides": (32, 4)}, "contiguous"),
        ({"strides": (16, 8)}, "contiguous"),
        ({"mask": object()}, "mask"),
    ],
)
def test_interfaces_that_cannot_be_written_to(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(TypeError, match=word):
        _interface_bytes({**INTERFACE, **changes})


class Interface:
    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {**INTERFACE, **changes}


def test_read_only_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="read-only"):
        Destination.open(Interface(data=(4096, True)))


def test_what_is_gpu_memory() -> None:
    class OnHost:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 1)

    assert is_cuda(Interface()) and is_cuda(OnGpu())
    assert not is_cuda(OnHost()) and not is_cuda(bytearray(3))


# --- without a driver -----------------------------------------------------------------------------


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libracer-has-no-such-driver.so.1")
    monkeypatch.setattr(driver, "_loaded", None)


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver(client: racer.Client) -> None:
    """R17, R33: importing and reading need none; asking for GPU memory says what is missing."""
    with pytest.raises(racer.GpuUnavailable) as caught:
        client.gpu_alloc(10)
    assert caught.value.code == "gpu_no_driver" and "runtime" in caught.value.hint
    with pytest.raises(racer.GpuUnavailable):
        Device.find("cuda:0")
    with pytest.raises(racer.GpuUnavailable):
        client.read_into("racer://local/b/k", Interface())


def test_arrays_of_host_memory_are_read_into_as_ever(
    daemon: FakeDaemon, client: racer.Client
) -> None:
    numpy = pytest.importorskip("numpy")
    url = daemon.put("llama", "weights", bytes(range(250)) * 10)
    array = numpy.zeros(2500, "u1")
    assert client.read_into(url, array) == 2500
    assert array.tobytes() == bytes(range(250)) * 10


def test_a_closed_client_gives_no_memory(client: racer.Client) -> None:
    client.close()
    with pytest.raises(racer.Closed):
        client.gpu_alloc(10)


@pytest.mark.parametrize("text", ["", "cuda:", "cpu", "GPU-12", "-1", "GPU-" + "x" * 32])
def test_names_that_are_no_gpu(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("racer.cuda.device.driver", lambda: None)
    with pytest.raises(ValueError, match="is no GPU"):
        Device.find(text)


def test_uuids_are_compared_by_their_digits() -> None:
    assert plain_uuid("GPU-AB-cd") == plain_uuid("abcd") == "abcd"


def test_a_driver_of_before_a_fork_is_refused_in_the_child() -> None:
    loaded = driver.Driver(ctypes.CDLL(None))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            loaded.check_process()
        except racer.Forked:
            os.write(writing, b"refused")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"refused"
    os.waitpid(pid, 0)


def test_a_function_that_the_driver_does_not_have() -> None:
    loaded = driver.Driver(ctypes.CDLL(None))
    with pytest.raises(racer.GpuUnavailable) as caught:
        loaded.cuMemCreate()
    assert caught.value.code == "gpu_driver_too_old"
    with pytest.raises(AttributeError):
        loaded.cuNoSuchThing()

"""cuFile: two providers behind one protocol, and the four threads that read with them.

Layer: gpu worker. The default provider is `cuda.bindings.cufile`, the other KvikIO; each is
imported only when it is chosen. Both release the interpreter lock while they read.

Compatibility mode is off unless the settings say otherwise (R11): without GPUDirect the daemon's
own host path is faster. Nothing uses the batch interface (F83).
"""

from __future__ import annotations

import os
import re
from typing import Any, Protocol

from racerd.gpu.worker.cufile_errors import Meaning, meaning

PROC_MODULES = "/proc/modules"


class CuFileError(Exception):
    """A cuFile call failed with `code`: 5001 to 5050, or an errno; 0 where it has none."""

    def __init__(self, call: str, code: int, text: str = "") -> None:
        super().__init__(f"{call} failed with {code}" + (f": {text}" if text else ""))
        self.code = code

    @property
    def meaning(self) -> Meaning:
        return meaning(self.code)


class CuFileProvider(Protocol):
    """What a reader needs. `open` and `close` once; the rest from any thread with a context."""

    def open(self, *, compat_mode: bool) -> None:
        """Opens the driver; may take a second, and for ever on a broken machine."""

    def close(self) -> None: ...

    def register_file(self, descriptor: int) -> Any:
        """Returns a handle for reads by one thread. The descriptor must stay open."""

    def deregister_file(self, handle: Any) -> None: ...

    def register_memory(self, address: int, size: int) -> None: ...

    def deregister_memory(self, address: int) -> None: ...

    def read(self, handle: Any, address: int, size: int, offset: int) -> int:
        """Reads `size` bytes at `offset` to device memory at `address`; may be short."""


class CudaCuFile:
    """`cuda.bindings.cufile`."""

    def __init__(self) -> None:
        from cuda.bindings import cufile

        self._cufile: Any = cufile

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._cufile, name)(*arguments)
        except self._cufile.cuFileError as error:
            raise CuFileError(name, int(getattr(error, "status", 0)), str(error)) from error
        except ValueError as error:
            # "5 is not a valid OpError": an errno, or a status that these bindings do not know.
            code = re.match(r"\d+", str(error))
            raise CuFileError(name, int(code.group()) if code else 0, str(error)) from error
        except RuntimeError as error:  # The library, or a symbol of it, was not found.
            raise CuFileError(name, 5007, str(error)) from error

    def open(self, *, compat_mode: bool) -> None:
        allow = self._cufile.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE
        self._call("set_parameter_bool", int(allow), compat_mode)
        self._call("driver_open")

    def close(self) -> None:
        self._call("driver_close")

    def register_file(self, descriptor: int) -> Any:
        description = self._cufile.Descr()
        description.type = int(self._cufile.FileHandleType.OPAQUE_FD)
        description.handle.fd = descriptor
        return self._call("handle_register", description.ptr)

    def deregister_file(self, handle: Any) -> None:
        self._call("handle_deregister", handle)

    def register_memory(self, address: int, size: int) -> None:
        self._call("buf_register", address, size, 0)

    def deregister_memory(self, address: int) -> None:
        self._call("buf_deregister", address)

    def read(self, handle: Any, address: int, size: int, offset: int) -> int:
        got = int(self._call("read", handle, address, size, offset, 0))
        if got < 0:
            raise CuFileError("read", -got)
        return got


class KvikioCuFile:
    """KvikIO. Its driver is opened by its own first use; a file is one handle."""

    def __init__(self) -> None:
        import kvikio
        import kvikio.buffer
        import kvikio.cufile_driver
        import kvikio.defaults

        self._kvikio: Any = kvikio

    def open(self, *, compat_mode: bool) -> None:
        mode = self._kvikio.CompatMode
        self._kvikio.defaults.set("compat_mode", mode.AUTO if compat_mode else mode.OFF)
        try:
            self._kvikio.cufile_driver.driver_open()
        except RuntimeError as error:
            raise CuFileError("driver_open", 5007, str(error)) from error

    def close(self) -> None:
        self._kvikio.cufile_driver.driver_close()

    def register_file(self, descriptor: int) -> Any:
        try:
            return self._kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r")
        except RuntimeError as error:
            raise CuFileError("CuFile", 5027, str(error)) from error

    def deregister_file(self, handle: Any) -> None:
        handle.close()

    def register_memory(self, address: int, size: int) -> None:
        self._memory(self._kvikio.buffer.memory_register, address, size)

    def deregister_memory(self, address: int) -> None:
        self._memory(self._kvikio.buffer.memory_deregister, address, 1)

    def _memory(self, function: Any, address: int, size: int) -> None:
        try:
            function(_DeviceArray(address, size))
        except RuntimeError as error:
            raise CuFileError(function.__name__, 5045, str(error)) from error

    def read(self, handle: Any, address: int, size: int, offset: int) -> int:
        try:
            return int(handle.raw_read(_DeviceArray(address, size), size, offset, 0))
        except RuntimeError as error:
            raise CuFileError("raw_read", 5044, str(error)) from error


class _DeviceArray:
    """The least that KvikIO takes for a buffer."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "strides": None,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def make_provider(name: str) -> CuFileProvider:
    """The provider `cuda` or `kvikio`. Raises CuFileError where its package is missing."""
    try:
        return KvikioCuFile() if name == "kvikio" else CudaCuFile()
    except ImportError as error:
        raise CuFileError("import", 5007, str(error)) from error


def reopen(descriptor: int) -> int:
    """A descriptor of the same slab that cuFile takes: without O_NOFOLLOW (R12), its own file.

    Each reader has one: a handle that is shared by threads serialises their reads (F86).
    """
    direct = os.O_DIRECT | os.O_RDONLY | os.O_CLOEXEC
    return os.open(f"/proc/self/fd/{descriptor}", direct)


def why_not_to_open() -> str | None:
    """A reason not even to try the driver: without /proc/modules it never returns (F79)."""
    if not os.access(PROC_MODULES, os.R_OK):
        return f"{PROC_MODULES} cannot be read, and the cuFile driver would loop for ever there"
    return None

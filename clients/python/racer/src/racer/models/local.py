"""A local directory as a source of model files.

Layer: models, I/O driver. Files are read with preadv into memory that is there already: no mapping
of the file, so that a page that fails is an exception (never SIGBUS), and a slow volume sees large
reads in sequence (never faults of 4 KiB).
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from typing import NoReturn

from racer.errors import Closed, ShareRefused, VersionChanged
from racer.host_memory import mapped_memory
from racer.models.names import SUFFIX, no_model
from racer.models.prepared import check_not_prepared
from racer.models.source import SourceFile
from racer.safetensors.errors import SafetensorsError
from racer.turns import Flag

PAGE_BYTES = 16 << 20
# preadv cannot be interrupted by another thread: between steps a cancelled read notices.
_STEP_BYTES = 8 << 20


class LocalSource:
    """The files in `path`. Symbolic links count as what they point to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.location = os.fspath(path).rstrip("/") or "/"
        self.page_bytes = PAGE_BYTES
        self.cancelled = Flag()

    def names(self) -> Sequence[str]:
        try:
            with os.scandir(self.location) as entries:
                # A link to nothing counts: what it was of is missing, and must be told.
                return [entry.name for entry in entries if not entry.is_dir()]
        except NotADirectoryError as error:
            raise no_model(self.location) from error

    def find(self, name: str) -> SourceFile | None:
        path = os.path.join(self.location, name)
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return None  # An index names it, and no file can have such a name.
        if not stat.S_ISREG(status.st_mode):
            raise SafetensorsError("not a regular file", file=path)
        if name.endswith(SUFFIX):
            check_not_prepared(self.location, path, status.st_size)
        return SourceFile(name, path, status.st_size, _version(status))

    def read(self, file: SourceFile, start: int, stop: int) -> bytes:
        buffer = bytearray(stop - start)
        self.read_into(file, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, file: SourceFile, start: int, view: memoryview) -> None:
        """Fills `view`, and then checks that all of it came from the version that was meant."""
        descriptor = os.open(file.url, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(view):
                if self.cancelled.is_set():
                    raise Closed(f"reading {file.url} was cancelled")
                count = os.preadv(descriptor, [view[done : done + _STEP_BYTES]], start + done)
                if not count:
                    break  # It was cut since: the version tells.
                done += count
            _check_version(file, descriptor)
            if done < len(view):
                raise SafetensorsError(f"ends at byte {start + done:,}", file=file.url)
        finally:
            os.close(descriptor)

    def read_whole(self, name: str, bytes_max: int) -> tuple[SourceFile, bytes | None] | None:
        file = self.find(name)
        if file is None:
            return None
        return file, self.read(file, 0, file.size) if file.size <= bytes_max else None

    def is_at_hand(self, file: SourceFile) -> bool:
        """A volume may be far away."""
        return False

    def landing(self, nbytes: int) -> LocalLanding:
        return LocalLanding(self, nbytes)

    @property
    def share_bytes(self) -> int:
        return 0

    def shared_already(self, file: SourceFile, at: int) -> None:
        """See `share`."""

    def shared_at_hand(self, file: SourceFile, at: int) -> None:
        """See `share`."""

    def share(self, file: SourceFile, at: int) -> NoReturn:
        raise ShareRefused("a directory shares no memory")

    def reads_into(self, device: object) -> bool:
        """Files are read into host memory."""
        return False

    def device_landing(self, nbytes: int, device: object) -> None:
        """See `reads_into`."""

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.cancelled.set()


class LocalLanding:
    """Anonymous memory, used again for each read."""

    def __init__(self, source: LocalSource, nbytes: int) -> None:
        self._source = source
        self._memory: mmap.mmap | None = mapped_memory(nbytes)
        self._view = memoryview(self._memory)

    @property
    def view(self) -> memoryview:
        return self._view

    def read(self, file: SourceFile, start: int, stop: int) -> Mapping[str, int]:
        # Released also where this raises: a traceback must not keep the memory from closing.
        with self._view[: stop - start] as view:
            self._source.read_into(file, start, view)
        return {"file": stop - start}

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._view.release()
            memory.close()


def _version(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_dev}-{status.st_ino}"


def _check_version(file: SourceFile, descriptor: int) -> None:
    if _version(os.fstat(descriptor)) != file.version:
        raise VersionChanged(
            f"{file.url} changed while the model was read", hint="load it again when it is complete"
        )

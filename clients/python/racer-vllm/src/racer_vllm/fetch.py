"""A model directory without the weights: what an engine reads before it loads them.

Layer: on the client, `choice` and `record`. `survey` finds out what a model is made of and in which
version; `write` makes a directory of it. Written are the files that are copied whole, the *headers*
of the weight files, and last `racer-model.json`.

Why headers: engines look into them before they load. vLLM takes from there whether the checkpoint
has an output layer of its own although the configuration says that it is tied, which layers of a
GPTQ or AWQ model are not quantised, and the data type where the configuration names none. A file
that ends after its header is refused by every safetensors reader as soon as a tensor is wanted, so
that such a directory is never taken for the weights themselves.

A file appears under its name only when it is whole; one writer at a time holds the directory's
lock, and others then find everything done; what is there in the right version is not read again.
While it writes new names, the lock's file tells them, so that a run that was killed is continued.
Names come from an origin and do not leave the directory; those of the record and of the lock are
the directory's own, and what the model has under them is left where it is. A file that somebody
else put there is not replaced, and a directory that is refused for one is left as it was.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from racer.cli.connect import name_options
from racer.cli.files import (
    check_distinct,
    named_errors,
    opened_folder,
    safe_parts,
    whole_file,
    write_all,
)
from racer.cli.work import for_each
from racer.errors import NotFound, RacerError, VersionChanged
from racer.models.directory import ModelDirectory
from racer.models.prefix import RacerSource
from racer.models.source import SourceFile
from racer.safetensors.header import LENGTH_BYTES, header_stop_untrusted, parse_header
from racer.urls import RacerUrl
from racer_vllm.choice import (
    CONFIG_NAMES,
    LOCK_NAME,
    WELL_KNOWN,
    has_tokenizer,
    is_copied,
    is_ours,
)
from racer_vllm.record import (
    RECORD_NAME,
    FileRecord,
    ModelPlaceError,
    ModelRecord,
    read_record,
)

FILE_BYTES_MAX: Final = 512 << 20
OBJECTS_MAX: Final = 100_000
_JOBS: Final = 8
# A model that is being uploaded changes while it is looked at: that often it is looked at again.
_SURVEYS_MAX: Final = 3


class IncompleteModel(RacerError):
    """What an engine cannot do without is not there."""

    default_code = "incomplete_model"


class ForeignFile(RacerError):
    """A file is in the way that nobody knows to be a copy of the model's."""

    default_code = "foreign_file"


@dataclass(frozen=True)
class Survey:
    """A model in one version: what is copied, and of which weights the headers are kept.

    `left_out` are names that would be copied but cannot, each with the reason.
    """

    location: str
    files: tuple[SourceFile, ...]
    shards: tuple[SourceFile, ...]
    left_out: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        return sum(shard.size for shard in self.shards)

    @property
    def digest(self) -> str:
        """The digest of the record that `write` makes: what is stored does not enter into it."""
        return ModelRecord(self.location, _unstored(self.files), _unstored(self.shards)).digest

    @property
    def warnings(self) -> list[str]:
        found = [f"left out: {text}" for text in self.left_out]
        if not has_tokenizer(file.name for file in self.files):
            found.append("there is no tokenizer with it: give the engine --tokenizer")
        return found


def _unstored(files: Sequence[SourceFile]) -> dict[str, FileRecord]:
    return {file.name: FileRecord(file.version, file.size, 0, "") for file in files}


@dataclass
class Written:
    """What `write` did, by name."""

    copied: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


# --- looking --------------------------------------------------------------------------------------


def survey(source: RacerSource, also: Sequence[str] = ()) -> Survey:
    """Looks at the model behind `source`, whose weights are checked as for loading.

    Raises IncompleteModel, SafetensorsError (a missing shard is named) and what the daemon says.
    """
    names, left_out, unlisted = _names(source, also)
    files = [file for file in _found(source, names) if file is not None]
    held = {file.name for file in files}
    if unlisted is not None and not held:
        raise NotFound(
            f"there is no {CONFIG_NAMES[0]} under {source.location}/, nor anything else that a"
            f" model has, asked from {os.uname().nodename}",
            hint=unlisted.hint or "`racer ls` shows what is there",
        ) from unlisted
    if not held.intersection(CONFIG_NAMES):
        raise IncompleteModel(
            f"there is no {CONFIG_NAMES[0]} under {source.location}/,"
            f" asked from {os.uname().nodename}",
            hint="is this the directory of the model? `racer ls` shows what is there",
        )
    model = ModelDirectory.open(source, extra_shards="ignore")
    shards = tuple(shard.file for shard in model.shards)
    check_distinct([safe_parts(file.name.encode()) for file in (*files, *shards)])
    return Survey(source.location, tuple(files), shards, tuple(left_out))


def _names(
    source: RacerSource, also: Sequence[str]
) -> tuple[list[str], list[str], NotFound | None]:
    """The names to copy, sorted; what cannot be; and, where nothing was listed so that the names
    are those which models have, why."""
    folder = RacerUrl.parse(f"{source.location}/")
    names: list[str] = []
    left_out: list[str] = []
    unlisted: NotFound | None = None
    listed = False
    try:
        for count, entry in enumerate(source.client.list(folder)):
            if count == OBJECTS_MAX:
                raise IncompleteModel(
                    f"more than {OBJECTS_MAX:,} objects lie under {source.location}/",
                    hint="give the directory of one model",
                )
            listed = True
            key = RacerUrl.parse(entry.url).key[len(folder.key) :]
            name = key.decode("utf-8", "backslashreplace")
            if not name or name.endswith("/") or not is_copied(name, also):
                continue
            if name.encode() != key:
                left_out.append(f"{name}, whose name is not UTF-8")
            elif entry.size is not None and entry.size > FILE_BYTES_MAX:
                left_out.append(f"{name}, which is too large for configuration")
            else:
                names.append(name)
    except NotFound as error:
        names, unlisted = [], error  # Plain web servers cannot list.
    if not names:
        if unlisted is None and not listed:
            unlisted = NotFound("nothing is listed")
        names = [*WELL_KNOWN, *(name for name in also if is_copied(name, also))]
    for name in names:
        safe_parts(name.encode())
    return sorted(set(names)), sorted(left_out), unlisted


def _found(source: RacerSource, names: Sequence[str]) -> list[SourceFile | None]:
    found: dict[str, SourceFile | None] = {}

    def find(name: str) -> None:
        found[name] = source.find(name)

    for_each(names, find, min(_JOBS, len(names)), source.cancel)
    return [found[name] for name in names]


# --- writing --------------------------------------------------------------------------------------


def write(source: RacerSource, survey: Survey, folder: Path) -> Written:
    """Makes `folder` a directory of what was surveyed. Raises ForeignFile, OSError, VersionChanged
    where the model changed since it was surveyed."""
    with named_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not _is_ours(root):
                _Writer(source, survey, folder, root).check()
            with _locked(root) as lock:
                return _Writer(source, survey, folder, root).run(lock)
        finally:
            os.close(root)


def _is_ours(root: int) -> bool:
    """Whether a writer was here: only the lock is the place to look at what it made."""
    try:
        os.stat(LOCK_NAME, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _locked(root: int) -> Iterator[int]:
    """One writer at a time; the lock goes with its holder, however that ends. Gives its file."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | flags, 0o666, dir_fd=root)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES) or not _is_ours(root):
            raise
        # Prepared, and mounted read-only: it is looked at, and if all is there, nothing is written.
        lock = os.open(LOCK_NAME, os.O_RDONLY | flags, dir_fd=root)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


class _Writer:
    """One run on a locked directory."""

    def __init__(self, source: RacerSource, survey: Survey, folder: Path, root: int) -> None:
        self._source = source
        self._survey = survey
        self._folder = folder
        self._root = root
        self._before = _record_before(folder) or ModelRecord(survey.location)
        known = {**self._before.files, **self._before.shards}
        # A record of an earlier release may name the lock, which is not to be removed.
        self._known = {name: held for name, held in known.items() if not is_ours(name)}
        self._replaced = set(self._known)  # What may be replaced, and removed.
        self._lock = threading.Lock()
        self._done = Written()

    def run(self, lock: int) -> Written:
        """Writes what is not there. Until it is done, the file `lock` says which names are being
        written: a run that ends in the middle leaves no record, and its files are ours too."""
        self._replaced.update(_intended(lock))
        self._check_all()
        surveyed = {file.name for file in (*self._survey.files, *self._survey.shards)}
        if not surveyed <= self._known.keys():
            _intend(lock, self._replaced | surveyed)
        self._clear_up(self._replaced | surveyed)
        files = self._all(self._survey.files, self._content)
        shards = self._all(self._survey.shards, self._header)
        for name in sorted(self._replaced - files.keys() - shards.keys()):
            self._remove(name)
        record = ModelRecord(self._survey.location, files, shards).to_bytes()
        if _stored(self._root, RECORD_NAME) != record:
            self._store(RECORD_NAME, record)
        if os.fstat(lock).st_size:
            os.ftruncate(lock, 0)
        return self._done

    def check(self) -> None:
        """Raises ForeignFile where `run` would; writes nothing, so that it needs no lock.

        A writer that began meanwhile is the one to find out what is in the way.
        """
        try:
            self._check_all()
        except ForeignFile:
            if not _is_ours(self._root):
                raise

    def _check_all(self) -> None:
        self._stored(RECORD_NAME)  # A link would be found out when all else is written.
        for file in self._survey.files:
            self._check_one(file, self._content)
        for shard in self._survey.shards:
            self._check_one(shard, self._header)

    def _check_one(self, file: SourceFile, content: Callable[[SourceFile], bytes]) -> None:
        if file.name in self._replaced:
            return
        stored = self._stored(file.name)
        if stored is not None and stored != content(file):
            raise self._foreign(file.name)

    def _stored(self, name: str) -> bytes | None:
        """`_stored`, where a link or a folder of that name is somebody else's too."""
        try:
            return _stored(self._root, name)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR):
                raise
            raise self._foreign(name) from error

    def _foreign(self, name: str) -> ForeignFile:
        return ForeignFile(
            f"{self._folder / name} is there, and is not the model's",
            hint="give a directory that is empty, or was made by racer-vllm-fetch",
        )

    def _clear_up(self, names: Iterable[str]) -> None:
        """Removes what a writer of `names` that was killed left behind: with the lock, nobody
        writes now."""
        for folders in {(), *(safe_parts(name.encode())[:-1] for name in names)}:
            with suppress(FileNotFoundError):
                with opened_folder(self._root, folders, make=False) as folder:
                    for name in os.listdir(folder):
                        if name.startswith(".racer-") and name.endswith(".part"):
                            os.unlink(name, dir_fd=folder)

    def _all(
        self, files: Sequence[SourceFile], content: Callable[[SourceFile], bytes]
    ) -> dict[str, FileRecord]:
        records: dict[str, FileRecord] = {}

        def one(file: SourceFile) -> None:
            record = self._one(file, content)
            with self._lock:
                records[file.name] = record

        for_each(files, one, max(1, min(_JOBS, len(files))), self._source.cancel)
        return records

    def _one(self, file: SourceFile, content: Callable[[SourceFile], bytes]) -> FileRecord:
        known = self._known.get(file.name)
        stored = self._stored(file.name)
        if known is not None and stored is not None:
            same_version = (known.etag, known.size) == (file.version, file.size)
            if same_version and hashlib.sha256(stored).hexdigest() == known.sha256:
                self._note(self._done.unchanged, file.name)
                return known
        data = content(file)
        if stored is not None and stored != data and file.name not in self._replaced:
            raise self._foreign(file.name)  # It came since this run looked.
        if stored == data:
            self._note(self._done.unchanged, file.name)
        else:
            self._store(file.name, data)
            self._note(self._done.copied, file.name)
        digest = hashlib.sha256(data).hexdigest()
        return FileRecord(file.version, file.size, len(data), digest)

    def _content(self, file: SourceFile) -> bytes:
        if file.size > FILE_BYTES_MAX:
            raise IncompleteModel(f"{file.url} has {file.size:,} bytes: no configuration has that")
        return self._source.read(file, 0, file.size) if file.size else b""

    def _header(self, file: SourceFile) -> bytes:
        length = self._source.read(file, 0, LENGTH_BYTES)
        stop = header_stop_untrusted(length, file.size, file=file.url)
        header = self._source.read(file, 0, stop)
        parse_header(header, file.size, file=file.url)
        return header

    def _store(self, name: str, data: bytes) -> None:
        *folders, base = safe_parts(name.encode())
        with opened_folder(self._root, tuple(folders)) as parent:
            with whole_file(parent, base, len(data)) as fd:
                write_all(fd, memoryview(data), 0)

    def _remove(self, name: str) -> None:
        """What the model had in an earlier version, and has no more."""
        *folders, base = safe_parts(name.encode())
        if _stored(self._root, name) is not None:
            with opened_folder(self._root, tuple(folders)) as parent:
                os.unlink(base, dir_fd=parent)
            self._note(self._done.removed, name)

    def _note(self, where: list[str], name: str) -> None:
        with self._lock:
            where.append(name)


def _intend(lock: int, names: Iterable[str]) -> None:
    data = json.dumps(sorted(names)).encode()
    write_all(lock, memoryview(data), 0)
    os.ftruncate(lock, len(data))
    os.fsync(lock)


def _intended(lock: int) -> set[str]:
    """What a run that did not come to its end was writing; nothing where it did."""
    try:
        told = json.loads(os.pread(lock, os.fstat(lock).st_size, 0))
    except (ValueError, RecursionError):
        return set()  # Empty; or it ended in the middle of saying so, and wrote nothing.
    names = told if isinstance(told, list) else []
    return {name for name in names if isinstance(name, str) and not is_ours(name)}


def _record_before(folder: Path) -> ModelRecord | None:
    try:
        return read_record(os.fspath(folder))
    except ModelPlaceError as error:
        # Its own hint, to run this very command, is for who wants to load.
        raise ForeignFile(
            error.message,
            hint="give another directory, or remove this one if it is of no other use",
        ) from error


def _stored(root: int, name: str) -> bytes | None:
    """The content of a file below `root`, None if there is none. Links are not followed."""
    *folders, base = safe_parts(name.encode())
    try:
        with opened_folder(root, tuple(folders), make=False) as parent:
            fd = os.open(base, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return None
    try:
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


# --- both -----------------------------------------------------------------------------------------


def fetch(
    url: str,
    place: Callable[[Survey], Path],
    *,
    socket: str | None = None,
    run_dir: str | None = None,
    also: Sequence[str] = (),
) -> tuple[Survey, Path, Written]:
    """Surveys the model at `url` and writes the directory that `place` names for it.

    `socket` and `run_dir` are the options of the command, and so errors call them. A model that
    changes meanwhile is looked at again, a few times.
    """
    for attempt in range(_SURVEYS_MAX):
        source = RacerSource(url, socket=socket, run_dir=run_dir)
        name_options(source.client)
        try:
            found = survey(source, also)
            folder = place(found)
            return found, folder, write(source, found, folder)
        except VersionChanged:
            if attempt == _SURVEYS_MAX - 1:
                raise
        finally:
            source.close()
    raise AssertionError("unreachable")

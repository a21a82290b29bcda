"""Loads settings: flags, then RACER_* variables, then TOML, then defaults; checked together.

Layer: config. Raises ConfigError with every problem there is; each names where the value came
from, what it is, and what the setting takes. Nothing is started and nothing is made here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from racerd.config import kinds
from racerd.config.caches import CacheReader, CacheSettings
from racerd.config.declarations import SETTINGS, Declared, Surroundings
from racerd.config.nearest import unknown
from racerd.config.settings import DiskSettings, Settings
from racerd.config.sources import Sources
from racerd.errors import ConfigError
from racerd.pages import ALIGNMENT_BYTES, PageGeometry
from racerd.units import MIB, TIB, format_bytes

SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un has 108, one of them for the NUL (unix(7)).
_DISK_SIZE = kinds.size(1 * MIB, 1024 * TIB)
_DISK_HELP = f"PATH or PATH:BYTES ({_DISK_SIZE.text})"


@dataclass(frozen=True)
class Loaded:
    """Settings, where each came from (`flag --gpu`, `variable …`, `file …`, `default`), and what
    an operator should know though it is no error."""

    settings: Settings
    sources: Mapping[str, str]
    around: Surroundings
    warnings: tuple[str, ...] = ()


@dataclass
class _Gathered:
    """What was read so far; what is wrong keeps the value at None and adds a problem."""

    sources: Sources
    around: Surroundings
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def load_settings(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    around: Surroundings | None = None,
    previous: Loaded | None = None,
) -> Loaded:
    """Returns what flags (`racerd.cli.parse_flags`), variables and the file give.

    With `previous`, for a reload, defaults come from the machine as it was then: free memory and
    free space are others now, and that is no change of settings.
    Raises ConfigError with all that is wrong.
    """
    sources = Sources(flags, environ)
    if around is None:
        around = Surroundings.here(environ) if previous is None else previous.around
    gathered = _Gathered(sources, around)
    for declared in SETTINGS:
        gathered.values[declared.name] = _value(declared, gathered)
    disks = _disks(gathered, previous)
    caches = _caches(gathered)
    problems = sources.problems + gathered.problems
    problems += _together(gathered, disks, caches)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    settings = Settings(**gathered.values, disks=disks, caches=caches)
    return Loaded(settings, gathered.origins, around, tuple(gathered.warnings))


def _value(declared: Declared, gathered: _Gathered) -> Any:
    found = gathered.sources.find(declared)
    gathered.origins[declared.name] = "default" if found is None else found.source
    try:
        if found is not None:
            return declared.kind.parse(found.value)
        return declared.default_value(gathered.around, gathered.values)
    except ValueError as error:
        where = declared.name if found is None else found.where
        gathered.problems.append(f"{where}: {error} ({declared.name}: {declared.kind.text})")
        return None


# --- disks ----------------------------------------------------------------------------------


def _disks(gathered: _Gathered, previous: Loaded | None) -> tuple[DiskSettings, ...]:
    given = gathered.sources.find_list("disks")
    found: list[DiskSettings | None]
    if given is not None:
        at, texts = given
        gathered.origins["disks"] = at.source
        found = [_disk_of_text(at.where, text, gathered.problems) for text in texts]
    elif "disks" in gathered.sources.table:
        gathered.origins["disks"] = gathered.sources.in_file("disks").source
        found = _disks_of_table(gathered)
    else:
        gathered.origins["disks"] = "default"
        if previous is not None and previous.sources["disks"] == "default":
            return previous.settings.disks
        found = [_default_disk(gathered)]
    return tuple(disk for disk in found if disk is not None)


def _default_disk(gathered: _Gathered) -> DiskSettings | None:
    state_dir = gathered.values["state_dir"]
    floor = gathered.values["free_space_floor"]
    if state_dir is None or floor is None:
        return None  # Another problem says why.
    path = state_dir / "slab-0"
    size = gathered.around.file_system(path).slab_default(floor)
    if size is None:
        gathered.warnings.append(
            f"pages are not kept on disk: the file system of {state_dir} has no room for a slab"
            f" that leaves {floor:.0%} of it free; name a disk with --disk PATH[:BYTES]"
        )
        return None
    return DiskSettings(path, size)


def _disk_of_text(where: str, text: str, problems: list[str]) -> DiskSettings | None:
    path, colon, size = text.rpartition(":")
    try:
        if not colon:
            return DiskSettings(kinds.PATH.parse(text))
        return DiskSettings(kinds.PATH.parse(path), _DISK_SIZE.parse(size))
    except ValueError as error:
        problems.append(f"{where} {text}: {error}; {_DISK_HELP} is wanted")
        return None


def _disks_of_table(gathered: _Gathered) -> list[DiskSettings | None]:
    raw, problems = gathered.sources.table["disks"], gathered.problems
    where = gathered.sources.key_in_file("disks")
    if not isinstance(raw, list):
        problems.append(f'{where}: a list is wanted: ["PATH:BYTES"], or [[disks]] tables')
        return []
    found: list[DiskSettings | None] = []
    for number, item in enumerate(raw):
        at = f"{where}[{number}]"
        if isinstance(item, str):
            found.append(_disk_of_text(at, item, problems))
            continue
        if not isinstance(item, dict):
            problems.append(f"{at}: a text or a table with path and bytes is wanted")
            continue
        names = sorted(item.keys() - {"path", "bytes"})
        problems += [unknown(f"{at}.{name}", name, ("path", "bytes")) for name in names]
        try:
            path = kinds.PATH.parse(item.get("path"))
            size = _DISK_SIZE.parse(item["bytes"]) if "bytes" in item else None
            found.append(DiskSettings(path, size))
        except ValueError as error:
            problems.append(f"{at}: {error}; path (text) and bytes ({_DISK_SIZE.text}) are wanted")
    return found


# --- caches ---------------------------------------------------------------------------------


def _caches(gathered: _Gathered) -> dict[str, CacheSettings]:
    """Tables of the file, then NAME=URL of flags or variable, which replace the origin only."""
    sources, problems = gathered.sources, gathered.problems
    tables = sources.table.get("caches", {})
    if not isinstance(tables, dict):
        problems.append(
            f"{sources.key_in_file('caches')}: tables are wanted: [caches.NAME] with an origin"
        )
        tables = {}
    tables = dict(tables)
    places = dict.fromkeys(tables, sources.in_file("caches").source)
    given = sources.find_list("caches")
    named: set[str] = set()
    for text in given[1] if given is not None else []:
        assert given is not None
        name, equals, url = text.partition("=")
        if not equals:
            problems.append(
                f"{given[0].where} {text}: NAME=URL is wanted, such as local=file:///models"
            )
            continue
        if name in named:
            problems.append(f"{given[0].where}: cache {name} is named twice")
        named.add(name)
        table = tables.get(name, {})
        tables[name] = {**table, "origin": url} if isinstance(table, dict) else table
        places[name] = given[0].source
    if not tables and given is None and "caches" not in sources.table:
        tables["local"] = {"origin": (gathered.around.folder / "models").as_uri()}
        places["local"] = "default"
    caches = {}
    for name, table in tables.items():
        where = sources.key_in_file if places[name].startswith("file") else str
        reader = CacheReader(name, table, where, sources.environ, sources.file_is_private)
        cache = reader.read()
        problems += reader.problems
        gathered.origins[f"caches.{name}"] = places[name]
        if cache is not None:
            caches[name] = cache
    return caches


# --- together -------------------------------------------------------------------------------


def _together(
    gathered: _Gathered, disks: tuple[DiskSettings, ...], caches: Mapping[str, CacheSettings]
) -> list[str]:
    """What only shows when the settings are seen together. Values at None are told elsewhere."""
    values = gathered.values
    paths = [disk.path for disk in disks]
    problems = [f"disks: {p} is named twice" for p in sorted(set(paths)) if paths.count(p) > 1]
    problems += _geometry_problems(values, gathered.origins)
    problems += _staging_problems(values)
    problems += _memory_problems(values, gathered.around.machine.limit_bytes)
    if values["run_dir"] is not None:
        for name in caches:
            problems += _socket_path_problems(str(values["run_dir"] / name / "client" / "socket"))
    if values["socket_mode"] is not None and values["socket_mode"] & 0o006:
        gathered.warnings.append(
            f"socket_mode {values['socket_mode']:04o} lets every user of this node read every cache"
        )
    return problems


def _geometry_problems(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    if values["page_bytes"] is None or values["frame_bytes"] is None:
        return []
    try:
        geometry = PageGeometry(values["page_bytes"], values["frame_bytes"])
    except ValueError as error:
        return [str(error)]
    page = geometry.page_bytes
    wanted = {"memory": 4, "plaintext": 2}
    if origins["dirty"] != "default":  # By default it is half of memory, and right where that is.
        wanted["dirty"] = 2
    return [
        f"{name}: {format_bytes(values[name])} must hold {pages} pages of {format_bytes(page)}:"
        f" give it {format_bytes(pages * page)} or more, or a smaller --page-bytes"
        for name, pages in wanted.items()
        if values[name] is not None and values[name] < pages * page
    ]


def _staging_problems(values: Mapping[str, Any]) -> list[str]:
    """A GPU stages whole pages, each frame with room for its tag: one copies, one is opened."""
    page, frame, staging = (values[n] for n in ("page_bytes", "frame_bytes", "gpu_staging_bytes"))
    if values["gpu"] == "off" or None in (page, frame, staging):
        return []
    wanted = 2 * (page + -(-page // frame) * ALIGNMENT_BYTES)
    if staging >= wanted:
        return []
    return [
        f"gpu_staging_bytes: {format_bytes(staging)} must hold 2 pages of {format_bytes(page)},"
        f" {wanted} bytes"
    ]


def _memory_problems(values: Mapping[str, Any], limit: int | None) -> list[str]:
    memory, plaintext, dirty = (values[name] for name in ("memory", "plaintext", "dirty"))
    problems = []
    if None not in (memory, plaintext) and limit is not None and memory + plaintext > limit:
        problems.append(
            f"memory: {format_bytes(memory)} and {format_bytes(plaintext)} of plaintext are more"
            f" than this container's memory limit of {format_bytes(limit)}"
        )
    if None not in (memory, dirty) and dirty > memory:
        problems.append(
            f"dirty: {format_bytes(dirty)} are more than memory, {format_bytes(memory)}, which"
            " pages waiting for a disk are a part of"
        )
    return problems


def _socket_path_problems(path: str) -> list[str]:
    length = len(os.fsencode(path))
    if length <= SOCKET_PATH_BYTES_MAX:
        return []
    return [
        f"run_dir: the socket path {path} has {length} bytes, the system's limit is"
        f" {SOCKET_PATH_BYTES_MAX}; choose a shorter --run-dir or cache name"
    ]

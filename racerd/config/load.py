"""Loads settings: flags, then RACER_* variables, then TOML, then defaults; checked together.

Layer: config. Raises ConfigError with every problem there is, each naming where the value came
from, what it is and what it should be.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from racerd.config import kinds
from racerd.config.caches import CacheSettings, parse_cache
from racerd.config.declarations import SETTINGS, Declared, Surroundings
from racerd.config.machine import slab_bytes_default
from racerd.config.nearest import unknown
from racerd.config.settings import DiskSettings, Settings
from racerd.errors import ConfigError
from racerd.pages import PageGeometry
from racerd.units import MIB, format_bytes, parse_bytes

SOCKET_PATH_BYTES_MAX = 107
_NOT_OURS = re.compile(
    # The client's, the deployment's and the tests' variables, and those that Kubernetes makes of
    # a Service whose name starts with `racer`.
    r"RACER_(SOCKET|CONFIG|ENABLE_GPU|CACHES|DISKS|DATAPLANE_NVIDIA|TEST_\w+"
    r"|\w+_SERVICE_(HOST|PORT\w*)|\w+_PORT(_\w+)?)"
)
_GPU_VARIABLE = {"auto": "auto", "true": "on", "false": "off"}
_DISK_SIZE = kinds.size(1 * MIB, 1 << 60)


@dataclass(frozen=True)
class Loaded:
    """Settings, and where each came from: `flag`, `variable`, `file` or `default`."""

    settings: Settings
    sources: Mapping[str, str]


class _Reader:
    """Collects values and problems from all sources."""

    def __init__(
        self, flags: Mapping[str, Any], environ: Mapping[str, str], table: Mapping[str, Any]
    ) -> None:
        self.flags = flags
        self.environ = environ
        self.table = table
        self.problems: list[str] = []
        self.sources: dict[str, str] = {}

    def raw(self, declared: Declared) -> tuple[str, Any] | None:
        """Where the strongest value of the setting comes from, and the value; None without one."""
        if self.flags.get(declared.name) is not None:
            return declared.flag, self.flags[declared.name]
        if declared.variable in self.environ:
            return declared.variable, self.environ[declared.variable]
        if declared.name == "gpu" and "RACER_ENABLE_GPU" in self.environ:
            text = self.environ["RACER_ENABLE_GPU"]
            return "RACER_ENABLE_GPU (auto, true or false)", _GPU_VARIABLE.get(text, text)
        if declared.name in self.table:
            return declared.name, self.table[declared.name]
        return None

    def value(self, declared: Declared, around: Surroundings, earlier: Mapping[str, Any]) -> Any:
        found = self.raw(declared)
        try:
            if found is None:
                self.sources[declared.name] = "default"
                return declared.default_value(around, earlier)
            self.sources[declared.name] = _source(found[0])
            return declared.kind.parse(found[1])
        except ValueError as error:
            where = declared.name if found is None else found[0]
            self.problems.append(f"{where}: {error}")
            return None


def _source(where: str) -> str:
    if where.startswith("--"):
        return "flag"
    return "variable" if where.startswith("RACER_") else "file"


def load_settings(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    around: Surroundings | None = None,
    cwd: Path | None = None,
) -> Loaded:
    """Returns the settings that `flags` (by name; also `config`, `cache`, `disk`), the variables
    and the file give. Raises ConfigError with all that is wrong."""
    around = around or Surroundings(environ, os.geteuid() == 0, Path.home())
    cwd = cwd or Path.cwd()
    problems: list[str] = []
    table = _read_table(flags.get("config") or environ.get("RACER_CONFIG"), problems)
    reader = _Reader(flags, environ, table)
    reader.problems += problems + _unknown_names(environ, table)
    values: dict[str, Any] = {}
    for declared in SETTINGS:
        values[declared.name] = reader.value(declared, around, values)
    disks = _disks(reader, values)
    caches = _caches(reader, cwd)
    if not reader.problems:
        reader.problems += _together(values, disks, caches)
    if reader.problems:
        raise ConfigError(reader.problems)
    return Loaded(Settings(**values, disks=disks, caches=caches), reader.sources)


def _read_table(path: str | None, problems: list[str]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        problems.append(f"--config {path}: cannot be read: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"--config {path}: not TOML: {error}")
    return {}


def _unknown_names(environ: Mapping[str, str], table: Mapping[str, Any]) -> list[str]:
    names = {declared.name for declared in SETTINGS} | {"disks", "caches"}
    variables = {declared.variable for declared in SETTINGS}
    problems = [unknown(key, key, names) for key in sorted(table.keys() - names)]
    for name in sorted(environ):
        ours = name.startswith("RACER_") and _NOT_OURS.fullmatch(name) is None
        if ours and name not in variables:
            problems.append(unknown(name, name, variables))
    return problems


def _disks(reader: _Reader, values: Mapping[str, Any]) -> tuple[DiskSettings, ...]:
    texts = reader.flags.get("disk") or reader.environ.get("RACER_DISKS", "").split(",")
    texts = [text for text in texts if text]
    if texts:
        reader.sources["disks"] = "flag" if reader.flags.get("disk") else "variable"
        where = "--disk" if reader.flags.get("disk") else "RACER_DISKS"
        found = [_disk_of_text(where, text, reader.problems) for text in texts]
    elif "disks" in reader.table:
        reader.sources["disks"] = "file"
        found = _disks_of_table(reader.table["disks"], reader.problems)
    else:
        reader.sources["disks"] = "default"
        found = [_default_disk(values)]
    return tuple(disk for disk in found if disk is not None)


def _default_disk(values: Mapping[str, Any]) -> DiskSettings | None:
    state_dir, floor = values["state_dir"], values["free_space_floor"]
    if state_dir is None or floor is None:
        return None
    return DiskSettings(state_dir / "slab-0", slab_bytes_default(state_dir, floor))


def _disk_of_text(where: str, text: str, problems: list[str]) -> DiskSettings | None:
    path, colon, size = text.rpartition(":")
    if not colon:
        return DiskSettings(kinds.PATH.parse(text))
    try:
        return DiskSettings(kinds.PATH.parse(path), _DISK_SIZE.parse(parse_bytes(size)))
    except ValueError as error:
        problems.append(f"{where} {text}: {error}; PATH or PATH:BYTES is wanted")
        return None


def _disks_of_table(raw: Any, problems: list[str]) -> list[DiskSettings | None]:
    if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
        problems.append("disks: a list of tables is wanted: [[disks]] with path and bytes")
        return []
    found: list[DiskSettings | None] = []
    for number, item in enumerate(raw):
        where = f"disks[{number}]"
        names = sorted(item.keys() - {"path", "bytes"})
        problems += [unknown(f"{where}.{name}", name, ("path", "bytes")) for name in names]
        try:
            path = kinds.PATH.parse(item.get("path"))
            size = _DISK_SIZE.parse(item["bytes"]) if "bytes" in item else None
            found.append(DiskSettings(path, size))
        except ValueError as error:
            problems.append(f"{where}: {error}")
    return found


def _caches(reader: _Reader, cwd: Path) -> dict[str, CacheSettings]:
    tables: dict[str, Any] = {}
    if isinstance(reader.table.get("caches", {}), dict):
        tables |= reader.table.get("caches", {})
        reader.sources["caches"] = "file"
    else:
        reader.problems.append("caches: tables are wanted: [caches.NAME] with an origin")
    given = reader.flags.get("cache") or reader.environ.get("RACER_CACHES", "").split(",")
    for text in (text for text in given if text):
        name, equals, url = text.partition("=")
        if not equals:
            reader.problems.append(
                f"--cache {text}: NAME=URL is wanted, such as local=file:///models"
            )
            continue
        reader.sources["caches"] = "flag" if reader.flags.get("cache") else "variable"
        tables[name] = {**tables.get(name, {}), "origin": url}
    if not tables and not reader.flags.get("config"):
        reader.sources["caches"] = "default"
        tables["local"] = {"origin": f"file://{cwd / 'models'}"}
    found = (parse_cache(name, table, reader.problems) for name, table in tables.items())
    return {cache.name: cache for cache in found if cache is not None}


def _together(
    values: Mapping[str, Any],
    disks: tuple[DiskSettings, ...],
    caches: Mapping[str, CacheSettings],
) -> list[str]:
    """What only shows when the settings are seen together."""
    problems = []
    try:
        geometry = PageGeometry(values["page_bytes"], values["frame_bytes"])
    except ValueError as error:
        return [str(error)]
    page = format_bytes(geometry.page_bytes)
    for name, pages in (("memory", 4), ("plaintext", 2), ("dirty", 2)):
        if values[name] < pages * geometry.page_bytes:
            problems.append(f"{name}: must hold {pages} pages of {page}")
    paths = [disk.path for disk in disks]
    problems += [f"disks: {p} is named twice" for p in sorted(set(paths)) if paths.count(p) > 1]
    for name in caches:
        path = str(values["run_dir"] / name / "client" / "socket")
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            problems.append(
                f"run_dir: the socket path {path} has {len(os.fsencode(path))} bytes, the system's"
                f" limit is {SOCKET_PATH_BYTES_MAX}; choose a shorter --run-dir or cache name"
            )
    return problems

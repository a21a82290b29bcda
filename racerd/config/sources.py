"""Where values come from: flags, then RACER_* variables, then the settings file.

Layer: config. `Sources` finds the strongest value of a setting and names its source in the words
that errors and `check-config` use.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from racerd.config.caches import is_private
from racerd.config.declarations import SETTINGS, Declared
from racerd.config.nearest import unknown
from racerd.units import MIB

FILE_BYTES_MAX = 1 * MIB

_NOT_OURS = re.compile(
    # The client's, the deployment's and the tests' variables, and those that Kubernetes makes of
    # a Service whose name starts with `racer`.
    r"RACER_(SOCKET|DATAPLANE_NVIDIA|TEST_\w+"
    r"|\w+_SERVICE_(HOST|PORT\w*)|\w+_PORT(_\w+)?)"
)
_GPU_VARIABLE = {"auto": "auto", "true": "on", "false": "off"}
_LISTS = {"disks": ("--disk", "RACER_DISKS"), "caches": ("--cache", "RACER_CACHES")}


@dataclass(frozen=True)
class Found:
    """A raw value. `where` is for errors, `source` for people: `flag --gpu`, `file /etc/r.toml`."""

    where: str
    source: str
    value: Any


class Sources:
    """The three sources together. Problems of the sources themselves gather in `problems`."""

    def __init__(self, flags: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.flags = flags
        self.environ = environ
        self.problems: list[str] = list(flags.get("problems") or ())
        self.file, self._file_named_by = _named_file(flags, environ)
        self.table = self._read_table()
        self.problems += self._unknown_names()

    def find(self, declared: Declared) -> Found | None:
        """The strongest value of a setting, or None where nobody gave one."""
        if self.flags.get(declared.name) is not None:
            flag = declared.flag
            return Found(flag, f"flag {flag}", self.flags[declared.name])
        if declared.variable in self.environ:
            return self._variable(declared.variable)
        if declared.name == "gpu" and "RACER_ENABLE_GPU" in self.environ:
            return self._gpu_variable()
        if declared.name in self.table:
            return self.in_file(declared.name, self.table[declared.name])
        return None

    def find_list(self, name: str) -> tuple[Found, list[str]] | None:
        """The texts of `disks` or `caches` from flags, else from the variable; None without."""
        flag, variable = _LISTS[name]
        given = self.flags.get(flag.lstrip("-"))
        if given:
            return Found(flag, f"flag {flag}", given), list(given)
        texts = [text for text in re.split(r"[,\s]+", self.environ.get(variable, "")) if text]
        return (self._variable(variable), texts) if texts else None

    def in_file(self, key: str, value: Any = None) -> Found:
        return Found(self.key_in_file(key), f"file {self.file}", value)

    def key_in_file(self, key: str) -> str:
        return f"{self.file}: {key}" if self.file else key

    def _variable(self, name: str) -> Found:
        return Found(name, f"variable {name}", self.environ[name])

    def _gpu_variable(self) -> Found:
        name = "RACER_ENABLE_GPU"
        text = self.environ[name]
        value = _GPU_VARIABLE.get(text)
        if value is None:
            self.problems.append(f"{name}: {text!r} is none of auto, true, false")
        return Found(name, f"variable {name}", value or "auto")

    def _read_table(self) -> dict[str, Any]:
        if self.file is None:
            return {}
        where = f"{self._file_named_by} {self.file}"
        try:
            with self.file.open("rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
            if len(content) > FILE_BYTES_MAX:
                self.problems.append(f"{where}: above {FILE_BYTES_MAX:,} bytes")
                return {}
            return tomllib.loads(content.decode())
        except OSError as error:
            self.problems.append(f"{where}: cannot be read: {error.strerror}")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            # The parser tells the place; of the text it may quote a character or a key.
            self.problems.append(f"{where}: not TOML: {error}")
        return {}

    @property
    def file_is_private(self) -> bool:
        """Whether the settings file may hold secrets: nobody but its owner can read it."""
        return self.file is not None and os.path.exists(self.file) and is_private(self.file)

    def _unknown_names(self) -> list[str]:
        names = {declared.name for declared in SETTINGS} | _LISTS.keys()
        variables = {declared.variable for declared in SETTINGS} | {
            "RACER_CONFIG", "RACER_ENABLE_GPU", "RACER_DISKS", "RACER_CACHES",
        }  # fmt: skip
        problems = [
            unknown(self.key_in_file(key), key, names) for key in sorted(self.table.keys() - names)
        ]
        for name in sorted(self.environ):
            ours = name.startswith("RACER_") and name not in variables
            if ours and _NOT_OURS.fullmatch(name) is None:
                problems.append(unknown(name, name, variables))
        if "RACER_GPU" in self.environ and "RACER_ENABLE_GPU" in self.environ:
            problems.append("RACER_GPU and RACER_ENABLE_GPU say the same: set one of them")
        return problems


def _named_file(flags: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """The settings file and what named it."""
    if flags.get("config"):
        return Path(flags["config"]), "--config"
    if environ.get("RACER_CONFIG"):
        return Path(environ["RACER_CONFIG"]), "RACER_CONFIG"
    return None, ""

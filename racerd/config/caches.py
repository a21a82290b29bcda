"""A cache's table: its origin and how to reach it.

Layer: config. Credentials come from the platform, or from a variable or file that the table names
(`sas_env`, `sas_file`); one in the text of the settings file is taken only if nobody else can read
that file. A credential is wrapped at once and never printed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from racerd.config import kinds
from racerd.config.nearest import unknown
from racerd.config.origin_options import OriginOptions, Secret
from racerd.errors import RequestError
from racerd.ids import ObjectId, check_cache_name
from racerd.units import KIB, MIB, TIB

_REMOTE = ("s3", "gs", "az", "http", "https")
SCHEMES = ("file", *_REMOTE)
_STORES = ("s3", "gs", "az")
_SECRET_BYTES_MAX = 64 * KIB


@dataclass(frozen=True)
class CacheSettings:
    """`origin` is a URL without credentials; `quota_bytes` bounds its share of the disks."""

    name: str
    origin: str
    options: OriginOptions
    quota_bytes: int | None = None


@dataclass(frozen=True)
class Option:
    """One option of a cache and the schemes of the origins that it applies to."""

    kind: kinds.Kind
    help: str
    schemes: tuple[str, ...] = SCHEMES
    secret: bool = False


SECRET = kinds.Kind("secret", lambda raw: Secret(kinds.TEXT.parse(raw)), show=repr)

OPTIONS: Mapping[str, Option] = {
    "buckets": Option(kinds.TEXTS, "the only buckets that can be named"),
    "endpoint": Option(kinds.TEXT, "URL of the service, where it is not the public one", _STORES),
    "region": Option(kinds.TEXT, "region of the service", ("s3",)),
    "path_style": Option(kinds.BOOLEAN, "bucket in the path, not in the host name", ("s3",)),
    "allow_http": Option(kinds.BOOLEAN, "plain http to the endpoint", _STORES),
    "anonymous": Option(kinds.BOOLEAN, "no credentials", _STORES),
    "profile": Option(kinds.TEXT, "profile in the shared credentials file", ("s3",)),
    "access_key_id": Option(kinds.TEXT, "static key: its name", ("s3",)),
    "secret_access_key": Option(SECRET, "static key: its secret", ("s3",), secret=True),
    "session_token": Option(SECRET, "static key: its session", ("s3",), secret=True),
    "account_key": Option(SECRET, "key of the storage account", ("az",), secret=True),
    "sas": Option(SECRET, "shared access signature", ("az",), secret=True),
    "bearer_token": Option(
        SECRET, "sent as Authorization: Bearer", ("gs", "az", "http", "https"), secret=True
    ),
    "service_account_file": Option(kinds.TEXT, "JSON key of a service account", ("gs",)),
    "ca_bundle": Option(kinds.TEXT, "PEM file with the CAs to trust", _REMOTE),
    "weak_etags": Option(
        kinds.BOOLEAN,
        "objects without an ETag are told apart by size and Last-Modified",
        ("http", "https"),
    ),
    "connect_timeout_seconds": Option(kinds.seconds(0.1, 300), "time to connect", _REMOTE),
    "idle_timeout_seconds": Option(
        kinds.seconds(0.1, 3600), "time without a byte before a transfer is resumed", _REMOTE
    ),
    "progress_bytes_per_second_min": Option(
        kinds.size(0, TIB), "slower transfers are given up; 0 allows any", _REMOTE
    ),
    "retries": Option(kinds.count(0, 100), "times that a request is made again", _REMOTE),
    "quota_bytes": Option(
        kinds.or_off(kinds.size(MIB, 1024 * TIB)), "what its pages may take of the disks"
    ),
}
_SECRETS = tuple(name for name, option in OPTIONS.items() if option.secret)
KEYS = (
    "origin",
    *OPTIONS,
    *(f"{name}{suffix}" for name in _SECRETS for suffix in ("_env", "_file")),
)


class CacheReader:
    """Reads the table of one cache and gathers what is wrong with it."""

    def __init__(
        self,
        name: str,
        table: Any,
        where: Callable[[str], str],
        environ: Mapping[str, str],
        private: bool,
    ) -> None:
        """`where` names a key's source; `private`: nobody else can read what `table` is from."""
        self.name = name
        self.table = table
        self.where = where
        self.environ = environ
        self.private = private
        self.problems: list[str] = []

    def read(self) -> CacheSettings | None:
        """Returns the cache, or None with `problems`."""
        try:
            check_cache_name(self.name)
        except ValueError as error:
            self._problem("", str(error))
        if not isinstance(self.table, dict):
            self._problem("", "a table with an `origin` is wanted")
            return None
        for key in sorted(self.table.keys() - set(KEYS)):
            self.problems.append(unknown(self._where(key), key, KEYS))
        values = {name: self._value(name, option) for name, option in OPTIONS.items()}
        values = {name: value for name, value in values.items() if value is not None}
        origin = self._origin(values)
        self._check_together(values)
        if self.problems or origin is None:
            return None
        quota = values.pop("quota_bytes", None)
        assert values.keys() <= {field.name for field in fields(OriginOptions)}
        return CacheSettings(self.name, origin, OriginOptions(**values), quota)

    def _where(self, key: str) -> str:
        return self.where(f"caches.{self.name}.{key}" if key else f"caches.{self.name}")

    def _problem(self, key: str, text: str) -> None:
        self.problems.append(f"{self._where(key)}: {text}")

    def _value(self, name: str, option: Option) -> Any:
        if option.secret:
            return self._secret(name)
        if name not in self.table:
            return None
        try:
            return option.kind.parse(self.table[name])
        except ValueError as error:
            self._problem(name, f"{error} ({option.kind.text})")
            return None

    def _secret(self, name: str) -> Secret | None:
        given = [key for key in (name, f"{name}_env", f"{name}_file") if key in self.table]
        if len(given) > 1:
            self._problem(given[1], f"{given[0]} says the same: give one of them")
        if not given:
            return None
        key, raw = given[0], self.table[given[0]]
        if not isinstance(raw, str) or not raw:
            self._problem(key, "text is wanted")
            return None
        if key == name:
            if not self.private:
                self._problem(
                    name,
                    "others can read the file that holds this secret: give it mode 0600, or use"
                    f" {name}_file or {name}_env",
                )
            return Secret(raw)
        return self._secret_of_variable(key, raw) if key.endswith("_env") else (
            self._secret_of_file(key, Path(raw))
        )  # fmt: skip

    def _secret_of_variable(self, key: str, variable: str) -> Secret | None:
        text = self.environ.get(variable, "")
        if not text:
            self._problem(key, f"the variable {variable} is not set")
            return None
        return Secret(text)

    def _secret_of_file(self, key: str, path: Path) -> Secret | None:
        try:
            with path.open("rb") as file:
                content = file.read(_SECRET_BYTES_MAX + 1)
            text = content.decode().strip()
        except OSError as error:
            self._problem(key, f"{path} cannot be read: {error.strerror}")
            return None
        except UnicodeDecodeError:
            text = ""
        if not text or len(content) > _SECRET_BYTES_MAX:
            self._problem(key, f"{path} is empty, no text, or above {_SECRET_BYTES_MAX} bytes")
            return None
        return Secret(text)

    def _origin(self, values: Mapping[str, Any]) -> str | None:
        url = self.table.get("origin")
        if not isinstance(url, str) or not url:
            self._problem("origin", "missing; write a URL such as file:///models")
            return None
        problems = _url_problems(url)
        for problem in problems:
            self._problem("origin", problem)
        if problems:
            return None
        parts = urlsplit(url)
        for name in values:
            if parts.scheme not in OPTIONS[name].schemes:
                allowed = ", ".join(OPTIONS[name].schemes)
                self._problem(name, f"does not apply to {parts.scheme}:// but to {allowed}")
        if parts.scheme == "az" and not parts.netloc and "endpoint" not in values:
            self._problem("origin", "az://ACCOUNT is wanted, or an endpoint")
        return url

    def _check_together(self, values: Mapping[str, Any]) -> None:
        for bucket in values.get("buckets", ()):
            try:
                ObjectId("x", bucket, b"x")
            except RequestError as error:
                self._problem("buckets", error.message)
        if ("access_key_id" in values) != ("secret_access_key" in values):
            self._problem("access_key_id", "access_key_id and secret_access_key come together")
        if "session_token" in values and "access_key_id" not in values:
            self._problem("session_token", "needs access_key_id and secret_access_key")
        credentials = {*_SECRETS, "access_key_id", "profile", "service_account_file"}
        if values.get("anonymous") and (given := sorted(credentials & values.keys())):
            self._problem("anonymous", f"contradicts {', '.join(given)}")
        if "endpoint" in values:
            self._check_endpoint(values["endpoint"], bool(values.get("allow_http")))
        for name in ("ca_bundle", "service_account_file"):
            if name in values and not os.access(values[name], os.R_OK):
                self._problem(name, f"{values[name]} is not there or cannot be read")

    def _check_endpoint(self, endpoint: str, allow_http: bool) -> None:
        problem = _http_problem(endpoint)
        if problem:
            self._problem("endpoint", problem)
        elif endpoint.startswith("http:") and not allow_http:
            self._problem("endpoint", "plain http needs allow_http = true")


def is_private(path: Path) -> bool:
    """Whether only its owner can read `path`."""
    return not stat.S_IMODE(path.stat().st_mode) & 0o044


def _url_problems(url: str) -> list[str]:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return [f"not a URL: {error}"]
    if parts.username is not None or parts.password is not None:
        return ["credentials do not belong in a URL: they are options of the cache's table"]
    if parts.scheme not in SCHEMES:
        wanted = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        return [f"{url!r} has no known scheme: one of {wanted} is wanted"]
    if parts.query or parts.fragment:
        return ["an origin's URL has no query and no fragment; write %3F for ? and %23 for #"]
    if parts.scheme == "file":
        absolute = not parts.netloc and parts.path.startswith("/")
        return [] if absolute else ["a file origin is file:///absolute/path"]
    if parts.scheme in _STORES:
        bare = parts.path in ("", "/")
        return [] if bare else [f"{parts.scheme}:// takes no path: a prefix belongs to the key"]
    problem = _http_problem(url)
    return [problem] if problem else []


def _http_problem(url: str) -> str:
    """What is wrong with `url` as the address of an HTTP service; empty if nothing is."""
    try:
        parts = urlsplit(url)
        port = parts.port  # Raises where it is no port.
    except ValueError as error:
        return f"not a URL: {error}"
    if parts.username is not None or parts.password is not None:
        return "credentials do not belong in a URL"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "http(s)://HOST[:PORT] is wanted"
    if parts.query or parts.fragment:
        return "has no query and no fragment"
    return ""

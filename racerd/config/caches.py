"""A cache's table: its origin and how to reach it.

Layer: config, pure. Credentials come from the environment of the platform, or from a file that is
named here; a credential in the text of a setting is wrapped at once and never printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from racerd.config import kinds
from racerd.config.nearest import unknown
from racerd.config.origin_options import OriginOptions, Secret
from racerd.errors import RequestError
from racerd.ids import ObjectId, check_cache_name

SCHEMES = ("file", "http", "https", "s3", "gs", "az")


@dataclass(frozen=True)
class CacheSettings:
    """`origin` is a URL without credentials; `quota_bytes` bounds its share of the disks."""

    name: str
    origin: str
    options: OriginOptions
    quota_bytes: int | None = None


def _secret(raw: Any) -> Secret:
    return Secret(kinds.TEXT.parse(raw))


_SECRET = kinds.Kind("secret text", _secret)
_OPTIONS: dict[str, kinds.Kind] = {
    "buckets": kinds.TEXTS,
    "endpoint": kinds.TEXT,
    "region": kinds.TEXT,
    "path_style": kinds.BOOLEAN,
    "allow_http": kinds.BOOLEAN,
    "anonymous": kinds.BOOLEAN,
    "profile": kinds.TEXT,
    "access_key_id": kinds.TEXT,
    "secret_access_key": _SECRET,
    "session_token": _SECRET,
    "account_key": _SECRET,
    "sas": _SECRET,
    "bearer_token": _SECRET,
    "service_account_file": kinds.TEXT,
    "ca_bundle": kinds.TEXT,
    "weak_etags": kinds.BOOLEAN,
    "connect_timeout_seconds": kinds.seconds(0.1, 300),
    "idle_timeout_seconds": kinds.seconds(0.1, 3600),
    "progress_bytes_per_second_min": kinds.size(0, 1 << 40),
    "retries": kinds.count(0, 100),
}
_OWN = {"quota_bytes": kinds.size(1 << 20, 1 << 60)}
OPTION_KINDS: Mapping[str, kinds.Kind] = {"origin": kinds.TEXT, **_OPTIONS, **_OWN}


def parse_cache(name: str, table: Any, problems: list[str]) -> CacheSettings | None:
    """Returns the cache, or None after adding what is wrong with it to `problems`."""
    where = f"caches.{name}"
    before = len(problems)
    try:
        check_cache_name(name)
    except ValueError as error:
        problems.append(f"{where}: {error}")
    if not isinstance(table, dict):
        problems.append(f"{where}: a table with an `origin` is wanted")
        return None
    problems += [
        unknown(f"{where}.{key}", key, OPTION_KINDS) for key in table.keys() - OPTION_KINDS
    ]
    values: dict[str, Any] = {}
    for key in OPTION_KINDS.keys() & table.keys():
        try:
            values[key] = OPTION_KINDS[key].parse(table[key])
        except ValueError as error:
            problems.append(f"{where}.{key}: {error}")
    origin = values.pop("origin", None)
    if origin is None:
        if "origin" not in table:
            problems.append(f"{where}.origin: missing; write a URL such as file:///models")
    else:
        problems += [f"{where}.origin: {problem}" for problem in _origin_problems(origin)]
    problems += [f"{where}.buckets: {p}" for p in _bucket_problems(values.get("buckets", ()))]
    if len(problems) > before:
        return None
    quota = values.pop("quota_bytes", None)
    assert values.keys() <= {field.name for field in fields(OriginOptions)}
    return CacheSettings(name, origin, OriginOptions(**values), quota)


def _origin_problems(url: str) -> list[str]:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return [f"not a URL: {error}"]
    if parts.scheme not in SCHEMES:
        wanted = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        return [f"{url!r} has no known scheme: one of {wanted} is wanted"]
    if parts.username or parts.password:
        return ["credentials do not belong in a URL; see docs/origins.md for where they go"]
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        return ["a file origin is file:///absolute/path"]
    if parts.query or parts.fragment:
        return ["an origin's URL has no query and no fragment"]
    return []


def _bucket_problems(buckets: tuple[str, ...]) -> list[str]:
    found = []
    for bucket in buckets:
        try:
            ObjectId("x", bucket, b"x")
        except RequestError as error:
            found.append(error.message)
    return found

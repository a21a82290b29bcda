"""From a cache's URL to its origin.

Layer: origin. Importing it imports obstore; making an origin opens nothing.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from racerd.config.origin_options import OriginOptions
from racerd.errors import ConfigError
from racerd.origin.directory import DirectoryOrigin
from racerd.origin.protocol import Origin
from racerd.origin.remote import RemoteOrigin
from racerd.telemetry import Metrics


def make_origin(url: str, options: OriginOptions, *, cache: str, metrics: Metrics) -> Origin:
    """Returns the origin at `url`. Raises ConfigError for a scheme that is not known."""
    parts = urlsplit(url)
    match parts.scheme:
        case "file":
            return DirectoryOrigin(Path(unquote(parts.path)), options)
        case "s3" | "gs" | "az" | "http" | "https":
            return RemoteOrigin(url, options, cache=cache, metrics=metrics)
        case scheme:
            raise ConfigError([f"cache {cache}: no origin has the scheme {scheme!r}"])

"""From a cache's URL to its origin.

Layer: origin. Importing it imports obstore; making an origin opens nothing.
"""

from __future__ import annotations

import logging
from functools import partial
from urllib.parse import unquote_to_bytes, urlsplit

from racerd.config.origin_options import OriginOptions
from racerd.errors import ConfigError
from racerd.origin.beneath import Beneath
from racerd.origin.directory import DirectoryOrigin
from racerd.origin.protocol import Origin
from racerd.origin.remote import RemoteOrigin
from racerd.telemetry import Metrics


def make_origin(url: str, options: OriginOptions, *, cache: str, metrics: Metrics) -> Origin:
    """Returns the origin at `url`. Raises ConfigError for a scheme that is not known."""
    parts = urlsplit(url)
    match parts.scheme:
        case "file":
            root = unquote_to_bytes(parts.path)
            return DirectoryOrigin(root, Beneath(root, partial(_no_openat2, root)))
        case "s3" | "gs" | "az" | "http" | "https":
            return RemoteOrigin(url, options, cache=cache, metrics=metrics)
        case scheme:
            raise ConfigError([f"cache {cache}: no origin has the scheme {scheme!r}"])


def _no_openat2(root: bytes, error: OSError) -> None:
    logging.getLogger(__name__).warning(
        "%r: openat2 is refused here (%s); paths are walked one part at a time",
        root,
        error.strerror,
    )

"""From a cache's URL to its origin.

Layer: origin. Making an origin reads its CA bundle and nothing else; connections come later.
"""

from __future__ import annotations

import logging
from functools import partial
from urllib.parse import unquote_to_bytes, urlsplit

from racerd.config.origin_options import OriginOptions
from racerd.errors import ConfigError
from racerd.origin.background import BackgroundLoop
from racerd.origin.beneath import Beneath
from racerd.origin.directory import DirectoryOrigin, why_unusable
from racerd.origin.front import OriginFront
from racerd.origin.http_client import HttpClient
from racerd.origin.http_origin import HttpOrigin, HttpSettings
from racerd.origin.object_store import Lister, ObjectStoreOrigin
from racerd.origin.obstore_listing import ObstoreLister
from racerd.origin.obstore_requests import Requests
from racerd.origin.protocol import Origin
from racerd.origin.retries import Retries
from racerd.origin.s3_listing import S3Lister
from racerd.origin.signed_bodies import SignedBodies
from racerd.origin.stores import Stores
from racerd.telemetry import Metrics

_LOG = logging.getLogger(__name__)


def make_origin(url: str, options: OriginOptions, *, cache: str, metrics: Metrics) -> Origin:
    """Returns the origin at `url`. Raises ConfigError with what is wrong with URL or options."""
    parts = urlsplit(url)
    retries = Retries(cache, metrics, options.retries)
    buckets = options.buckets
    origin: Origin
    match parts.scheme:
        case "file":
            origin = _directory(unquote_to_bytes(parts.path), metrics)
            if why := why_unusable_now(url):
                _LOG.warning(
                    "cache %s: reads of the origin %s fail for now: %s", cache, url, why,
                )  # fmt: skip
        case "http" | "https":
            settings = HttpSettings(
                options.bearer_token, options.weak_etags, options.progress_bytes_per_second_min
            )
            origin = HttpOrigin(url, _client(options, cache), retries, settings)
        case "s3" | "gs" | "az":
            origin = _object_store(url, options, cache, retries, metrics)
            if parts.netloc and parts.scheme != "az":
                buckets = buckets or (parts.netloc,)  # s3://bucket: the only one there is.
        case scheme:
            raise ConfigError([f"cache {cache}: no origin has the scheme {scheme!r}"])
    return OriginFront(origin, buckets, cache=cache, metrics=metrics)


def why_unusable_now(url: str) -> str:
    """Why nothing can be read from the origin at `url`, as far as this node alone can tell; ""
    where it knows of nothing. Nobody else is asked."""
    parts = urlsplit(url)
    return why_unusable(unquote_to_bytes(parts.path)) if parts.scheme == "file" else ""


def _object_store(
    url: str, options: OriginOptions, cache: str, retries: Retries, metrics: Metrics
) -> ObjectStoreOrigin:
    stores = Stores(url, options)
    try:
        stores.check()
    except ConfigError as error:
        raise ConfigError([f"cache {cache}: {problem}" for problem in error.problems]) from error
    where = f"{url} at {stores.endpoint}" if stores.endpoint else url
    requests = Requests(where, BackgroundLoop(f"origin-{cache}"))
    lister: Lister
    if stores.scheme == "s3":
        lister = S3Lister(
            cache, url, options, client=_client(options, cache), requests=requests, retries=retries
        )
    else:
        lister = ObstoreLister(cache, stores, requests, retries)
    signed_bodies = None
    plain = (stores.endpoint or "").startswith("http:")
    if stores.scheme == "s3" and plain and not options.anonymous:  # Who has no key signs nothing.
        signed_bodies = SignedBodies(
            _client(options, cache),
            stores,
            requests,
            retries,
            bytes_per_second_min=options.progress_bytes_per_second_min,
            on_given_up=partial(_say_given_up, where, metrics),
        )
    return ObjectStoreOrigin(stores, requests, retries, lister, signed_bodies)


def _say_given_up(where: str, metrics: Metrics, status: int) -> None:
    metrics.fallbacks.labels("signed_url", "refused").inc()
    _LOG.warning(
        "%s refuses signed URLs (status %d): bodies come through obstore, which takes more CPU",
        where,
        status,
    )


def _directory(root: bytes, metrics: Metrics) -> DirectoryOrigin:
    def refused(error: OSError) -> None:
        metrics.fallbacks.labels("openat2", "refused").inc()
        _LOG.warning(
            "openat2 is refused here (%s): paths below %r are walked part by part, which is slower;"
            " allow the system call in the container's seccomp profile",
            error.strerror,
            root,
        )

    return DirectoryOrigin(root, Beneath(root, refused))


def _client(options: OriginOptions, cache: str) -> HttpClient:
    try:
        return HttpClient(
            ca_bundle=options.ca_bundle,
            connect_timeout_seconds=options.connect_timeout_seconds,
            idle_timeout_seconds=options.idle_timeout_seconds,
        )
    except OSError as error:  # ssl.SSLError is one.
        raise ConfigError(
            [f"cache {cache}: ca_bundle {options.ca_bundle} cannot be used: {error.strerror}"]
        ) from error

"""Builds obstore stores for the buckets of one origin: the one door to obstore's configuration.

Layer: origin. A store belongs to one bucket and, for odd keys, to one head of a key; the last few
are kept, because each has its own pool of connections. obstore retries broken transfers itself (it
resumes at the offset under the same ETag); how often is reined in here. Everything else is tried
again by `attempts`, where it is counted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from racerd.config.origin_options import OriginOptions, Secret
from racerd.errors import ConfigError
from racerd.origin.store_names import StoreName

Store = S3Store | GCSStore | AzureStore | HTTPStore

_KEPT_MAX = 32
_PLAIN = StoreName("", "")
_RESUMES = 2


class Stores:
    """The stores of the origin at `url`. Thread-safe."""

    def __init__(self, url: str, options: OriginOptions) -> None:
        self._parts = urlsplit(url)
        self._url = url.rstrip("/")
        self._options = options
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Store] = OrderedDict()

    @property
    def takes_odd_heads(self) -> bool:
        """Whether the base of a store can carry a key's odd head on the wire as it is."""
        return self._parts.scheme in ("s3", "http", "https")

    def get(self, bucket: str, name: StoreName = _PLAIN) -> Store:
        """The store for `bucket` in which `name.tail` names what `name` does."""
        head = name.head
        if not name.tail and head and self._parts.scheme in ("http", "https"):
            head += "/"  # HTTPStore, unlike S3Store, asks for its base alone by an empty tail.
        with self._lock:
            store = self._kept.get((bucket, head))
            if store is None:
                store = self._kept[(bucket, head)] = self._make(bucket, head)
                if len(self._kept) > _KEPT_MAX:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end((bucket, head))
            return store

    def close(self) -> None:
        with self._lock:
            self._kept.clear()

    def _make(self, bucket: str, head: str) -> Store:
        common: dict[str, Any] = {
            "client_options": self._client_options(),
            "retry_config": {
                "max_retries": _RESUMES,
                "retry_timeout": timedelta(seconds=60),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(seconds=1),
                    "base": 2,
                },
            },
        }
        match self._parts.scheme:
            case "s3":
                return S3Store(bucket + head, **self._s3(), **common)
            case "gs":
                return GCSStore(bucket, **self._gs(), **common)
            case "az":
                return AzureStore(bucket, **self._az(), **common)
            case _:
                encoded = quote(bucket, safe="-._~")
                return HTTPStore.from_url(f"{self._url}/{encoded}{head}", **common)

    def _client_options(self) -> dict[str, Any]:
        options = self._options
        plain = options.allow_http or self._parts.scheme == "http"
        # Google decompresses stored gzip objects for clients that do not accept gzip; elsewhere
        # a proxy must not compress: either way the bytes are those that are stored.
        encoding = "gzip" if self._parts.scheme == "gs" else "identity"
        chosen: dict[str, Any] = {
            "allow_http": plain,
            "connect_timeout": timedelta(seconds=options.connect_timeout_seconds),
            "read_timeout": timedelta(seconds=options.idle_timeout_seconds),
            "timeout": timedelta(days=1),  # Bytes that flow may take as long as they like.
            "default_headers": {"accept-encoding": encoding},
            "user_agent": "racerd",
        }
        if options.ca_bundle is not None:
            try:
                chosen["root_certificate"] = Path(options.ca_bundle).read_bytes()
            except OSError as error:
                raise ConfigError(
                    [f"ca_bundle {options.ca_bundle} cannot be read: {error.strerror}"]
                ) from error
        return chosen

    def _s3(self) -> dict[str, Any]:
        options = self._options
        return _given(
            endpoint=options.endpoint,
            region=options.region,
            virtual_hosted_style_request=not options.path_style,
            skip_signature=options.anonymous or None,
            access_key_id=options.access_key_id,
            secret_access_key=_revealed(options.secret_access_key),
            session_token=_revealed(options.session_token),
            credential_provider=_profile_provider(options.profile),
        )

    def _gs(self) -> dict[str, Any]:
        options = self._options
        return _given(
            config=_given(
                base_url=options.endpoint,
                skip_signature=options.anonymous or None,
                bearer_token=_revealed(options.bearer_token),
                service_account=options.service_account_file,
            )
        )

    def _az(self) -> dict[str, Any]:
        options = self._options
        return _given(
            account_name=self._parts.netloc or None,
            endpoint=options.endpoint,
            skip_signature=options.anonymous or None,
            account_key=_revealed(options.account_key),
            sas_key=_revealed(options.sas),
            bearer_token=_revealed(options.bearer_token),
        )


def _given(**values: Any) -> dict[str, Any]:
    """Only what was set: obstore fills the rest from the platform's environment."""
    return {name: value for name, value in values.items() if value is not None}


def _revealed(secret: Secret | None) -> str | None:
    return None if secret is None else secret.reveal()


def _profile_provider(profile: str | None) -> Any:
    """Credentials of a named AWS profile, by boto3, which reads every form a profile can have."""
    if profile is None:
        return None
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise ConfigError(
            ["profile: reading AWS profiles needs boto3: pip install 'racerd[aws]'"]
        ) from None
    session = boto3.session.Session(profile_name=profile)  # type: ignore[no-untyped-call]
    return Boto3CredentialProvider(session=session)

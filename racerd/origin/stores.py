"""Builds obstore stores: the one door to obstore's configuration.

Layer: origin. A store belongs to one bucket and is kept: it has a pool of connections and, where
the platform gives an identity, its own cached credentials. Credentials that are not set here are
found by obstore: environment, web identity, pod identity, instance metadata (docs/origins.md).

A key that obstore's `Path` would refuse or change gets a store of its own whose base URL ends with
the whole key, percent-encoded by us, and is asked for by the empty path. For S3 and GCS the base
ends with "#", so that what obstore appends is a fragment and stays off the wire; Azure appends the
container as one path part, so that the last part of the key takes the container's place.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from racerd.config.origin_options import OriginOptions, Secret
from racerd.errors import ConfigError
from racerd.ids import ObjectId
from racerd.origin.names import encoded, plain_path

Store = S3Store | GCSStore | AzureStore

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_CREDENTIALS = ("access_key_id", "account_key", "sas", "bearer_token", "service_account_file")
_KEPT_MAX = 64
_PROFILE_TTL = timedelta(minutes=10)
# obstore resumes a broken body at its offset under the same ETag, and checks both; this bounds how
# often, and how often it asks again. Further attempts are ours, and counted (`retries`).
_OBSTORE_RETRIES = 2


@dataclass(frozen=True, slots=True)
class Located:
    """An object as obstore is asked for it."""

    store: Store
    path: str


class Stores:
    """The stores of one origin. Thread-safe."""

    def __init__(self, url: str, options: OriginOptions) -> None:
        parts = urlsplit(url)
        self.scheme = parts.scheme
        self._account = parts.netloc
        self._options = options
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Store] = OrderedDict()

    @property
    def endpoint(self) -> str | None:
        """The one endpoint that is read, listed and shown; None is the public service's own."""
        if self._options.endpoint is not None:
            return self._options.endpoint.rstrip("/")
        found = (os.environ.get(name) for name in _ENDPOINTS[self.scheme])
        return next((value.rstrip("/") for value in found if value), None)

    def check(self) -> None:
        """Raises ConfigError for settings that no request could be made with."""
        if (self.endpoint or "").startswith("http:") and not self._allow_http:
            raise ConfigError(
                [f"the endpoint {self.endpoint} is plain http, which needs `allow_http = true`"]
            )
        try:
            self._make("check")
        except (BaseError, ValueError):
            # Its text may quote what it does not like, which may be a key.
            given = [name for name in _CREDENTIALS if getattr(self._options, name) is not None]
            raise ConfigError(
                [f"{' or '.join(given) or 'the environment'}: a credential that cannot be used"]
            ) from None

    def locate(self, object_id: ObjectId) -> Located:
        """The store and the path that name exactly this object on the wire."""
        path = plain_path(object_id.key)
        if path is not None:
            return Located(self.bucket(object_id.bucket), path)
        wire = f"{object_id.bucket}/{encoded(object_id.key)}"
        return Located(self._keep(wire, lambda: self._odd(object_id.bucket, object_id.key)), "")

    def bucket(self, bucket: str) -> Store:
        """The store of a whole bucket."""
        return self._keep(bucket, lambda: self._make(bucket))

    def for_query(self, bucket: str, query: str, *, keep: bool) -> S3Store:
        """A store whose empty path is the bucket, or the root, with `query` (S3 only). With `keep`
        it is there the next time: making one reads all root certificates."""
        if not keep:
            return self._s3(bucket, f"?{query}#")
        store = self._keep(f"{bucket}?{query}", lambda: self._s3(bucket, f"?{query}#"))
        assert isinstance(store, S3Store)
        return store

    def close(self) -> None:
        with self._lock:
            self._kept.clear()

    def _keep(self, wire: str, make: Callable[[], Store]) -> Store:
        with self._lock:
            store = self._kept.get(wire)
            if store is None:
                store = self._kept[wire] = make()
                if len(self._kept) > _KEPT_MAX:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(wire)
            return store

    def _make(self, bucket: str) -> Store:
        match self.scheme:
            case "s3":
                return self._s3(bucket, "")
            case "gs":
                return self._gs(bucket, self.endpoint)
            case _:
                return self._az(bucket, self.endpoint)

    def _odd(self, bucket: str, key: bytes) -> Store:
        match self.scheme:
            case "s3":
                return self._s3(bucket, f"/{encoded(key)}#")
            case "gs":
                base = self.endpoint or "https://storage.googleapis.com"
                return self._gs("-", f"{base}/{bucket}/{encoded(key)}#")
            case _:
                base = self.endpoint or f"https://{self._account}.blob.core.windows.net"
                parents, _, last = key.rpartition(b"/")
                folder = f"/{encoded(parents)}" if b"/" in key else ""
                return self._az(last.decode(), f"{base}/{bucket}{folder}")

    # --- kinds ------------------------------------------------------------------------------

    def _s3(self, bucket: str, suffix: str) -> S3Store:
        """`suffix` follows the bucket in the URL as it is."""
        options = self._options
        place: dict[str, Any] = {"bucket": bucket + suffix, "endpoint": self.endpoint}
        hosted = not options.path_style and bool(bucket)
        if hosted:
            # obstore takes a virtual-hosted endpoint as given, bucket and all.
            base = urlsplit(self.endpoint or f"https://s3.{self.region}.amazonaws.com")
            host = f"{base.scheme}://{bucket}.{base.netloc}{base.path}"
            place = {"bucket": bucket, "endpoint": host + suffix}
        return S3Store(
            **_given(**place),
            **_given(
                region=self.region,
                virtual_hosted_style_request=hosted,
                skip_signature=options.anonymous or None,
                access_key_id=options.access_key_id,
                secret_access_key=_revealed(options.secret_access_key),
                session_token=_revealed(options.session_token),
                credential_provider=self._profile,
            ),
            **self._common,
        )

    def _gs(self, bucket: str, base_url: str | None) -> GCSStore:
        options = self._options
        config: Any = _given(
            base_url=base_url,
            skip_signature=options.anonymous or None,
            bearer_token=_revealed(options.bearer_token),
            service_account=options.service_account_file,
        )
        return GCSStore(bucket, config=config, **self._common)

    def _az(self, container: str, endpoint: str | None) -> AzureStore:
        options = self._options
        config: Any = _given(
            account_name=self._account or None,
            endpoint=endpoint,
            skip_signature=options.anonymous or None,
            account_key=_revealed(options.account_key),
            sas_key=None if options.sas is None else unquote(options.sas.reveal().lstrip("?")),
            token=_revealed(options.bearer_token),
        )
        return AzureStore(container, config=config, **self._common)

    # --- what all of them share --------------------------------------------------------------

    @property
    def _allow_http(self) -> bool:
        return self._options.allow_http or os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"

    @property
    def region(self) -> str:
        environ = os.environ
        return (
            self._options.region
            or environ.get("AWS_REGION")
            or environ.get("AWS_DEFAULT_REGION")
            or "us-east-1"
        )

    @cached_property
    def _profile(self) -> Any:
        """Credentials of a named AWS profile, by boto3, which reads every form one can have."""
        named = self._options.profile
        if named is None and "AWS_ACCESS_KEY_ID" not in os.environ:
            named = os.environ.get("AWS_PROFILE")
        if named is None or self._options.anonymous or self._options.access_key_id:
            return None
        try:
            from boto3.session import Session
            from botocore.exceptions import BotoCoreError
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            raise ConfigError(
                ["profile: reading AWS profiles needs boto3: pip install boto3"]
            ) from None
        try:
            session = Session(profile_name=named)  # type: ignore[no-untyped-call]
            # obstore asks again five minutes before the end of this; botocore hands nothing out
            # that ends within ten.
            return Boto3CredentialProvider(session=session, ttl=_PROFILE_TTL)
        except BotoCoreError as error:
            raise ConfigError([f"profile: {error}"]) from error

    @cached_property
    def _common(self) -> dict[str, Any]:
        options = self._options
        # Google decompresses stored gzip objects for clients that do not accept gzip (F61);
        # elsewhere nobody is to compress on the way. Both give the bytes that are stored.
        encoding = "gzip" if self.scheme == "gs" else "identity"
        client: dict[str, Any] = {
            "allow_http": self._allow_http,
            "connect_timeout": timedelta(seconds=options.connect_timeout_seconds),
            "read_timeout": timedelta(seconds=options.idle_timeout_seconds),
            "timeout": timedelta(days=1),  # Bytes that flow may take as long as they like (F58).
            "default_headers": {"accept-encoding": encoding},
            "user_agent": "racerd",
        }
        if options.ca_bundle is not None:
            try:
                client["root_certificate"] = Path(options.ca_bundle).read_bytes()
                ssl.create_default_context(cafile=options.ca_bundle)  # Says if it is no PEM.
            except OSError as error:
                raise ConfigError(
                    [f"ca_bundle {options.ca_bundle} cannot be used: {error.strerror}"]
                ) from error
        retry = {
            "max_retries": _OBSTORE_RETRIES,
            "retry_timeout": timedelta(seconds=60),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=1),
                "base": 2,
            },
        }
        return {"client_options": client, "retry_config": retry}


def _given(**values: Any) -> dict[str, Any]:
    """Only what was set: obstore fills the rest from the platform's environment."""
    return {name: value for name, value in values.items() if value is not None}


def _revealed(secret: Secret | None) -> str | None:
    return None if secret is None else secret.reveal()

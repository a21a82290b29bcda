"""What an operator may say about an origin, and the wrapper that keeps secrets out of text.

Layer: config, pure values. Every field has a default that suits the public service of its kind.
"""

from __future__ import annotations

from dataclasses import dataclass


class Secret:
    """A credential. It prints as `***`; only `reveal` gives the text, to the code that signs."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass(frozen=True, slots=True)
class OriginOptions:
    """How to reach one origin. Times are seconds.

    `buckets` restricts which buckets can be named; None allows all. `weak_etags` allows objects
    that have no ETag at all to be identified by size and Last-Modified.
    """

    buckets: tuple[str, ...] | None = None
    endpoint: str | None = None
    region: str | None = None
    path_style: bool = True
    allow_http: bool = False
    anonymous: bool = False
    profile: str | None = None
    access_key_id: str | None = None
    secret_access_key: Secret | None = None
    session_token: Secret | None = None
    account_key: Secret | None = None
    sas: Secret | None = None
    bearer_token: Secret | None = None
    service_account_file: str | None = None
    ca_bundle: str | None = None
    weak_etags: bool = False
    connect_timeout_seconds: float = 5.0
    idle_timeout_seconds: float = 20.0
    progress_bytes_per_second_min: int = 16 * 1024
    retries: int = 4

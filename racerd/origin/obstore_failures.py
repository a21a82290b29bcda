"""What obstore's exceptions mean, told without their text.

Layer: origin. Its messages hold URLs, and bodies of servers; a URL may hold a SAS. So errors are
classified by what can be recognised in them, and neither the text nor the exception goes on.
`tests/contract` brings each of them about: an update of obstore that words them anew fails there.
"""

from __future__ import annotations

import re

from obstore.exceptions import PermissionDeniedError, PreconditionError, UnauthenticatedError

from racerd.errors import RacerError
from racerd.ids import ObjectId
from racerd.origin.failures import (
    Transient,
    broken_protocol,
    forbidden,
    not_found,
    unavailable,
    version_changed,
)
from racerd.origin.http_status import failure_of

_STATUS = re.compile(r"status code: (\d{3})", re.ASCII)
_CODE = re.compile(r"<Code>([A-Za-z]{3,64})</Code>", re.ASCII)
_KIND = re.compile(r"kind: (\w+)", re.ASCII)
# What only a request for credentials has: its kind, its method, or its file. Objects are read with
# GET and HEAD.
_IDENTITY = re.compile(
    r"TokenRequest|FederatedTokenFile|External AWS credential provider|source: Credential"
    r"|Failed to read [\w ]*token file|Error performing (?:PUT|POST) ",
    re.ASCII,
)
_FIELDS = re.compile(r"source: (Header|NoContentRange|ParseContentRange)\b", re.ASCII)
_HINTS = {
    "ExpiredToken": "the credentials have expired; renew them where racerd gets them from",
    "RequestTimeTooSkewed": "the clock of this node is wrong: signatures carry the time",
    "InvalidAccessKeyId": "the access key does not exist at this endpoint",
    "SignatureDoesNotMatch": "the secret key, the region or the endpoint is wrong",
    "AuthenticationFailed": "the account key or the SAS is wrong or has expired",
}


class RangeIgnored(Exception):
    """A whole object came where a range was asked for."""


def meaning(
    error: Exception, object_id: ObjectId, where: str, *, expected: str | None = None
) -> RacerError | Transient | RangeIgnored:
    """Returns what `error` means for a request about `object_id`; `expected` is its ETag."""
    text = str(error)
    if _IDENTITY.search(text):
        return _no_credentials(text, where)
    if isinstance(error, FileNotFoundError):
        return not_found(object_id.text, where)
    found = _STATUS.search(text)
    status = int(found.group(1)) if found else None
    if isinstance(error, PreconditionError) or status in (412, 416):
        return version_changed(object_id, expected or "the one asked for", None)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return _forbidden(text, object_id, where)
    if status in (401, 403, 404) and text.startswith("Generic S3"):
        # Of the object it would be of a class of its own: this is a metadata service.
        return _no_credentials(text, where)
    if status is not None:
        return failure_of(status, None, object_id.text, where)
    if "NotPartial" in text:
        return RangeIgnored()
    if _FIELDS.search(text):
        return broken_protocol("a field that is needed is missing or malformed", where)
    if "UnexpectedRange" in text or "InvalidRangeRequest" in text:
        return broken_protocol("another range than was asked for", where)
    if "BareRedirect" in text:
        return unavailable(
            "it redirects to another region", where, hint="set the cache's `region` to the bucket's"
        )
    return _network(text, where)


def _forbidden(text: str, object_id: ObjectId, where: str) -> RacerError:
    code = _CODE.search(text)
    error = forbidden(object_id.text, where, code.group(1) if code else "")
    if code and code.group(1) in _HINTS:
        error.hint = _HINTS[code.group(1)]
    return error


def _no_credentials(text: str, where: str) -> Transient:
    status = _STATUS.search(text)
    why = f" (status {status.group(1)})" if status else ""
    return Transient(
        "credentials",
        unavailable(
            f"no credentials could be had{why}",
            where,
            hint="set keys, a profile or `anonymous` for the cache, or give the node or pod an"
            " identity; docs/origins.md lists the ways",
        ),
    )


def _network(text: str, where: str) -> RacerError | Transient:
    kind = _KIND.search(text)
    if "BadScheme" in text:
        return unavailable("it is http://", where, hint="plain http needs `allow_http = true`")
    if "InvalidCertificate" in text:
        return unavailable(
            "its TLS certificate is not trusted", where, hint="`ca_bundle` names the CA to trust"
        )
    if "dns error" in text:
        hint = "check the URL, and the DNS settings of this node or pod"
        return Transient("dns", unavailable("its host cannot be resolved", where, hint=hint))
    if kind and kind.group(1) == "Connect":
        hint = "check that the origin is up and that a firewall or network policy allows it"
        return Transient("connect", unavailable("connecting failed", where, hint=hint))
    if kind and kind.group(1) == "Timeout":
        return Transient("idle", unavailable("no byte within the idle time-out", where))
    return Transient("reset", unavailable("the connection broke", where))

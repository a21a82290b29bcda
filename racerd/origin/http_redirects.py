"""Follows redirects: a few, never from https to http, credentials for the first host only.

Layer: origin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urljoin

from racerd.origin.call import Call
from racerd.origin.failures import broken_protocol
from racerd.origin.http_client import HttpClient, Request, Response, split_url
from racerd.origin.http_status import REDIRECTS

_REDIRECTS_MAX = 5


@contextlib.contextmanager
def following(client: HttpClient, request: Request, call: Call, where: str) -> Iterator[Response]:
    """An exchange that ends at the first response which is no redirect."""
    for _ in range(_REDIRECTS_MAX + 1):
        with client.exchange(request, call) as response:
            location = response.field("Location")
            if response.status not in REDIRECTS or location is None:
                yield response
                return
        request = _redirected(request, location, where)
    raise broken_protocol(f"more than {_REDIRECTS_MAX} redirects", where)


def _redirected(request: Request, location: str, where: str) -> Request:
    try:
        address, target = split_url(urljoin(request.address.text + request.target, location))
    except ValueError:
        raise broken_protocol("a redirect to no URL", where) from None
    if request.address.scheme == "https" and address.scheme == "http":
        raise broken_protocol("a redirect from https to http", where)
    fields = dict(request.fields)
    if address != request.address:
        fields.pop("Authorization", None)
    return replace(request, address=address, target=target, fields=fields)

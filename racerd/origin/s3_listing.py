"""Listings of S3, exact to the byte: ListObjectsV2 and ListBuckets through signed URLs.

Layer: origin. obstore passes listed names through its `Path`, which fails on "a//b" and loses
trailing slashes; so it only signs the URL here, with whatever identity it has, and the page is
fetched and read by us. Source: Amazon S3 API reference, ListObjectsV2, 2006-03-01.

S3 lists in byte order of the key. Servers that keep a tree do not ("a/b" before "a-b"), and start
anywhere for `start-after`: where that is noticed, a listing is collected whole and sorted.
"""

from __future__ import annotations

import itertools
import logging
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from urllib.parse import quote, unquote_to_bytes

import obstore

from racerd.config.origin_options import OriginOptions, Secret
from racerd.errors import RequestError
from racerd.ids import ObjectId
from racerd.origin.call import Call
from racerd.origin.etags import as_etag
from racerd.origin.failures import broken_protocol, forbidden, not_found
from racerd.origin.http_client import HttpClient, Request, Response, split_url
from racerd.origin.http_status import REDIRECTS, failure_of
from racerd.origin.names import is_text, text_head
from racerd.origin.obstore_requests import Requests
from racerd.origin.protocol import ListedObject, ListedPrefix
from racerd.origin.retries import Retries
from racerd.origin.stores import Stores
from racerd.units import KIB, MIB

_LOG = logging.getLogger(__name__)

_PAGE_KEYS = 1000
_PAGE_BYTES_MAX = 16 * MIB
_ERROR_BYTES_MAX = 16 * KIB
_SORTED_ENTRIES_MAX = 1_000_000
_SIGNED_FOR = timedelta(minutes=5)
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{3,64})</Code>")
_TOKEN = "continuation-token"
_TREES = ("SeaweedFS",)  # Servers, by their Server field, that list in tree order.

Entry = ListedObject | ListedPrefix


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing. `token` asks for the next; None says that this is the last."""

    entries: list[Entry]
    ordered: bool
    token: str | None


class S3Lister:
    """Implements `Lister`. Owns `client`; stores and requests belong to the origin."""

    def __init__(
        self,
        cache: str,
        url: str,
        options: OriginOptions,
        *,
        client: HttpClient,
        requests: Requests,
        retries: Retries,
    ) -> None:
        self._cache = cache
        self._anonymous = options.anonymous
        if options.anonymous:
            # Signing builds the URL; what it adds is cut off again.
            nobody = Secret("anonymous")
            options = replace(
                options, anonymous=False, access_key_id="anonymous", secret_access_key=nobody
            )
        self._stores = Stores(url, options)
        self._client = client
        self._requests = requests
        self._retries = retries
        self._tree = False

    def close(self) -> None:
        self._stores.close()
        self._client.close()

    def list_buckets(self, call: Call) -> list[str] | None:
        if self._anonymous:
            return None
        about = ObjectId(self._cache, "-", b"the list of buckets")
        try:
            body = self._get("", "x-id=ListBuckets", about, call)[0]
        except RequestError as error:
            if error.code != "forbidden":
                raise
            return None  # These credentials may read buckets, and not list them.
        names = _parsed(body, self._requests.where).iterfind(".//{*}Bucket/{*}Name")
        return sorted(name.text for name in names if name.text)

    def list_objects(
        self, bucket: str, prefix: bytes, delimited: bool, after: bytes | None, call: Call
    ) -> Iterator[Entry]:
        if not is_text(prefix):
            return  # Names at S3 are Unicode.
        after = after or b""
        last = after
        for page in () if self._tree else self._pages(bucket, prefix, delimited, after, call):
            wanted = [e for e in page.entries if e.key > after and e.key.startswith(prefix)]
            if not page.ordered or (wanted and wanted[0].key <= last):
                self._note_tree()
                if last != after:
                    raise broken_protocol(
                        "it does not list in order of the keys",
                        self._requests.where,
                        hint="ask again: from now on its listings are sorted here",
                    )
            if self._tree:
                break
            yield from wanted
            last = wanted[-1].key if wanted else last
        if self._tree:
            yield from self._sorted(bucket, prefix, delimited, after, call)

    def _sorted(
        self, bucket: str, prefix: bytes, delimited: bool, after: bytes, call: Call
    ) -> list[Entry]:
        entries: dict[bytes, Entry] = {}
        for page in self._pages(bucket, prefix, delimited, b"", call):
            entries.update((e.key, e) for e in page.entries if e.key.startswith(prefix))
            if len(entries) > _SORTED_ENTRIES_MAX:
                raise broken_protocol(
                    f"it lists more than {_SORTED_ENTRIES_MAX} names, out of order",
                    self._requests.where,
                    hint="list a longer prefix",
                )
        return [entries[key] for key in sorted(entries) if key > after]

    def _note_tree(self) -> None:
        if not self._tree:
            self._tree = True
            _LOG.warning(
                "%s does not list in order of the keys: its listings are collected and sorted",
                self._requests.where,
            )

    def _pages(
        self, bucket: str, prefix: bytes, delimited: bool, after: bytes, call: Call
    ) -> Iterator[Page]:
        about = ObjectId(self._cache, bucket, prefix or b"/")
        fields: dict[str, bytes | str] = {"list-type": "2", "encoding-type": "url"}
        fields |= {"max-keys": str(_PAGE_KEYS), "prefix": prefix}
        if delimited:
            fields["delimiter"] = "/"
        if start := text_head(after):
            fields["start-after"] = start
        while True:
            query = "&".join(f"{name}={quote(value, safe='')}" for name, value in fields.items())
            body, server = self._get(bucket, query, about, call)
            if any(tree in server for tree in _TREES):
                self._note_tree()
            page = parse_page(body, self._requests.where)
            yield page
            if page.token is None:
                return
            if page.token == fields.get(_TOKEN):
                raise broken_protocol("the next page is the same page", self._requests.where)
            fields[_TOKEN] = page.token

    def _get(self, bucket: str, query: str, about: ObjectId, call: Call) -> tuple[bytes, str]:
        """Returns the body and the Server field of one GET, signed anew for each attempt (F62)."""

        def attempt() -> tuple[bytes, str]:
            address, target = split_url(self._signed(bucket, query, about, call))
            fields = {"Accept-Encoding": "identity", "User-Agent": "racerd"}
            with self._client.exchange(Request("GET", address, target, fields), call) as response:
                if response.status != 200:
                    raise self._failure(response, about)
                body = response.read(_PAGE_BYTES_MAX)
                return body, response.field("Server") or ""

        return self._retries.run(attempt, call)

    def _signed(self, bucket: str, query: str, about: ObjectId, call: Call) -> str:
        # The beginnings of listings are asked for again and again; what follows has a token in it.
        store = self._stores.for_query(bucket, query, keep=_TOKEN not in query)
        url: str = self._requests.run(
            lambda: obstore.sign_async(store, "GET", "", _SIGNED_FOR), about, call
        )
        url = url.partition("#")[0]
        return url.partition("X-Amz-Algorithm")[0].rstrip("?&") if self._anonymous else url

    def _failure(self, response: Response, about: ObjectId) -> Exception:
        where, subject = self._requests.where, f"the listing of {about.text}"
        found = _CODE.search(response.read(_ERROR_BYTES_MAX))
        code = found.group(1).decode() if found else ""
        if code == "NoSuchBucket":
            return not_found(f"bucket {about.bucket!r}", where)
        if response.status in REDIRECTS or code in ("PermanentRedirect", "TemporaryRedirect"):
            region = response.field("x-amz-bucket-region") or "another region"
            hint = "set the cache's `region` to the bucket's"
            return broken_protocol(f"the bucket is in {region}", where, hint=hint)
        if response.status == 403 and code:
            return forbidden(subject, where, code)
        return failure_of(response.status, response.field("Retry-After"), subject, where)


def parse_page(body: bytes, where: str) -> Page:
    """Returns a page of ListObjectsV2. Raises SourceError `origin_protocol`."""
    root = _parsed(body, where)
    try:
        encoded = root.findtext("{*}EncodingType") == "url"
        objects: list[Entry] = [
            ListedObject(
                _name(_text(item, "Key"), encoded),
                _size(_text(item, "Size")),
                as_etag(item.findtext("{*}ETag")),
            )
            for item in root.iterfind("{*}Contents")
        ]
        prefixes: list[Entry] = [
            ListedPrefix(_name(_text(item, "Prefix"), encoded))
            for item in root.iterfind("{*}CommonPrefixes")
        ]
    except ValueError as error:
        raise broken_protocol("a listing with entries that make no sense", where) from error
    more = root.findtext("{*}IsTruncated") == "true"
    ordered = _ordered(objects) and _ordered(prefixes)
    entries = sorted(objects + prefixes, key=lambda entry: entry.key)
    return Page(entries, ordered, root.findtext("{*}NextContinuationToken") if more else None)


def _parsed(body: bytes, where: str) -> ET.Element:
    if len(body) >= _PAGE_BYTES_MAX:
        raise broken_protocol("a listing that is too long", where)
    try:
        return ET.fromstring(body)
    except ET.ParseError as error:
        raise broken_protocol("a listing that is no XML", where) from error


def _text(item: ET.Element, name: str) -> str:
    text = item.findtext("{*}" + name)
    if text is None:
        raise ValueError(name)
    return text


def _size(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("Size")
    return int(text)


def _name(text: str, encoded: bool) -> bytes:
    """`encoding-type=url` writes a space as "+" (Amazon, SeaweedFS) or "%20" (moto)."""
    return unquote_to_bytes(text.replace("+", "%20")) if encoded else text.encode()


def _ordered(entries: list[Entry]) -> bool:
    return all(a.key < b.key for a, b in itertools.pairwise(entries))

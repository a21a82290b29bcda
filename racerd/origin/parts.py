"""Is this response really bytes [start, stop) of that version? The one place that decides.

Layer: origin, pure. Every part of a read is conditional on the version; servers and proxies that
ignore the condition, the range, or both, are found here by what the response says of itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from racerd.ids import ObjectVersion
from racerd.origin.etags import derived_etag, is_derived
from racerd.origin.failures import broken_protocol, version_changed

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.ASCII)


@dataclass(frozen=True, slots=True)
class PartHead:
    """What a response says of its body. `partial` is 206; [start, stop) of `size` bytes."""

    partial: bool
    start: int
    stop: int
    size: int
    etag: str | None
    last_modified: str | None = None


def parse_content_range(text: str | None) -> tuple[int, int, int] | None:
    """Returns (start, stop, size) of a Content-Range field, or None where it is unusable."""
    match = _CONTENT_RANGE.fullmatch((text or "").strip())
    if match is None:
        return None
    first, last, size = (int(group) for group in match.groups())
    return (first, last + 1, size) if first <= last < size else None


def check_part(version: ObjectVersion, start: int, stop: int, head: PartHead, where: str) -> int:
    """Returns the offset up to which the body may be used: `stop`, or less of a shortened range.

    Raises RequestError `version_changed` where the response is of another version, and
    SourceError `origin_protocol` where it is not what was asked for.
    """
    _check_version(version, head, where)
    if head.partial:
        if head.start != start or not start < head.stop <= stop:
            raise broken_protocol(
                f"asked for bytes {start}-{stop - 1}, it sent {head.start}-{head.stop - 1}", where
            )
        return head.stop
    if start != 0 or stop != version.size:
        raise broken_protocol(
            "it ignores Range and sends whole objects",
            where,
            hint="use a server or proxy that supports range requests",
        )
    return stop


def _check_version(version: ObjectVersion, head: PartHead, where: str) -> None:
    found = derived_etag(head.last_modified, head.size) if is_derived(version.etag) else head.etag
    if found is None:
        raise broken_protocol("a part came without the ETag that its version has", where)
    if found != version.etag or head.size != version.size:
        raise version_changed(version.object_id, version.etag, found)
    told = version.weak and version.origin_token and head.last_modified
    if told and head.last_modified != version.origin_token:
        raise version_changed(version.object_id, version.etag, found)

"""What a client asks: one function builds the request of each operation.

Layer: sans-IO, on `wire`. A function takes what was checked before (a `RacerUrl`, a range that is
not empty); an ETag is checked here, because users pass it on as text. `answers` reads what comes
back.
"""

from __future__ import annotations

from racer.errors import BadRequest
from racer.urls import RacerUrl, percent_encode
from racer.wire import Request, is_etag

HOST_READ = "host-read"
GPU_READ = "gpu-read"


def _range(start: int, stop: int | None) -> tuple[str, str]:
    return ("Range", f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}")


def _if_match(etag: str | None) -> tuple[tuple[str, str], ...]:
    if etag is None:
        return ()
    if not is_etag(etag):
        raise BadRequest(
            f"{etag!r} is not an ETag", hint="pass it as `stat` gave it, quotes (and W/) included"
        )
    return (("If-Match", etag),)


def info_request() -> Request:
    return Request("GET", "/v1/info")


def stat_request(url: RacerUrl, etag: str | None) -> Request:
    return Request("HEAD", f"/v1/objects/{url.path}", _if_match(etag))


def body_request(url: RacerUrl, start: int, stop: int | None, etag: str | None) -> Request:
    """A streamed read of `[start, stop)`; all of the object where start is 0 and stop None."""
    fields = () if start == 0 and stop is None else (_range(start, stop),)
    return Request("GET", f"/v1/objects/{url.path}", (*fields, *_if_match(etag)))


def host_read_request(
    url: RacerUrl,
    part: tuple[int, int],
    etag: str | None,
    *,
    target: str | None,
    target_offset: int,
    operation: str = HOST_READ,
) -> Request:
    """A read of `[start, stop)` into a registered target, or (None) a descriptor sent with it.

    `operation` is GPU_READ for a target in GPU memory.
    """
    fields = [_range(*part), *_if_match(etag)]
    if target is not None:
        fields.append(("Racer-Target", target))
    if target_offset:
        fields.append(("Racer-Target-Offset", str(target_offset)))
    return Request("POST", f"/v1/{operation}/{url.path}", tuple(fields))


def register_request() -> Request:
    return Request("POST", "/v1/targets", (("Racer-Target-Kind", "host"),))


def register_gpu_request(uuid: str, nbytes: int) -> Request:
    """Registers an exported allocation of `nbytes` on the GPU `uuid` ("GPU-…")."""
    fields = (
        ("Racer-Target-Kind", "gpu"),
        ("Racer-Gpu", uuid),
        ("Racer-Target-Bytes", str(nbytes)),
    )
    return Request("POST", "/v1/targets", fields)


def release_request(target: str) -> Request:
    return Request("DELETE", f"/v1/targets/{target}")


def list_request(
    url: RacerUrl, *, delimiter: bytes | None, after: str | None, limit: int
) -> Request:
    if not url.bucket:
        return Request("GET", "/v1/list/")
    query = [f"limit={limit}"]
    if delimiter is not None:
        # A slash is plain in a path but not in every reader's idea of a query.
        query.append(f"delimiter={percent_encode(delimiter)}")
    if after is not None:
        query.append(f"after={after}")
    return Request("GET", f"/v1/list/{url.path}?{'&'.join(query)}")


def share_request(url: RacerUrl, at: int, etag: str | None) -> Request:
    """Asks for the shared memory that holds byte `at`."""
    return Request("POST", f"/v1/share/{url.path}", (_range(at, None), *_if_match(etag)))


def shared_request(url: RacerUrl, start: int, etag: str | None) -> Request:
    """Asks what is shared already from byte `start` on."""
    fields = () if start == 0 else (_range(start, None),)
    return Request("GET", f"/v1/share/{url.path}", (*fields, *_if_match(etag)))


def prefetch_request(url: RacerUrl, start: int, stop: int | None, etag: str | None) -> Request:
    fields = () if start == 0 and stop is None else (_range(start, stop),)
    return Request("POST", f"/v1/prefetch/{url.path}", (*fields, *_if_match(etag)))


def evict_request(url: RacerUrl, *, prefix: bool) -> Request:
    return _select_request("evict", url, prefix)


def pin_request(url: RacerUrl, *, prefix: bool) -> Request:
    return _select_request("pin", url, prefix)


def unpin_request(url: RacerUrl, *, prefix: bool) -> Request:
    return _select_request("unpin", url, prefix)


def pins_request() -> Request:
    return Request("GET", "/v1/pins/")


def _select_request(operation: str, url: RacerUrl, prefix: bool) -> Request:
    """About one object or, with `prefix`, about all that lies under the URL."""
    return Request("POST", f"/v1/{operation}/{url.path}{'?prefix=true' if prefix else ''}")


def explain_request(url: RacerUrl, start: int, stop: int | None) -> Request:
    fields = () if start == 0 and stop is None else (_range(start, stop),)
    return Request("GET", f"/v1/explain/{url.path}", fields)

"""The client for threads: `Client`.

Layer: top of the package, on `endpoint`, `transfer` and `landing`. Safe to use from any number of
threads; a forked child gets connections of its own. How a read goes: small ones come over the
socket in one exchange; large ones are written by the daemon into shared memory, several parts at a
time, and copied out once (`read`, `read_into`) or not at all (`map`, `Landing`). Where the daemon
cannot write into our memory, the bytes are streamed instead, and the log says so once.
"""

from __future__ import annotations

import io
import os
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from racer import bulk, questions
from racer.bulk import SMALL_BYTES, BulkRead
from racer.deadline import Deadline
from racer.endpoint import Endpoint
from racer.errors import Closed, RangeNotSatisfiable, VersionChanged
from racer.landing import Landing, Ring
from racer.mapping import MappedObject
from racer.memory import SharedMemory
from racer.questions import Question, T, Url
from racer.ranges import stop_of, within
from racer.results import (
    Entry,
    Evicted,
    Explanation,
    Front,
    Info,
    Pinned,
    Pins,
    Prefetched,
    Stat,
    Unpinned,
)
from racer.shared import SharedChunk, SharedPieces
from racer.sharing import share, shared
from racer.socket_path import SocketPlace
from racer.streaming import get
from racer.urls import RacerUrl

if TYPE_CHECKING:
    from racer.gpu import GpuBuffer
    from racer.gpu.place import GpuPlace
    from racer.gpu.reads import GpuSide

Buffer = bytearray | memoryview
GpuArray = Any  # There is no type for "speaks DLPack, or has __cuda_array_interface__".

TIMEOUT_SECONDS = 300.0
CONNECTIONS_MAX = 16


class Client:
    """Reads objects through the racerd of this node.

    `socket` names one cache's socket, `run_dir` the directory with all of them; without either the
    environment decides (see `socket_path`). `timeout` is how long, in seconds, a call goes on
    without getting further: each request, or each part of a large read, has to end in that time,
    retries included; every call can give its own.

    Use it as a context manager, or `close` it. Nothing is opened before the first call.
    """

    def __init__(
        self,
        *,
        socket: str | os.PathLike[str] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        timeout: float = TIMEOUT_SECONDS,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        Deadline.after(timeout)  # Raises for what is no time.
        self.place = SocketPlace.find(
            None if socket is None else os.fspath(socket),
            None if run_dir is None else os.fspath(run_dir),
        )
        self.timeout = timeout
        self._connections_max = connections_max
        self._lock = threading.Lock()
        self._endpoints: dict[str, Endpoint] = {}
        self._ring = Ring()
        self._gpu: GpuSide | None = None
        self._closed = False
        _CLIENTS.add(self)

    # --- lifetime ---------------------------------------------------------------------------

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and frees the client's own memory.

        Landings and mappings are their owners' and stay. Calls in other threads end with `Closed`
        when they need a connection the next time.
        """
        with self._lock:
            self._closed = True
            endpoints = list(self._endpoints.values())
        if self._gpu is not None:
            self._gpu.close()
        self._ring.close()
        for endpoint in endpoints:
            endpoint.pool.close()

    def abort(self) -> None:
        """`close`, and calls that other threads have running end at once, with an error.

        Their landings are lost then, where the daemon may still write to them.
        """
        self.close()
        with self._lock:
            endpoints = list(self._endpoints.values())
        for endpoint in endpoints:
            endpoint.pool.abort()

    def _endpoint(self, cache: str) -> Endpoint:
        with self._lock:
            if self._closed:
                raise Closed("the client was closed")
            endpoint = self._endpoints.get(cache)
            if endpoint is None:
                endpoint = Endpoint(cache, self.place, self._connections_max)
                self._endpoints[cache] = endpoint
            return endpoint

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self.timeout if timeout is None else timeout)

    # --- shared memory ----------------------------------------------------------------------

    def share(
        self, url: Url, offset: int = 0, *, etag: str | None = None, timeout: float | None = None
    ) -> SharedChunk:
        """Returns the memory with byte `offset` of an object that all its readers share.

        The daemon opens the bytes once, however many ask. Raises ShareRefused where it shares no
        memory, or no more now; and what reads raise. Close the result, or use it in a `with` block.
        """
        parsed = RacerUrl.parse_object(url)
        return share(self._endpoint(parsed.cache), parsed, offset, etag, self._deadline(timeout))

    def shared(
        self, url: Url, offset: int = 0, *, etag: str | None = None, timeout: float | None = None
    ) -> SharedPieces:
        """Returns what of an object its readers share already, from `offset` on, and its version.

        One exchange, nothing is opened for it, and it gives a bounded number of pieces. Raises as
        `share`. Close the result, or use it in a `with` block.
        """
        parsed = RacerUrl.parse_object(url)
        return shared(self._endpoint(parsed.cache), parsed, offset, etag, self._deadline(timeout))

    # --- small questions --------------------------------------------------------------------

    def _ask(self, question: Question[T], timeout: float | None) -> T:
        answer = self._endpoint(question.cache).call(
            question.request,
            self._deadline(timeout),
            about=question.about,
            idempotent=question.idempotent,
        )
        return question.read(answer)

    def info(self, cache: str, *, timeout: float | None = None) -> Info:
        """What the daemon says about itself and about `cache`."""
        RacerUrl(cache)
        return self._endpoint(cache).refresh_info(self._deadline(timeout))

    def caches(self) -> list[str]:
        """Names of the caches that have a socket in the run directory."""
        return self.place.caches()

    def stat(self, url: Url, *, etag: str | None = None, timeout: float | None = None) -> Stat:
        """Size and version of an object. With `etag`, raises VersionChanged unless it is that."""
        return self._ask(questions.stat(url, etag), timeout)

    def list(
        self, url: Url, *, recursive: bool = True, timeout: float | None = None
    ) -> Iterator[Entry]:
        """Yields what lies under a prefix (the URL's key, literally; often with a slash at the
        end), in the origin's order. Without `recursive`, one level: names up to the next slash.
        """
        after: str | None = None
        while True:
            question = questions.listing(url, recursive=recursive, after=after)
            listing = self._ask(question, timeout)
            yield from listing.entries
            if listing.after is None:
                return
            after = listing.after

    def prefetch(
        self,
        url: Url,
        offset: int = 0,
        length: int | None = None,
        *,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> Prefetched:
        """Has the daemon fetch a range into its cache; returns when it is there."""
        return self._ask(questions.prefetch(url, offset, length, etag), timeout)

    def evict(self, url: Url, *, prefix: bool = False, timeout: float | None = None) -> Evicted:
        """Drops every cached page of an object, or (`prefix`) of all objects under the URL."""
        return self._ask(questions.evict(url, prefix=prefix), timeout)

    def pin(self, url: Url, *, prefix: bool = False, timeout: float | None = None) -> Pinned:
        """Spares an object, or (`prefix`) all under the URL, from eviction; also after a restart.

        Fetches nothing: see `prefetch`. Raises PinRefused where there is no room for the pin.
        """
        return self._ask(questions.pin(url, prefix=prefix), timeout)

    def unpin(self, url: Url, *, prefix: bool = False, timeout: float | None = None) -> Unpinned:
        """Takes back just the `pin` that was made with these arguments."""
        return self._ask(questions.unpin(url, prefix=prefix), timeout)

    def pins(self, cache: str, *, timeout: float | None = None) -> Pins:
        """All pins of `cache`, and how much more may be pinned."""
        return self._ask(questions.pins(cache), timeout)

    def explain(
        self,
        url: Url,
        offset: int = 0,
        length: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Explanation:
        """Which rung would serve each page now, and why not an earlier one."""
        return self._ask(questions.explain(url, offset, length), timeout)

    # --- reads ------------------------------------------------------------------------------

    def read(
        self,
        url: Url,
        offset: int = 0,
        length: int | None = None,
        *,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> bytes:
        """Returns `length` bytes from `offset` (all that follow, without `length`).

        Fewer come only where the object ends. The bytes are of one version: of `etag`, or of the
        one that is current at the start. Raises VersionChanged, NotFound, RangeNotSatisfiable
        (`offset` is at or past the end; an empty object can be read from 0) and the rest.
        """
        parsed = RacerUrl.parse_object(url)
        stop = stop_of(offset, length)
        seconds = self.timeout if timeout is None else timeout
        if stop is not None and (stop == offset or stop - offset > SMALL_BYTES):
            stat = self.stat(parsed, etag=etag, timeout=seconds)
            start, end = within(parsed, offset, stop, stat.size)
            if start == end:
                return b""
            return self._read_large(self._bulk(parsed, start, end, stat.etag, seconds))
        return self._read_small(parsed, offset, stop, etag, seconds)

    def read_front(
        self, url: Url, length: int, *, etag: str | None = None, timeout: float | None = None
    ) -> Front:
        """Returns size and version of an object with its first `length` bytes, which are few.

        Fewer come only where the object ends. One exchange for what `stat` and `read` take two
        for; raises what they raise.
        """
        parsed = RacerUrl.parse_object(url)
        seconds = self.timeout if timeout is None else timeout
        try:
            body, data = get(self._endpoint(parsed.cache), parsed, 0, length, etag, seconds)
        except RangeNotSatisfiable as error:
            if error.size != 0:
                raise
            stat = self.stat(parsed, etag=etag, timeout=seconds)  # Empty: no range is in it.
            if stat.size:
                raise
            return Front(0, stat.etag, b"")
        return Front(body.size, body.etag, data)

    def _read_small(
        self, url: RacerUrl, offset: int, stop: int | None, etag: str | None, seconds: float
    ) -> bytes:
        """A short range; or, with no end, a short one first and then what it says is left."""
        first_stop = offset + SMALL_BYTES if stop is None else stop
        endpoint = self._endpoint(url.cache)
        try:
            body, data = get(endpoint, url, offset, first_stop, etag, seconds)
        except RangeNotSatisfiable as error:
            if error.size == 0 and offset == 0:
                return b""  # An empty object has no first byte, and can be read all the same.
            raise
        if stop is not None or body.stop == body.size:
            return data
        rest = self._bulk(url, body.stop, body.size, body.etag, seconds)
        return data + self._read_large(rest)

    def read_into(
        self,
        url: Url,
        buffer: Buffer | GpuArray,
        offset: int = 0,
        *,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """Fills a writable buffer from `offset` on; returns how many bytes came.

        That is the buffer's length, or less where the object ends. On an error the buffer holds
        nothing to rely on. `buffer` may be in GPU memory: a `GpuBuffer`, or a contiguous array of
        torch, cupy, numba or whatever speaks DLPack or has `__cuda_array_interface__`. The bytes
        are there when the call returns; see docs/client.md for the way that they take.
        """
        parsed = RacerUrl.parse_object(url)
        seconds = self.timeout if timeout is None else timeout
        if offset < 0:
            raise ValueError(f"the offset {offset} is negative")
        if may_be_gpu(buffer):
            from racer.gpu.place import is_gpu_destination

            if is_gpu_destination(buffer):
                return self._read_into_gpu(parsed, buffer, offset, etag, seconds)
        with memoryview(buffer) as given, given.cast("B") as view:
            if view.readonly:
                raise TypeError("the buffer is read-only")
            if len(view) <= SMALL_BYTES:
                data = self.read(parsed, offset, len(view), etag=etag, timeout=seconds)
                view[: len(data)] = data
                return len(data)
            stat = self.stat(parsed, etag=etag, timeout=seconds)
            start, end = within(parsed, offset, offset + len(view), stat.size)
            if start < end:
                read = self._bulk(parsed, start, end, stat.etag, seconds)
                with view[: end - start] as wanted:
                    bulk.fill(read, self._ring, wanted)
            return end - start

    def _read_into_gpu(
        self, url: RacerUrl, array: GpuArray, offset: int, etag: str | None, seconds: float
    ) -> int:
        from racer.gpu.place import GpuPlace

        with GpuPlace(array) as place:
            stat = self.stat(url, etag=etag, timeout=seconds)
            start, end = within(url, offset, offset + place.nbytes, stat.size)
            if start < end:
                place.wait()
                self.fill_gpu(url, place, start, end, stat.etag, seconds)
            return end - start

    def fill_gpu(
        self,
        url: RacerUrl,
        place: GpuPlace,
        start: int,
        stop: int,
        etag: str,
        timeout: float | None = None,
    ) -> Mapping[str, int]:
        """Reads `[start, stop)`, which the version `etag` has, to the front of `place`; returns
        the bytes by rung ("host" and "stream" are steps of the way, see `racer.gpu`)."""
        seconds = self.timeout if timeout is None else timeout
        return self._gpu_side().fill(self._bulk(url, start, stop, etag, seconds), place)

    def gpu_alloc(self, nbytes: int, device: object = 0) -> GpuBuffer:
        """Makes `nbytes` of GPU memory that the daemon writes into; the caller closes it.

        `device` is a number, "cuda:1", "GPU-<uuid>" or a torch.device; no other GPU is touched.
        torch, cupy and numba use the memory without a copy. Raises GpuUnavailable where there is
        no such GPU, GpuError where it has no room.
        """
        with self._lock:
            if self._closed:
                raise Closed("the client was closed")
        from racer.gpu.buffer import GpuBuffer, alloc

        return GpuBuffer(alloc(nbytes, device))

    def _gpu_side(self) -> GpuSide:
        from racer.gpu.reads import GpuSide

        with self._lock:
            if self._closed:
                raise Closed("the client was closed")
            if self._gpu is None:
                self._gpu = GpuSide(self._ring)
            return self._gpu

    def stream(
        self,
        url: Url,
        offset: int = 0,
        length: int | None = None,
        *,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> Generator[memoryview]:
        """Yields the bytes in order, in chunks that are valid until the next one is asked for.

        For what is passed on at once: memory stays bounded whatever the object's size. Leave it
        early only through `contextlib.closing`, so that its reads end there and then.
        """
        parsed = RacerUrl.parse_object(url)
        stop = stop_of(offset, length)
        seconds = self.timeout if timeout is None else timeout
        stat = self.stat(parsed, etag=etag, timeout=seconds)
        start, end = within(parsed, offset, stop, stat.size)
        chunks = bulk.in_order(self._bulk(parsed, start, end, stat.etag, seconds), self._ring)
        try:
            for chunk in chunks:
                yield chunk.view
        finally:
            chunks.close()

    def map(
        self,
        url: Url,
        offset: int = 0,
        length: int | None = None,
        *,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> MappedObject:
        """Reads into fresh shared memory that the daemon fills directly: nothing is copied.

        Raises MemoryUnavailable where the system has no room for it.
        """
        parsed = RacerUrl.parse_object(url)
        stop = stop_of(offset, length)
        seconds = self.timeout if timeout is None else timeout
        try:
            return self._map(parsed, offset, stop, etag, seconds)
        except VersionChanged:
            if etag is not None:
                raise
            # The object was replaced between the question for its size and the read of it.
            return self._map(parsed, offset, stop, None, seconds)

    def _map(
        self, url: RacerUrl, offset: int, stop: int | None, etag: str | None, seconds: float
    ) -> MappedObject:
        stat = self.stat(url, etag=etag, timeout=seconds)
        start, end = within(url, offset, stop, stat.size)
        memory: SharedMemory | None = None
        rungs: dict[str, int] = {}
        if start < end:
            read = self._bulk(url, start, end, stat.etag, seconds)
            memory, rungs = bulk.into_fresh_memory(read)
        return MappedObject(
            memory,
            url=stat.url,
            etag=stat.etag,
            offset=offset,
            object_size=stat.size,
            rungs=rungs,
        )

    def landing(self, nbytes: int, *, timeout: float | None = None) -> Landing:
        """Makes `nbytes` of touched, reusable memory to read into; the caller closes it."""
        return Landing(nbytes, self._endpoint, self.timeout if timeout is None else timeout)

    def _bulk(self, url: RacerUrl, start: int, stop: int, etag: str, seconds: float) -> BulkRead:
        return BulkRead(self._endpoint(url.cache), url, etag, start, stop, seconds)

    def _read_large(self, read: BulkRead) -> bytes:
        # BytesIO owns a bytes object that can be written to until it is taken out, uncopied.
        buffer = io.BytesIO()
        buffer.seek(read.stop - read.start - 1)
        buffer.write(b"\0")
        with buffer.getbuffer() as view:
            bulk.fill(read, self._ring, view)
        return buffer.getvalue()

    def _after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._ring.after_fork_in_child()
        if self._gpu is not None:
            self._gpu.after_fork_in_child()


def may_be_gpu(buffer: object) -> bool:
    """Whether it is worth loading what knows GPU memory."""
    return hasattr(buffer, "__dlpack_device__") or hasattr(buffer, "__cuda_array_interface__")


_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()


def _start_clients_afresh() -> None:
    for client in list(_CLIENTS):
        client._after_fork_in_child()


os.register_at_fork(after_in_child=_start_clients_afresh)

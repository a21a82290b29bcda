"""An HTTP origin for campaigns: objects of known bytes, some of which come slowly.

Runs on a thread of its own. `/b/fast/N` is answered at once; of `/b/slow/N` each range comes in two
halves with `pause_seconds` between them, so that whoever reads it can be met in the middle.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
import zlib
from types import TracebackType

_ETAG = '"1"'


_BASE_BYTES = 16 << 20


@functools.cache
def _base(size: int) -> bytes:
    return random.Random(0).randbytes(_BASE_BYTES + size)


def content(key: str, size: int, start: int = 0, stop: int | None = None) -> bytes:
    """Bytes of an object: anybody who knows its name and size can check them.

    All objects are parts of one long string, each from a place of its own: that is cheap, and a
    byte of the wrong object or of the wrong offset is still a wrong byte.
    """
    place = zlib.crc32(key.encode()) % _BASE_BYTES
    return _base(size)[place + start : place + (size if stop is None else stop)]


class SlowOrigin:
    """`with SlowOrigin(size) as origin:` serves objects of `size` bytes under `origin.url`."""

    def __init__(self, size: int, *, pause_seconds: float = 0.1) -> None:
        self.size = size
        self.pause_seconds = pause_seconds
        self.requests = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="origin")

    def __enter__(self) -> SlowOrigin:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode("latin-1"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # The daemon has no more use for this connection.
        except asyncio.CancelledError:
            return  # The campaign is over.
        finally:
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        self.requests += 1
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ")
        fields = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        start, stop = 0, self.size
        status, extra = "200 OK", ""
        if "range" in fields:
            low, high = fields["range"].removeprefix("bytes=").split("-")
            start, stop = int(low), min(int(high) + 1 if high else self.size, self.size)
            status = "206 Partial Content"
            extra = f"Content-Range: bytes {start}-{stop - 1}/{self.size}\r\n"
        writer.write(
            f"HTTP/1.1 {status}\r\nETag: {_ETAG}\r\nAccept-Ranges: bytes\r\n{extra}"
            f"Content-Length: {stop - start}\r\n\r\n".encode()
        )
        if method == "GET":
            middle = (start + stop) // 2 if "/slow/" in path else stop
            writer.write(content(path, self.size, start, middle))
            if middle < stop:
                await writer.drain()
                await asyncio.sleep(self.pause_seconds)
                writer.write(content(path, self.size, middle, stop))
        await writer.drain()

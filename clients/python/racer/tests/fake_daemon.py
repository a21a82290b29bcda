"""A small daemon in a thread, for the client's tests: right by default, wrong on demand.

It serves objects from memory by `docs/protocol.md`, over real Unix sockets with real descriptors,
and keeps every request. `on` replaces the answer to chosen requests: by another answer, by raw
bytes, by the end of the connection. Written from the document alone; it shares no code with the
client or with racerd.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import mmap
import os
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.sealing import seal_writing

REASONS = {200: "OK", 201: "Created", 206: "Partial Content"}


@dataclass
class Seen:
    """A request as it came."""

    method: str
    path: str
    query: dict[str, str]
    fields: dict[str, str]
    descriptors: list[int] = field(default_factory=list)
    connection: int = 0

    @property
    def line(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class Reply:
    """An answer. `raw` replaces all of it; `cut` sends so many bytes of it and hangs up."""

    status: int = 200
    fields: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw: bytes | None = None
    cut: int | None = None
    close: bool = False
    to_head: bool = False
    descriptors: list[int] = field(default_factory=list)  # Sent with the first byte, and closed.

    def encode(self) -> bytes:
        if self.raw is not None:
            return self.raw
        fields = {"Content-Length": str(len(self.body)), **self.fields}
        lines = [f"HTTP/1.1 {self.status} {REASONS.get(self.status, 'Whatever')}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return head if self.to_head else head + self.body


def error(status: int, code: str, retry: str = "never", **fields: str) -> Reply:
    """An error as the protocol writes it; `Retry_After` becomes a field."""
    detail = {"code": code, "message": f"told {code}", "hint": "a hint", "retry": retry}
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return Reply(status, named, json.dumps({"error": detail}).encode())


HANG_UP = Reply(raw=b"", close=True)
Hook = Callable[[Seen], Reply | None]


class FakeDaemon:
    """Serves `cache` at `<run_dir>/<cache>/client/socket` while it is entered."""

    def __init__(self, run_dir: Path, cache: str = "local", page_bytes: int = 1 << 20) -> None:
        self.run_dir = run_dir
        self.cache = cache
        self.page_bytes = page_bytes
        self.path = run_dir / cache / "client" / "socket"
        self.objects: dict[tuple[str, bytes], tuple[str, bytes]] = {}
        self.seen: list[Seen] = []
        self.targets: dict[str, tuple[int, int]] = {}
        self.connections = 0
        self.state = "ready"
        self.pins: list[tuple[str | bool, ...]] = []
        self.gpus: list[str] = []
        self.shared_already = False  # Whether another reader had all objects opened before.
        self.share_chunk_bytes = 0  # 0: nothing is told about it, and objects are not cut.
        self._hooks: list[Hook] = []
        self._lock = threading.Lock()
        self._open: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    # --- for tests --------------------------------------------------------------------------

    def put(self, bucket: str, key: str | bytes, data: bytes, etag: str = '"v1"') -> str:
        name = key.encode() if isinstance(key, str) else key
        self.objects[bucket, name] = (etag, data)
        return f"racer://{self.cache}/{bucket}/{urllib.parse.quote(name, safe='-._~/')}"

    def on(self, line: str, *replies: Reply | Hook | None) -> None:
        """The next requests whose line matches the pattern get these answers, then the true one.

        None stands for the true answer; a function decides when it is asked.
        """
        pending = list(replies)
        pattern = re.compile(line)

        def hook(seen: Seen) -> Reply | None:
            if not pattern.search(seen.line):
                return None
            with self._lock:
                if not pending:
                    return None
                reply = pending.pop(0)
            return reply(seen) if callable(reply) else reply

        self._hooks.append(hook)

    def always(self, line: str, reply: Reply | Hook) -> None:
        pattern = re.compile(line)

        def hook(seen: Seen) -> Reply | None:
            if not pattern.search(seen.line):
                return None
            return reply(seen) if callable(reply) else reply

        self._hooks.append(hook)

    def lines(self) -> list[str]:
        return [seen.line for seen in self.seen]

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.lines())

    # --- life -------------------------------------------------------------------------------

    def __enter__(self) -> FakeDaemon:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        self._run(self._accept, self._listener)

    def stop(self) -> None:
        """Ends like a killed process: every connection breaks, the socket file stays."""
        assert self._listener is not None
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.hang_up()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._listener.close()
        self._listener = None

    def wait_for_clients(self) -> None:
        """Returns when it has seen the end of every connection; their clients must be closed."""
        for thread in self._threads[1:]:  # The first one accepts.
            thread.join()

    def hang_up(self) -> None:
        with self._lock:
            for sock in self._open.values():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _run(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                number = self.connections
                self._open[number] = sock
            self._run(self._serve, number, sock)

    def _serve(self, number: int, sock: socket.socket) -> None:
        mine: list[str] = []
        try:
            while self._exchange(number, sock, mine):
                pass
        except OSError:
            pass  # The client went away in the middle.
        finally:
            with self._lock:
                del self._open[number]
                for target in mine:
                    self._forget(target)
            sock.close()

    def _exchange(self, number: int, sock: socket.socket, mine: list[str]) -> bool:
        head, descriptors = _receive_head(sock)
        if not head:
            return False
        seen = _parse(head, descriptors)
        seen.connection = number
        self.seen.append(seen)
        try:
            reply = next((r for r in (hook(seen) for hook in self._hooks) if r), None)
            if reply is None:
                reply = self._answer(seen, mine)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        reply.to_head = seen.method == "HEAD"
        data = reply.encode()
        if reply.descriptors:
            try:
                sent = socket.send_fds(sock, [data], reply.descriptors)
            finally:
                for descriptor in reply.descriptors:
                    os.close(descriptor)
            data = data[sent:]
        if reply.cut is not None:
            sock.sendall(data[: reply.cut])
            return False
        sock.sendall(data)
        return not reply.close and reply.fields.get("Connection") != "close"

    # --- the protocol -----------------------------------------------------------------------

    def _answer(self, seen: Seen, mine: list[str]) -> Reply:
        _, _, operation, *rest = seen.path.split("/", 4)
        name = (
            urllib.parse.unquote(rest[0]) if rest else "",
            urllib.parse.unquote_to_bytes(rest[1]) if len(rest) > 1 else b"",
        )
        if operation == "info":
            return _json(
                protocol=1,
                version="9.9",
                cache=self.cache,
                origin="memory:",
                page_bytes=self.page_bytes,
                frame_bytes=4096,
                gpu="ready" if self.gpus else "off",
                gpus=self.gpus,
                state=self.state,
                **self._cut(),
            )
        if operation == "list":
            return self._list(seen, *name)
        if operation == "targets":
            return self._register(seen, mine) if seen.method == "POST" else self._release(seen)
        if operation in ("pin", "unpin", "pins"):
            return self._pin(operation, rest, prefix=seen.query.get("prefix") == "true")
        if operation == "evict":
            return _json(pages=2, bytes=123)
        found = self.objects.get(name)
        if found is None:
            return error(404, "not_found")
        etag, data = found
        if seen.fields.get("if-match", etag) != etag:
            return error(412, "version_changed", ETag=etag)
        start, stop = 0, len(data)
        if "range" in seen.fields:
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", seen.fields["range"])
            assert match is not None, seen.fields["range"]
            start = int(match.group(1))
            stop = min(len(data), int(match.group(2)) + 1) if match.group(2) else len(data)
            if start >= len(data):
                reply = error(416, "range_not_satisfiable")
                reply.fields["Content-Range"] = f"bytes */{len(data)}"
                return reply
        common = {"ETag": etag, "Racer-Size": str(len(data)), "Racer-Expires-In": "60"}
        if operation == "objects":
            body = data[start:stop]
            if seen.method == "HEAD":
                return Reply(200, common, data)
            if "range" not in seen.fields:
                return Reply(200, common, body)
            common["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            return Reply(206, common, body)
        if operation == "host-read":
            return self._host_read(seen, etag, data, start, stop)
        if operation == "gpu-read":
            return self._gpu_read(seen, etag, data, start, stop)
        if operation == "share" and seen.method == "GET":
            return self._shared(etag, data, start)
        if operation == "share":
            return self._share(etag, data, start)
        if operation == "prefetch":
            return _json(pages=1, bytes=stop - start, rungs={"origin": stop - start})
        if operation == "explain":
            page = {"index": 0, "rung": "disk", "why": {"memory": "not kept"}, "last": None}
            return _json(etag=etag, size=len(data), pages=[page])
        return error(404, "unknown_operation")

    def _host_read(self, seen: Seen, etag: str, data: bytes, start: int, stop: int) -> Reply:
        offset = int(seen.fields.get("racer-target-offset", "0"))
        if "racer-target" in seen.fields:
            assert not seen.descriptors
            with self._lock:
                known = self.targets.get(seen.fields["racer-target"])
                fd = os.dup(known[0]) if known is not None else -1
            if known is None:
                return error(404, "target_unknown")
        else:
            assert len(seen.descriptors) == 1
            fd = os.dup(seen.descriptors[0])
        try:
            refusal = _refusal(fd)
            if refusal is not None:
                return refusal
            if offset + stop - start > os.fstat(fd).st_size:
                return error(422, "target_too_small")
            with mmap.mmap(fd, 0) as mapping:
                mapping[offset : offset + stop - start] = data[start:stop]
        finally:
            os.close(fd)
        reply = _json(
            bytes=stop - start, offset=start, size=len(data), rungs={"memory": stop - start}
        )
        reply.fields["ETag"] = etag
        return reply

    def _gpu_read(self, seen: Seen, etag: str, data: bytes, start: int, stop: int) -> Reply:
        """Through the memfd that stands for GPU memory where the stand-in driver is."""
        offset = int(seen.fields.get("racer-target-offset", "0"))
        assert not seen.descriptors
        with self._lock:
            known = self.targets.get(seen.fields["racer-target"])
            if known is None:
                return error(404, "target_unknown")
            fd = os.dup(known[0])
        try:
            if offset + stop - start > known[1]:
                return error(422, "target_too_small")
            with mmap.mmap(fd, 0) as mapping:
                mapping[offset : offset + stop - start] = data[start:stop]
        finally:
            os.close(fd)
        rungs = {"cufile": stop - start}
        reply = _json(bytes=stop - start, offset=start, size=len(data), rungs=rungs)
        reply.fields["ETag"] = etag
        return reply

    def _cut(self) -> dict[str, int]:
        return {"share_chunk_bytes": self.share_chunk_bytes} if self.share_chunk_bytes else {}

    def _shared(self, etag: str, data: bytes, start: int) -> Reply:
        """All pieces from `start` on where they are there already, or none of them."""
        length = self.share_chunk_bytes or len(data)
        starts = range(start - start % length, len(data), length) if self.shared_already else ()
        parts = [(at, data[at : at + length]) for at in starts][:16]
        pieces = [
            {"offset": at, "bytes": len(part), "rungs": {"shared": len(part)}} for at, part in parts
        ]
        reply = _json(size=len(data), pieces=pieces, **self._cut())
        reply.fields["ETag"] = etag
        reply.descriptors = [_sealed(part) for _, part in parts]
        return reply

    def _share(self, etag: str, data: bytes, start: int) -> Reply:
        """The piece with byte `start`, in memory that nobody can write to any more."""
        length = self.share_chunk_bytes or len(data)
        at = start - start % length
        part = data[at : at + length]
        reply = _json(offset=at, bytes=len(part), size=len(data), rungs={"shared": len(part)})
        reply.fields["ETag"] = etag
        reply.descriptors = [_sealed(part)]
        return reply

    def _gpu_refusal(self, seen: Seen) -> Reply | None:
        if seen.fields["racer-gpu"] not in self.gpus:
            return error(422, "gpu_unknown")
        if "/memfd:fakegpu-" not in os.readlink(f"/proc/self/fd/{seen.descriptors[0]}"):
            return error(422, "target_not_gpu_memory")
        assert int(seen.fields["racer-target-bytes"]) == os.fstat(seen.descriptors[0]).st_size
        return None

    def _register(self, seen: Seen, mine: list[str]) -> Reply:
        if len(seen.descriptors) != 1:
            return error(400, "descriptor_missing")
        kind = seen.fields.get("racer-target-kind", "host")
        refusal = self._gpu_refusal(seen) if kind == "gpu" else _refusal(seen.descriptors[0])
        if refusal is not None:
            return refusal
        target, size = os.urandom(16).hex(), os.fstat(seen.descriptors[0]).st_size
        with self._lock:
            self.targets[target] = (os.dup(seen.descriptors[0]), size)
        mine.append(target)
        reply = _json(id=target, kind=kind, bytes=size)
        reply.status = 201
        return reply

    def _release(self, seen: Seen) -> Reply:
        with self._lock:
            found = self._forget(seen.path.rpartition("/")[2])
        return _json() if found else error(404, "target_unknown")

    def _forget(self, target: str) -> bool:
        fd, _ = self.targets.pop(target, (-1, 0))
        if fd >= 0:
            os.close(fd)
        return fd >= 0

    def _pin(self, operation: str, names: list[str], *, prefix: bool) -> Reply:
        """Each pin takes 1,000 bytes of 10,000."""
        made = (*names, prefix)
        there = made in self.pins
        if operation == "pin" and not there:
            self.pins.append(made)
        if operation == "unpin" and there:
            self.pins.remove(made)
        room = 10_000 - 1000 * len(self.pins)
        if operation == "pin":
            return _json(pages=1, bytes=1000, room_bytes=room)
        if operation == "unpin":
            return _json(removed=there, room_bytes=room)
        shown = [
            {"bucket": bucket, "key": key, "prefix": prefix, "pages": 1, "bytes": 1000}
            for bucket, key, prefix in self.pins
        ]
        return _json(pins=shown, room_bytes=room)

    def _list(self, seen: Seen, bucket: str, prefix: bytes) -> Reply:
        if not bucket:
            return _json(buckets=sorted({name for name, _ in self.objects}))
        limit = int(seen.query.get("limit", "1000"))
        after = urllib.parse.unquote_to_bytes(seen.query.get("after", ""))
        delimiter = seen.query.get("delimiter", "")
        keys = sorted(k for b, k in self.objects if b == bucket and k.startswith(prefix))
        objects, prefixes, last = [], [], None
        for key in keys:
            shown = key
            if delimiter and b"/" in key[len(prefix) :]:
                shown = prefix + key[len(prefix) :].split(b"/")[0] + b"/"
            if shown <= after:
                continue
            encoded = urllib.parse.quote(shown, safe="-._~/")
            if len(objects) + len(prefixes) == limit and encoded not in prefixes:
                return _json(objects=objects, prefixes=prefixes, next=last)
            last = encoded
            if shown is not key:
                if encoded not in prefixes:
                    prefixes.append(encoded)
                continue
            etag, data = self.objects[bucket, key]
            objects.append({"key": encoded, "size": len(data), "etag": etag})
        return _json(objects=objects, prefixes=prefixes, next=None)


def _refusal(fd: int) -> Reply | None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return error(422, "target_not_memory")
    if not seals & fcntl.F_SEAL_SHRINK:
        return error(422, "target_unsealed")
    status = os.fstat(fd)
    if status.st_blocks * 512 < status.st_size:
        return error(422, "target_sparse")
    return None


def _sealed(data: bytes) -> int:
    """Memory that nobody can write to any more."""
    fd = os.memfd_create("fake-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    seal_writing(fd, fcntl.F_SEAL_SHRINK)
    return fd


def _json(**values: object) -> Reply:
    body = json.dumps(values, separators=(",", ":")).encode()
    return Reply(200, {"Content-Type": "application/json"}, body)


def _receive_head(sock: socket.socket) -> tuple[bytes, list[int]]:
    head = b""
    descriptors: list[int] = []
    while not head.endswith(b"\r\n\r\n"):
        space = socket.CMSG_SPACE(4 * 4)
        data, ancillary, _, _ = sock.recvmsg(65536, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                assert not head, "descriptors go with the first byte of the head"
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % 4])
                descriptors += received
        if not data:
            return b"", descriptors
        head += data
    return head, descriptors


def _parse(head: bytes, descriptors: list[int]) -> Seen:
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, version = first.split(" ")
    assert version == "HTTP/1.1"
    path, _, query = target.partition("?")
    fields = {}
    for line in lines:
        name, _, value = line.partition(": ")
        assert name.lower() not in fields, name
        fields[name.lower()] = value
    pairs = dict(part.split("=", 1) for part in query.split("&")) if query else {}
    named = {
        key: urllib.parse.unquote(value) if key == "delimiter" else value
        for key, value in pairs.items()
    }
    return Seen(method, path, named, fields, descriptors)

"""The golden transcripts from the client's side: what it sends, and what it makes of the answers.

A scripted server plays each transcript over a real Unix socket. Where the client could send a
request of the transcript, it is built by the client's own functions and must be the same, field by
field; the others (malformed on purpose, to try the daemon) are sent as they stand. Either way the
answer goes through the client's own reading.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import racer
from racer import answers, requests
from racer.connection import Connection
from racer.deadline import Deadline
from racer.errors import code_for_status, kind_for_code
from racer.refusals import error_of
from racer.socket_path import SocketPlace
from racer.urls import RacerUrl
from racer.wire import Request, ResponseHead

GOLDEN = Path(__file__).resolve().parents[4] / "tests" / "golden" / "wire"
WORLD = json.loads((GOLDEN / "world.json").read_text())
TRANSCRIPTS = sorted(path.stem for path in GOLDEN.glob("*.json") if path.stem != "world")

Step = dict[str, Any]


def content(of: dict[str, Any]) -> bytes:
    """Bytes of `{"text": …}` or `{"pattern": n or [first, count]}`."""
    if "text" in of:
        return bytes(of["text"], "latin-1")
    first, count = of["pattern"] if isinstance(of["pattern"], list) else (0, of["pattern"])
    return bytes((i * 7 + i // 256) % 251 for i in range(first, first + count))


OBJECTS = {(o["bucket"], o["key"]): content(o) for o in WORLD["objects"]}
ETAGS = {(o["bucket"], o["key"]): o["etag"] for o in WORLD["objects"]}


def response(step: Step, asked: str) -> bytes:
    """The bytes of a `server` step, which answers the head `asked`.

    An answer by parts lists the fields that its transcript is about; what the protocol gives with
    every answer about an object is added.
    """
    server = step["server"]
    if isinstance(server, str):
        return bytes(server, "latin-1")
    body = b""
    fields = dict(server["fields"])
    found = re.match(r"(\S+) /v1/(objects|host-read)/([^/ ]+)/(\S+) ", asked)
    if found is not None and server["status"] < 400:
        name = (found.group(3), unnormal(found.group(4)))
        fields.setdefault("ETag", ETAGS[name])
        if found.group(2) == "objects":
            fields.setdefault("Racer-Size", str(len(OBJECTS[name])))
    if "json" in server:
        body = json.dumps(server["json"], separators=(",", ":")).encode()
        fields.setdefault("Content-Type", "application/json")
    elif "text" in server or "pattern" in server:
        body = content(server)
    fields.setdefault("Content-Length", str(len(body)))
    lines = [f"HTTP/1.1 {server['status']} Reason", *(f"{n}: {v}" for n, v in fields.items())]
    head = bytes("\r\n".join([*lines, "", ""]), "latin-1")
    return head if server.get("head_only") else head + body


# --- the scripted server ------------------------------------------------------------------------


class Script:
    """Plays a transcript's server steps and keeps what the client sent for each `client` step."""

    def __init__(self, steps: list[Step], path: Path) -> None:
        self.steps = steps
        self.received: list[bytes] = []
        self.memories: list[int] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._play, daemon=True)

    def __enter__(self) -> Script:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for fd in self.memories:
            os.close(fd)

    def _play(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        asked = ""
        with sock:
            for step in self.steps:
                if "client" in step:
                    asked = step["client"]
                    self.received.append(self._receive(sock, step))
                elif "memory" in step:
                    os.pwrite(self.memories[step["memory"]], content(step), step["offset"])
                elif "server" in step:
                    sock.sendall(response(step, asked))
                elif step["end"] == "server":
                    return

    def _receive(self, sock: socket.socket, step: Step) -> bytes:
        """What the client sends for one step: up to the end of the step's own last head, or, for
        a step that has no end, as many bytes."""
        wanted = bytes(step["client"], "latin-1")
        data = b""
        while not (
            data.endswith(wanted[-4:]) if b"\r\n\r\n" in wanted else len(data) >= len(wanted)
        ):
            chunk, ancillary, _, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(64))
            for _, _, payload in ancillary:
                received = array.array("i", payload[: len(payload) - len(payload) % 4])
                self.memories += received
            if not chunk:
                break
            data += chunk
        return data


# --- what the client would send -----------------------------------------------------------------


def parse(text: str) -> tuple[str, str, dict[str, str]] | None:
    """Method, target and fields of a head that a client of this kind could send, or None."""
    head, end, rest = text.partition("\r\n\r\n")
    lines = head.split("\r\n")
    first = lines[0].split(" ")
    if not end or rest or len(first) != 3 or first[2] != "HTTP/1.1":
        return None
    fields: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(": ")
        if not colon or name.lower() in fields:
            return None
        fields[name.lower()] = value
    for ignored in ("host", "racer-deadline-ms"):
        fields.pop(ignored, None)
    return first[0], first[1], fields


def build(method: str, target: str, fields: dict[str, str]) -> Request | None:
    """The client's own request for what a transcript asks, or None where it has none."""
    path, _, query = target.partition("?")
    operation, _, name = path.removeprefix("/v1/").partition("/")
    try:
        url = RacerUrl.parse(f"racer://golden/{name}")
    except racer.BadUrl:
        return None
    start, stop, etag = 0, None, fields.get("if-match")
    if "range" in fields:
        match = re.fullmatch(r"bytes=(\d{1,15})-(\d{0,15})", fields["range"])
        if match is None:
            return None
        start = int(match.group(1))
        stop = int(match.group(2)) + 1 if match.group(2) else None
    builders: dict[tuple[str, str], Callable[[], Request]] = {
        ("GET", "info"): requests.info_request,
        ("HEAD", "objects"): lambda: requests.stat_request(url, etag),
        ("GET", "objects"): lambda: requests.body_request(url, start, stop, etag),
        ("GET", "list"): lambda: _list_request(url, query),
        ("POST", "targets"): requests.register_request,
        ("DELETE", "targets"): lambda: requests.release_request(name),
        ("POST", "host-read"): lambda: requests.host_read_request(
            url,
            (start, stop or 0),
            etag,
            target=fields.get("racer-target"),
            target_offset=int(fields.get("racer-target-offset", "0")),
        ),
        ("POST", "prefetch"): lambda: requests.prefetch_request(url, start, stop, etag),
        ("POST", "evict"): lambda: requests.evict_request(url, prefix="prefix=true" in query),
        ("POST", "pin"): lambda: requests.pin_request(url, prefix="prefix=true" in query),
        ("POST", "unpin"): lambda: requests.unpin_request(url, prefix="prefix=true" in query),
        ("GET", "pins"): requests.pins_request,
        ("GET", "explain"): lambda: requests.explain_request(url, start, stop),
    }
    builder = builders.get((method, operation))
    try:
        return None if builder is None else builder()
    except (racer.RacerError, ValueError):
        return None


def _list_request(url: RacerUrl, query: str) -> Request:
    pairs = dict(part.partition("=")[::2] for part in query.split("&")) if query else {}
    delimiter = pairs.get("delimiter")
    return requests.list_request(
        url,
        delimiter=None if delimiter is None else unquote(delimiter).encode(),
        after=pairs.get("after"),
        limit=int(pairs.get("limit", "1000")),
    )


# --- what the client makes of the answers ---------------------------------------------------------


def check_answer(request: Request | None, head: ResponseHead, body: bytes, server: Any) -> None:
    """The answer read as the client reads it: an error of the right kind, or right values."""
    if isinstance(server, dict):
        assert head.status == server["status"]
    if head.status >= 400:
        error = error_of(head, body, about="golden")
        told = server.get("json", {}).get("error", {})
        code = told.get("code") or server["fields"].get("Racer-Error")
        assert error.code == (code or code_for_status(head.status))
        assert isinstance(error, kind_for_code(error.code))
        assert type(error) is not racer.RacerError, f"the code {error.code} has no class"
        assert error.retry == told.get("retry", error.retry)
        if "Retry-After" in server["fields"]:
            assert error.retry_after == float(server["fields"]["Retry-After"])
        if isinstance(error, racer.VersionChanged):
            assert error.etag == server["fields"].get("ETag")
        if isinstance(error, racer.RangeNotSatisfiable):
            assert f"bytes */{error.size}" == server["fields"]["Content-Range"]
        return
    if request is None:
        return
    path, _, _ = request.target.partition("?")
    operation, _, name = path.removeprefix("/v1/").partition("/")
    bucket, _, key = name.partition("/")
    fields = dict(request.fields)
    url = RacerUrl.parse(f"racer://golden/{name}")
    told = server.get("json") if isinstance(server, dict) else json.loads(body)
    match request.method, operation:
        case "HEAD", _:
            stat = answers.read_stat(url, head)
            assert (stat.size, stat.etag) == (len(OBJECTS[bucket, key]), ETAGS[bucket, key])
        case "GET", "objects":
            start, stop = _span(fields)
            served = answers.read_body_head(head, start, stop, fields.get("If-Match"))
            assert body == OBJECTS[bucket, unnormal(key)][served.start : served.stop]
        case "POST", "host-read":
            size = len(OBJECTS[bucket, key])
            start, stop = _span(fields)
            part = (start, size if stop is None else stop)
            done = answers.read_host_read(head, body, part, fields.get("If-Match"))
            assert (done.bytes, done.size, dict(done.rungs)) == (
                told["bytes"],
                told["size"],
                told["rungs"],
            )
        case "GET", "info":
            info = answers.read_info(body)
            shown = json.loads(json.dumps(info._asdict()))  # Its tuples are lists on the wire.
            assert shown == {name: told[name] for name in info._fields}
        case "GET", "list":
            listing = answers.read_listing(url, body)
            assert listing.after == told.get("next")
            assert len(listing.entries) == sum(
                len(told.get(kind, ())) for kind in ("objects", "prefixes", "buckets")
            )
        case "POST", "targets":
            assert answers.read_target_id(body, told["bytes"]) == told["id"]
        case "POST", "prefetch":
            assert answers.read_prefetched(body)._asdict() == told
        case "POST", "evict":
            assert answers.read_evicted(body)._asdict() == told
        case "POST", "pin":
            assert answers.read_pinned(body)._asdict() == told
        case "POST", "unpin":
            assert answers.read_unpinned(body)._asdict() == told
        case "GET", "pins":
            pins = answers.read_pins("golden", body)
            assert pins.room_bytes == told["room_bytes"]
            assert [(RacerUrl.parse(pin.url).path, *pin[1:]) for pin in pins.pins] == [
                (f"{p['bucket']}/{p['key']}", p["prefix"], p["pages"], p["bytes"])
                for p in told["pins"]
            ]
        case "GET", "explain":
            explanation = answers.read_explanation(url, body)
            assert [page.page for page in explanation.pages] == [p["index"] for p in told["pages"]]
            assert explanation.next_page == told.get("next_index")


def unnormal(key: str) -> str:
    """The spelling of a key in `world.json`."""
    return str(RacerUrl("golden", "b", RacerUrl.parse(f"racer://golden/b/{key}").key)).split(
        "/b/", 1
    )[1]


def _span(fields: dict[str, str]) -> tuple[int, int | None]:
    if "Range" not in fields:
        return 0, None
    first, last = fields["Range"].removeprefix("bytes=").split("-")
    return int(first), int(last) + 1 if last else None


def descriptor(of: dict[str, Any], opened: ExitStack) -> int:
    """A descriptor of a transcript, as far as the script's writes need it to be what it says."""
    if of.get("memfd"):
        fd = os.memfd_create("golden", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, of["memfd"])
        if of.get("without") != "shrink_seal":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    else:
        fd = os.open(os.devnull, os.O_RDONLY)
    opened.callback(os.close, fd)
    return fd


def exchanges(steps: list[Step]) -> Iterator[tuple[Step, Step | None]]:
    """Client steps, each with the answer that follows before the next one."""
    pending: Step | None = None
    for step in steps:
        if "client" in step:
            if pending is not None:
                yield pending, None
            pending = step
        elif "server" in step and pending is not None:
            yield pending, step
            pending = None
    if pending is not None:
        yield pending, None


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_golden_transcript(name: str, tmp_path: Path) -> None:
    """R1, R3, R5, R6: the client speaks the protocol that is written down."""
    transcript = json.loads((GOLDEN / f"{name}.json").read_text())
    steps: list[Step] = transcript["exchange"]
    captured: dict[str, str] = {}
    sent: list[bytes] = []
    deadline = Deadline.after(30)
    place = SocketPlace.find(socket=str(tmp_path / "socket"))
    script = Script(_captured(steps, captured), tmp_path / "socket")
    with script, ExitStack() as opened:
        connection = Connection(place, str(tmp_path / "socket"))
        opened.callback(connection.close)
        for client, answer in exchanges(script.steps):
            descriptors = [descriptor(d, opened) for d in client.get("descriptors", ())]
            parsed = parse(client["client"])
            request = build(*parsed) if parsed is not None else None
            if request is not None and not same(request, parsed):
                request = None  # Another spelling of the same question: sent as it stands.
            sent.append(bytes(client["client"], "latin-1") if request is None else b"")
            if request is not None:
                connection.send(request, deadline, descriptors)
            else:
                to_head = client["client"].startswith("HEAD")
                connection._exchange.start(Request("HEAD" if to_head else "GET", "/"), 1)
                send_raw(connection, sent[-1], descriptors)
            if answer is None:
                break
            server = answer["server"]
            if isinstance(server, dict) and server.get("cut"):
                with pytest.raises(racer.ConnectionLost, match="ended after"):
                    connection.receive(deadline)
                break
            head, body = connection.receive(deadline)
            check_answer(request, head, body, server)
            if head.closes:
                assert connection.closed
                break
    for wanted, got in zip(
        [step["client"] for step in script.steps if "client" in step], script.received, strict=False
    ):
        known, seen = parse(wanted), parse(got.decode("latin-1"))
        if known is not None and seen is not None:
            assert seen == known


def _captured(steps: list[Step], captured: dict[str, str]) -> list[Step]:
    """The steps with `${name}` replaced by the value of the example answer."""
    done = []
    for step in steps:
        if "client" in step:
            text = step["client"]
            for name, value in captured.items():
                text = text.replace(f"${{{name}}}", value)
            step = step | {"client": text}
        for name, place in step.get("capture", {}).items():
            value = step["server"]
            for part in place.split("."):
                value = value[part]
            captured[name] = value
        done.append(step)
    return done


def same(request: Request, parsed: tuple[str, str, dict[str, str]] | None) -> bool:
    """Whether the client's own head asks exactly what the transcript's does."""
    return parsed == parse(request.encode().decode("latin-1"))


def send_raw(connection: Connection, data: bytes, descriptors: list[int]) -> None:
    rights = array.array("i", descriptors).tobytes()
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    sock = connection._open_socket()
    sock.settimeout(30)
    sock.sendmsg([data], control)


def test_the_client_can_ask_many_of_the_transcripts_itself() -> None:
    """If this number falls, the test above tests less than it says."""
    own = total = 0
    for name in TRANSCRIPTS:
        captured: dict[str, str] = {}
        steps = json.loads((GOLDEN / f"{name}.json").read_text())["exchange"]
        for step in _captured(steps, captured):
            if "client" in step:
                total += 1
                parsed = parse(step["client"])
                request = build(*parsed) if parsed is not None else None
                own += request is not None and same(request, parsed)
    assert own >= 50, (own, total)

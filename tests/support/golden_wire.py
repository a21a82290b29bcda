"""Golden transcripts of the client protocol: loading, and playing the client against a socket.

`tests/golden/wire/README.md` is the format.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from tests.support.gpu_rig import GpuMemory
from tests.support.socket_rig import SEALS, Answer, Memory, RawClient

FOLDER = Path(__file__).parent.parent / "golden" / "wire"
MFD_HUGETLB = 4


@dataclass(frozen=True)
class Transcript:
    name: str
    why: str
    given: Mapping[str, Any]
    exchange: list[dict[str, Any]]


@dataclass(frozen=True)
class WorldObject:
    bucket: str
    key: bytes
    etag: str
    content: bytes


def transcripts() -> list[Transcript]:
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        if path.name != "world.json":
            data = json.loads(path.read_text())
            found.append(
                Transcript(data["name"], data["why"], data.get("given", {}), data["exchange"])
            )
    return found


def pattern(first: int, count: int) -> bytes:
    return bytes((i * 7 + i // 256) % 251 for i in range(first, first + count))


def world() -> tuple[str, list[WorldObject]]:
    """The cache's name and what is in it."""
    data = json.loads((FOLDER / "world.json").read_text())
    objects = [
        WorldObject(
            entry["bucket"],
            unquote_to_bytes(entry["key"]),
            entry["etag"],
            pattern(0, entry["pattern"]) if "pattern" in entry else entry["text"].encode("latin-1"),
        )
        for entry in data["objects"]
    ]
    return data["cache"], objects


def body_of(response: Mapping[str, Any]) -> bytes:
    """The body that a response by parts carries."""
    if "json" in response:
        return json.dumps(response["json"], separators=(",", ":")).encode()
    if "pattern" in response:
        return pattern(*response["pattern"])
    text: str = response.get("text", "")
    return text.encode("latin-1")


def text_of(response: Mapping[str, Any]) -> bytes:
    """A response by parts as the bytes that it stands for."""
    body = body_of(response)
    fields = dict(response["fields"])
    if "json" in response:
        fields.setdefault("Content-Type", "application/json")
    fields.setdefault("Content-Length", str(len(body)))
    status = response["status"]
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@contextmanager
def descriptor(spec: Mapping[str, Any]) -> Iterator[int]:
    """The descriptor that a client step sends."""
    if spec.get("pipe"):
        reading, writing = os.pipe()
        try:
            yield reading
        finally:
            os.close(reading)
            os.close(writing)
        return
    if "gpu" in spec:
        with GpuMemory(spec["gpu"], spec["memfd"]) as exported:
            yield exported.descriptor
        return
    size, without = spec["memfd"], spec.get("without")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (MFD_HUGETLB if spec.get("hugetlb") else 0)
    seals = SEALS & ~fcntl.F_SEAL_SHRINK & ~fcntl.F_SEAL_SEAL if without == "shrink_seal" else SEALS
    allocated = 0 if without == "pages" or spec.get("hugetlb") else size
    with Memory(size, seals=seals, allocated=allocated, flags=flags) as memory:
        if without != "write":
            yield memory.fd
            return
        read_only = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield read_only
        finally:
            os.close(read_only)


@dataclass
class Player:
    """Plays the client of one transcript and checks what the daemon answers."""

    client: RawClient
    stack: ExitStack
    names: dict[str, str] = field(default_factory=dict)
    descriptors: list[int] = field(default_factory=list)
    expected_memory: list[dict[str, Any]] = field(default_factory=list)

    def play(self, exchange: list[dict[str, Any]]) -> None:
        for step in exchange:
            if "client" in step:
                self._send(step)
            elif "memory" in step:
                self.expected_memory.append(step)
            elif "server" in step:
                self._receive(step)
                self._check_memory()
            elif step["end"] == "server":
                assert self.client.ended(), "the daemon sends more, or does not close"
            else:
                self.client.sock.close()

    def _send(self, step: dict[str, Any]) -> None:
        new = [self.stack.enter_context(descriptor(spec)) for spec in step.get("descriptors", ())]
        self.descriptors += new
        text = re.sub(r"\$\{(\w+)\}", lambda found: self.names[found[1]], step["client"])
        self.client.send(text, new)

    def _receive(self, step: dict[str, Any]) -> None:
        expected = step["server"]
        if isinstance(expected, str):
            wanted = expected.encode("latin-1")
            self.client.sock.settimeout(20)
            found = b""
            while len(found) < len(wanted) and (more := self.client.sock.recv(len(wanted))):
                found += more
            assert found == wanted
            return
        if expected.get("cut"):
            answer = self.client.receive_cut()
        else:
            answer = self.client.receive(head_only=expected.get("head_only", False))
        self._check(answer, expected, step.get("vary", []))
        for name, place in step.get("capture", {}).items():
            self.names[name] = _at(answer.json, place)

    def _check(self, answer: Answer, expected: dict[str, Any], vary: list[str]) -> None:
        assert answer.status == expected["status"], answer
        for name, value in expected["fields"].items():
            assert name in answer.fields, (name, answer)
            if f"fields.{name}" not in vary:
                assert answer.fields[name] == value, (name, answer)
        if "json" in expected:
            vary = [*vary, "json.error.message", "json.error.hint"]
            _compare(answer.json, expected["json"], "json", vary)
        elif not expected.get("head_only"):
            assert answer.body == body_of(expected)

    def _check_memory(self) -> None:
        for step in self.expected_memory:
            wanted = (
                pattern(*step["pattern"]) if "pattern" in step else step["text"].encode("latin-1")
            )
            fd = self.descriptors[step["memory"]]
            assert os.pread(fd, len(wanted), step["offset"]) == wanted
        self.expected_memory.clear()


def play(path: Path, transcript: Transcript) -> None:
    """Plays the client of `transcript` on a fresh connection. Blocking."""
    with RawClient(path) as client, ExitStack() as stack:
        Player(client, stack).play(transcript.exchange)
        client.sock.close()


def _at(value: Any, place: str) -> Any:
    for name in place.split(".")[1:]:
        value = value[name]
    return value


def _compare(found: Any, wanted: Any, place: str, vary: list[str]) -> None:
    assert type(found) is type(wanted), (place, found, wanted)
    if place in vary:
        return
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), (place, found, wanted)
        for name, value in wanted.items():
            _compare(found[name], value, f"{place}.{name}", vary)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), (place, found, wanted)
        for index, value in enumerate(wanted):
            _compare(found[index], value, f"{place}.{index}", vary)
    else:
        assert found == wanted, place

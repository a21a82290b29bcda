"""What hostile clients do: one act for each way to abuse a connection, from one random source.

An act returns how it ended in a few words, which the campaign counts. It raises `WrongAnswer` where
the daemon said what it must not: another refusal than the protocol's, or bytes that are not the
object's. A 503 is always right.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import mmap
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tools.torture.hostile import ENDED, Answer, Connection, head
from tools.torture.hostile_targets import BAD_TARGETS, memory, opened
from tools.torture.slow_origin import content

_libc = ctypes.CDLL(None, use_errno=True)
_FALLOC_FL_KEEP_SIZE_AND_PUNCH_HOLE = 3
_EXCESS_BYTES = 1 << 20
_PARKED_SECONDS = 30.0
_OBJECTS = {"fast": 8, "slow": 400}  # Of the latter, a daemon caches a fifth.


class WrongAnswer(Exception):
    """The daemon did what it must not. The message says what."""


@dataclass
class Attack:
    """Where to attack, with what luck. `parked` are connections that are left hanging."""

    path: Path
    rng: random.Random
    object_bytes: int
    parked: list[Connection]
    parked_max: int = 40

    def key(self, kind: str) -> str:
        """A small number of `fast` objects stays cached; a `slow` one is likely to be new."""
        return f"/b/{kind}/{self.rng.randrange(_OBJECTS[kind])}"

    def span(self, most: int = 1 << 20) -> tuple[int, int]:
        length = self.rng.randrange(1, most)
        start = self.rng.randrange(self.object_bytes - length)
        return start, start + length

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        with Connection(self.path) as connection:
            yield connection


def _range(start: int, stop: int) -> str:
    return f"Range: bytes={start}-{stop - 1}"


def _expect(answer: Answer, *allowed: str) -> str:
    if answer.told not in allowed and answer.status != 503:
        raise WrongAnswer(f"{answer.told} instead of {' or '.join(allowed)}: {answer.body[:200]!r}")
    return answer.told


# --- heads and bytes ----------------------------------------------------------------------------


def half_head(attack: Attack) -> str:
    """Part of a head, then nothing: closed at once, or left for the daemon to end."""
    whole = head("GET /v1/objects" + attack.key("fast"), "X-Padding: " + "x" * 500)
    part = whole[: attack.rng.randrange(1, len(whole) - 1)]
    if attack.rng.random() < 0.05 and len(attack.parked) < attack.parked_max:
        parked = Connection(attack.path)
        parked.send(part)
        attack.parked.append(parked)
        return "parked"
    with attack.connected() as client:
        if attack.parked_max and attack.rng.random() < 0.2:
            # The daemon then holds the client's end, too, and would wait for ever for its end.
            client.send(part, [client.sock.fileno()])
            return "left with its own socket"
        client.send(part)
    return "left"


def slow_head(attack: Attack) -> str:
    """A head in many small pieces, whole in the end: that is allowed."""
    whole = head("HEAD /v1/objects" + attack.key("fast"))
    with attack.connected() as client:
        while whole:
            count = attack.rng.randrange(1, 12)
            client.send(whole[:count])
            whole = whole[count:]
        return _expect(client.receive(to_head=True), "200")


def garbage(attack: Attack) -> str:
    """Bytes that are no head: noise, TLS, another protocol, controls, bare line feeds."""
    noise = attack.rng.choice(
        [
            attack.rng.randbytes(attack.rng.randrange(1, 4096)),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + attack.rng.randbytes(512),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /v1/info HTTP/1.1\nHost: racer\n\n",
            b"GET  /v1/info HTTP/1.1\r\n\r\n",
            b"GET /v1/info HTTP/9.9\r\n\r\n",
            b"\r\n" * 50 + b"\0" * 100,
        ]
    )
    with attack.connected() as client:
        client.send(noise + b"\r\n\r\n")
        return _expect(client.receive(), "400 bad_request", "431 head_too_large", "ended")


def huge_head(attack: Attack) -> str:
    """A head without an end, or with more fields than there may be."""
    if attack.rng.random() < 0.5:
        data = head("GET /v1/info", *(f"X-{n}: 1" for n in range(attack.rng.randrange(65, 900))))
    else:
        data = b"GET /v1/info HTTP/1.1\r\nX: " + b"y" * attack.rng.randrange(33_000, 300_000)
    with attack.connected() as client:
        client.send(data)
        return _expect(client.receive(), "431 head_too_large", "400 bad_request", "ended")


def odd_requests(attack: Attack) -> str:
    """Well-formed heads that ask for what there is not."""
    line, fields, told = attack.rng.choice(
        [
            ("GET /v1/objects/b/%zz", (), "400 bad_request"),
            ("GET /v1/objects/b/" + "k" * 1025, (), "400 bad_request"),
            ("GET /v1/objects/%ff/k", (), "400 bad_request"),
            ("GET /v1/objects/b/%00", (), "400 bad_request"),
            ("GET /v1/objects/b/k?x=1", (), "400 bad_request"),
            ("GET /v1/objects/b/k", ("Range: bytes=5-1",), "400 bad_request"),
            ("GET /v1/objects/b/k", ("Range: bytes=0-1,3-4",), "400 bad_request"),
            ("GET /v1/objects/b/k", ("Range: bytes=0-1", "Range: bytes=0-1"), "400 bad_request"),
            ("GET /v1/objects/b/k", ("Content-Length: 5",), "400 bad_request"),
            ("GET /v1/objects/b/k", ("Transfer-Encoding: chunked",), "400 bad_request"),
            ("GET /v1/objects/b/k", ("Racer-Deadline-Ms: 0",), "400 bad_request"),
            ("POST /v1/host-read/b/k", ("Racer-Target: " + "f" * 32,), "404 target_unknown"),
            ("DELETE /v1/targets/" + "0" * 32, (), "404 target_unknown"),
            ("DELETE /v1/targets/../../etc", (), "400 bad_request"),
            ("PUT /v1/objects/b/k", (), "405 method_not_allowed"),
            ("GET /etc/passwd", (), "404 unknown_operation"),
            ("POST /v1/targets", (), "400 descriptor_missing"),
            ("POST /v1/pin/b", (), "400 bad_request"),
        ]
    )
    if told == "404 target_unknown" and "host-read" in line:
        line = "POST /v1/host-read" + attack.key("fast")
    with attack.connected() as client:
        return _expect(client.ask(line, *fields), told)


def pipelined(attack: Attack) -> str:
    """Heads on heads, some with descriptors, before any answer; perhaps a flood of them."""
    with attack.connected() as client, memory(4096) as fd:
        for _ in range(attack.rng.randrange(2, 20)):
            fds = [fd] * attack.rng.choice([0, 0, 1, 4])
            if not client.send(head("GET /v1/objects" + attack.key("slow")), fds):
                return "ended"
        if attack.rng.random() < 0.3:
            flood = b"x" * 65_536
            for _ in range(_EXCESS_BYTES // len(flood) + 2):
                if not client.send(flood):
                    return "flood cut off"
        answer = client.receive()
        return _expect(answer, "200", "ended", "400 bad_request", "400 descriptor_unexpected")


def deaf(attack: Attack) -> str:
    """Asks for a lot and reads nothing of it: the deadline has to end that."""
    with attack.connected() as client:
        client.send(head("GET /v1/objects" + attack.key("fast"), "Racer-Deadline-Ms: 100"))
        time.sleep(attack.rng.random() * 0.15)
    return "left"


def half_close(attack: Attack) -> str:
    """Shuts down one side or the other in the middle of a request."""
    with attack.connected() as client:
        client.send(head("GET /v1/objects" + attack.key("slow")))
        with suppress(OSError):
            client.sock.shutdown(attack.rng.choice([socket.SHUT_WR, socket.SHUT_RD]))
        time.sleep(attack.rng.random() * 0.005)
    return "left"


# --- descriptors --------------------------------------------------------------------------------


def descriptor_flood(attack: Attack) -> str:
    """More descriptors than a head may have: the control buffer overflows (MSG_CTRUNC)."""
    with attack.connected() as client, memory(4096) as fd:
        client.send(head("POST /v1/targets"), [fd] * attack.rng.randrange(5, 254))
        return _expect(client.receive(), "400 bad_request", "ended")


def descriptors_in_a_head(attack: Attack) -> str:
    """Descriptors where no head starts."""
    whole = head("POST /v1/targets")
    with attack.connected() as client, memory(4096) as fd:
        client.send(whole[:5])
        for at in range(5, len(whole), 7):
            if not client.send(whole[at : at + 7], [fd] * attack.rng.randrange(1, 5)):
                return "ended"
        allowed = ("400 descriptor_unexpected", "400 bad_request", "ended", "201")
        return _expect(client.receive(), *allowed)


def descriptors_for_nothing(attack: Attack) -> str:
    """Descriptors with a request that takes none, or too many for one that takes one."""
    line = attack.rng.choice(
        [
            "GET /v1/info",
            "GET /v1/objects" + attack.key("fast"),
            "POST /v1/targets",
            "GET /v1/pins/",
        ]
    )
    with attack.connected() as client, memory(4096) as fd:
        count = attack.rng.randrange(2, 5)
        return _expect(client.ask(line, fds=[fd] * count), "400 descriptor_unexpected")


def other_messages(attack: Attack) -> str:
    """Credentials in place of descriptors, and a head that comes with them."""
    with attack.connected() as client:
        mine = array.array("i", [os.getpid(), os.getuid(), os.getgid()])
        with suppress(PermissionError):
            client.sock.sendmsg(
                [head("GET /v1/info")], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, mine)]
            )
            return _expect(client.receive(), "200")
        return "not allowed to"


def bad_target(attack: Attack) -> str:
    """A descriptor that is no target, registered or sent with a read."""
    name = attack.rng.choice(list(BAD_TARGETS))
    make, told = BAD_TARGETS[name]
    start, stop = attack.span(65_536)
    try:
        with make(65_536) as fd, attack.connected() as client:
            if attack.rng.random() < 0.5:
                answer = client.ask("POST /v1/targets", fds=[fd])
            else:
                line = "POST /v1/host-read" + attack.key("fast")
                answer = client.ask(line, _range(start, stop), fds=[fd])
    except OSError as error:
        return f"{name}: this kernel says {error.strerror}"
    _expect(answer, told)
    return f"{name}: {answer.told}"


def vanishing_memory(attack: Attack) -> str:
    """Memory that shrinks, grows or gets holes while it is read into."""
    start, stop = attack.span()
    size = stop - start
    shrinks = attack.rng.random() < 0.4
    seals = 0 if shrinks else fcntl.F_SEAL_SHRINK
    key = attack.key("slow")
    with memory(size, seals=seals) as fd, attack.connected() as client:
        client.send(head("POST /v1/host-read" + key, _range(start, stop)), [fd])
        time.sleep(attack.rng.random() * 0.01)
        if shrinks:
            os.ftruncate(fd, 0)
            return "shrunk: " + _expect(client.receive(), "422 target_unsealed")
        for _ in range(attack.rng.randrange(1, 4)):
            os.ftruncate(fd, os.fstat(fd).st_size + mmap.PAGESIZE)
        _punch(fd, attack.rng.randrange(size))
        answer = client.receive()
        told = _expect(answer, "200", "422 target_sparse")
        if answer.status == 200:
            _check_bytes_or_zeros(attack, key, start, os.pread(fd, size, 0))
        return "grown and punched: " + told


def _punch(fd: int, at: int) -> None:
    offset = ctypes.c_long(at - at % mmap.PAGESIZE)
    length = ctypes.c_long(mmap.PAGESIZE)
    if _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE_AND_PUNCH_HOLE, offset, length) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def _check_bytes_or_zeros(attack: Attack, key: str, start: int, found: bytes) -> None:
    """Bytes that their owner punched out while they were written may be zeros; all others are
    the object's."""
    wanted = content(key, attack.object_bytes, start, start + len(found))
    for at in range(0, len(found), mmap.PAGESIZE):
        page, right = found[at : at + mmap.PAGESIZE], wanted[at : at + mmap.PAGESIZE]
        if page != right and any(a not in (0, b) for a, b in zip(page, right, strict=True)):
            raise WrongAnswer(f"wrong bytes of {key} at {start + at}")


def leaked_targets(attack: Attack) -> str:
    """Registers as many targets as it may, and more, and leaves without releasing one."""
    with attack.connected() as client, memory(attack.rng.choice([4096, 65_536])) as fd:
        for _ in range(attack.rng.choice([1, 5, 66])):
            answer = client.ask("POST /v1/targets", fds=[fd])
            _expect(answer, "201")
            if answer.status == 503:
                return "refused: " + answer.told
    return "left"


def target_of_the_dead(attack: Attack) -> str:
    """Uses a target of a connection that has ended."""
    with memory(65_536) as fd:
        with attack.connected() as owner:
            answer = owner.ask("POST /v1/targets", fds=[fd])
            _expect(answer, "201")
            if answer.status != 201:
                return answer.told
        with attack.connected() as client:
            line = "POST /v1/host-read" + attack.key("fast")
            told = client.ask(line, "Range: bytes=0-9", f"Racer-Target: {answer.json('id')}")
            # The end of a connection is noticed a moment after it.
            return _expect(told, "404 target_unknown", "200")


def released_while_read(attack: Attack) -> str:
    """Deletes a target on one connection while another reads into it."""
    with ExitStack() as stack:
        owner = stack.enter_context(attack.connected())
        reader = stack.enter_context(attack.connected())
        size = 1 << 20
        fd = stack.enter_context(memory(size))
        answer = owner.ask("POST /v1/targets", fds=[fd])
        _expect(answer, "201")
        if answer.status != 201:
            return answer.told
        target = answer.json("id")
        start = attack.rng.randrange(attack.object_bytes - size)
        reader.send(
            head(
                "POST /v1/host-read" + attack.key("slow"),
                _range(start, start + size),
                f"Racer-Target: {target}",
            )
        )
        time.sleep(attack.rng.random() * 0.01)
        _expect(owner.ask(f"DELETE /v1/targets/{target}"), "200")
        before = os.pread(fd, size, 0)
        told = _expect(reader.receive(), "200", "404 target_unknown")
        if os.pread(fd, size, 0) != before:
            raise WrongAnswer("a target was written to after its release was answered")
        return told


def shared_memory(attack: Attack) -> str:
    """Takes memory that others read, too, and tries by every way to change it."""
    key = attack.key(attack.rng.choice(["fast", "slow"]))
    at = attack.rng.randrange(attack.object_bytes)
    with attack.connected() as client:
        client.send(head("POST /v1/share" + key, f"Range: bytes={at}-{at}"))
        if attack.rng.random() < 0.2:
            return "left before the answer"
        answer, fds = client.receive_with_descriptors()
        try:
            told = _expect(answer, "200", "422 share_off")
            if answer.status != 200:
                return told
            if len(fds) != 1:
                raise WrongAnswer(f"{len(fds)} descriptors came with shared memory")
            _deface(fds[0])
            start, count = int(str(answer.json("offset"))), int(str(answer.json("bytes")))
            wanted = content(key, attack.object_bytes, start, start + count)
            if os.pread(fds[0], count, 0) != wanted:
                raise WrongAnswer(f"wrong bytes of {key} in shared memory")
            return told
        finally:
            for fd in fds:
                os.close(fd)


def _deface(fd: int) -> None:
    """Every way to write to the memory behind `fd`, or to change its size, has to fail."""
    _deface_through(fd)
    with suppress(OSError), opened(f"/proc/self/fd/{fd}", os.O_RDWR) as again:
        _deface_through(again)


def _deface_through(fd: int) -> None:
    size = os.fstat(fd).st_size
    ways: tuple[Callable[[], object], ...] = (
        lambda: os.pwrite(fd, b"defaced", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, size + mmap.PAGESIZE),
        lambda: mmap.mmap(fd, mmap.PAGESIZE),
        lambda: _punch(fd, 0),
    )
    for way in ways:
        with suppress(OSError):
            way()
            raise WrongAnswer("shared memory could be written to, or its size be changed")


# --- ends ---------------------------------------------------------------------------------------


def _in_get(attack: Attack, client: Connection, stack: ExitStack) -> None:
    client.send(head("GET /v1/objects" + attack.key("slow")))


def _in_body(attack: Attack, client: Connection, stack: ExitStack) -> None:
    client.send(head("GET /v1/objects" + attack.key("fast")))
    client.sock.recv(attack.rng.randrange(1, 65_536))


def _in_one_shot(attack: Attack, client: Connection, stack: ExitStack) -> None:
    start, stop = attack.span(4 << 20)
    fd = stack.enter_context(memory(stop - start))
    client.send(head("POST /v1/host-read" + attack.key("slow"), _range(start, stop)), [fd])


def _in_host_read(attack: Attack, client: Connection, stack: ExitStack) -> None:
    start, stop = attack.span(4 << 20)
    fd = stack.enter_context(memory(stop - start))
    answer = client.ask("POST /v1/targets", fds=[fd])
    if answer.status == 201:
        target = f"Racer-Target: {answer.json('id')}"
        line = "POST /v1/host-read" + attack.key("slow")
        client.send(head(line, _range(start, stop), target))


def _in_targets(attack: Attack, client: Connection, stack: ExitStack) -> None:
    """Big enough for the daemon to check and map it on a thread."""
    fd = stack.enter_context(memory(attack.rng.choice([1 << 20, 24 << 20])))
    client.send(head("POST /v1/targets"), [fd])


def _in_delete(attack: Attack, client: Connection, stack: ExitStack) -> None:
    fd = stack.enter_context(memory(1 << 20))
    answer = client.ask("POST /v1/targets", fds=[fd])
    if answer.status == 201:
        client.send(head(f"DELETE /v1/targets/{answer.json('id')}"))


def _in_prefetch(attack: Attack, client: Connection, stack: ExitStack) -> None:
    client.send(head("POST /v1/prefetch" + attack.key("slow")))


def _in_share(attack: Attack, client: Connection, stack: ExitStack) -> None:
    at = attack.rng.randrange(attack.object_bytes)
    client.send(head("POST /v1/share" + attack.key("slow"), f"Range: bytes={at}-{at}"))


def _in_explain(attack: Attack, client: Connection, stack: ExitStack) -> None:
    client.send(head("GET /v1/explain" + attack.key("fast")))


def _idle(attack: Attack, client: Connection, stack: ExitStack) -> None:
    """Connected, and nothing more."""


_PHASES: dict[str, Callable[[Attack, Connection, ExitStack], None]] = {
    "idle": _idle,
    "get": _in_get,
    "body": _in_body,
    "one-shot read": _in_one_shot,
    "read into a target": _in_host_read,
    "targets": _in_targets,
    "delete": _in_delete,
    "prefetch": _in_prefetch,
    "share": _in_share,
    "explain": _in_explain,
}


def abrupt_close(attack: Attack) -> str:
    """Goes away in one of the phases of a request, with bytes unread."""
    phase = attack.rng.choice(list(_PHASES))
    with ExitStack() as stack:
        client = stack.enter_context(attack.connected())
        _PHASES[phase](attack, client, stack)
        time.sleep(attack.rng.random() * 0.01)
    return f"in {phase}"


def killed(attack: Attack) -> str:
    """A process of its own that gets SIGKILL in one of the phases, its memory with it."""
    phase = attack.rng.choice(list(_PHASES))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with ExitStack() as stack:
                client = stack.enter_context(attack.connected())
                _PHASES[phase](attack, client, stack)
                os.write(writing, b"1")
                signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    time.sleep(attack.rng.random() * 0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"in {phase}"


# `bad target` more often than the others: there are many kinds.
ACTS: tuple[Callable[[Attack], str], ...] = (
    *(half_head, slow_head, garbage, huge_head, odd_requests, pipelined, deaf, half_close),
    *(descriptor_flood, descriptors_in_a_head, descriptors_for_nothing, other_messages),
    *(bad_target, bad_target, bad_target, vanishing_memory, leaked_targets, target_of_the_dead),
    *(
        shared_memory,
        shared_memory,
        released_while_read,
        abrupt_close,
        abrupt_close,
        killed,
        killed,
    ),
)


def end_parked(attack: Attack) -> list[str]:
    """Each connection with half a head must be told so, and cut; returns how each ended."""
    found = []
    for connection in attack.parked:
        with connection:
            connection.sock.settimeout(_PARKED_SECONDS)
            try:
                answer = connection.receive()
            except TimeoutError:
                raise WrongAnswer("half a head was let stand for ever") from None
            if answer is not ENDED:
                _expect(answer, "400 bad_request")
            found.append(answer.told)
    return found

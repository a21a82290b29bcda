"""A forked child never shares what the parent uses."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections.abc import Callable

import pytest

import racer
from clients.python.racer.tests.fake_daemon import FakeDaemon, Seen
from clients.python.racer.tests.patterns import MIB, pattern


def in_child(check: Callable[[], None]) -> None:
    """Runs `check` in a forked child; fails with the child's traceback where it raised."""
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            check()
            status = 0
        except BaseException:  # noqa: BLE001 - told to the parent; a child must not return.
            os.write(sending, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(status)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, told


def sockets() -> list[str]:
    """Open sockets of this process that lead to a peer's file or from one."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # The descriptor of this very listing.
    return [link for link in links if link.startswith("socket:")]


@pytest.fixture
def forked_daemon(daemon: FakeDaemon) -> FakeDaemon:
    """The daemon's threads and sockets are in the parent: fork with care, connect by path."""
    return daemon


def test_a_child_gets_connections_of_its_own(
    forked_daemon: FakeDaemon, client: racer.Client
) -> None:
    url = forked_daemon.put("llama", "weights", pattern(MIB))
    assert client.read(url) == pattern(MIB)
    used = forked_daemon.connections

    def child() -> None:
        assert client.read(url) == pattern(MIB)
        assert client.stat(url).size == MIB

    in_child(child)
    assert forked_daemon.connections > used
    mine = {seen.connection for seen in forked_daemon.seen if seen.connection <= used}
    theirs = {seen.connection for seen in forked_daemon.seen if seen.connection > used}
    assert mine and theirs
    assert client.read(url) == pattern(MIB)
    assert forked_daemon.seen[-1].connection in mine


def test_a_child_holds_nothing_open_of_the_parent(
    forked_daemon: FakeDaemon, client: racer.Client
) -> None:
    """R7: a connection that a child held would live on when the parent is gone, and its reads."""
    url = forked_daemon.put("llama", "weights", pattern(MIB))
    others = len(sockets())  # The daemon's listener, and what tests before this one left to it.
    client.read(url)
    with client.landing(MIB) as landing:
        landing.read(url, 0, MIB)
        # The daemon runs in this process, so that both ends of each connection are here; its
        # threads may be about to take one up or to close one.
        while len(sockets()) != others + 2 * len(forked_daemon._open):
            os.sched_yield()
        # In the child the daemon's ends are there, the client's ends are not.
        theirs = others + len(forked_daemon._open)

        def child() -> None:
            assert len(sockets()) == theirs, (sockets(), theirs)

        in_child(child)
        assert landing.read(url, 0, MIB).bytes == MIB


def test_a_landing_of_the_parent_is_refused_in_the_child(
    forked_daemon: FakeDaemon, client: racer.Client
) -> None:
    url = forked_daemon.put("llama", "weights", pattern(MIB))
    with client.landing(MIB) as landing, client.map(url) as view:
        landing.read(url, 0, MIB)

        def child() -> None:
            with pytest.raises(racer.Forked, match="by the parent process"):
                landing.read(url, 0, MIB)
            assert landing.view == pattern(MIB)  # The memory itself is there.
            assert view == pattern(MIB)
            with client.landing(MIB) as own:
                assert own.read(url, 0, MIB).bytes == MIB

        in_child(child)
        assert landing.read(url, 0, MIB).bytes == MIB
        view.release()


def test_fork_while_other_threads_hold_the_locks(
    forked_daemon: FakeDaemon, client: racer.Client
) -> None:
    """The locks of the parent may be held by threads that the child does not have."""
    url = forked_daemon.put("llama", "weights", pattern(MIB))
    small = forked_daemon.put("llama", "small", b"small")
    client.read(url)
    asked, release = threading.Event(), threading.Event()

    def hold(seen: Seen) -> None:
        if seen.connection == 1:
            asked.set()
            release.wait(30)

    forked_daemon.always("POST /v1/host-read", hold)
    thread = threading.Thread(target=client.read, args=(url,))
    thread.start()
    pool = client._endpoint("local").pool
    with client._lock, pool._turns.lock, client._ring._turns.lock:

        def child() -> None:
            assert client.read(small, timeout=10) == b"small"
            assert client.read(url, timeout=10) == pattern(MIB)

        # The locks are held at this very moment, and stay so in the parent.
        in_child(child)
    release.set()
    thread.join()


def test_an_async_client_says_that_it_is_the_parent_s(forked_daemon: FakeDaemon) -> None:
    url = forked_daemon.put("llama", "small", b"small")
    loop = asyncio.new_event_loop()
    client = racer.AsyncClient(run_dir=forked_daemon.run_dir)
    assert loop.run_until_complete(client.read(url)) == b"small"

    def child() -> None:
        with pytest.raises(racer.Forked, match="belongs to the parent"):
            loop.run_until_complete(client.read(url))

    in_child(child)
    loop.run_until_complete(client.aclose())
    loop.close()

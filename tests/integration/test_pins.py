"""Pins through the client, the daemon and its disk, and over restarts (R24)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import racer
from racerd.units import MIB
from tests.support.read_rig import content
from tools.daemon_process import DaemonProcess

PINNED = content(1 * MIB, 1)
FLOOD_OBJECTS = 16
SMALL = (
    *("--page-bytes=64KiB", "--frame-bytes=4KiB", "--memory=2MiB", "--plaintext=4MiB"),
    *("--scrub-bytes-per-second=0", "--log-level=warning"),
)


def test_what_is_pinned_outlives_a_flood_and_restarts(tmp_path: Path) -> None:
    """R24, R23: pinned pages stay on the disk while twice its size passes through; unpinned, they
    go; and what would not fit is refused with figures."""
    models = tmp_path / "models" / "b"
    (models / "flood").mkdir(parents=True)
    (models / "pinned").write_bytes(PINNED)
    for number in range(FLOOD_OBJECTS):
        (models / "flood" / str(number)).write_bytes(content(1 * MIB, number + 2))
    daemon = DaemonProcess(
        tmp_path / "node",
        caches={"local": f"file://{tmp_path / 'models'}"},
        arguments=[*SMALL, f"--disk={tmp_path / 'slab'}:8MiB"],
    )
    url = "racer://local/b/pinned"
    with daemon, racer.Client(socket=daemon.socket("local")) as client:
        client.prefetch(url)
        pinned = client.pin(url)
        assert pinned.pages == len(PINNED) // 65_536 and pinned.bytes >= len(PINNED)
        assert client.pins("local").pins == (racer.Pin(url, False, pinned.pages, pinned.bytes),)
        flood(client)
        daemon.stop()
        daemon.start()
        assert [pin.url for pin in client.pins("local").pins] == [url]
        assert client.read(url) == PINNED
        assert daemon.metric("racer_origin_bytes_total") == 0, "a pinned page was fetched again"
        assert daemon.metric("racer_store_pinned_bytes") == pinned.bytes
        with pytest.raises(racer.PinRefused, match="at most") as refused:
            client.pin("racer://local/b/", prefix=True)
        assert refused.value.hint and refused.value.status == 507
        assert client.unpin(url).removed
        daemon.kill()
        daemon.start()
        assert client.pins("local").pins == ()
        flood(client)
        before = daemon.metric("racer_origin_bytes_total")
        assert client.read(url) == PINNED
        assert daemon.metric("racer_origin_bytes_total") > before, (
            "unpinned, it stayed all the same"
        )


def test_the_daemon_tells_who_is_connected(tmp_path: Path) -> None:
    """F66: a page for people, of a real daemon."""
    (tmp_path / "models" / "b").mkdir(parents=True)
    caches = {"local": f"file://{tmp_path / 'models'}"}
    with DaemonProcess(tmp_path / "node", caches=caches, arguments=SMALL) as daemon:
        assert json.loads(daemon.get("/debug/connections")) == []
        with racer.Client(socket=daemon.socket("local")) as client:
            client.info("local")
            [told] = json.loads(daemon.get("/debug/connections"))
            assert (told["cache"], told["pid"]) == ("local", os.getpid())
            assert told["client"] == "waits for a request"
            assert (told["targets"], told["not_taken_bytes"]) == (0, 0)


def flood(client: racer.Client) -> None:
    """Twice what the disk holds."""
    for number in range(FLOOD_OBJECTS):
        client.prefetch(f"racer://local/b/flood/{number}")

"""What reads return, over a real socket, from a daemon that behaves."""

from __future__ import annotations

import array
import mmap
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import racer
from clients.python.racer.tests.fake_daemon import FakeDaemon, error
from clients.python.racer.tests.patterns import MIB, pattern
from racer.bulk import SMALL_BYTES
from racer.transfer import PART_BYTES, RING_PART_BYTES, cut


def test_stat_tells_size_version_and_expiry(daemon: FakeDaemon, client: racer.Client) -> None:
    """R3: HEAD gives size and ETag."""
    url = daemon.put("llama", "config.json", b"{}", '"c1"')
    stat = client.stat(url)
    assert (stat.url, stat.size, stat.etag) == (url, 2, '"c1"')
    assert stat.expires_at > 0
    assert daemon.lines() == ["HEAD /v1/objects/llama/config.json"]


def test_small_read_is_one_exchange(daemon: FakeDaemon, client: racer.Client) -> None:
    """R3: a plain GET with Range."""
    url = daemon.put("llama", "config.json", b"0123456789")
    assert client.read(url) == b"0123456789"
    assert client.read(url, 2, 3) == b"234"
    assert client.read(url, 8, 100) == b"89"
    assert daemon.count("GET") == 3
    assert {seen.connection for seen in daemon.seen} == {1}


@pytest.mark.parametrize("size", [SMALL_BYTES + 100, 3 * MIB + 17])
def test_large_read_comes_through_shared_memory(
    daemon: FakeDaemon, client: racer.Client, size: int
) -> None:
    """R1: what is large does not travel over the socket."""
    data = pattern(size)
    url = daemon.put("llama", "weights", data)
    assert client.read(url) == data
    assert client.read(url, 5, size - 5) == data[5:]
    assert daemon.count("POST /v1/host-read") == (2 if size > MIB else 1)
    assert daemon.count("POST /v1/targets") == 1


def test_read_of_many_parts(daemon: FakeDaemon, client: racer.Client) -> None:
    data = pattern(5 * RING_PART_BYTES + 12345)
    url = daemon.put("llama", "weights", data)
    buffer = bytearray(len(data) + 10)
    assert client.read_into(url, buffer) == len(data)
    assert buffer[: len(data)] == data
    reads = [seen for seen in daemon.seen if "host-read" in seen.path]
    assert len(reads) == 6
    assert len({seen.connection for seen in reads}) > 1
    assert {seen.fields["if-match"] for seen in reads} == {'"v1"'}
    assert all(int(seen.fields["range"][6:].split("-")[0]) % MIB == 0 for seen in reads)


def test_read_into_any_writable_buffer(daemon: FakeDaemon, client: racer.Client) -> None:
    data = pattern(200_000)
    url = daemon.put("llama", "weights", data)
    numbers = array.array("I", bytes(200_000))
    assert client.read_into(url, memoryview(numbers)) == len(data)
    assert numbers.tobytes() == data
    with mmap.mmap(-1, 4096) as mapping:
        assert client.read_into(url, memoryview(mapping), 1000) == 4096
        assert mapping[:] == data[1000:5096]
    assert client.read_into(url, bytearray(100), 199_950) == 50
    with pytest.raises(TypeError, match="read-only"):
        client.read_into(url, memoryview(bytes(10)))


def test_map_is_memory_that_the_daemon_filled(daemon: FakeDaemon, client: racer.Client) -> None:
    """R1: one host-read, no copy."""
    data = pattern(MIB)
    url = daemon.put("llama", "weights", data)
    with client.map(url) as view:
        assert view == data
        assert not view.readonly
    assert daemon.lines() == [
        "HEAD /v1/objects/llama/weights",
        "GET /v1/info",
        "POST /v1/host-read/llama/weights",
    ]


def test_map_of_many_parts(daemon: FakeDaemon, client: racer.Client) -> None:
    data = pattern(3 * PART_BYTES + 1)
    url = daemon.put("llama", "weights", data)
    mapped = client.map(url, 3)
    with mapped as view:
        assert view == data[3:]
        assert mapped.etag == '"v1"'
        assert mapped.rungs == {"memory": len(data) - 3}
    assert not daemon.targets


def test_views_of_a_closed_mapping_stay_valid(daemon: FakeDaemon, client: racer.Client) -> None:
    """L49: lifetimes cannot dangle: what was made from the view keeps the memory."""
    data = pattern(MIB)
    url = daemon.put("llama", "weights", data)
    mapped = client.map(url)
    with mapped as view:
        piece = view[100:200]
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    with pytest.raises(racer.Closed):
        _ = mapped.view
    assert piece == data[100:200]
    piece.release()


def test_empty_object(daemon: FakeDaemon, client: racer.Client) -> None:
    url = daemon.put("llama", "empty", b"")
    assert client.read(url) == b""
    assert client.read(url, 0, 10) == b""
    assert client.read_into(url, bytearray(10)) == 0
    assert client.read_into(url, bytearray(100_000)) == 0
    assert list(client.stream(url)) == []
    with client.map(url) as view:
        assert bytes(view) == b""


def test_ranges_behind_the_end(daemon: FakeDaemon, client: racer.Client) -> None:
    url = daemon.put("llama", "weights", pattern(200_000))
    for read in (
        lambda: client.read(url, 200_000),
        lambda: client.read(url, 200_001, 5),
        lambda: client.read(url, 200_001, 100_000),
        lambda: client.read_into(url, bytearray(100_000), 300_000),
        lambda: client.map(url, 200_001),
        lambda: list(client.stream(url, 999_999)),
    ):
        with pytest.raises(racer.RangeNotSatisfiable) as caught:
            read()
        assert caught.value.size == 200_000
    with pytest.raises(ValueError):
        client.read(url, -1)
    with pytest.raises(ValueError):
        client.read(url, 0, -1)


def test_pinned_reads(daemon: FakeDaemon, client: racer.Client) -> None:
    """R3: every read can be pinned to an ETag."""
    url = daemon.put("llama", "weights", pattern(200_000), '"v2"')
    for read in (
        lambda: client.read(url, 0, 10, etag='"v1"'),
        lambda: client.read(url, 0, 100_000, etag='"v1"'),
        lambda: client.read_into(url, bytearray(100_000), etag='"v1"'),
        lambda: client.map(url, etag='"v1"'),
        lambda: client.stat(url, etag='"v1"'),
    ):
        with pytest.raises(racer.VersionChanged) as caught:
            read()
        assert caught.value.etag == '"v2"'
    assert client.read(url, 0, 3, etag='"v2"') == pattern(3)


def test_version_that_changes_under_a_long_read(daemon: FakeDaemon, client: racer.Client) -> None:
    """R3: a read never mixes two versions."""
    url = daemon.put("llama", "weights", pattern(3 * RING_PART_BYTES))

    def change(seen: object) -> None:
        daemon.put("llama", "weights", bytes(3 * RING_PART_BYTES), '"v2"')

    daemon.on("POST /v1/host-read", None, change)
    with pytest.raises(racer.VersionChanged):
        client.read_into(url, bytearray(3 * RING_PART_BYTES))
    assert client.read_into(url, bytearray(100_000)) == 100_000


def test_map_starts_again_where_the_object_was_replaced_meanwhile(
    daemon: FakeDaemon, client: racer.Client
) -> None:
    url = daemon.put("llama", "weights", pattern(100_000))

    def change(seen: object) -> None:
        daemon.put("llama", "weights", b"new" * 30_000, '"v2"')

    daemon.on("POST /v1/host-read", change)
    with client.map(url) as view:
        assert view == b"new" * 30_000


def test_stream_is_in_order_and_bounded(daemon: FakeDaemon, client: racer.Client) -> None:
    data = pattern(2 * RING_PART_BYTES + 5)
    url = daemon.put("llama", "weights", data)
    pieces = [bytes(chunk) for chunk in client.stream(url, 7)]
    assert b"".join(pieces) == data[7:]
    assert max(map(len, pieces)) <= RING_PART_BYTES


def test_stream_that_is_left_early(daemon: FakeDaemon, client: racer.Client) -> None:
    """R7: what is in flight is cancelled, and nothing is left behind."""
    url = daemon.put("llama", "weights", pattern(6 * RING_PART_BYTES))
    chunks = client.stream(url)
    next(chunks)
    chunks.close()
    assert client.read(url, 0, 100_000) == pattern(100_000)


def test_landing_is_read_into_again_and_again(daemon: FakeDaemon, client: racer.Client) -> None:
    data = pattern(2 * PART_BYTES)
    url = daemon.put("llama", "weights", data)
    with client.landing(PART_BYTES + MIB) as landing:
        done = landing.read(url, 10, PART_BYTES + MIB)
        assert (done.bytes, done.offset, done.etag) == (PART_BYTES + MIB, 10, '"v1"')
        assert landing.view == data[10 : 10 + PART_BYTES + MIB]
        done = landing.read(url, 2 * PART_BYTES - 5, 100, at=MIB)
        assert done.bytes == 5
        assert landing.view[MIB : MIB + 5] == data[-5:]
        assert landing.view[MIB + 5 : MIB + 10] == data[10 + MIB + 5 : 10 + MIB + 10]
        with pytest.raises(ValueError, match="do not fit"):
            landing.read(url, 0, 100, at=landing.nbytes - 99)
        assert daemon.count("POST /v1/targets") == 1
        assert len(daemon.targets) == 1
    assert daemon.count("DELETE /v1/targets") == 1
    assert not daemon.targets
    with pytest.raises(racer.Closed):
        landing.read(url, 0, 1)


def test_many_threads_share_a_client(daemon: FakeDaemon, client: racer.Client) -> None:
    """F30 of the client's side: no thread sees another's bytes."""
    urls = {daemon.put("llama", f"file-{n}", bytes([n]) * (300_000 + n)): n for n in range(8)}
    wrong: list[str] = []

    def work(url: str, n: int) -> None:
        for _ in range(5):
            if client.read(url) != bytes([n]) * (300_000 + n):
                wrong.append(url)
            if client.read(url, n, 50) != bytes([n]) * 50:
                wrong.append(url)

    threads = [threading.Thread(target=work, args=item) for item in urls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert daemon.connections <= 17


def test_listing(daemon: FakeDaemon, client: racer.Client) -> None:
    names = ["a", "dir/b", "dir/c d", "dir/sub/e%f", "z"]
    urls = [daemon.put("llama", name, name.encode()) for name in names]
    assert [entry.url for entry in client.list("racer://local/llama/")] == urls
    level = list(client.list("racer://local/llama/dir/", recursive=False))
    assert [(entry.url, entry.is_prefix) for entry in level] == [
        (urls[1], False),
        (urls[2], False),
        ("racer://local/llama/dir/sub/", True),
    ]
    assert [entry.size for entry in level] == [5, 7, None]
    buckets = list(client.list("racer://local/"))
    assert [(entry.url, entry.is_prefix) for entry in buckets] == [("racer://local/llama/", True)]


def test_listing_of_many_pages(daemon: FakeDaemon, client: racer.Client) -> None:
    urls = [daemon.put("llama", f"k {n:05}", b"") for n in range(2500)]
    assert [entry.url for entry in client.list("racer://local/llama/k")] == urls
    assert daemon.count("GET /v1/list") == 3


def test_prefetch_evict_explain_info(daemon: FakeDaemon, client: racer.Client) -> None:
    url = daemon.put("llama", "weights", bytes(1000))
    assert client.prefetch(url).rungs == {"origin": 1000}
    assert client.prefetch(url, 10, 20).bytes == 20
    assert client.evict(url).pages == 2
    assert client.evict("racer://local/llama/", prefix=True).bytes == 123
    assert daemon.seen[-1].query == {"prefix": "true"}
    explanation = client.explain(url)
    page = explanation.pages[0]
    assert (page.rung, page.why, page.last_rung) == ("disk", {"memory": "not kept"}, None)
    assert explanation.next_page is None
    assert client.pin(url) == racer.Pinned(1, 1000, 9000)
    assert client.pin("racer://local/llama/", prefix=True).room_bytes == 8000
    assert daemon.seen[-1].query == {"prefix": "true"}
    assert client.pins("local").pins == (
        racer.Pin(url, False, 1, 1000),
        racer.Pin("racer://local/llama/", True, 1, 1000),
    )
    assert client.unpin(url) == racer.Unpinned(True, 9000)
    assert client.unpin(url) == racer.Unpinned(False, 9000)
    daemon.on("POST /v1/pin", error(507, "pin_refused"))
    with pytest.raises(racer.PinRefused):
        client.pin(url)
    assert client.info("local").version == "9.9"
    assert client.caches() == ["local"]


@pytest.mark.parametrize("page_bytes", [65536, 1 << 20, 16 << 20, 64 << 20])
def test_parts_of_any_page_size(daemon: FakeDaemon, client: racer.Client, page_bytes: int) -> None:
    """Pages larger than a slot of the ring are read in several parts."""
    daemon.page_bytes = page_bytes
    data = pattern(3 * RING_PART_BYTES + 5)
    url = daemon.put("llama", "weights", data)
    assert client.read(url) == data


@given(
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.sampled_from([1, 7, 64, 4096]),
    st.sampled_from([64, 256, 4096]),
)
def test_the_cut_covers_the_range_once(start: int, length: int, part: int, page: int) -> None:
    parts = list(cut(start, start + length, part, page))
    assert sum(p.length for p in parts) == length
    assert all(0 < p.length <= part for p in parts)
    for before, after in pairwise(parts):
        assert before.stop == after.start
        assert before.stop % (page if part >= page else part) == 0

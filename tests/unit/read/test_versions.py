"""Versions: one HEAD in flight, a time to live, pins that need no origin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from racerd.errors import RacerError, RequestError
from racerd.ids import ObjectId, ObjectVersion
from racerd.read.versions import Resolution
from racerd.runtime.deadline import Deadline
from tests.support.read_rig import PAGE, ReadRig, content, small_settings
from tests.support.scripted_origin import unavailable

DATA = content(PAGE)


def run(folder: Path, body: Callable[[ReadRig], Awaitable[None]], **settings: object) -> None:
    async def main() -> None:
        async with ReadRig(folder, settings=small_settings(**settings)) as rig:
            rig.origin.put(b"k", DATA)
            await body(rig)

    uvloop.run(main())


def resolve(
    rig: ReadRig, if_match: str | None = None, *, key: bytes = b"k", seconds: float = 20.0
) -> asyncio.Task[Resolution]:
    wait = rig.reader.resolve(
        ObjectId("cache", "b", key), if_match=if_match, deadline=Deadline.after(seconds)
    )
    return asyncio.ensure_future(wait)


async def failure(task: Awaitable[object]) -> RacerError:
    with pytest.raises(RacerError) as caught:
        await task
    return caught.value


def test_the_origin_is_asked_once_in_a_while(tmp_path: Path) -> None:
    """F51, R32: hits cost no HEAD while the answer holds."""

    async def body(rig: ReadRig) -> None:
        first = await resolve(rig)
        assert 0 < first.expires_in_seconds <= 60
        rig.origin.put(b"k", DATA, etag='"v2"')
        for _ in range(5):
            assert (await resolve(rig)).version == first.version
        assert rig.origin.heads[b"k"] == 1

    run(tmp_path, body)


def test_an_answer_that_expired_is_asked_for_again(tmp_path: Path) -> None:
    async def body(rig: ReadRig) -> None:
        await resolve(rig)
        rig.origin.put(b"k", DATA, etag='"v2"')
        assert (await resolve(rig)).version.etag == '"v2"'
        assert rig.origin.heads[b"k"] == 2

    run(tmp_path, body, version_seconds=0.0)


def test_one_head_is_everybodys(tmp_path: Path) -> None:
    """F51, F30: a hundred readers of one object ask once; who leaves takes nobody's answer away."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        tasks = [resolve(rig) for _ in range(100)]
        await rig.arrived()
        tasks[0].cancel()
        hasty = resolve(rig, seconds=0.01)
        assert (await failure(hasty)).code == "deadline_exceeded"
        rig.origin.release()
        found = await asyncio.gather(*tasks[1:])
        assert {resolution.version.etag for resolution in found} == {'"v1"'}
        assert rig.origin.heads[b"k"] == 1 and tasks[0].cancelled()

    run(tmp_path, body)


def test_a_head_that_nobody_waits_for_any_more_is_dropped_while_it_is_queued(
    tmp_path: Path,
) -> None:
    async def body(rig: ReadRig) -> None:
        rig.origin.hold(obeys_cancel=False)
        busy = [resolve(rig, key=b"%d" % i) for i in range(8)]
        await rig.arrived(8)
        queued = resolve(rig)
        await asyncio.sleep(0)
        queued.cancel()
        await asyncio.wait([queued])
        again = resolve(rig)
        await asyncio.sleep(0)
        rig.origin.release()
        assert (await again).version.etag == '"v1"'
        assert rig.origin.heads[b"k"] == 1
        await asyncio.gather(*busy, return_exceptions=True)

    run(tmp_path, body)


def test_a_pin_that_is_known_needs_no_origin(tmp_path: Path) -> None:
    """R3, F65: an old version that was seen is still answered for, after it changed and expired."""

    async def body(rig: ReadRig) -> None:
        await resolve(rig)
        rig.origin.put(b"k", DATA[:10], etag='"v2"')
        assert (await resolve(rig)).version.etag == '"v2"'
        rig.origin.on_head = lambda _: (_ for _ in ()).throw(unavailable())
        for etag, size in (('"v1"', PAGE), ('"v2"', 10)):
            found = await resolve(rig, etag)
            assert (found.version.etag, found.version.size) == (etag, size)
        assert rig.origin.heads[b"k"] == 2

    run(tmp_path, body, version_seconds=0.0)


@pytest.mark.parametrize("etag", ['"v1"', 'W/"12-34"'])
def test_a_pin_that_is_stored_needs_no_origin(tmp_path: Path, etag: str) -> None:
    """R3, R23, R32: after a restart a pinned load of what is on disk does without the origin."""

    async def first(rig: ReadRig) -> None:
        rig.origin.put(b"k", DATA, etag=etag)
        await rig.read((await resolve(rig)).version)
        await rig.stored()

    async def second(rig: ReadRig) -> None:
        rig.origin.objects.clear()
        found = await resolve(rig, etag)
        assert await rig.read(found.version) == (DATA, {"disk": PAGE})
        assert not rig.origin.heads and not rig.origin.fetches

    run(tmp_path, first)
    run(tmp_path, second)


def test_a_pin_that_is_not_current_is_refused_with_what_is(tmp_path: Path) -> None:
    """R3: 412, and the ETag that the object has now."""

    async def body(rig: ReadRig) -> None:
        error = await failure(resolve(rig, '"other"'))
        assert isinstance(error, RequestError)
        assert (error.code, error.current_etag) == ("version_changed", '"v1"')
        # Asked again within the second it costs no HEAD (F51) …
        assert (await failure(resolve(rig, '"other"'))).code == "version_changed"
        assert rig.origin.heads[b"k"] == 1

    run(tmp_path, body)


def test_a_pin_newer_than_the_last_answer_is_looked_up(tmp_path: Path) -> None:
    """A client may know a version before we do: the answer that still holds is not the judge."""

    async def body(rig: ReadRig) -> None:
        assert (await resolve(rig)).version.etag == '"v1"'
        rig.origin.put(b"k", DATA, etag='"v2"')
        assert (await resolve(rig, '"v2"')).version.etag == '"v2"'
        assert (await resolve(rig)).version.etag == '"v2"'

    run(tmp_path, body, absence_seconds=0.0)


def test_absence_is_remembered_for_a_moment_only(tmp_path: Path) -> None:
    async def body(rig: ReadRig) -> None:
        for _ in range(3):
            assert (await failure(resolve(rig, key=b"none"))).code == "not_found"
        assert rig.origin.heads[b"none"] == 1

    run(tmp_path, body, absence_seconds=60.0)

    async def forgetful(rig: ReadRig) -> None:
        assert (await failure(resolve(rig, key=b"none"))).code == "not_found"
        rig.origin.put(b"none", b"now it is there")
        assert (await resolve(rig, key=b"none")).version.size == 15

    run(tmp_path, forgetful, absence_seconds=0.0)


def test_a_failure_of_the_origin_is_not_remembered(tmp_path: Path) -> None:
    async def body(rig: ReadRig) -> None:
        rig.origin.on_head = lambda _: (_ for _ in ()).throw(unavailable())
        assert (await failure(resolve(rig))).code == "origin_unavailable"
        rig.origin.on_head = None
        assert (await resolve(rig)).version.etag == '"v1"'

    run(tmp_path, body)


def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    async def body(rig: ReadRig) -> None:
        for number in range(10):
            rig.origin.put(b"%d" % number, DATA)
            await resolve(rig, key=b"%d" % number)
        for number in range(40):
            rig.origin.put(b"9", DATA, etag=f'"{number}"')
            await resolve(rig, key=b"9")
        versions = rig.reader._versions
        assert len(versions._answers) == len(versions._known) == 4
        assert max(len(known) for known in versions._known.values()) <= 16

    run(tmp_path, body, versions_max=4, version_seconds=0.0)


def test_evicting_forgets_the_version(tmp_path: Path) -> None:
    async def body(rig: ReadRig) -> None:
        await resolve(rig)
        rig.origin.put(b"k", DATA, etag='"v2"')
        await rig.reader.evict("b", b"k", prefix=False)
        assert (await resolve(rig)).version.etag == '"v2"'

    run(tmp_path, body)


def test_an_old_news_of_a_change_does_not_undo_a_newer_answer(tmp_path: Path) -> None:
    async def body(rig: ReadRig) -> None:
        old: ObjectVersion = (await resolve(rig)).version
        rig.origin.put(b"k", DATA, etag='"v2"')
        rig.reader._versions.invalidate(old)
        assert (await resolve(rig)).version.etag == '"v2"'
        rig.reader._versions.invalidate(old)
        assert (await resolve(rig)).version.etag == '"v2"'
        assert rig.origin.heads[b"k"] == 2

    run(tmp_path, body)

"""Flights with real threads and an origin at a gate: one acquisition, however many readers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from racerd.errors import RacerError, ResourceError
from racerd.ids import ObjectVersion
from tests.support.read_rig import PAGE, ReadRig, content, small_settings
from tests.support.scripted_origin import unavailable, version_changed

DATA = content(3 * PAGE + 100)


def run(folder: Path, body: Callable[[ReadRig], Awaitable[None]], **options: object) -> None:
    async def main() -> None:
        async with ReadRig(folder, **options) as rig:  # type: ignore[arg-type]
            rig.origin.put(b"k", DATA)
            await body(rig)

    uvloop.run(main())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def read(
    rig: ReadRig, version: ObjectVersion, start: int = 0, stop: int = PAGE, **context: object
) -> asyncio.Task[tuple[bytes, dict[str, int]]]:
    return asyncio.ensure_future(rig.read(version, start, stop, **context))


async def code_of(task: Awaitable[object]) -> str:
    with pytest.raises(RacerError) as caught:
        await task
    return caught.value.code


def test_many_readers_of_a_cold_page_make_one_request(tmp_path: Path) -> None:
    """R32, F30: one leader, the others join; each gets its own bytes of the page."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        tasks = [read(rig, rig.version(), 10 * i, 10 * i + 1000) for i in range(20)]
        await rig.arrived()
        await turns()
        assert len(rig.services.flights) == 1
        rig.origin.release()
        for number, task in enumerate(tasks):
            got, rungs = await task
            assert got == DATA[10 * number : 10 * number + 1000]
            assert rungs == {"origin": 1000}
        assert rig.origin.fetches == {(b"k", 0): 1}
        assert rig.metric("racer_flight_joins_total") == 19

    run(tmp_path, body)


def test_a_latecomer_shares_the_plaintext_while_it_is_sealed(tmp_path: Path) -> None:
    """R32: sealing goes on behind the first reader; between landing and memory there is no gap in
    which a second request could slip."""

    async def body(rig: ReadRig) -> None:
        await rig.read(rig.version(), 0, PAGE)
        got, rungs = await rig.read(rig.version(), 5, 50)
        assert got == DATA[5:50] and rungs in ({"origin": 45}, {"memory": 45})
        assert rig.origin.fetches == {(b"k", 0): 1}

    run(tmp_path, body)


def test_the_last_reader_who_leaves_cancels(tmp_path: Path) -> None:
    """R7, R32: as long as somebody wants the page it is fetched; when nobody does, it is not."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        first, second = read(rig, rig.version()), read(rig, rig.version())
        await rig.arrived()
        first.cancel()  # The leader. The flight is not his alone.
        await turns()
        assert len(rig.services.flights) == 1 and rig.origin.running == 1
        second.cancel()
        await asyncio.wait([first, second])
        assert first.cancelled() and second.cancelled()
        await turns()
        assert len(rig.services.flights) == 0
        # The call ends by itself, because it was asked to: the gate is still closed.
        await rig.reader._strays.close()
        assert rig.origin.cancelled == 1

    run(tmp_path, body)


def test_who_comes_after_the_cancel_gets_a_flight_of_its_own(tmp_path: Path) -> None:
    """F26: a cancelled flight that has not ended yet is joined by nobody."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold(obeys_cancel=False)
        first = read(rig, rig.version())
        await rig.arrived()
        first.cancel()
        await asyncio.wait([first])
        second = read(rig, rig.version())
        await rig.arrived()
        assert rig.origin.running == 2
        rig.origin.release()
        assert (await second)[0] == DATA[:PAGE]

    run(tmp_path, body)


def test_a_stuck_origin_holds_nobody_past_the_deadline(tmp_path: Path) -> None:
    """R7, F66: the reader leaves at its deadline; the call keeps its charge until it returns."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold(obeys_cancel=False)
        task = read(rig, rig.version(), seconds=0.05)
        await rig.arrived()
        assert await code_of(task) == "deadline_exceeded"
        assert rig.origin.running == 1
        assert rig.services.admission.plaintext.used == PAGE
        rig.origin.release()
        await rig.reader._strays.close()
        assert rig.services.admission.plaintext.used == 0

    run(tmp_path, body)


def test_each_waits_under_its_own_deadline(tmp_path: Path) -> None:
    """A leader in a hurry does not take the others' time away."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        hasty = read(rig, rig.version(), seconds=0.05)
        patient = read(rig, rig.version())
        assert await code_of(hasty) == "deadline_exceeded"
        assert not patient.done()
        rig.origin.release()
        assert (await patient)[0] == DATA[:PAGE]
        assert rig.origin.fetches == {(b"k", 0): 1}

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("failure", "code"),
    [(unavailable, "origin_unavailable"), (lambda: ZeroDivisionError("defect"), "internal")],
)
def test_a_failure_is_everybodys_with_its_cause(
    tmp_path: Path, failure: Callable[[], Exception], code: str
) -> None:
    """F26: the flight resolves whatever happens; each waiter gets an error of its own."""

    async def body(rig: ReadRig) -> None:
        def fail(version: ObjectVersion, start: int, stop: int) -> None:
            raise failure()

        rig.origin.on_fetch = fail
        rig.origin.hold()
        tasks = [read(rig, rig.version()) for _ in range(3)]
        await rig.arrived()
        await turns()
        rig.origin.release()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [error.code for error in errors] == [code] * 3  # type: ignore[union-attr]
        assert len({id(error) for error in errors}) == 3
        assert all(error.__cause__ is not None for error in errors)  # type: ignore[union-attr]
        rig.origin.on_fetch = None
        assert (await rig.read(rig.version(), 0, PAGE))[0] == DATA[:PAGE]

    run(tmp_path, body)


def test_a_short_answer_is_no_page(tmp_path: Path) -> None:
    """R22, F46: an origin that gives fewer bytes than asked for is not believed."""

    async def body(rig: ReadRig) -> None:
        rig.origin.short_by = 1
        assert await code_of(rig.read(rig.version(), 0, PAGE)) == "origin_protocol"
        rig.origin.short_by = 0
        assert (await rig.read(rig.version()))[0] == DATA

    run(tmp_path, body)


def test_an_object_that_changes_while_it_is_read_fails_the_read(tmp_path: Path) -> None:
    """R3, F55, F65: no partial success, and the next request resolves anew."""

    async def body(rig: ReadRig) -> None:
        old = rig.version()
        await rig.reader.resolve(old.object_id, if_match=None, deadline=rig.context().deadline)

        def change(version: ObjectVersion, start: int, stop: int) -> None:
            if start:
                raise version_changed(version)

        rig.origin.on_fetch = change
        assert await code_of(rig.read(old)) == "version_changed"
        rig.origin.on_fetch = None
        rig.origin.put(b"k", DATA[::-1], etag='"v2"')
        new = await rig.reader.resolve(
            old.object_id, if_match=None, deadline=rig.context().deadline
        )
        assert new.version.etag == '"v2"' and rig.origin.heads[b"k"] == 2
        assert (await rig.read(new.version))[0] == DATA[::-1]
        # What is cached of the old version is still that version's, for whoever pinned it.
        assert (await rig.read(old, 0, PAGE))[0] == DATA[:PAGE]

    run(tmp_path, body)


def test_one_failing_page_ends_the_others(tmp_path: Path) -> None:
    """The first failure cancels the pages in progress: their origin calls are told to stop."""

    async def body(rig: ReadRig) -> None:
        def fail(version: ObjectVersion, start: int, stop: int) -> None:
            raise unavailable()

        rig.origin.hold()
        task = read(rig, rig.version(), 0, 3 * PAGE)
        await rig.arrived(3)
        rig.origin.on_fetch = fail
        rig.origin.release()
        assert await code_of(task) == "origin_unavailable"
        await rig.reader._strays.close()
        assert rig.origin.running == 0

    run(tmp_path, body)


def test_flights_are_told_and_stuck_ones_found(tmp_path: Path) -> None:
    """F66: page, rung, age and waiters of everything in the air; oldest first, no payload."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        tasks = [read(rig, rig.version(), i * PAGE, i * PAGE + 5) for i in (0, 1, 1)]
        await rig.arrived(2)
        await turns()
        told = rig.services.flights.describe()
        assert [entry["page"] for entry in told] == ["b/k page 0", "b/k page 1"]
        assert [entry["waiters"] for entry in told] == [1, 2]
        assert {entry["rung"] for entry in told} == {"origin"}
        assert all("no disk has it" in str(entry["why"]) for entry in told)
        assert all(entry["age_seconds"] >= 0 for entry in told)  # type: ignore[operator]
        assert len(rig.services.flights.stuck(0.0)) == 2
        assert rig.services.flights.stuck(3600.0) == []
        rig.origin.release()
        await asyncio.gather(*tasks)

    run(tmp_path, body)


def test_the_number_of_flights_is_bounded(tmp_path: Path) -> None:
    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        tasks = [read(rig, rig.version(), i * PAGE, i * PAGE + 5) for i in range(2)]
        await rig.arrived(2)
        assert await code_of(rig.read(rig.version(), 2 * PAGE, 2 * PAGE + 5)) == "overloaded"
        assert rig.metric("racer_overloaded_total", budget="flights") == 1
        rig.origin.release()
        await asyncio.gather(*tasks)

    run(tmp_path, body, settings=small_settings(waiters_max=2))


def test_closing_ends_what_runs(tmp_path: Path) -> None:
    """R31: a cache that goes takes its flights along; its readers are told."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        task = read(rig, rig.version())
        await rig.arrived()
        await rig.services.flights.close_cache("another")
        assert not task.done()
        await rig.services.flights.close_cache("cache")
        assert await code_of(task) == "draining"
        await rig.services.flights.close()
        with pytest.raises(ResourceError, match="shutting down"):
            await rig.read(rig.version(), PAGE, PAGE + 1)

    run(tmp_path, body)

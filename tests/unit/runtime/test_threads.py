"""Worker threads: results, cancelling, fairness, batches, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from racerd.runtime.threads import Job, WorkerThreads, finished, settled

RUNNERS: list[Callable[[Coroutine[Any, Any, None]], None]] = [asyncio.run, uvloop.run]


@pytest.fixture(params=RUNNERS, ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    runner: Callable[[Coroutine[Any, Any, None]], None] = request.param
    return runner


class Gate:
    """A piece of work that says that it began and ends when it is let go."""

    def __init__(self, result: object = None) -> None:
        self.began = threading.Event()
        self.release = threading.Event()
        self.ended = False
        self.result = result

    def __call__(self) -> Any:
        self.began.set()
        assert self.release.wait(30)
        self.ended = True
        return self.result


async def until(event: threading.Event) -> None:
    """Waits for a worker without blocking the loop."""
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, 30)


async def turns(count: int = 5) -> None:
    """Lets everything that is ready on the loop run."""
    for _ in range(count):
        await asyncio.sleep(0)


# ---------- results


def test_results_and_errors_come_back(run: Any) -> None:
    async def main() -> None:
        async with WorkerThreads("t", 2) as threads:
            assert await threads.run(lambda: 6 * 7) == 42
            assert await threads.run(lambda: None) is None
            with pytest.raises(ZeroDivisionError):
                await threads.run(lambda: 1 // 0)
            with pytest.raises(SystemExit):
                await threads.run(lambda: exec("raise SystemExit(3)"))
            assert await threads.run(threading.current_thread) in threads._threads

    run(main())


def test_work_runs_on_named_threads_and_no_more_than_asked_for(run: Any) -> None:
    async def main() -> None:
        gates = [Gate() for _ in range(5)]
        async with WorkerThreads("open", 3) as threads:
            assert sorted(t.name for t in threads._threads) == ["open-0", "open-1", "open-2"]
            jobs = [threads.submit(gate) for gate in gates]
            for gate in gates[:3]:
                await until(gate.began)
            assert not gates[3].began.is_set()
            assert threads.unfinished == 5
            for gate in gates:
                gate.release.set()
            await asyncio.gather(*(job.future for job in jobs))
            assert threads.unfinished == 0

    run(main())


def test_pieces_run_side_by_side_and_end_together(run: Any) -> None:
    async def main() -> None:
        gates = [Gate() for _ in range(3)]
        after: list[bool] = []

        def then() -> str:
            after.append(all(gate.ended for gate in gates))
            return "joined"

        async with WorkerThreads("t", 3) as threads:
            job = threads.submit_pieces(gates, then=then)
            for gate in gates:
                await until(gate.began)
            for gate in gates:
                assert not job.future.done()
                gate.release.set()
            assert await finished(job) == "joined"
            assert after == [True]

    run(main())


def test_each_piece_runs_once_whatever_the_number_of_threads(run: Any) -> None:
    async def main() -> None:
        for count in (1, 2, 5):
            ran: list[int] = []
            pieces = [lambda i=i, ran=ran: ran.append(i) for i in range(100)]
            async with WorkerThreads("t", count) as threads:
                await finished(threads.submit_pieces(pieces))
            assert sorted(ran) == list(range(100))

    run(main())


def test_the_first_error_ends_the_job_and_the_rest_never_runs(run: Any) -> None:
    async def main() -> None:
        ran: list[str] = []

        def fail() -> None:
            raise OSError(5, "Input/output error")

        async with WorkerThreads("t", 1) as threads:
            pieces = [lambda: ran.append("first"), fail, lambda: ran.append("third")]
            job = threads.submit_pieces(pieces, then=lambda: ran.append("then"))
            with pytest.raises(OSError, match="Input/output"):
                await finished(job)
            assert ran == ["first"]

    run(main())


def test_an_error_waits_for_the_pieces_that_still_run(run: Any) -> None:
    """R7: the buffers of a failed job are free once its future is done."""

    async def main() -> None:
        slow = Gate()
        failed = threading.Event()

        def fail() -> None:
            failed.set()
            raise ValueError("bad")

        async with WorkerThreads("t", 2) as threads:
            job = threads.submit_pieces([slow, fail])
            await until(slow.began)
            await until(failed)
            await turns()
            assert not job.future.done()
            slow.release.set()
            with pytest.raises(ValueError, match="bad"):
                await finished(job)
            assert slow.ended

    run(main())


def test_an_error_in_then_is_the_jobs_error(run: Any) -> None:
    async def main() -> None:
        def then() -> None:
            raise KeyError("x")

        async with WorkerThreads("t", 1) as threads:
            with pytest.raises(KeyError):
                await finished(threads.submit_pieces([lambda: None], then=then))

    run(main())


def test_the_trace_of_an_error_is_kept_as_text(run: Any) -> None:
    """The log of a defect shows where it was, though no frame is kept alive."""

    async def main() -> None:
        def inner() -> None:
            raise ValueError("bad")

        def outer() -> None:
            try:
                inner()
            except ValueError as error:
                raise OSError(5, "worse") from error

        async with WorkerThreads("disk", 1) as threads:
            with pytest.raises(OSError, match="worse") as caught:
                await threads.run(outer)
        shown = "".join(traceback.format_exception(caught.value))
        for part in ("thread disk-0", "in outer", "in inner", "ValueError: bad"):
            assert part in shown

    run(main())


def test_stop_iteration_does_not_stop_the_deliveries(run: Any) -> None:
    """A future refuses to carry it; the jobs delivered with it must not be lost."""

    async def main() -> None:
        async with WorkerThreads("t", 1) as threads:
            bad = threads.submit(lambda: next(iter(())))
            good = threads.submit(lambda: 1)
            with pytest.raises(RuntimeError, match="StopIteration"):
                await finished(bad)
            assert await finished(good) == 1

    run(main())


def test_a_job_without_pieces_is_refused() -> None:
    async def main() -> None:
        async with WorkerThreads("t", 1) as threads:
            with pytest.raises(ValueError, match="piece"):
                threads.submit_pieces([])
            assert threads.unfinished == 0

    asyncio.run(main())


def test_threads_that_do_not_run_take_no_work() -> None:
    async def main() -> None:
        threads = WorkerThreads("t", 1)
        with pytest.raises(RuntimeError, match="not running"):
            threads.submit(lambda: None)
        async with threads:
            await threads.run(lambda: None)
        with pytest.raises(RuntimeError, match="not running"):
            threads.submit(lambda: None)

    asyncio.run(main())


# ---------- cancelling


def test_a_queued_job_that_is_cancelled_never_runs(run: Any) -> None:
    async def main() -> None:
        busy, queued = Gate(), Gate()
        async with WorkerThreads("t", 1) as threads:
            first = threads.submit(busy)
            await until(busy.began)
            task = asyncio.create_task(threads.run(queued))
            await turns()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task  # At once, though the only worker is busy.
            assert not first.future.done()
            busy.release.set()
            await finished(first)
        assert not queued.began.is_set()

    run(main())


def test_a_running_job_is_waited_for_through_any_number_of_cancellations(run: Any) -> None:
    """R7: when the awaiting task ends, no worker touches its buffers any more."""

    async def main() -> None:
        gate = Gate("lost")
        async with WorkerThreads("t", 1) as threads:
            task = asyncio.create_task(threads.run(gate))
            await until(gate.began)
            for _ in range(3):
                task.cancel()
                await turns()
                assert not task.done()
            gate.release.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert gate.ended

    run(main())


def test_cancelling_between_pieces_drops_the_rest(run: Any) -> None:
    async def main() -> None:
        running = Gate()
        later: list[int] = []
        async with WorkerThreads("t", 1) as threads:
            pieces = [running, *(lambda: later.append(1) for _ in range(10))]
            job = threads.submit_pieces(pieces, then=lambda: later.append(2))
            await until(running.began)
            job.cancel()
            job.cancel()
            assert not job.future.done()
            running.release.set()
            await settled(job.future)
            assert job.future.cancelled()
            assert threads.unfinished == 0
        assert later == []

    run(main())


def test_cancelling_what_has_ended_changes_nothing(run: Any) -> None:
    async def main() -> None:
        async with WorkerThreads("t", 1) as threads:
            job = threads.submit(lambda: 5)
            assert await finished(job) == 5
            job.cancel()
            assert job.future.result() == 5
            assert threads.unfinished == 0

    run(main())


def test_cancelling_a_job_whose_future_was_cancelled_leaves_nothing_unfinished(run: Any) -> None:
    """A caller that awaits the bare future and is cancelled must not keep the pool from ending."""

    async def main() -> None:
        busy, queued = Gate(), Gate()
        async with WorkerThreads("t", 1) as threads:
            first = threads.submit(busy)
            await until(busy.began)
            job = threads.submit(queued)
            job.future.cancel()
            job.cancel()
            busy.release.set()
            await finished(first)
        assert threads.unfinished == 0

    run(main())


def test_the_error_of_a_cancelled_job_is_not_reported_as_lost(run: Any) -> None:
    """No `exception was never retrieved` in the log of a daemon whose clients go away."""

    async def main() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(context)
        )
        gate = Gate()

        def fail() -> None:
            gate()
            raise OSError(5, "late")

        async with WorkerThreads("t", 1) as threads:
            task = asyncio.create_task(threads.run(fail))
            await until(gate.began)
            task.cancel()
            await turns()
            gate.release.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        del task
        gc.collect()
        assert complaints == []

    run(main())


# ---------- what a job holds on to


class Buffer:
    """Stands for a view of a client's memory."""


def test_a_job_that_is_over_holds_no_buffer(run: Any) -> None:
    """R7: not by its call, not by its error's traceback, not in an idle worker."""

    async def main() -> None:
        def submit(threads: WorkerThreads, fails: bool) -> tuple[Job[Any], weakref.ref[Buffer]]:
            buffer = Buffer()

            def work(held: Buffer = buffer) -> None:
                local = (held, buffer)
                if fails:
                    try:
                        raise ValueError("inner")
                    except ValueError:
                        raise OSError(5, f"failed with {len(local)}") from None

            return threads.submit(work), weakref.ref(buffer)

        async with WorkerThreads("t", 1) as threads:
            for fails in (False, True):
                job, alive = submit(threads, fails)
                await settled(job.future)
                gc.collect()
                assert alive() is None
                assert (job.future.exception() is not None) == fails

    run(main())


# ---------- fairness and batches


async def order_of(threads: WorkerThreads, plan: list[tuple[str, int, bool]]) -> Any:
    """Queues jobs (name, pieces, urgent) behind a busy worker; returns (gate, jobs, order)."""
    order: list[str] = []
    busy = Gate()
    jobs: list[Job[Any]] = [threads.submit(busy)]
    await until(busy.began)
    for name, pieces, urgent in plan:
        work = [lambda name=name: order.append(name) for _ in range(pieces)]
        jobs.append(threads.submit_pieces(work, urgent=urgent))
    return busy, jobs, order


def test_jobs_take_turns(run: Any) -> None:
    """A page of many pieces does not hold up the page behind it."""

    async def main() -> None:
        async with WorkerThreads("t", 1) as threads:
            busy, jobs, order = await order_of(threads, [("long", 10, False), ("short", 1, False)])
            busy.release.set()
            await asyncio.gather(*(job.future for job in jobs))
            assert order.index("short") <= 1

    run(main())


def test_urgent_jobs_come_first_and_the_others_are_not_starved(run: Any) -> None:
    async def main() -> None:
        async with WorkerThreads("t", 1) as threads:
            busy, jobs, order = await order_of(
                threads, [("bulk", 6, False), *((f"urgent {i}", 1, True) for i in range(12))]
            )
            busy.release.set()
            await asyncio.gather(*(job.future for job in jobs))
            assert order[0].startswith("urgent")
            assert "bulk" in order[:5]  # One turn in four.
            assert order[-1] == "bulk"
            urgent = [name for name in order if name != "bulk"]
            assert urgent == [f"urgent {i}" for i in range(12)]

    run(main())


def test_jobs_that_end_together_wake_the_loop_once() -> None:
    """The hand-off back to the loop is paid by the batch, not by the job."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        wakes = 0
        real = loop.call_soon_threadsafe

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return real(*args, **kwargs)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
        async with WorkerThreads("t", 1) as threads:
            last = threading.Event()
            jobs = [threads.submit(lambda: None) for _ in range(200)]
            jobs.append(threads.submit(last.set))
            last.wait(30)  # The loop is held up here on purpose.
            await asyncio.gather(*(job.future for job in jobs))
            assert wakes <= 3
        loop.call_soon_threadsafe = real  # type: ignore[method-assign]

    asyncio.run(main())


def test_the_time_in_the_queue_is_known(run: Any) -> None:
    async def main() -> None:
        busy = Gate()
        async with WorkerThreads("t", 1) as threads:
            first = threads.submit(busy)
            await until(busy.began)
            second = threads.submit(lambda: None)
            waiting = second.queued_seconds
            assert not second.started
            assert second.queued_seconds >= waiting >= 0
            busy.release.set()
            await finished(second)
            assert second.started
            settled_at = second.queued_seconds
            assert second.queued_seconds == settled_at >= waiting
            await finished(first)

    run(main())


# ---------- the end


def test_leaving_waits_for_what_is_queued_and_running(run: Any) -> None:
    async def main() -> None:
        gates = [Gate() for _ in range(4)]
        threads = WorkerThreads("t", 2)
        await threads.__aenter__()
        jobs = [threads.submit(gate) for gate in gates]
        leaving = asyncio.create_task(threads.__aexit__(None, None, None))
        await until(gates[0].began)
        await turns()
        assert not leaving.done()
        for gate in gates:
            gate.release.set()
        await leaving
        assert all(gate.ended for gate in gates)
        assert all(job.future.done() for job in jobs)

    run(main())


def test_leaving_that_is_cancelled_still_ends_every_thread(run: Any) -> None:
    """A second signal during the drain must not leave workers behind."""

    async def main() -> None:
        gate = Gate()
        threads = WorkerThreads("t", 2)
        await threads.__aenter__()
        workers = list(threads._threads)
        threads.submit(gate)
        await until(gate.began)
        leaving = asyncio.create_task(threads.__aexit__(None, None, None))
        for _ in range(3):
            await turns()
            leaving.cancel()
        await turns()
        assert not leaving.done()
        gate.release.set()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert not any(worker.is_alive() for worker in workers)

    run(main())


def test_threads_that_cannot_all_start_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start
    started = 0

    def start(self: threading.Thread) -> None:
        nonlocal started
        if self.name.startswith("few-"):
            started += 1
            if started == 3:
                raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="can't start"):
            await WorkerThreads("few", 4).__aenter__()
        assert not [t for t in threading.enumerate() if t.name.startswith("few-")]

    asyncio.run(main())


def test_threads_that_may_not_choose_a_core_work_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("racerd.runtime.threads.os.sched_setaffinity", refuse)
    monkeypatch.setattr("racerd.runtime.threads.os.sched_getaffinity", lambda _: {0, 1})

    async def main() -> None:
        async with WorkerThreads("t", 2, spread=True) as threads:
            assert await threads.run(lambda: 1) == 1

    asyncio.run(main())
    assert "Operation not permitted" in caplog.text


def test_spread_threads_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[int, list[int]] = {}
    monkeypatch.setattr(
        "racerd.runtime.threads.os.sched_setaffinity",
        lambda thread, cores: chosen.__setitem__(thread, list(cores)),
    )
    monkeypatch.setattr("racerd.runtime.threads.os.sched_getaffinity", lambda _: set(range(5)))

    async def main() -> None:
        async with WorkerThreads("t", 2, spread=True):
            pass

    asyncio.run(main())
    assert sorted(chosen.values()) == [[0, 2, 4], [1, 3]]

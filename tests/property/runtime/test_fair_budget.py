"""Byte budgets: the hard limit, turns between keys, and nobody who waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from racerd.errors import ResourceError
from racerd.runtime.budget import Charge, FairBudget
from racerd.runtime.deadline import Deadline


def run(main: Callable[[], Awaitable[None]]) -> None:
    uvloop.run(main())  # type: ignore[arg-type]


def later() -> Deadline:
    return Deadline.after(60)


def waiting(budget: FairBudget, amount: int, key: str) -> asyncio.Task[Charge]:
    return asyncio.ensure_future(budget.charge(amount, key, deadline=later()))


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_what_is_free_is_given_at_once() -> None:
    budget = FairBudget("test", 10)
    first = budget.try_charge(6, "a")
    assert first is not None and budget.used == 6
    assert budget.try_charge(5, "b") is None
    first.release()
    first.release()  # Twice is once.
    assert budget.used == 0
    with budget.try_charge(10, "b") as charge:  # type: ignore[union-attr]
        assert budget.used == charge.amount == 10
    assert budget.used == 0


def test_more_than_a_share_can_never_be_had() -> None:
    budget = FairBudget("test", 10, key_limit=4)
    with pytest.raises(ValueError, match="above the share"):
        budget.try_charge(5, "a")


def test_a_greedy_key_gets_its_turn_and_no_more() -> None:
    """Twenty wishes of one connection do not stand in front of one of another."""

    async def main() -> None:
        budget = FairBudget("test", 2)
        held = [budget.try_charge(1, "greedy") for _ in range(2)]
        greedy = [waiting(budget, 1, "greedy") for _ in range(20)]
        await turns()
        modest = waiting(budget, 1, "modest")
        await turns()
        held[0].release()  # type: ignore[union-attr]
        held[1].release()  # type: ignore[union-attr]
        await turns()
        assert modest.done() and sum(task.done() for task in greedy) == 1
        (await modest).release()
        for task in greedy:
            (await task).release()
        assert budget.used == budget.waiting == 0

    run(main)


def test_a_key_at_its_limit_does_not_keep_others_from_what_is_free() -> None:
    async def main() -> None:
        budget = FairBudget("test", 10, key_limit=4)
        full = budget.try_charge(4, "a")
        more = waiting(budget, 1, "a")
        await turns()
        assert not more.done()
        other = await budget.charge(4, "b", deadline=later())
        assert not more.done()
        full.release()  # type: ignore[union-attr]
        (await more).release()
        other.release()

    run(main)


def test_a_big_wish_is_not_overtaken_by_small_ones() -> None:
    async def main() -> None:
        budget = FairBudget("test", 10)
        held = budget.try_charge(8, "a")
        big = waiting(budget, 9, "b")
        await turns()
        small = waiting(budget, 1, "c")
        await turns()
        assert not small.done()
        big.cancel()  # It stood in front of one that fits.
        (await small).release()
        held.release()  # type: ignore[union-attr]

    run(main)


def test_the_queue_is_bounded() -> None:
    async def main() -> None:
        budget = FairBudget("test", 1, waiters_max=2)
        held = budget.try_charge(1, "a")
        tasks = [waiting(budget, 1, "a") for _ in range(2)]
        await turns()
        with pytest.raises(ResourceError) as refused:
            await budget.charge(1, "b", deadline=later())
        assert refused.value.code == "overloaded"
        assert refused.value.retry_after_seconds
        held.release()  # type: ignore[union-attr]
        for task in tasks:
            (await task).release()
        assert budget.refused == 1

    run(main)


def test_patience_and_deadline_end_a_wait() -> None:
    async def main() -> None:
        budget = FairBudget("test", 1)
        held = budget.try_charge(1, "a")
        with pytest.raises(ResourceError) as refused:
            await budget.charge(1, "b", deadline=later(), patience_seconds=0.01)
        assert refused.value.code == "overloaded"
        with pytest.raises(ResourceError) as late:
            await budget.charge(1, "b", deadline=Deadline.after(0.01), patience_seconds=60)
        assert late.value.code == "deadline_exceeded"
        assert budget.waiting == 0
        held.release()  # type: ignore[union-attr]
        assert budget.used == 0 and not budget._keys

    run(main)


def test_what_is_held_for_convenience_is_given_up_first() -> None:
    async def main() -> None:
        budget = FairBudget("test", 3)
        spare = [budget.try_charge(1, "spare") for _ in range(3)]

        def give_up_one() -> bool:
            if not spare:
                return False
            spare.pop().release()  # type: ignore[union-attr]
            return True

        budget.reclaim = give_up_one
        charge = await budget.charge(2, "a", deadline=later())
        assert len(spare) == 1 and budget.used == 3
        charge.release()
        spare.pop().release()  # type: ignore[union-attr]

    run(main)


def test_a_grant_that_comes_with_the_cancel_is_given_back() -> None:
    """F26: granted and cancelled in one turn of the loop."""

    async def main() -> None:
        budget = FairBudget("test", 1)
        held = budget.try_charge(1, "a")
        task = waiting(budget, 1, "b")
        await turns()
        held.release()  # type: ignore[union-attr]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert budget.used == 0 and not budget._keys

    run(main)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 40), st.integers(1, 3))
def test_any_order_keeps_the_limit_and_serves_all(seed: int, limit: int, divisor: int) -> None:
    """F10: never above the limit or a key's share; when all is given back, nobody waits."""
    chance = random.Random(seed)
    share = max(1, limit // divisor)

    async def main() -> None:
        budget = FairBudget("test", limit, key_limit=share)
        tasks: list[asyncio.Task[Charge]] = []
        held: list[Charge] = []
        for _ in range(80):
            act = chance.randrange(4)
            if act <= 1:
                tasks.append(waiting(budget, chance.randint(1, share), chance.choice("abc")))
            elif act == 2 and held:
                held.pop(chance.randrange(len(held))).release()
            elif tasks:
                chance.choice(tasks).cancel()
            if chance.random() < 0.6:
                await turns()
            done = [task for task in tasks if task.done()]
            tasks = [task for task in tasks if not task.done()]
            held += [task.result() for task in done if not task.cancelled()]
            by_key = {key: sum(c.amount for c in held if c.key == key) for key in "abc"}
            assert sum(by_key.values()) <= budget.used <= limit
            assert all(amount <= share for amount in by_key.values())
        while held or tasks:
            for charge in held:
                charge.release()
            await turns()
            held = [task.result() for task in tasks if task.done() and not task.cancelled()]
            tasks = [task for task in tasks if not task.done()]
            assert held or not tasks, "somebody waits though all is free"
        assert budget.used == budget.waiting == 0 and not budget._keys

    run(main)

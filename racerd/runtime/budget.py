"""Byte budgets with a hard limit, shared fairly.

Layer: bottom; loop thread only. Whoever wants bytes takes a `Charge` and gives it back. When the
budget is spent, takers wait in a queue of their own **key** (a connection), and what comes free
goes to the keys in turn: a greedy connection gets as much as a modest one, not as much as it asks.

Nothing waits without a bound: each key may hold a share only, the number of waiters is limited,
and a waiter whose key was not served for `patience_seconds`, or whose deadline passes, gives up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from types import TracebackType

from racerd.errors import ResourceError, Retry
from racerd.runtime.deadline import Deadline, deadline_exceeded
from racerd.units import format_bytes


class Charge:
    """Bytes held of a budget until `release`. Releasing twice is harmless."""

    __slots__ = ("_budget", "amount", "key")

    def __init__(self, budget: FairBudget, amount: int, key: Hashable) -> None:
        self._budget: FairBudget | None = budget
        self.amount = amount
        self.key = key

    def release(self) -> None:
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._release(self)

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class _Waiter:
    __slots__ = ("amount", "future")

    def __init__(self, amount: int, future: asyncio.Future[Charge]) -> None:
        self.amount = amount
        self.future = future


class _Key:
    """What one key holds and who waits under it."""

    __slots__ = ("held", "served_at", "waiting")

    def __init__(self) -> None:
        self.held = 0
        self.served_at = time.monotonic()
        self.waiting: deque[_Waiter] = deque()


class FairBudget:
    """`limit` bytes, of which one key holds at most `key_limit`."""

    def __init__(
        self, name: str, limit: int, *, key_limit: int | None = None, waiters_max: int = 4096
    ) -> None:
        self.name = name
        self.limit = limit
        self.key_limit = limit if key_limit is None else min(key_limit, limit)
        self.waiters_max = waiters_max
        self.used = 0
        self.refused = 0
        self.waiting = 0
        self._keys: OrderedDict[Hashable, _Key] = OrderedDict()  # The next to be served first.
        # Gives up a charge that is held for convenience only; False where there is none.
        self.reclaim: Callable[[], bool] | None = None

    def try_charge(self, amount: int, key: Hashable) -> Charge | None:
        """Takes `amount` if it is free and nobody waits for it, else returns None.

        Raises ValueError for more than one key may ever hold.
        """
        if amount > self.key_limit:
            raise ValueError(f"{amount} bytes are above the share of {self.name}: {self.key_limit}")
        if self.waiting or self.used + amount > self.limit:
            return None
        account = self._keys.get(key)
        if account is None:
            account = self._keys[key] = _Key()
        elif account.held + amount > self.key_limit:
            return None
        return self._grant(account, amount, key)

    async def charge(
        self,
        amount: int,
        key: Hashable,
        *,
        deadline: Deadline,
        patience_seconds: float = math.inf,
    ) -> Charge:
        """Takes `amount`, waiting for a turn.

        Raises ResourceError `overloaded` when `waiters_max` wait already, or when `key` was
        served nothing for `patience_seconds`; `deadline_exceeded` at the deadline. Cancelling
        leaves the queue.
        """
        charge = self.try_charge(amount, key)
        while charge is None and self.reclaim is not None and self.reclaim():
            charge = self.try_charge(amount, key)
        if charge is not None:
            return charge
        if self.waiting >= self.waiters_max:
            raise self._overloaded("too many reads wait already")
        return await self._wait(amount, key, deadline, patience_seconds)

    async def _wait(
        self, amount: int, key: Hashable, deadline: Deadline, patience_seconds: float
    ) -> Charge:
        account = self._keys.get(key)
        if account is None:
            account = self._keys[key] = _Key()
        if not account.waiting and not account.held:
            account.served_at = time.monotonic()
        waiter = _Waiter(amount, asyncio.get_running_loop().create_future())
        account.waiting.append(waiter)
        self.waiting += 1
        try:
            self._serve()  # A key at its limit must not keep others from what is free.
            while not waiter.future.done():
                patience_ends = account.served_at + patience_seconds
                until = min(deadline.at, patience_ends)
                await asyncio.wait([waiter.future], timeout=max(0.0, until - time.monotonic()))
                if waiter.future.done():
                    break
                now = time.monotonic()
                if now >= deadline.at:
                    raise deadline_exceeded(f"waiting for a share of the {self.name} budget")
                if now >= account.served_at + patience_seconds:
                    raise self._overloaded(f"nothing came free in {patience_seconds:g} s")
            return waiter.future.result()
        except BaseException:
            if waiter.future.done():
                waiter.future.result().release()
            else:
                self._withdraw(account, waiter, key)
            raise

    def _withdraw(self, account: _Key, waiter: _Waiter, key: Hashable) -> None:
        account.waiting.remove(waiter)
        self.waiting -= 1
        self._forget_if_idle(account, key)
        self._serve()  # It may have stood in front of somebody who fits.

    def _grant(self, account: _Key, amount: int, key: Hashable) -> Charge:
        self.used += amount
        account.held += amount
        account.served_at = time.monotonic()
        return Charge(self, amount, key)

    def _release(self, charge: Charge) -> None:
        self.used -= charge.amount
        account = self._keys[charge.key]
        account.held -= charge.amount
        self._forget_if_idle(account, charge.key)
        if self.waiting:
            self._serve()

    def _forget_if_idle(self, account: _Key, key: Hashable) -> None:
        if not account.held and not account.waiting:
            self._keys.pop(key, None)

    def _serve(self) -> None:
        """Gives what is free to the keys in turn."""
        while self.waiting:
            found = self._next_served()
            if found is None:
                return
            key, account = found
            waiter = account.waiting.popleft()
            self.waiting -= 1
            self._keys.move_to_end(key)
            waiter.future.set_result(self._grant(account, waiter.amount, key))

    def _next_served(self) -> tuple[Hashable, _Key] | None:
        """The first key in turn that may have more, if its wish fits.

        A wish that does not fit is not overtaken by smaller ones of other keys: it would starve.
        """
        for key, account in self._keys.items():
            if not account.waiting or account.held + account.waiting[0].amount > self.key_limit:
                continue
            fits = self.used + account.waiting[0].amount <= self.limit
            return (key, account) if fits else None
        return None

    def _overloaded(self, why: str) -> ResourceError:
        self.refused += 1
        return ResourceError(
            "overloaded",
            f"the {self.name} budget of {format_bytes(self.limit)} is spent: {why}",
            hint="ask again later, or give the daemon more memory (--memory)",
            retry=Retry.SAME,
            retry_after_seconds=1.0,
        )

"""Leases: the right of a task to touch a target, which ends when the target is released.

Layer: serve, loop thread. What all kinds of target have in common: a released target hands out no
more leases, cancels the tasks that hold one, and waits for them (R7).
"""

from __future__ import annotations

import asyncio
import traceback as tracebacks
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from racerd.errors import RequestError
from racerd.runtime.threads import settled


class Handed(Protocol):
    """What a lease hands out. `release` ends its use, and is called once."""

    def release(self) -> None: ...


H = TypeVar("H", bound=Handed)


class Leases:
    """The leases on one target."""

    def __init__(self) -> None:
        self.held: set[Lease[Any]] = set()
        self._over = False
        self._quiet: asyncio.Future[None] | None = None

    def check(self) -> None:
        """Raises RequestError `target_unknown` once the target is released."""
        if self._over:
            raise target_unknown("the target was released")

    def returned(self, lease: Lease[Any]) -> None:
        self.held.discard(lease)
        if not self.held and self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    async def end(self) -> bool:
        """Revokes every lease and waits for the tasks that hold them. Runs to its end if
        cancelled. False where that was done before."""
        if self._over:
            return False
        self._over = True
        if self.held:
            self._quiet = asyncio.get_running_loop().create_future()
            for lease in tuple(self.held):
                lease.revoke()
            await settled(self._quiet)
        return True


class Lease(Generic[H]):
    """The right of one task to touch a part of a target, for the length of a `with` block.

    When the target is released meanwhile, the block is cancelled, and the cancellation comes out
    as RequestError `target_unknown`.
    """

    __slots__ = ("_cancelling", "_leases", "_revoked", "_task", "_view")

    def __init__(self, leases: Leases, view: H) -> None:
        self._leases = leases
        self._view = view
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._revoked = False

    def __enter__(self) -> H:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._leases.held.add(self)
        return self._view

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        if error is not None:
            _forget_locals(error)
        self._view.release()
        self._leases.returned(self)
        if not self._revoked:
            return
        # As asyncio.timeout does: take our cancellation back, unless there is another one.
        ours_alone = self._task.uncancel() <= self._cancelling
        if ours_alone and isinstance(error, asyncio.CancelledError):
            raise target_unknown("the target was released while it was read into") from error

    def revoke(self) -> None:
        assert self._task is not None
        self._revoked = True
        self._task.cancel()


def target_unknown(message: str) -> RequestError:
    return RequestError(
        "target_unknown",
        message,
        hint="a target lasts until it is deleted or its connection ends; register it again",
    )


def _forget_locals(error: BaseException) -> None:
    """Drops the locals of the finished frames that `error` came through: views of a target's
    memory among them, which would keep it mapped for as long as somebody keeps the error."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        tracebacks.clear_frames(one.__traceback__)
        pending += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions

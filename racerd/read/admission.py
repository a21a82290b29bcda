"""Admission: the byte budgets of reads, and what a read is told that gets no share of one.

Layer: read; loop thread only. Budgets, each a hard limit, each shared fairly between
connections (see `racerd.runtime.budget`):

    plaintext   pages from origins, from before they are asked for until they are copied and sealed
    streams     chunks that plain streams hold for a consumer
    reading     pages queued for a disk or being read: enough to keep it busy, so that the queue,
                which knows no connections, stays short
    opening     work handed to the `open` threads, for the same reason
    gpu         for each GPU, ciphertext that its worker has in hand: what it stages, and as much
                again that is ready to follow

`plaintext` and `streams` share the operator's one limit in fixed parts, and nobody waits for one
of the first while holding what the other waits for: two streams cannot block each other for ever.
Sealed memory is bounded by the arena, dirty pages by `writeback`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from racerd.errors import ResourceError
from racerd.pages import PageGeometry
from racerd.read.settings import ReadSettings
from racerd.runtime.budget import Charge, FairBudget
from racerd.runtime.deadline import Deadline
from racerd.telemetry import Metrics


class Admission:
    """The budgets of one node, with their gauges."""

    def __init__(self, settings: ReadSettings, geometry: PageGeometry, metrics: Metrics) -> None:
        self._patience_seconds = settings.admission_seconds
        self._metrics = metrics
        share = settings.connection_pages * geometry.page_bytes
        streams = settings.streams_bytes
        self.plaintext = FairBudget(
            "plaintext",
            settings.plaintext_bytes - streams,
            key_limit=share,
            waiters_max=settings.waiters_max,
        )
        self.streams = FairBudget(
            "streams", streams, key_limit=share, waiters_max=settings.waiters_max
        )
        self.reading = FairBudget(
            "reading", settings.reading_bytes, key_limit=share, waiters_max=settings.waiters_max
        )
        self.opening = FairBudget(
            "opening", settings.opening_bytes, key_limit=share, waiters_max=settings.waiters_max
        )
        self._staging: dict[str, FairBudget] = {}
        self._share = share
        self._waiters_max = settings.waiters_max
        self._page_bytes = geometry.page_bytes
        for budget in self.budgets:
            self._show(budget)

    def staging(self, gpu: str, staging_bytes: int) -> FairBudget:
        """The budget of one GPU, made on its first use."""
        budget = self._staging.get(gpu)
        if budget is None:
            limit = max(2 * staging_bytes, self._page_bytes)
            budget = self._staging[gpu] = FairBudget(
                f"gpu:{gpu}", limit, key_limit=self._share, waiters_max=self._waiters_max
            )
            self._show(budget)
        return budget

    def _show(self, budget: FairBudget) -> None:
        self._metrics.budget_limit.labels(budget.name).set(budget.limit)
        self._metrics.budget_used.labels(budget.name).set_function(_used(budget))

    @property
    def budgets(self) -> tuple[FairBudget, ...]:
        return (self.plaintext, self.streams, self.reading, self.opening)

    async def take(
        self, budget: FairBudget, amount: int, *, connection: Hashable, deadline: Deadline
    ) -> Charge:
        """Takes `amount` of `budget` in turn. Raises as `FairBudget.charge`; counts refusals."""
        try:
            return await budget.charge(
                amount, connection, deadline=deadline, patience_seconds=self._patience_seconds
            )
        except ResourceError as error:
            if error.code == "overloaded":
                self._metrics.overloaded.labels(budget.name).inc()
            raise


def _used(budget: FairBudget) -> Callable[[], float]:
    return lambda: budget.used

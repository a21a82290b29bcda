"""What answers may take up of this process's memory, over all connections of a cache.

Layer: serve, loop thread. Bytes of objects have budgets of their own, below. What is left is the
kernel's memory for what was sent and not read (`send_buffers`), and listings and explanations,
which are megabytes long and stay until the client has taken them: a thousand clients that ask for
one and do not read it must not be a thousand of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from racerd.errors import ResourceError
from racerd.runtime.budget import FairBudget
from racerd.runtime.deadline import Deadline
from racerd.runtime.process import descriptors_max
from racerd.serve.descriptors import DescriptorsUnderway
from racerd.serve.send_buffers import SendBuffers
from racerd.serve.serve_metrics import ServeMetrics
from racerd.serve.settings import ClientSocketSettings
from racerd.units import MIB
from racerd.wire.messages import Message

# A listing: 1 MiB of names, encoded, with sizes and ETags of up to 10,000 objects.
_LENGTHY_BYTES = 8 * MIB
_DESCRIPTORS_SHARE = 16  # Of those that this process may have, one of so many may be on its way.
_NOTHING = nullcontext()


class AnswerRoom:
    """The room for answers of one cache."""

    def __init__(self, settings: ClientSocketSettings, metrics: ServeMetrics) -> None:
        self.buffers = SendBuffers(settings.send_buffers_bytes)
        self.descriptors = DescriptorsUnderway(descriptors_max() // _DESCRIPTORS_SHARE)
        self._patience_seconds = settings.turn_seconds
        self._metrics = metrics
        self._lengthy = FairBudget(
            "answers", settings.answers_bytes, waiters_max=settings.connections_max
        )

    def of(
        self, message: Message, connection: Hashable, deadline: Deadline
    ) -> AbstractAsyncContextManager[None]:
        """Room for the answer to `message`, for the block; waits for a turn where there is none.

        Entering raises ResourceError `overloaded`, `deadline_exceeded`.
        """
        return self._turn(connection, deadline) if message.lengthy else _NOTHING

    @asynccontextmanager
    async def _turn(self, connection: Hashable, deadline: Deadline) -> AsyncIterator[None]:
        try:
            charge = await self._lengthy.charge(
                _LENGTHY_BYTES,
                connection,
                deadline=deadline,
                patience_seconds=self._patience_seconds,
            )
        except ResourceError as error:
            if error.code == "overloaded":
                self._metrics.overloaded("answers")
            raise
        with charge:
            yield

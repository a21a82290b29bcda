"""The asyncio side: `AsyncClient` and `AsyncLanding`.

Layer: beside the blocking client, on the same wire, messages, plans and memory. One event loop's;
works on asyncio's own loop and on uvloop. Cancelling a call closes the connections it used, which
cancels its reads in the daemon; memory that such a read may still write to is never used again.
"""

from racer.aio.client import AsyncClient
from racer.aio.landing import AsyncLanding, AsyncMapping

__all__ = ["AsyncClient", "AsyncLanding", "AsyncMapping"]

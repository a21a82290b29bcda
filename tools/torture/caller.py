"""Somebody who calls now and then: connects, asks one thing, and goes, as commands do.

Every call is a newcomer's. Tells how long each took, from connecting to the answer.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

from tools.torture.hostile import Connection

_PAUSE_SECONDS = 0.25


class Caller:
    """`with Caller(...) as caller:` calls from a thread of its own, to its last call's end."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._call_often, name="caller")
        self.seconds: list[float] = []
        self.failed: list[str] = []

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _call_often(self) -> None:
        while not self._stop.wait(_PAUSE_SECONDS):
            began = time.perf_counter()
            try:
                with Connection(self._path) as client:
                    answer = client.ask(f"HEAD /v1/objects{self._key}")
            except OSError as error:
                self.failed.append(f"no answer came: {error!r}")
                return
            self.seconds.append(time.perf_counter() - began)
            if answer.status not in (200, 503):
                self.failed.append(f"{answer.told} instead of 200")
                return

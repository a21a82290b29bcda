"""The load of a kill campaign: clients that read, prefetch, explain and evict, whatever happens.

Layer: torture; each reader is a thread with a client of its own, which outlives every daemon. What
a reader does follows from its seed; when it does it depends on the machine.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import racer
from tools.torture.ledger import PAGE_BYTES, Ledger, Model

_PAUSE_SECONDS = 0.05


class Lives:
    """Which life of the daemon is going on, and how far it is. Thread-safe.

    A request that fails is excused only if the daemon was not ready, or was killed, meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._number = 0
        self._ready = False
        self._recovered = False
        self._awaited: dict[int, int] = {}

    def ready(self) -> None:
        with self._lock:
            self._number += 1
            self._ready = True
            self._lock.notify_all()

    def recovered(self, readers: int = 0) -> None:
        """Recovery is over. It counts once each of `readers` has begun two more requests: one may
        still join the fetch of a page that was begun when the page was not found yet."""
        with self._lock:
            self._awaited = dict.fromkeys(range(readers), 2)
            self._recovered = not readers

    def began(self, reader: int) -> None:
        """A reader begins a request."""
        with self._lock:
            if self._awaited:
                self._awaited[reader] = self._awaited.get(reader, 0) - 1
                self._awaited = {each: left for each, left in self._awaited.items() if left > 0}
                self._recovered |= not self._awaited

    def ending(self) -> None:
        """To be called before the daemon is hurt."""
        with self._lock:
            self._ready = self._recovered = False
            self._awaited = {}

    @property
    def now(self) -> tuple[int, bool, bool]:
        """The life's number, whether it is ready, and whether its recovery is over."""
        with self._lock:
            return self._number, self._ready, self._recovered

    def wait_ready(self, seconds: float) -> bool:
        """Waits up to `seconds` for a daemon that is ready."""
        with self._lock:
            return self._lock.wait_for(lambda: self._ready, seconds)

    def undisturbed(self, before: tuple[int, bool, bool]) -> bool:
        """Whether the daemon was ready from `before` until now."""
        number, ready, _ = self.now
        return before[1] and ready and before[0] == number


class Reader(threading.Thread):
    """Clients under load, one after the other. `stop` ends them.

    `steadfast`: one client for all lives, which waits for the next daemon as clients do. Others
    are given up with the daemon that they talked to. `failure` is a defect, not a broken promise.
    """

    def __init__(
        self, number: int, socket: Path, models: list[Model], ledger: Ledger, lives: Lives,
        seed: str, *, steadfast: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(name=f"reader-{number}")
        self._number = number
        self._steadfast = steadfast
        self._client: racer.Client | None = None
        self._socket = socket
        self._models = [model for model in models if model.owner in (None, number)]
        self._own = [model for model in models if model.owner == number]
        self._ledger = ledger
        self._lives = lives
        self._chance = random.Random(seed)
        self._stopping = threading.Event()
        self.failure: BaseException | None = None

    def stop(self) -> None:
        self._stopping.set()

    def cut(self) -> None:
        """The daemon is dead: whoever is not steadfast gives up what runs. From any thread."""
        client = self._client
        if client is not None and not self._steadfast:
            client.abort()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._lives.wait_ready(_PAUSE_SECONDS):
                    self._one_client()
        except BaseException as failure:  # noqa: BLE001  told by the campaign's own thread
            self.failure = failure

    def _one_client(self) -> None:
        with racer.Client(socket=self._socket, timeout=60.0) as client:
            self._client = client
            while not self._stopping.is_set() and self._step(client):
                pass

    def _step(self, client: racer.Client) -> bool:
        """One request. Returns whether the client is still of use."""
        name, work = self._choose()
        self._lives.began(self._number)
        before = self._lives.now
        try:
            work(client, before)
        except racer.RacerError as error:
            if self._lives.undisturbed(before):
                self._ledger.breach(f"{name} failed in a healthy daemon: {error.code}: {error}")
            self._ledger.count("requests cut short")
            self._lives.wait_ready(_PAUSE_SECONDS)
            return self._steadfast
        self._ledger.count("requests")
        return True

    def _choose(self) -> tuple[str, Callable[[racer.Client, tuple[int, bool, bool]], None]]:
        dice = self._chance.randrange(20)
        if dice == 0:
            return "evict", self._evict
        if dice < 4:
            return "prefetch", self._prefetch
        if dice < 6:
            return "explain", self._explain
        return ("map", self._map) if dice == 6 else ("read", self._read)

    def _read(self, client: racer.Client, before: tuple[int, bool, bool]) -> None:
        """A range, or the whole object, into memory of the reader's own."""
        model = self._chance.choice(self._models)
        start, stop = 0, len(model.data)
        if self._chance.random() < 0.6:
            start = self._chance.randrange(stop)
            stop = min(stop, start + self._chance.randint(1, 5 * PAGE_BYTES))
        self._ledger.read_again(model)
        pages = set(range(start // PAGE_BYTES, -(-stop // PAGE_BYTES)))
        promised = pages <= self._ledger.kept_of(model)
        with client.landing(stop - start) as landing:
            report = landing.read(model.url, start, stop - start)
            self._ledger.compare(model, start, landing.view[: report.bytes])
        if report.bytes != stop - start:
            self._ledger.breach(f"{report.bytes} bytes of {model.name} came, not {stop - start}")
        if set(report.rungs) == {"disk"}:
            self._ledger.on_disk(model, pages)
        if promised and "origin" in report.rungs and self._recovered_throughout(before):
            self._ledger.breach(f"{model.name} [{start}, {stop}) was on disk and was fetched again")

    def _map(self, client: racer.Client, before: tuple[int, bool, bool]) -> None:
        model = self._chance.choice(self._models)
        self._ledger.read_again(model)
        with client.map(model.url) as view:
            self._ledger.compare(model, 0, view)

    def _prefetch(self, client: racer.Client, before: tuple[int, bool, bool]) -> None:
        """What the daemon says it has on disk is promised from then on.

        What came from the origin is in the cache; that may be memory alone, if the disk takes no
        writes, as for a moment during recovery.
        """
        model = self._chance.choice(self._models)
        self._ledger.read_again(model)
        done = client.prefetch(model.url)
        if set(done.rungs) == {"disk"}:
            self._ledger.on_disk(model, model.pages)

    def _explain(self, client: racer.Client, before: tuple[int, bool, bool]) -> None:
        model = self._chance.choice(self._models)
        self.audit(client, model, before)

    def audit(self, client: racer.Client, model: Model, before: tuple[int, bool, bool]) -> None:
        """Holds what the daemon says about `model` against what it promised."""
        kept, gone = self._ledger.kept_of(model), self._ledger.is_gone(model)
        told = client.explain(model.url)
        cached = {page.page for page in told.pages if page.rung != "origin"}
        if gone and cached and self._lives.undisturbed(before):
            self._ledger.breach(f"{model.name} was evicted and is back: pages {sorted(cached)}")
        lost = kept - cached
        if lost and self._recovered_throughout(before):
            why = {page.why.get("disk") for page in told.pages if page.page in lost}
            self._ledger.breach(f"{model.name}: pages {sorted(lost)} were kept and are lost: {why}")

    def _recovered_throughout(self, before: tuple[int, bool, bool]) -> bool:
        return before[2] and self._lives.undisturbed(before)

    def _evict(self, client: racer.Client, before: tuple[int, bool, bool]) -> None:
        """Only of objects that nobody else reads: what is gone must then stay away."""
        model = self._chance.choice(self._own)
        self._ledger.leaving(model)
        client.evict(model.url)
        self._ledger.evicted(model)

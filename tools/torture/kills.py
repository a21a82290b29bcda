"""The kill campaign: a real daemon under load, SIGKILLed at random moments, restarted each time.

    python -m tools.torture kills --kills 200 --seed 1 [--scenario steady] [--folder /var/tmp]

Every byte that a client reads is compared with the source. After the last kill the daemon has to
serve what it had promised to keep without one request for data to the origin, and nothing may be
left behind. The seed decides on objects, requests, moments and damage; how threads and processes
interleave is the machine's choice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import racer
from racerd.ids import PageId
from racerd.pages import PageGeometry
from racerd.store import DiskSettings, Store, StoreSettings
from racerd.telemetry import Metrics
from racerd.units import GIB, MIB
from tests.support.counting_origin import CountingOrigin
from tests.support.store_pages import read_back, sealed, version
from tools.daemon_process import DaemonProcess
from tools.torture import damage
from tools.torture.ledger import FRAME_BYTES, PAGE_BYTES, Ledger, Model, make_models
from tools.torture.leftovers import files_below, held_below
from tools.torture.load import Lives, Reader

GEOMETRY = PageGeometry(PAGE_BYTES, FRAME_BYTES)
READERS = 4
_SETTLE_SECONDS = 60.0
_WATCH_SECONDS = 0.005


@dataclass(frozen=True)
class Scenario:
    """One kind of campaign.

    `ballast`: records that lie on the slab before the first start and that nobody reads: they make
    recovery long enough to be met, and must all be there at the end. `keeps`: whether everything
    that was kept must be found after every kill.
    """

    name: str
    text: str
    disk_bytes: int
    ballast: int
    keeps: bool
    harm: str = ""


SCENARIOS = {
    each.name: each
    for each in (
        Scenario(
            "steady", "nothing else goes wrong",
            disk_bytes=GIB, ballast=4000, keeps=True,
        ),
        Scenario(
            "scan", "both checkpoints are lost before each start",
            disk_bytes=GIB, ballast=3000, keeps=True,
            harm="checkpoints",
        ),
        Scenario(
            "small", "a disk for half of the data: eviction all the time",
            disk_bytes=6 * MIB, ballast=0, keeps=False,
        ),
        Scenario(
            "rot", "random bytes are overwritten before each start",
            disk_bytes=96 * MIB, ballast=2000, keeps=False, harm="rot",
        ),
    )
}  # fmt: skip


@dataclass
class Result:
    """What one scenario came to. `broken`: promises that were not kept, in words."""

    scenario: str
    kills: Counter[str] = field(default_factory=Counter)
    tally: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Campaign:
    """One scenario, from an empty folder to the last audit.

    `seconds`: no further life begins after so long; the last audit comes all the same.
    """

    def __init__(
        self, scenario: Scenario, kills: int, seed: str, folder: Path, seconds: float
    ) -> None:
        self.scenario = scenario
        self.kills = kills
        self.seed = seed
        self.folder = folder
        self.seconds = seconds
        self.chance = random.Random(f"{seed} moments")
        self.slab = folder / "slab"
        self.ledger = Ledger(scenario.keeps)
        self.lives = Lives()
        self.result = Result(scenario.name)
        self.models: list[Model] = []
        self.readers: list[Reader] = []
        self._startup_seconds = 1.0
        self._usual: set[str] = set()
        self._copy = 0  # Of superblock and notes: the one that may be damaged next.

    def run(self) -> Result:
        started = time.monotonic()
        objects = self.folder / "objects"
        self.models = make_models(objects, random.Random(f"{self.seed} objects"), READERS)
        self._lay_ballast()
        with CountingOrigin(objects) as origin:
            daemon = self._daemon(origin.url)
            try:
                self._first_life(daemon)
                with self._under_load(daemon.socket("local")):
                    for _ in range(self.kills):
                        self._one_life(daemon)
                        if self._defective() or time.monotonic() - started > self.seconds:
                            break
                self._last_life(daemon, origin)
            finally:
                if daemon.process is not None:
                    daemon.kill()
        self._check_ballast()
        self.result.broken += self.ledger.broken
        self.result.broken += [f"left behind: {each}" for each in held_below(self.folder)]
        self.result.tally += self.ledger.tally
        self.result.seconds = time.monotonic() - started
        return self.result

    # --- what there is ----------------------------------------------------------------------

    def _daemon(self, url: str) -> DaemonProcess:
        return DaemonProcess(
            self.folder / "daemon",
            caches={"local": url},
            arguments=[
                *(f"--page-bytes={PAGE_BYTES}", f"--frame-bytes={FRAME_BYTES}", "--memory=4MiB"),
                "--request-pages=4",  # Four readers then find room to read into at any time.
                f"--disk={self.slab}:{self.scenario.disk_bytes}",
                "--checkpoint-seconds=1",
                *("--scrub-bytes-per-second=16MiB", "--free-space-floor=0.01"),
                # A busy machine must not look like a slow disk: that would excuse a refetch.
                *("--disk-seconds=60", "--write-seconds=60", "--drain-seconds=5"),
            ],
        )

    def _ballast(self) -> list[PageId]:
        return [
            PageId(version(b"%d" % number, size=100 + number % 5000, cache="ballast"), 0)
            for number in range(self.scenario.ballast)
        ]

    @contextlib.contextmanager
    def _store(self) -> Iterator[Store]:
        settings = StoreSettings(
            (DiskSettings(self.slab, self.scenario.disk_bytes),), free_floor_ratio=0.01
        )
        with Store(settings, GEOMETRY, Metrics()) as store:
            _until(lambda: not store.recovering, "the store has recovered")
            yield store

    def _lay_ballast(self) -> None:
        with self._store() as store:
            for page in self._ballast():
                if not store.write(sealed(page)):
                    raise RuntimeError(f"{page.text} found no place on the new slab")

    def _check_ballast(self) -> None:
        """What lay on the slab before the first kill and was never touched, byte for byte."""
        pages = self._ballast()
        with self._store() as store:
            found = sum(read_back(store, page) for page in pages)
        self.result.tally["untouched pages found"] = found
        if self.scenario.keeps and self.ledger.tally["pages evicted for space"]:
            raise CampaignFailed("the disk was too small for so many kills: pages were evicted")
        if self.scenario.keeps and found < len(pages):
            self.result.broken.append(f"{len(pages) - found} pages that nobody touched are lost")

    @contextlib.contextmanager
    def _under_load(self, socket: Path) -> Iterator[None]:
        self.readers = [
            Reader(
                number, socket, self.models, self.ledger, self.lives,
                f"{self.seed} reader {number}", steadfast=number == 0,
            )
            for number in range(READERS)
        ]  # fmt: skip
        for reader in self.readers:
            reader.start()
        try:
            yield
        finally:
            for reader in self.readers:
                reader.stop()
                reader.cut()
            for reader in self.readers:
                reader.join()
            failures = [reader.failure for reader in self.readers if reader.failure is not None]
            self.result.broken += [f"a reader ended: {failure!r}" for failure in failures]

    def _defective(self) -> bool:
        return any(reader.failure is not None for reader in self.readers)

    # --- lives ------------------------------------------------------------------------------

    def _first_life(self, daemon: DaemonProcess) -> None:
        """Notes the files that a daemon has while it serves: none may be added to them."""
        started = time.monotonic()
        daemon.start()
        self._startup_seconds = time.monotonic() - started
        self._usual = files_below(self.folder)
        daemon.stop()

    def _check_files(self) -> None:
        """What a kill has left must be gone once the next daemon is ready."""
        for name in sorted(files_below(self.folder) - self._usual):
            self.result.broken.append(f"a file is left behind by a kill: {name}")

    def _one_life(self, daemon: DaemonProcess) -> None:
        """Starts the daemon, lets it live until some moment, and kills it."""
        self._harm()
        moment = self.chance.choice(("starting", "recovering", "serving", "serving", "stopping"))
        daemon.spawn()
        if moment == "starting":
            time.sleep(self.chance.random() * self._startup_seconds)
        else:
            self._until_ready(daemon)
            moment = self._live(daemon, moment)
        self.lives.ending()
        daemon.kill()
        for reader in self.readers:
            reader.cut()
        self.result.kills[moment] += 1

    def _until_ready(self, daemon: DaemonProcess) -> None:
        try:
            daemon.wait_ready()
        except (RuntimeError, TimeoutError) as error:
            raise CampaignFailed(f"somebody would have to look after it: {error}") from error
        self.lives.ready()
        self._copy = self.chance.randrange(2)
        self._check_files()

    def _live(self, daemon: DaemonProcess, moment: str) -> str:
        """Lives until the moment to be killed. Returns what the daemon was really doing."""
        lasting = self.chance.random()
        if moment == "recovering":
            time.sleep(lasting * 0.02)
            return self._seen_recovering(daemon)
        with self._watching(daemon) as recovered:
            if moment == "serving":
                recovered.wait(_SETTLE_SECONDS)
            time.sleep(lasting * 1.5)
        evicted = daemon.metric("racer_store_evicted_pages_total", reason="capacity")
        self.ledger.count("pages evicted for space", int(evicted))
        for reason in ("no_frames", "busy", "slow", "stuck", "unreadable", "failed"):
            passed = daemon.metric("racer_fallbacks_total", step="disk", reason=reason)
            self.ledger.count(f"reads that passed the disk by: {reason}", int(passed))
        if moment == "stopping":
            self.lives.ending()
            assert daemon.process is not None
            daemon.process.terminate()
            time.sleep(lasting * 0.2)
        return moment

    def _seen_recovering(self, daemon: DaemonProcess) -> str:
        """A read that is answered while recovery goes on, before and after; then the kill."""
        model = self.models[0]
        before = _recovery(daemon)
        with racer.Client(socket=daemon.socket("local")) as client:
            self.ledger.compare(model, 0, client.read(model.url, length=PAGE_BYTES))
        after = _recovery(daemon)
        if before is None or after is None:
            return "serving"
        self.ledger.count("reads answered during recovery")
        if (before["segments_done"], before["pages"]) != (after["segments_done"], after["pages"]):
            self.ledger.count("recoveries seen to advance")
        return "recovering"

    @contextlib.contextmanager
    def _watching(self, daemon: DaemonProcess) -> Iterator[threading.Event]:
        """Notes when recovery is over, beside the load; the event tells."""
        stop, recovered = threading.Event(), threading.Event()

        def watch() -> None:
            while not stop.wait(_WATCH_SECONDS):
                if _recovery(daemon) is None:
                    self.lives.recovered(READERS)
                    recovered.set()
                    return

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield recovered
        finally:
            stop.set()
            thread.join()

    def _harm(self) -> None:
        if self.scenario.harm == "checkpoints":
            damage.lose_checkpoints(self.slab)
            self.ledger.count("checkpoints lost", 2)
        elif self.scenario.harm == "rot":
            self.ledger.count("spots damaged", damage.rot(self.slab, self.chance, self._copy))

    # --- the end ----------------------------------------------------------------------------

    def _last_life(self, daemon: DaemonProcess, origin: CountingOrigin) -> None:
        """After the last kill: what was kept is served without the origin, what is gone is gone."""
        daemon.spawn()
        self._until_ready(daemon)
        _until(lambda: _recovery(daemon) is None, "recovery has ended")
        self.lives.recovered()
        self.result.tally["corrupt pages dropped"] += int(
            daemon.metric("racer_corrupt_pages_total", rung="disk")
        )
        descriptors = daemon.metric("racer_open_descriptors")
        with racer.Client(socket=daemon.socket("local")) as client:
            self._audit(client)
            self._read_kept(client, origin)
            for model in self.models:
                self.ledger.compare(model, 0, client.read(model.url))
        self._check_idle(daemon, descriptors)
        self.lives.ending()
        status = daemon.stop()
        if status != 0:
            self.result.broken.append(f"racerd ended with {status} when it was told to stop")
        left = files_below(self.folder / "daemon" / "run")
        self.result.broken += [
            f"a file is left behind: {name}" for name in left if not name.endswith("socket.lock")
        ]

    def _audit(self, client: racer.Client) -> None:
        auditor = Reader(0, Path(), self.models, self.ledger, self.lives, self.seed)
        for model in self.models:
            auditor.audit(client, model, self.lives.now)
        self.result.tally["pages promised"] = len(self.ledger.kept)

    def _read_kept(self, client: racer.Client, origin: CountingOrigin) -> None:
        """Reads each promised page alone and counts what the origin is asked for."""
        origin.requests.clear()
        for model in self.models:
            for page in sorted(self.ledger.kept_of(model)):
                start = page * PAGE_BYTES
                self.ledger.compare(model, start, client.read(model.url, start, PAGE_BYTES))
        asked = origin.requests["GET"]
        self.result.tally["origin requests for promised pages"] = asked
        if asked:
            self.result.broken.append(f"the origin was asked {asked} times for promised pages")

    def _check_idle(self, daemon: DaemonProcess, descriptors: float) -> None:
        def idle() -> bool:
            return daemon.metric("racer_connections") == 0 and daemon.metric("racer_flights") == 0

        _until(idle, "the clients are gone")
        try:
            _until(
                lambda: daemon.metric("racer_open_descriptors") <= descriptors,
                "descriptors are back to the start",
                seconds=10.0,
            )
        except CampaignFailed as failure:
            self.result.broken.append(str(failure))
        for budget in ("plaintext", "dirty"):
            if used := daemon.metric("racer_budget_used_bytes", budget=budget):
                self.result.broken.append(f"{used:.0f} bytes stay charged to the budget {budget}")


class CampaignFailed(Exception):
    """The campaign cannot go on: the daemon does not come up, or never gets where it should."""


def _recovery(daemon: DaemonProcess) -> dict[str, int] | None:
    """How far recovery is, of /readyz; None once it is over."""
    try:
        (disk,) = json.loads(daemon.get("/readyz"))["disks"]
    except (OSError, ValueError, KeyError):
        return {"segments_done": -1, "pages": -1}  # Not up yet, or just killed.
    return dict(disk["recovery"], pages=disk["pages"]) if disk["recovering"] else None


def _until(true: object, what: str, *, seconds: float = _SETTLE_SECONDS) -> None:
    assert callable(true)
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise CampaignFailed(f"never happened in {seconds:.0f} s: {what}")
        time.sleep(_WATCH_SECONDS)


# --- the command ----------------------------------------------------------------------------


def run_scenario(
    name: str, kills: int, seed: str, parent: Path, seconds: float = math.inf
) -> Result:
    """Runs one scenario in a folder of its own below `parent`, which is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=parent))
    try:
        campaign = Campaign(SCENARIOS[name], kills, f"{seed} {name}", folder, seconds)
        try:
            return campaign.run()
        except CampaignFailed as failure:
            campaign.result.broken += [str(failure), *campaign.ledger.broken]
            return campaign.result
    finally:
        shutil.rmtree(folder)


def shares(kills: int) -> dict[str, int]:
    """How many of `kills` each scenario gets: the first ones what cannot be divided."""
    each, more = divmod(kills, len(SCENARIOS))
    return {name: each + (number < more) for number, name in enumerate(SCENARIOS)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=200, help="in all (200)")
    parser.add_argument("--seed", type=int, default=None, help="random, and printed, by default")
    parser.add_argument("--scenario", choices=SCENARIOS, help="all kills in this one")
    parser.add_argument("--seconds", type=float, default=math.inf, help="at most, per scenario")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on a disk")


def run(arguments: argparse.Namespace) -> int:
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    counts = shares(arguments.kills)
    if arguments.scenario is not None:
        counts = {arguments.scenario: arguments.kills}
    print(f"seed {seed}", flush=True)
    results = []
    for name, kills in counts.items():
        print(f"  {name}: {kills} kills, {SCENARIOS[name].text} …", flush=True)
        results.append(run_scenario(name, kills, str(seed), arguments.folder, arguments.seconds))
        for broken in results[-1].broken:
            print(f"    BROKEN: {broken}", file=sys.stderr, flush=True)
    print(table(results))
    return 1 if any(result.broken for result in results) else 0


def table(results: list[Result]) -> str:
    """The figures in Markdown, a column for each scenario."""
    rows: dict[str, list[str]] = {"kills survived": []}
    moments = ("starting", "recovering", "serving", "stopping")
    names = dict.fromkeys(name for result in results for name in sorted(result.tally))
    for moment in moments:
        rows[f"… while {moment}"] = [f"{result.kills[moment]}" for result in results]
    for name in ("wrong bytes", *(name for name in names if name != "wrong bytes")):
        rows[name] = [f"{result.tally[name]:,}" for result in results]
    rows["kills survived"] = [f"{result.kills.total()}" for result in results]
    rows["promises broken"] = [f"{len(result.broken)}" for result in results]
    rows["seconds"] = [f"{result.seconds:.0f}" for result in results]
    lines = [
        f"| | {' | '.join(result.scenario for result in results)} |",
        f"| --- |{' ---: |' * len(results)}",
    ]
    return "\n".join(lines + [f"| {name} | {' | '.join(row)} |" for name, row in rows.items()])

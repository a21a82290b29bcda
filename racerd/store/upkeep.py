"""The upkeep of one disk: all that its own thread does.

Layer: store. The housekeeper's thread opens the slab and recovers it (`begin`), then writes what
waits: tombstones, notes, checkpoints, and tries a disk that is down (`tick`), and closes it
(`end`). Other threads read `mount`, which is replaced as a whole, and have things done by
`ask`, which waits a bounded time: a disk may hang.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from racerd.errors import IntegrityError
from racerd.store.device import DiskError
from racerd.store.housekeeper import Keeper, Work
from racerd.store.live import LiveSlab
from racerd.store.mount import Mount, Mounter
from racerd.store.notes import Selector
from racerd.store.settings import StoreSettings
from racerd.store.watch import DiskWatch
from racerd.telemetry import Metrics

log = logging.getLogger(__name__)

SCANNED_WORTH_A_CHECKPOINT = 256  # Pages that recovery had to find by reading their headers.


class Upkeep:
    """See the module. `mount` is None while the slab is not open.

    `on_open` is called whenever it was opened, before it is recovered.
    """

    def __init__(
        self, label: str, mounter: Mounter, watch: DiskWatch, metrics: Metrics, *,
        settings: StoreSettings, make_keeper: Callable[[str, Work], Keeper],
        on_open: Callable[[], None],
    ) -> None:  # fmt: skip
        self.mount: Mount | None = None
        self._label = label
        self._mounter = mounter
        self._watch = watch
        self._metrics = metrics
        self._settings = settings
        self._on_open = on_open
        self._keeper = make_keeper(f"store {label}", self)
        self._closing: LiveSlab | None = None  # Given up, but an operation on it is running.
        self._quotas: Mapping[str, int] = {}
        self._pins: tuple[Selector, ...] = ()
        self._pins_version = 0
        self._opened = threading.Event()  # Tried to: the slab may be closed all the same.
        self._locked: DiskError | None = None
        self._waited = False  # `wait_open` is over: it raises nothing any more.
        self._told = ""

    # What other threads call

    def start(self) -> None:
        """Starts the thread."""
        self._keeper.start()

    def wait_open(self) -> None:
        """Waits a bounded time for the slab to be open. Raises DiskError `slab_locked`.

        Any other failure leaves the disk down: the store works without it.
        """
        self._opened.wait(self._settings.wait_seconds_max)
        self._waited = True
        if self._locked is not None:
            raise self._locked

    def close(self) -> None:
        """Has the slab closed and ends the thread. Waits a bounded time for the disk."""
        if not self._keeper.stop(self._settings.wait_seconds_max):
            log.warning("%s does not answer: it is left as it is and recovered later", self._label)

    def ask(self, mount: Mount, call: Callable[[], object]) -> bool:
        """Runs `call` on the thread while `mount` is in use; False if it did not end in time."""

        def run() -> None:
            if self.mount is not mount:
                return
            try:
                call()
            except DiskError as error:
                log.warning("%s: %s; %s", self._label, error.message, error.hint)

        return self._keeper.ask(run, self._settings.wait_seconds_max)

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Slab bytes that each cache may take, also when the slab is opened again."""
        self._quotas = dict(quotas)
        mount = self.mount
        if mount is not None:
            self._apply_quotas(mount.live)

    def set_pins(self, pins: tuple[Selector, ...], version: int) -> bool:
        """See `Disk.set_pins`."""
        self._pins, self._pins_version = pins, version
        mount = self.mount
        if mount is None:
            return False
        live = mount.live
        with live.lock:
            live.engine.mark_pinned(pins)
        self.ask(mount, lambda: self._note_pins(live))
        return live.slab.notes.pins_version >= version

    # Opening and closing

    def begin(self) -> None:
        """Opens the slab and recovers it."""
        try:
            self._open()
        except Exception:
            # A defect, told by the keeper: until a probe opens the slab after all, nobody uses it.
            self._watch.start_down("opening the slab failed; the log says how")
            raise
        finally:
            self._opened.set()
        self._recover()

    def end(self) -> None:
        """Writes a last checkpoint and closes the slab."""
        mount = self.mount
        if mount is None:
            return
        if self._watch.readable:
            mount.checkpoints.write()
        self._close(mount.live)

    def _open(self) -> None:
        try:
            mount = self._mounter.mount(self._keeper.nudge)
        except (DiskError, IntegrityError) as error:
            self._not_opened(error)
            return
        self._locked = None
        self._told = ""
        self.mount = mount
        self._apply_quotas(mount.live)  # After it can be seen: a change meanwhile applies itself.
        self._on_open()

    def _not_opened(self, error: DiskError | IntegrityError) -> None:
        if isinstance(error, DiskError):
            self._watch.count(error)
            self._locked = error if error.code == "slab_locked" else None
        self._watch.start_down(error.message)
        self._watch.publish()
        if self._locked is not None and not self._waited:
            return  # `wait_open` raises it, and who started the store tells it.
        if error.message != self._told:  # Each probe may meet it again.
            self._told = error.message
            log.error("%s is not used: %s; %s", self._label, error.message, error.hint)

    def _apply_quotas(self, live: LiveSlab) -> None:
        with live.lock:
            live.engine.quotas = self._quotas

    def _close(self, live: LiveSlab) -> bool:
        """Closes the device unless something is still running on it. Returns whether it did."""
        self.mount = None
        self._closing = live
        if not self._watch.shut():
            log.warning("%s stays open: an operation on it does not return", self._label)
            return False
        self._closing = None
        try:
            live.slab.device.close()
        except DiskError as error:
            self._watch.count(error)
            log.warning("%s: %s; %s", self._label, error.message, error.hint)
        return True

    # Recovery

    def _recover(self) -> None:
        mount = self.mount
        if mount is None:
            return
        live = mount.live
        started = self._watch.now()
        try:
            mount.recovery.run(mount.checkpoints.read_latest(), self._breathe)
            if self._keeper.stopping:
                return
            live.tombstones.bury_all(mount.recovery.losers)
            self._after_recovery(mount)
        except DiskError as error:
            self._watch.count(error)
            self._watch.start_down(error.message)
            log.warning("%s: recovery stopped: %s", self._label, error.message)
            self._close(live)
            return
        self._tell_recovery(live, self._watch.now() - started)

    def _breathe(self) -> bool:
        """Between steps of recovery: does what others ask for; True to stop."""
        self._keeper.run_tasks()
        return self._keeper.stopping

    def _after_recovery(self, mount: Mount) -> None:
        live, slab = mount.live, mount.live.slab
        if slab.notes.pins_version < self._pins_version:  # Pins changed while the disk was away.
            self._note_pins(live)
        with live.lock:
            live.engine.mark_pinned(slab.notes.pins)
        for segment in mount.recovery.headless:
            mount.writer.renew_header(segment)
        self._settle(live)
        if slab.before != slab.geometry:
            mount.checkpoints.forget_areas()
            mount.checkpoints.write()
            slab.device.truncate(slab.geometry.capacity_bytes)
        # Who is killed again before the next one is due would scan all that once more.
        scanned = mount.recovery.progress.pages_from_scan
        mount.checkpoints.schedule(now=scanned >= SCANNED_WORTH_A_CHECKPOINT)

    def _settle(self, live: LiveSlab) -> None:
        """Ends recovery for good once its tombstones are written: no eviction is noted any more.

        Raises DiskError; the next tick tries again, and no page is kept until then.
        """
        if not live.tombstones.bury():
            return
        notes = live.slab.notes
        if notes.fences:
            with self._watch.operation():
                live.slab.write_notes(replace(notes, sequence=notes.sequence + 1, fences=()))
        live.settled = True

    def _tell_recovery(self, live: LiveSlab, seconds: float) -> None:
        progress = live.progress
        self._metrics.store_recovery_seconds.labels(self._label).set(seconds)
        if len(live.engine.index):
            log.info(
                "%s: recovered in %.1f s: pages from the checkpoint %d, by scanning %d",
                self._label, seconds, progress.pages_from_checkpoint, progress.pages_from_scan,
            )  # fmt: skip
        if progress.segments_unreadable:
            log.warning(
                "%s: %d segments could not be read and are not used until the next start",
                self._label, progress.segments_unreadable,
            )  # fmt: skip

    # Chores

    def tick(self) -> None:
        """Once a second and when something was dropped."""
        if self._watch.probe_due():
            self._probe()
        self._watch.publish()
        mount = self.mount
        if mount is None or not self._watch.writable:
            return
        live = mount.live
        try:
            mount.writer.keep_floor()
            if live.progress.done and not live.settled:
                self._settle(live)
        except DiskError as error:
            log.warning("%s: %s", self._label, error.message)
        if live.tombstones:
            live.tombstones.bury()
        if mount.checkpoints.due:
            mount.checkpoints.write()

    def _probe(self) -> None:
        """Tries a disk that is down: its device as it is, or opened anew if it was lost."""
        mount = self.mount
        if mount is not None:
            try:
                with self._watch.operation():
                    mount.live.slab.device.prove_writes()
            except DiskError as error:
                self._watch.probed(error.message)
                if error.gone:
                    self._close(mount.live)
            else:
                self._watch.probed(None)
            return
        if self._closing is not None and not self._close(self._closing):
            return
        self._watch.unshut()
        self._open()
        if self.mount is not None:
            self._watch.probed(None)
            self._recover()

    def make_durable(self, live: LiveSlab, fence: Selector | None) -> None:
        """Tombstones, and a note for what recovery may still find (`fence`); then a flush.

        By `ask` only. Raises DiskError.
        """
        live.tombstones.bury()
        notes = live.slab.notes
        if fence is not None and not live.progress.done:
            fenced = replace(notes, sequence=notes.sequence + 1, fences=(*notes.fences, fence))
            if fenced.fits:
                with self._watch.operation():
                    live.slab.write_notes(fenced)
                return
            log.warning("%s: too many evictions during recovery to note this one", self._label)
        with self._watch.operation():
            live.slab.device.flush()

    def _note_pins(self, live: LiveSlab) -> None:
        notes = live.slab.notes
        changed = replace(
            notes, sequence=notes.sequence + 1, pins=self._pins, pins_version=self._pins_version
        )
        with self._watch.operation():
            live.slab.write_notes(changed)

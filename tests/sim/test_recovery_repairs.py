"""What recovery mends by itself, so that two faults with a start between them cost no more than
two faults far apart."""

from __future__ import annotations

import pytest

from racerd.ids import PageId
from racerd.store import Store, upkeep
from racerd.store.geometry import SUPERBLOCK_OFFSETS
from racerd.store.housekeeper import Work
from racerd.store.record import stamp_crc
from racerd.store.superblock import SEGMENT_MAGIC
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB
from tests.sim.store_driver import InlineKeeper
from tests.sim.test_store_recovery import PAGES, PATH, SMALL, Rig, wipe_checkpoints
from tests.support.store_pages import GEOMETRY, counted, read_back, sealed, settings, version


@pytest.mark.parametrize("first", [0, 1])
def test_one_damaged_superblock_after_the_other_costs_nothing(first: int) -> None:
    """R23, F37: the copy that is damaged is renewed at the next start."""
    rig = Rig()
    rig.filled().close()
    before = [bytes(rig.medium.now[at : at + 512]) for at in SUPERBLOCK_OFFSETS]
    for number in (first, 1 - first, first):
        rig.medium.punch(SUPERBLOCK_OFFSETS[number], 4096)
        store = rig.start()
        assert rig.found(store) == PAGES
        store.close()
        assert [bytes(rig.medium.now[at : at + 512]) for at in SUPERBLOCK_OFFSETS] == before


def test_a_full_medium_does_not_stop_the_repair_from_being_tried_later() -> None:
    """F1, R23: the slab serves with one copy as long as nothing can be written."""
    rig = Rig()
    rig.filled().close()
    rig.medium.rot(SUPERBLOCK_OFFSETS[0] + 30)
    rig.faults.no_space = True
    assert rig.found(rig.start()) == PAGES
    rig.faults.no_space = False
    rig.start().close()
    rig.medium.rot(SUPERBLOCK_OFFSETS[1] + 30)
    assert rig.found(rig.start()) == PAGES


@pytest.mark.parametrize("number", [0, 1])
def test_a_slab_that_a_newer_racerd_began_to_take_over_is_left_alone(number: int) -> None:
    """F35: one whole copy of a newer format is enough; the older copy is no excuse to write."""
    rig = Rig()
    rig.filled().close()
    sector = memoryview(rig.medium.now)[SUPERBLOCK_OFFSETS[number] :][:512]
    sector[16] = 3
    stamp_crc(sector)
    sector.release()
    before = bytes(rig.medium.now)
    store = rig.start()
    assert rig.found(store) == [] and "newer format" in store.explain(PAGES[0])
    store.close()
    assert rig.medium.now == before


def test_a_rotten_version_number_is_rot_and_not_a_newer_format() -> None:
    """R23: a flipped bit costs nothing, wherever it is."""
    rig = Rig()
    rig.filled().close()
    rig.medium.now[SUPERBLOCK_OFFSETS[0] + 16] ^= 4
    assert rig.found(rig.start()) == PAGES


@pytest.mark.parametrize("worth_it", [True, False])
def test_whoever_is_killed_again_and_again_does_not_scan_the_same_pages_twice(
    worth_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R23, F37: recovery that scanned much is followed by a checkpoint; a few pages are not."""
    count = len(PAGES)
    monkeypatch.setattr(upkeep, "SCANNED_WORTH_A_CHECKPOINT", count if worth_it else count + 1)
    rig = Rig()
    wipe_checkpoints(rig, rig.filled())
    store = rig.start()
    assert store.disks[0].progress.pages_from_scan == count
    store.disks[0].upkeep.tick()
    store = rig.start()  # Killed: nothing was closed.
    progress = store.disks[0].progress
    found = (progress.pages_from_checkpoint, progress.pages_from_scan)
    assert found == ((count, 0) if worth_it else (0, count))
    assert rig.found(store) == PAGES


def test_the_progress_of_recovery_is_in_the_metrics_while_it_runs() -> None:
    """R23: how many segments and pages, and that it is going on."""
    seen: list[tuple[float, float, float]] = []

    def look() -> None:
        seen.append(
            (
                counted(rig.metrics, "racer_store_recovering"),
                counted(rig.metrics, "racer_store_recovery_segments", what="done"),
                counted(rig.metrics, "racer_store_recovery_pages", source="scan"),
            )
        )

    class Watched(Rig):
        def keeper(self, name: str, work: Work) -> InlineKeeper:
            made = super().keeper(name, work)
            made.between_steps = look
            return made

    rig = Watched()
    wipe_checkpoints(rig, rig.filled())
    seen.clear()
    store = rig.start()
    done = [segments for _, segments, _ in seen]
    pages = [found for _, _, found in seen]
    assert all(recovering for recovering, _, _ in seen)
    assert done == sorted(done) and len(set(done)) > 5
    assert pages == sorted(pages) and len(set(pages)) > 3
    assert counted(rig.metrics, "racer_store_recovering") == 0
    total = counted(rig.metrics, "racer_store_recovery_segments", what="total")
    assert counted(rig.metrics, "racer_store_recovery_segments", what="done") == total
    assert store.disks[0].report().troubles == ()


def test_what_was_dropped_after_the_checkpoint_is_known_to_be_gone_when_it_is_looked_at() -> None:
    """F29: after a kill the index is that of the checkpoint; a tombstone on the medium is the later
    word, and whoever asks for certainty gets it without reading a page."""
    rig = Rig()
    store = rig.filled()
    store.checkpoint()
    store.evict_object(SMALL.object_id)
    gone = PageId(SMALL, 0)
    store = rig.start()
    assert store.contains(gone) and store.unproven(gone), "the checkpoint knows no better"
    before = rig.medium.writes
    store.confirm(gone)
    store.disks[0].upkeep.tick()
    assert rig.medium.writes == before, "it has its tombstone"
    assert not store.contains(gone) and not store.unproven(gone)
    assert counted(rig.metrics, "racer_corrupt_pages_total") == 0, "a tombstone is no damage"
    assert counted(rig.metrics, "racer_store_reads_total") == 0
    for page in PAGES[:-1]:
        store.confirm(page)
        assert store.contains(page) and not store.unproven(page)
    assert rig.found(store) == PAGES[:-1]


def test_what_was_read_scanned_or_written_needs_no_further_look() -> None:
    """A record's header is read once after a start; doubts are never saved in a checkpoint."""
    rig = Rig()
    store = rig.filled(PAGES[:3])
    assert not any(store.unproven(page) for page in PAGES[:3]), "written in this life"
    store.close()
    store = rig.start()
    assert all(store.unproven(page) for page in PAGES[:3])
    assert rig.found(store, PAGES[:1]) == PAGES[:1]
    assert [store.unproven(page) for page in PAGES[:3]] == [False, True, True]
    device = store.disks[0]._live.slab.device
    before = device.operations
    store.confirm(PAGES[0])
    assert device.operations == before
    wipe_checkpoints(rig, store)
    store = rig.start()
    assert not any(store.unproven(page) for page in PAGES[:3]), "scanned"


def test_a_look_at_a_damaged_or_failing_record_is_no_confirmation() -> None:
    """R22, F18: damage is dropped and told; an error of the disk leaves the page in doubt."""
    rig = Rig()
    store = rig.filled(PAGES[:2])
    store.close()
    store = rig.start()
    rig.faults.read_errors = 1.0
    store.confirm(PAGES[0])
    assert store.contains(PAGES[0]) and store.unproven(PAGES[0])
    rig.faults.read_errors = 0.0
    found = store.disks[0]._live.engine.start_check(PAGES[1])
    store.disks[0]._live.engine.end_read(found)
    rig.medium.rot(found.offset + 40)
    store.confirm(PAGES[1])
    assert not store.contains(PAGES[1])
    assert "its copy was damaged (header_crc)" in store.explain(PAGES[1])
    store.confirm(PAGES[0])
    assert rig.found(store, PAGES[:2]) == PAGES[:1]


@pytest.mark.parametrize("between", [0, 25])
@pytest.mark.parametrize("how", ["evicted", "dropped"])
def test_a_page_that_was_dropped_and_kept_anew_after_the_checkpoint_is_found(
    how: str, between: int
) -> None:
    """F29, R23: the checkpoint tells of the record that has a tombstone by now, the scan of the one
    that was written later, in the same segment or in another: the one that is there counts."""
    rig = Rig(8 * MIB)
    store = rig.filled(PAGES[:5])
    store.checkpoint()
    page = PAGES[3]
    if how == "evicted":
        store.evict_object(page.version.object_id)
    else:
        store.drop(page, "corrupt_tag")
        store.disks[0].upkeep.tick()
    others = [PageId(version(b"other"), number) for number in range(between)]
    for each in (*others, page):
        assert store.write(sealed(each))
    store = rig.start()
    assert rig.found(store, [page, *others]) == [page, *others]
    store.close()
    assert rig.found(rig.start(), [page]) == [page]


def test_a_copy_is_durable_before_its_original_dies() -> None:
    """R23: a power loss that keeps the new header of an emptied segment, and nothing else that was
    not flushed, costs no page that was durable before eviction moved it."""
    rig = Rig(2 * MIB)
    hot = PageId(SMALL, 0)
    store = rig.filled([hot])
    store.checkpoint()
    engine = store.disks[0]._live.engine

    def place() -> int:
        found = engine.start_check(hot)
        engine.end_read(found)
        return found.offset

    first = place()
    for number in range(200):
        if place() != first:
            break
        assert rig.found(store, [hot])
        assert store.write(sealed(PageId(version(b"flood"), number)))
    assert place() != first, "it was never moved"
    headers = [write for write in rig.medium.unflushed if write[1].startswith(SEGMENT_MAGIC)]
    rig.medium.unflushed = headers
    rig.medium.flush()
    rig.medium.lose_power()
    assert rig.found(rig.start(), [hot]) == [hot]


def test_pages_of_the_segment_that_was_being_filled_are_read_before_it_is_scanned() -> None:
    """R23, F29: the checkpoint's word on it is enough; nothing is taken for damaged and dropped."""
    asked: list[bool] = []

    class Impatient(Rig):
        def keeper(self, name: str, work: Work) -> InlineKeeper:
            made = super().keeper(name, work)
            made.between_steps = lambda: asked.extend(self.look())
            return made

        def look(self) -> list[bool]:
            if self.store is None or not self.store.contains(PAGES[6]):
                return []
            self.store.confirm(PAGES[5])
            return [read_back(self.store, PAGES[6]), self.store.contains(PAGES[5])]

        store: Store | None = None

    rig = Impatient()
    store = rig.filled(PAGES[:7])
    store.checkpoint()
    for page in PAGES[7:]:
        assert store.write(sealed(page))
    rig.metrics = Metrics()
    rig.store = Store(
        settings(PATH, capacity=rig.medium.size), GEOMETRY, rig.metrics,
        open_device=lambda _: rig.device(), clock=rig.clock, make_keeper=rig.keeper,
    )  # fmt: skip
    rig.store.__enter__()
    assert asked and all(asked)
    assert counted(rig.metrics, "racer_corrupt_pages_total") == 0
    assert rig.found(rig.store) == PAGES


@pytest.mark.parametrize("between", [0, 25])
def test_of_two_records_of_a_page_the_later_one_counts(between: int) -> None:
    """R22, F37: the first one was torn by a crash, its tombstone never written, and the page
    kept anew, in the same segment or in another: a second crash does not cost it."""
    rig = Rig()
    store = rig.filled(PAGES[:3])
    torn = store.disks[0]._live.engine.start_check(PAGES[2])
    store.disks[0]._live.engine.end_read(torn)
    rig.medium.punch(torn.offset + 16 * KIB, 4 * KIB)
    assert not read_back(store, PAGES[2])
    others = [PageId(version(b"other"), number) for number in range(between)]
    for page in (*others, PAGES[2]):
        assert store.write(sealed(page))
    store = rig.start()  # Killed before the tombstone was written.
    assert rig.found(store, [PAGES[2], *others]) == [PAGES[2], *others]


def test_what_was_evicted_during_recovery_is_not_kept_anew_before_recovery_is_over() -> None:
    """F29, F37: a crash would leave the note of the eviction, which drops the newer record, too;
    and a page that is still to be found would be there twice. It is kept when all is settled."""
    results: list[bool] = []

    class Busy(Rig):
        def keeper(self, name: str, work: Work) -> InlineKeeper:
            made = super().keeper(name, work)
            made.between_steps = self.evict_and_write
            return made

        def evict_and_write(self) -> None:
            if self.store is not None:
                self.store.evict_object(SMALL.object_id)
                results.append(self.store.write(sealed(PageId(SMALL, 0))))

        store: Store | None = None

    rig = Busy()
    wipe_checkpoints(rig, rig.filled())
    rig.metrics = Metrics()
    rig.store = Store(
        settings(PATH, capacity=rig.medium.size), GEOMETRY, rig.metrics,
        open_device=lambda _: rig.device(), clock=rig.clock, make_keeper=rig.keeper,
    )  # fmt: skip
    rig.store.__enter__()
    assert results and not any(results)
    refused = counted(rig.metrics, "racer_store_writes_total", result="recovering")
    assert refused > 0 and rig.store.disks[0].notes.fences == ()
    assert rig.found(rig.store) == PAGES[:-1]
    assert rig.store.write(sealed(PageId(SMALL, 0)))
    rig.store = None
    assert rig.found(rig.start()) == PAGES


def test_evictions_that_cannot_be_noted_as_done_keep_pages_out_until_they_are() -> None:
    """F18, F29: a disk that fails at the end of recovery is tried again at every tick."""
    rig = Rig()
    store = rig.filled()
    store.evict_object(SMALL.object_id)
    live = store.disks[0]._live
    live.settled = False
    rig.faults.write_errors = 1.0
    store.disks[0].drop(PAGES[0])
    store.disks[0].upkeep.tick()
    assert not live.settled and not store.write(sealed(PageId(SMALL, 0)))
    rig.faults.write_errors = 0.0
    rig.clock.sleep(60.0)
    store.disks[0].upkeep.tick()
    assert live.settled and store.write(sealed(PageId(SMALL, 0)))

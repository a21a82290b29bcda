"""What recovery mends by itself, so that two faults with a start between them cost no more than
two faults far apart."""

from __future__ import annotations

import pytest

from racerd.store import disk
from racerd.store.geometry import SUPERBLOCK_OFFSETS
from racerd.store.housekeeper import Work
from racerd.store.record import stamp_crc
from tests.sim.store_driver import InlineKeeper
from tests.sim.test_store_recovery import PAGES, Rig, wipe_checkpoints
from tests.support.store_pages import counted


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
    monkeypatch.setattr(disk, "SCANNED_WORTH_A_CHECKPOINT", count if worth_it else count + 1)
    rig = Rig()
    wipe_checkpoints(rig, rig.filled())
    store = rig.start()
    assert store.disks[0].progress.pages_from_scan == count
    store.disks[0].tick()
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

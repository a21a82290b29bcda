"""Every fault of a disk is told: a metric with a reason, `explain` and /debug in plain words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from racerd.ids import PageId
from racerd.store import Store
from racerd.store import fates as fates_module
from racerd.store.admission import OthersAtSecondSight
from racerd.store.device import Space
from racerd.store.fates import Fates
from racerd.store.health import DiskState
from racerd.store.index import PageIndex, hash_of
from racerd.store.troubles import floor_reason
from racerd.store.writer import FLOOR_QUIET_SECONDS
from racerd.telemetry import Metrics
from racerd.units import MIB
from tests.sim.store_driver import Clock, InlineKeeper
from tests.sim.test_store_faults import PAGES, RECORD, Rig, fill, found, state
from tests.support.store_pages import GEOMETRY, counted, read_back, sealed, version

NEW = PageId(version(b"new"), 0)


def told(store: Store) -> str:
    """What /debug/disks says is wrong."""
    (report,) = store.reports()
    return "; ".join(report.troubles)


def test_a_disk_that_is_well_has_nothing_to_tell() -> None:
    rig = Rig()
    store = rig.start()
    fill(store)
    assert told(store) == ""
    assert store.explain(PAGES[0]) == "on disk /faulty/0"
    assert store.explain(NEW) == "not on disk: never kept, or gone for longer than is remembered"


def test_an_unstable_disk() -> None:
    """F18, F22."""
    rig = Rig()
    store = rig.start()
    fill(store)
    rig.fault.read_only = True
    for number in range(3):
        assert not store.write(sealed(PageId(version(b"x"), number)))
    rig.wait(store, 1.0)
    assert state(store) is DiskState.UNSTABLE
    assert counted(rig.metrics, "racer_store_state", state="unstable") == 1
    assert counted(rig.metrics, "racer_store_writes_total", result="io_error") == 3
    assert "unstable: write of slab /faulty/0 failed" in told(store)
    assert "EROFS" in told(store) and "takes no new pages" in told(store)
    assert "the disk failed to write it" in store.explain(PageId(version(b"x"), 1))
    assert not store.write(sealed(NEW))
    assert counted(rig.metrics, "racer_store_writes_total", result="down") == 1
    assert store.explain(NEW) == "not on disk: not kept: no disk took writes, 0 s ago"


def test_a_disk_that_is_down() -> None:
    """F17, F18."""
    rig = Rig()
    store = rig.start()
    fill(store)
    rig.fault.vanished = True
    assert found(store) == []
    rig.wait(store, 0.1)
    assert counted(rig.metrics, "racer_store_state", state="down") == 1
    assert counted(rig.metrics, "racer_store_device_errors_total", errno="ENODEV") > 0
    assert "down: read of slab /faulty/0 failed" in told(store)
    assert "reads pass it by" in told(store)
    assert "is down: read of slab /faulty/0 failed" in store.explain(PAGES[0])


def test_recovery() -> None:
    """R23: how far it is, and that what was found is served."""
    rig = Rig()
    store = rig.start()
    fill(store)
    seen: list[tuple[str, str, float]] = []

    class Watched(InlineKeeper):
        def run_tasks(self) -> None:
            metric = counted(rig.metrics, "racer_store_recovering")
            seen.append((told(again), again.explain(NEW), metric))

    rig.metrics = Metrics()
    again = Store(
        rig.settings, GEOMETRY, rig.metrics, open_device=rig.open, clock=rig.clock,
        make_keeper=Watched,
    )  # fmt: skip
    again.__enter__()
    middle = seen[len(seen) // 2]
    assert "recovering (" in middle[0] and "segments; what is found is served" in middle[0]
    assert middle[1] == "not found yet: the store is still being recovered"
    assert middle[2] == 1 and counted(rig.metrics, "racer_store_recovering") == 0
    assert told(again) == ""


def test_a_medium_without_space() -> None:
    """F1."""
    rig = Rig()
    store = rig.start()
    fill(store)
    rig.fault.no_space = True
    assert not store.write(sealed(NEW))
    assert counted(rig.metrics, "racer_store_writes_total", result="disk_full") == 1
    assert counted(rig.metrics, "racer_store_device_errors_total", errno="ENOSPC") > 0
    assert "the medium is full: nothing is written for 10 s" in told(store)
    assert "the medium is full" in store.explain(NEW)
    rig.fault.no_space = False
    rig.wait(store, 11.0)
    assert told(store) == ""


def test_the_floor_of_free_space(caplog: pytest.LogCaptureFixture) -> None:
    """F23: a slab that may not grow is no fault, and is told; in the log once an incident."""
    rig = Rig(free_floor_ratio=0.15)
    rig.space = Space(free=500 * MIB, total=1000 * MIB, own=0)
    store = rig.start()
    fill(store)
    rig.devices[-1]._space = Space(free=150 * MIB, total=1000 * MIB, own=0)  # type: ignore[attr-defined]
    rig.wait(store, 1.0)
    assert counted(rig.metrics, "racer_store_at_floor") == 1
    assert "at its floor of free space: the slab does not grow" in told(store)
    rig.devices[-1]._space = rig.space  # type: ignore[attr-defined]
    rig.wait(store, 1.0)
    assert counted(rig.metrics, "racer_store_at_floor") == 0 and told(store) == ""
    for pause, said in ((1.0, 1), (FLOOR_QUIET_SECONDS, 2)):
        rig.wait(store, pause)
        # Longer than it is quiet for: still one incident.
        rig.devices[-1]._space = Space(free=150 * MIB, total=1000 * MIB, own=0)  # type: ignore[attr-defined]
        for _ in range(3):
            rig.wait(store, FLOOR_QUIET_SECONDS / 2)
        rig.devices[-1]._space = rig.space  # type: ignore[attr-defined]
        rig.wait(store, 1.0)
        assert caplog.text.count("15% of its file system free") == said
    assert "would leave less than 15%" in caplog.text
    assert "new pages take the place of old ones" in caplog.text


def test_a_slab_that_never_had_room(caplog: pytest.LogCaptureFixture) -> None:
    """F23: not as if old pages made room for new ones; and when it has some, that is said, too."""
    rig = Rig(free_floor_ratio=0.15)
    rig.space = Space(free=150 * MIB, total=1000 * MIB, own=0)
    store = rig.start()
    rig.wait(store, 1.0)
    assert not store.write(sealed(NEW))
    assert "the slab has no room, no pages are kept on it" in told(store)
    assert "the slab has no room, no pages are kept on it" in caplog.text
    rig.devices[-1]._space = Space(free=500 * MIB, total=1000 * MIB, own=0)  # type: ignore[attr-defined]
    rig.wait(store, 1.0)
    assert store.write(sealed(NEW))
    rig.devices[-1]._space = rig.space  # type: ignore[attr-defined]
    rig.wait(store, 1.0)
    assert "new pages take the place of old ones" in caplog.text


def test_why_a_slab_does_not_grow() -> None:
    assert "no room for another 256 MiB" in floor_reason(0.0, 256 * MIB)
    assert "256 MiB would leave less than 0.5% of its file system free" in floor_reason(
        0.005, 256 * MIB
    )
    assert "less than 15% of its file system is free" in floor_reason(0.15, 0)


def test_a_quota() -> None:
    """F9, F41."""
    rig = Rig(quotas={"models": 5 * RECORD})
    store = rig.start()
    fill(store, PAGES[:3])
    assert told(store) == "", "there is room for a further page"
    fill(store, PAGES[3:6])
    assert counted(rig.metrics, "racer_store_evicted_pages_total", reason="quota") == 1
    assert "the cache models is at its quota, 340 KiB here" in told(store)
    assert store.explain(PAGES[0]).startswith("not on disk: evicted because its cache reached its")
    store.set_quotas({"models": RECORD - 1})
    assert not store.write(sealed(NEW))
    assert counted(rig.metrics, "racer_store_writes_total", result="quota") == 1
    assert "its cache is at its quota" in store.explain(NEW)


def test_a_write_budget_that_is_spent() -> None:
    rig = Rig(write_bytes_per_day=10 * RECORD)
    store = rig.start()
    assert [store.write(sealed(page)) for page in PAGES[:11]] == [True] * 10 + [False]
    assert counted(rig.metrics, "racer_store_writes_total", result="write_budget") == 1
    assert counted(rig.metrics, "racer_store_write_budget_left_bytes") == 0
    assert "what may be written in a day is spent" in told(store)
    assert "what may be written to the disk in a day is spent" in store.explain(PAGES[10])
    rig.clock.sleep(86_400.0)
    assert counted(rig.metrics, "racer_store_write_budget_left_bytes") == 10 * RECORD
    assert told(store) == ""


def test_an_eviction_for_space() -> None:
    """F1: also which pages, and when."""
    rig = Rig(size=2 * MIB)
    store = rig.start()
    pages = [PageId(version(b"flood"), number) for number in range(60)]
    fill(store, pages)
    gone = [page for page in pages if not store.contains(page)]
    assert counted(rig.metrics, "racer_store_evicted_pages_total", reason="capacity") == len(gone)
    rig.clock.sleep(7.0)
    told_of = {store.explain(page) for page in gone}
    assert gone and told_of == {"not on disk: evicted to make room for newer pages, 7 s ago"}


def test_an_eviction_on_request() -> None:
    rig = Rig()
    store = rig.start()
    fill(store)
    store.evict_prefix("models", "bucket", b"")
    assert counted(rig.metrics, "racer_store_evicted_pages_total", reason="asked") == 20
    assert {store.explain(page) for page in PAGES} == {"not on disk: evicted on request, 0 s ago"}
    assert store.write(sealed(PAGES[0])) and store.explain(PAGES[0]) == "on disk /faulty/0"


@pytest.mark.parametrize("by", ["reader", "scrubber", "opener"])
def test_a_damaged_page(by: str) -> None:
    """R22, L39: by whom it is found out, it is counted, dropped and told alike."""
    rig = Rig()
    store = rig.start()
    fill(store)
    if by == "opener":  # The tag did not verify: only who has the key can tell.
        store.drop(PAGES[0], "corrupt_tag")
        name, reason = "racer_store_evicted_pages_total", "corrupt_tag"
    else:
        engine = store.disks[0]._live.engine
        rotten = engine.start_read(PAGES[0])
        engine.end_read(rotten)
        rig.media[rig.paths[0]].rot(rotten.offset + 40 * 1024)
        name, reason = "racer_corrupt_pages_total", "frame_crc"
        if by == "reader":
            assert not read_back(store, PAGES[0])
        while by == "scrubber" and store.disks[0].scrub_next() is not None:
            pass
    assert counted(rig.metrics, name, reason=reason) == 1
    assert store.explain(PAGES[0]) == (
        f"not on disk: dropped: its copy was damaged ({reason}), 0 s ago"
    )


def test_a_key_that_was_removed() -> None:
    rig = Rig()
    store = rig.start()
    fill(store, PAGES[:1])
    store.drop(PAGES[0], "key_retired")
    assert counted(rig.metrics, "racer_store_evicted_pages_total", reason="key_retired") == 1
    assert "the key that it was sealed with was removed" in store.explain(PAGES[0])


def test_a_page_that_cannot_be_read() -> None:
    """F5, F18."""
    rig = Rig()
    store = rig.start()
    fill(store, PAGES[:2])
    rig.fault.read_errors = 1.0
    assert found(store, PAGES[:1]) == found(store, PAGES[:1]) == []
    rig.fault.read_errors = 0.0
    assert counted(rig.metrics, "racer_store_reads_total", result="io_error") == 2
    assert counted(rig.metrics, "racer_store_evicted_pages_total", reason="unreadable") == 1
    assert "the disk failed twice to read it" in store.explain(PAGES[0])


def test_a_page_of_another_node_seen_for_the_first_time() -> None:
    rig = Rig()
    store = rig.start(admission=OthersAtSecondSight(lambda _: False))
    assert not store.write(sealed(NEW))
    assert "another node's page, seen for the first time" in store.explain(NEW)


def test_every_result_of_a_write_has_a_sentence() -> None:
    """The results that docs/store.md names are those that `explain` has words for."""
    table = Path("docs/store.md").read_text().partition("| result | meaning |")[2]
    rows = [line for line in table.partition("\n\n")[0].splitlines() if line.startswith("| ")]
    results = {name.strip() for row in rows[1:] for name in row.split("|")[1].split(",")}
    assert len(results) == 14
    told_of = {result for result in results if fates_module.refusal(result) is not None}
    assert results - told_of == {"kept", "present", "in_flight"}


def test_fates_are_found_by_page_and_by_row() -> None:
    """The hash of a page is the same, one by one and many at once; memory does not grow."""
    clock = Clock()
    fates = Fates(clock)
    index = PageIndex(1)
    pages = [PageId(version(b"k", etag=f'"{number}"'), number * 7) for number in range(500)]
    rows = np.array(
        [index.add(page, segment=0, block=1, length=1, flags=0, pinned=False) for page in pages]
    )
    assert index.hashes_of(rows).tolist() == [hash_of(page) for page in pages]
    fates.note_all(index.hashes_of(rows), "evicted")
    clock.sleep(3.0)
    fates.note(pages[3], "dropped")
    assert fates.find(pages[3]) == ("dropped", 0.0)
    assert fates.find(pages[4]) == ("evicted", 3.0)
    assert fates.find(NEW) is None
    remembered = [fates.find(page) for page in pages].count(("evicted", 3.0))
    assert remembered > 490, "a few share a slot with a later one"

"""The slab store: sealed pages on disk. Synchronous; knows no event loop and no wall clock.

    store       the door: several disks, a page placed by hash
    disk        one slab with threads, a clock and a health; writer, housekeeper, tombstones, watch
                and live are its parts
    engine      what is where, what goes next, what is given up; made of index, columns, segments
    geometry    where things lie on a slab
    record      a page on a slab; record_v2, record_v1, codec, superblock and notes are the formats
    loan        a record that somebody else reads from the slab
    slab, record_io, checkpoint, recovery, device, buffers      what touches the medium
    health, admission, budget, scrub, settings                  policies

docs/store.md says how it behaves, docs/store-format.md what lies on the disk.
"""

from racerd.store.loan import NotLent, RecordLoan
from racerd.store.notes import Selector
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.store.store import Store

__all__ = ["DiskSettings", "NotLent", "RecordLoan", "Selector", "Store", "StoreSettings"]

"""The slab store: sealed pages on disk. Synchronous; knows no event loop and no wall clock.

    store       the door: several disks, a page placed by hash
    disk        one slab with threads, a clock and a health; upkeep is what its own thread does
    mount       an open slab, and who works on it: reader, writer, recovery, checkpoint_writer
    engine      what is where, what goes next, what is given up; made of ledger, eviction, segments

docs/store.md says how it behaves and ends with a map of all modules, docs/store-format.md says what
lies on the disk.
"""

from racerd.store.loan import NotLent, RecordLoan
from racerd.store.notes import Selector
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.store.store import Store

__all__ = ["DiskSettings", "NotLent", "RecordLoan", "Selector", "Store", "StoreSettings"]

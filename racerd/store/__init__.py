"""The slab store: sealed pages on disk. Synchronous; knows no event loop and no wall clock.

store      the door: several disks, a page placed by hash
disk       driver of one slab: lock, threads, health, metrics
engine     what is where, what goes next, what is given up (pure)
index · columns · segments · geometry      what the engine is made of (pure)
record · record_v2 · record_v1 · codec · superblock      formats (pure)
slab · record_io · checkpoint · recovery · device · buffers      I/O
health · settings      state of a disk, what an operator may choose (pure)
"""

from racerd.store.settings import DiskSettings, StoreSettings
from racerd.store.store import Store

__all__ = ["DiskSettings", "Store", "StoreSettings"]

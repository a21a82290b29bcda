"""What is compared: each lane is one loader reading from one state of the machine.

Lanes of one group pay for the same thing: bytes that are in the machine's memory, on its disk, or
in an object store. Ratios are taken within a group only, against the lane that `REFERENCE` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class State(Enum):
    """What is true when the clock starts. `scene.Scene` makes it so."""

    FILES_CACHED = "every page of the files is in the page cache"
    FILES_DROPPED = "no page of the files is in the page cache"
    RACERD_MEMORY = "racerd has every page in its memory tier, and shares none"
    RACERD_SHARED = "another process has the model loaded, in memory that racerd shares"
    RACERD_DISK = "racerd was restarted: every page is in its slab, none in memory"
    RACERD_COLD = "racerd was made anew and has nothing"
    S3 = "the object store has its files in the page cache"


class Group(Enum):
    """`value` is the heading."""

    MEMORY = "from memory"
    DISK = "from the local disk"
    STORE = "from an S3 server on the same machine"


@dataclass(frozen=True)
class Lane:
    """`options` are the loader's in `worker`; `environ` is set for its process.

    With `is_told_names` racer gets the names of the files, and asks no store for them.
    """

    key: str
    label: str
    group: Group
    state: State
    loader: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    is_told_names: bool = False

    @property
    def is_ours(self) -> bool:
        return self.loader == "racer"


# fmt: off
_MMAP = {"backend": "mmap", "clone": True}
_PREAD = {"backend": "pread", "clone": False}
_OWNED, _CLONED = {"clone": False}, {"clone": True}
_PRIVATE = {"share": "off"}  # Everything else of racer's is as it comes.
# Two loaders read around the page cache, unless they are told otherwise; where it has the files,
# they are told what is fastest then.
_BUFFERED = {
    "FASTSAFETENSORS_ODIRECT": "0",
    "RUNAI_STREAMER_FS_STRATEGY": "io_uring_buffered,sync_buffered",
}

LANES = (
    Lane("racer-shared", "racer, shared, next rank", Group.MEMORY, State.RACERD_SHARED, "racer",
         is_told_names=True),
    Lane("racer-shared-listing", "the same, listing the store", Group.MEMORY,
         State.RACERD_SHARED, "racer"),
    Lane("racer-first", "racer, shared, first rank", Group.MEMORY, State.RACERD_MEMORY, "racer"),
    Lane("racer-memory", "racer, memory of its own", Group.MEMORY, State.RACERD_MEMORY, "racer",
         _PRIVATE),
    Lane("mmap-memory", "safetensors, mmap + clone", Group.MEMORY, State.FILES_CACHED,
         "safetensors", _MMAP),
    Lane("pread-memory", "safetensors, pread", Group.MEMORY, State.FILES_CACHED, "safetensors",
         _PREAD),
    Lane("runai-memory", "runai", Group.MEMORY, State.FILES_CACHED, "runai", _OWNED,
         _BUFFERED),
    Lane("runai-clone-memory", "runai + clone", Group.MEMORY, State.FILES_CACHED, "runai",
         _CLONED, _BUFFERED),
    Lane("fastsafetensors-memory", "fastsafetensors, nogds", Group.MEMORY, State.FILES_CACHED,
         "fastsafetensors", environ=_BUFFERED),
    Lane("racer-disk", "racer, disk tier", Group.DISK, State.RACERD_DISK, "racer"),
    Lane("mmap-disk", "safetensors, mmap + clone", Group.DISK, State.FILES_DROPPED,
         "safetensors", _MMAP),
    Lane("pread-disk", "safetensors, pread", Group.DISK, State.FILES_DROPPED, "safetensors",
         _PREAD),
    Lane("runai-disk", "runai", Group.DISK, State.FILES_DROPPED, "runai", _OWNED),
    Lane("fastsafetensors-disk", "fastsafetensors, nogds", Group.DISK, State.FILES_DROPPED,
         "fastsafetensors"),
    Lane("racer-s3", "racer, cold", Group.STORE, State.RACERD_COLD, "racer"),
    Lane("runai-s3", "runai", Group.STORE, State.S3, "runai", _OWNED),
)
# fmt: on
REFERENCE = {
    Group.MEMORY: "runai-clone-memory",
    Group.DISK: "runai-disk",
    Group.STORE: "runai-s3",
}
# The rungs that may have served a lane's bytes, or its figures mean something else. Reading the
# headers brings the first page of each file to memory.
RUNGS = {
    State.RACERD_MEMORY: {"memory"},
    State.RACERD_SHARED: {"shared"},
    State.RACERD_DISK: {"disk", "memory"},
    State.RACERD_COLD: {"origin", "memory"},
}

"""Pages under one tag, as format v1 of the store holds them, for a scripted store."""

from __future__ import annotations

from racerd.crc64 import crc64
from racerd.crypto.sealing import PageSealer
from racerd.ids import PageId
from racerd.pages import PageGeometry, Seal
from tests.support.read_rig import FRAME, PAGE, ReadRig
from tests.support.scripted_store import ScriptedStore


def seal_as_one_frame(rig: ReadRig, store: ScriptedStore, page: PageId, plain: bytes) -> None:
    """Puts `page` into `store` under one tag. `plain` is a whole page."""
    sealer = PageSealer(page, PAGE, PageGeometry(PAGE, PAGE), rig.keyring.active)
    frame = memoryview(bytearray(PAGE + 16))
    sealer.seal_frames(0, memoryview(plain), [frame])
    seal = sealer.finish()
    assert crc64(frame[:PAGE]) == seal.crcs[0]
    frames = [bytearray(frame[at : at + FRAME]) + bytes(16) for at in range(0, PAGE, FRAME)]
    store.pages[page] = (
        Seal(seal.epoch, seal.salt, PAGE, seal.tags, seal.crcs, seal.plain_crc),
        frames,
    )
    store.whole_only = True
    store.crc_per_frame = False

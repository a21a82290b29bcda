"""Records that somebody else reads from the slab: where they lie, and for how long."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest

from racerd.crc64 import crc64
from racerd.ids import PageId
from racerd.store import NotLent, RecordLoan, Store
from racerd.store.buffers import aligned_buffer
from racerd.store.device import DiskError
from racerd.store.file_device import open_file_device
from racerd.store.geometry import BLOCK_BYTES
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB
from tests.support.store_pages import GEOMETRY, counted, sealed, settings, version

PAGE = PageId(version(b"one", size=50_001), 0)


def _opened(disk_path: Path) -> Store:
    return Store(settings(disk_path / "slab", capacity=8 * MIB), GEOMETRY, Metrics())


def _recovered(store: Store) -> None:
    pause = threading.Event()
    while store.recovering:
        pause.wait(0.002)


def _lent(store: Store, page: PageId) -> RecordLoan:
    loan = store.lend(page)
    assert isinstance(loan, RecordLoan)
    return loan


def test_the_ciphertext_lies_where_the_loan_says(disk_path: Path) -> None:
    """R10, R12, R20: on a 4 KiB boundary, frames back to back, read through a descriptor that has
    neither O_NOFOLLOW nor the slab's lock."""
    with _opened(disk_path) as store:
        _recovered(store)
        written = sealed(PAGE)
        assert store.write(written)
        loan = _lent(store, PAGE)
        assert loan.data_offset % BLOCK_BYTES == 0
        assert loan.seal == written.seal
        descriptor = loan.open_slab()
        try:
            buffer = aligned_buffer(64 * KIB)
            os.preadv(descriptor, [buffer], loan.data_offset)
            for index, crc in enumerate(loan.seal.crcs):
                start = index * GEOMETRY.frame_bytes
                frame = buffer[start : start + GEOMETRY.frame_length(50_001, index)]
                assert crc64(frame) == crc
        finally:
            loan.release()
            loan.release()
            store.close()
            # A descriptor that outlives the store does not keep others from the slab.
            open_file_device(disk_path / "slab").close()
            os.close(descriptor)


def test_a_record_on_loan_is_not_written_over(disk_path: Path) -> None:
    """R7, R22: however much is written meanwhile, the bytes under the loan stay the record's."""
    metrics = Metrics()
    with Store(settings(disk_path / "slab", capacity=16 * MIB), GEOMETRY, metrics) as store:
        _recovered(store)
        assert store.write(sealed(PAGE))
        loan = _lent(store, PAGE)
        descriptor = loan.open_slab()
        try:
            for index in range(400):  # More than the slab holds.
                store.write(sealed(PageId(version(b"flood"), index)))
            assert counted(metrics, "racer_store_evicted_pages_total") > 0
            buffer = aligned_buffer(16 * KIB)
            os.preadv(descriptor, [buffer], loan.data_offset)
            assert crc64(buffer) == loan.seal.crcs[0]
        finally:
            os.close(descriptor)
            loan.release()


def test_what_is_not_lent_says_why(disk_path: Path) -> None:
    """R10, R19, R21: pages that are not here, rotten headers, slabs without direct reads."""
    with _opened(disk_path) as store:
        _recovered(store)
        assert store.lend(PAGE) == NotLent("absent")
        assert store.write(sealed(PAGE))
        loan = _lent(store, PAGE)
        loan.release()
        with open(disk_path / "slab", "r+b") as slab:
            slab.seek(loan.data_offset - 100)
            slab.write(b"rot")
            slab.seek(loan.data_offset - BLOCK_BYTES + 30)
            slab.write(b"rot")
        assert store.lend(PAGE) == NotLent("corrupt")
        assert not store.contains(PAGE)
    with (
        tempfile.TemporaryDirectory(prefix="racer-test-", dir="/dev/shm") as folder,
        Store(settings(Path(folder) / "slab", capacity=8 * MIB), GEOMETRY, Metrics()) as store,
    ):
        _recovered(store)
        assert store.write(sealed(PAGE))
        lent = store.lend(PAGE)
        if store.disks[0].report().direct:  # A tmpfs takes O_DIRECT since Linux 6.6.
            assert isinstance(lent, RecordLoan)
            lent.release()
        else:
            assert lent == NotLent("not_direct")


def test_a_slab_that_was_opened_again_has_another_number(disk_path: Path) -> None:
    with _opened(disk_path) as store:
        _recovered(store)
        assert store.write(sealed(PAGE))
        loan = _lent(store, PAGE)
        assert store.slab_numbers == {loan.slab}
        loan.release()
        store.close()
        assert store.slab_numbers == frozenset()
        with pytest.raises(DiskError):
            loan.open_slab()
    with _opened(disk_path) as store:
        _recovered(store)
        assert loan.slab not in store.slab_numbers

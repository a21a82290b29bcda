"""What each cuFile error means for us, and what an operator can do.

Layer: gpu worker, pure. Codes and their texts: cufile.h of 1.20 (`CUFILEOP_STATUS_ENTRIES`, 5001
to 5050). A code that is not listed is treated as the worst: cuFile is turned off.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Remedy(Enum):
    """How the read, the slab or the driver goes on."""

    RETRY = "retry"  # The read once more; then as HOST.
    HOST = "host"  # This read takes the host path.
    SLAB_OFF = "slab_off"  # All reads of this slab take the host path.
    OFF = "off"  # cuFile is turned off in this worker.


@dataclass(frozen=True, slots=True)
class Meaning:
    """`reason` is a metric's label; `text` says what to do."""

    reason: str
    remedy: Remedy
    text: str


_R, _H, _S, _O = Remedy.RETRY, Remedy.HOST, Remedy.SLAB_OFF, Remedy.OFF
_NVFS = "load nvidia-fs on the host, or use a kernel and driver with PCI P2PDMA"
_DEFECT = "report it; the host path serves"
_LATER = "temporary; if it repeats, lower the load on this GPU"

MEANINGS: dict[int, Meaning] = {
    5001: Meaning("driver_not_initialized", _O, _NVFS),
    5002: Meaning("driver_invalid_props", _O, "check cufile.json"),
    5003: Meaning("driver_unsupported_limit", _O, "check the limits in cufile.json"),
    5004: Meaning("driver_version_mismatch", _O, "nvidia-fs and libcufile do not fit: update both"),
    5005: Meaning("driver_version_unreadable", _O, "check /proc/driver/nvidia-fs/version"),
    5006: Meaning("driver_closing", _O, "the worker is stopping"),
    5007: Meaning(
        "platform_not_supported", _O, "GPUDirect Storage does not work on this machine: " + _NVFS
    ),
    5008: Meaning("file_not_supported", _S, "put the slab on ext4 or xfs of a local NVMe disk"),
    5009: Meaning("gpu_not_supported", _O, "this GPU has no GPUDirect Storage"),
    5010: Meaning("nvfs_driver_error", _O, "see the kernel log for nvidia-fs"),
    5011: Meaning("cuda_driver_error", _O, "see the worker's log"),
    5012: Meaning("pointer_invalid", _H, _DEFECT),
    5013: Meaning("memory_type_invalid", _H, _DEFECT),
    5014: Meaning("pointer_out_of_range", _H, _DEFECT),
    5015: Meaning("context_mismatch", _H, _DEFECT),
    5016: Meaning("pinned_size_exceeded", _H, "raise properties.max_device_pinned_mem_size_kb"),
    5017: Meaning("mapped_size_exceeded", _H, _DEFECT),
    5018: Meaning("file_type", _S, "the slab must be a regular file or a block device"),
    5019: Meaning("open_flags", _S, _DEFECT),
    5020: Meaning("not_direct", _S, "the slab's file system refuses O_DIRECT"),
    5022: Meaning("invalid_value", _H, _DEFECT),
    5023: Meaning("memory_already_registered", _H, _DEFECT),
    5024: Meaning("memory_not_registered", _H, _DEFECT),
    5025: Meaning("permission_denied", _S, "give racerd access to the slab and /dev/nvidia-fs*"),
    5026: Meaning("driver_already_open", _H, _DEFECT),
    5027: Meaning(
        "handle_not_registered",
        _S,
        "mount the host's /run/udev read-only: cuFile classifies disks through it",
    ),
    5028: Meaning("handle_already_registered", _S, _DEFECT),
    5029: Meaning("device_not_found", _S, "mount the host's /run/udev and /sys read-only"),
    5030: Meaning(
        "device_not_classified",
        _S,
        "mount the host's /run/udev read-only, or move the slab off a device-mapper volume",
    ),
    5031: Meaning("descriptor_failed", _H, "raise the limit of open files (ulimit -n)"),
    5033: Meaning("nvfs_setup_error", _O, "see the kernel log for nvidia-fs"),
    5034: Meaning("disabled_by_config", _S, "cufile.json turns GPUDirect off for this file system"),
    5035: Meaning("batch_submit_failed", _H, _DEFECT),
    5036: Meaning("gpu_pinning_failed", _H, "BAR1 is full: see `nvidia-smi -q -d MEMORY`"),
    5037: Meaning("batch_full", _H, _DEFECT),
    5038: Meaning("async_not_supported", _H, _DEFECT),
    5039: Meaning("batch_setup_error", _H, _DEFECT),
    5040: Meaning("batch_submit_error", _H, _DEFECT),
    5041: Meaning("batch_status_error", _H, _DEFECT),
    5042: Meaning("batch_cancel_error", _H, _DEFECT),
    5043: Meaning("no_memory", _R, _LATER),
    5044: Meaning("io_error", _R, "see the kernel log for the disk"),
    5045: Meaning("buffer_register_error", _H, "BAR1 is full: see `nvidia-smi -q -d MEMORY`"),
    5046: Meaning("hash_error", _H, _DEFECT),
    5047: Meaning("invalid_context", _H, _DEFECT),
    5048: Meaning("nvfs_internal_error", _O, "see the kernel log for nvidia-fs"),
    5049: Meaning("no_compat_mode", _S, "GPUDirect is not possible here, and compat mode is off"),
    5050: Meaning("io_max", _H, _DEFECT),
}

UNKNOWN = Meaning("unknown", Remedy.OFF, "see cufile.log of the worker, and report it")
SYSTEM = Meaning("errno", Remedy.RETRY, "see the kernel log for the disk")
SHORT = Meaning("short_read", Remedy.HOST, "the slab ends before the record: the store checks it")


def meaning(code: int) -> Meaning:
    """The meaning of a cuFile status; of -1 and small numbers, which are errnos."""
    if 0 < code < 5000:
        return SYSTEM
    return MEANINGS.get(code, UNKNOWN)

"""All checks, in the order in which a person would ask.

Layer: doctor; blocking. What needs a GPU is skipped with the reason where there is none to need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from racerd.config.settings import Settings
from racerd.doctor.direct import BarFacts, judge_bar, judge_direct, probe_bar, probe_direct
from racerd.doctor.disks import DiskFacts, judge_disk, probe_disk, probe_file
from racerd.doctor.finding import Finding, failed, not_applicable, ok
from racerd.doctor.folders import judge_folder, judge_key_file, probe_folder, probe_key_file
from racerd.doctor.gpu_try import TriedGpu, judge_gpu, try_gpu
from racerd.doctor.libraries import judge_libraries, probe_libraries
from racerd.doctor.limits import judge_limits, probe_limits
from racerd.gpu.identity import uuid_text
from racerd.gpu.probe import FoundGpu, FoundGpus, find_gpus
from racerd.pages import PAGE_BYTES_DEFAULT

_NO_DRIVER = "no NVIDIA driver"
_OF_THE_NODE = ("libcufile", "libnuma", "nvrtc", "gpudirect", "proc-modules", "udev")
_OF_A_GPU = ("bar1", "gpu-ipc", "kernels", "decrypt", "cufile", "cufile-read")


def examine(settings: Settings) -> list[Finding]:
    """Everything about this node that matters to a racerd with `settings`. Takes seconds for each
    GPU; a minute where a driver hangs."""
    findings = _folders(settings)
    disks = [probe_disk(disk.path, disk.size_bytes) for disk in settings.disks]
    if not disks:
        findings.append(not_applicable("disk", "pages are not kept on disk"))
    for facts in disks:
        findings += judge_disk(facts, settings.free_space_floor)
    return findings + _gpus(settings, disks)


def _folders(settings: Settings) -> list[Finding]:
    return [
        judge_folder("run-dir", probe_folder(settings.run_dir), "--run-dir"),
        judge_folder("state-dir", probe_folder(settings.state_dir), "--state-dir"),
        judge_key_file(probe_key_file(settings.key_file)),
    ]


def _gpus(settings: Settings, disks: list[DiskFacts]) -> list[Finding]:
    if settings.gpu == "off":
        return _without_gpus(settings, "GPUs are off by settings (--gpu=off)")
    found = asyncio.run(find_gpus())
    driver = judge_driver(found, wanted=settings.gpu == "on")
    usable = [gpu for gpu in found.gpus if not gpu.problem]
    if not usable:
        why = _NO_DRIVER if found.code == "driver_library_missing" else "no GPU can be used"
        return [*driver, *_without_gpus(settings, why)]
    findings = [*driver, *_node(settings)]
    with _probe_files(settings, disks) as slabs:
        for gpu in usable:
            findings += _one_gpu(settings, gpu, slabs)
    pinned = settings.memory + settings.gpu_staging_bytes * len(usable)
    return [*findings, judge_limits(probe_limits(pinned), why_unused=None)]


def _without_gpus(settings: Settings, why: str) -> list[Finding]:
    lines = [not_applicable(check, why) for check in (*_OF_THE_NODE, *_OF_A_GPU)]
    return [*lines, judge_limits(probe_limits(settings.memory), why_unused=why)]


def judge_driver(found: FoundGpus, *, wanted: bool) -> list[Finding]:
    """The driver and the GPUs that it shows. `wanted`: the daemon would not start without one."""
    findings = []
    if found.code == "driver_library_missing" and not wanted:
        findings.append(not_applicable("driver", _NO_DRIVER))
    elif found.code:
        findings.append(failed("driver", found.message, found.hint or "see `nvidia-smi`"))
    elif not found.gpus:
        remedy = "give the container the node's GPUs, and check CUDA_VISIBLE_DEVICES"
        findings.append(failed("driver", "the NVIDIA driver shows no GPU", remedy))
    else:
        findings.append(ok("driver", f"{len(found.gpus)} GPU(s)"))
    for gpu in found.gpus:
        if gpu.problem:
            text, _, remedy = gpu.problem.partition(": ")
            name = f"{gpu.name} {uuid_text(gpu.uuid)}"
            findings.append(failed("gpu", f"{name}: {text}", remedy or "see `nvidia-smi -q`"))
    return findings


def _node(settings: Settings) -> list[Finding]:
    libraries = judge_libraries(probe_libraries())
    if settings.cufile_provider == "off":
        why = "cuFile is off by settings (--cufile-provider=off)"
        kept = [finding for finding in libraries if finding.check == "nvrtc"]
        others = [check for check in _OF_THE_NODE if check != "nvrtc"]
        return [*kept, *(not_applicable(check, why) for check in others)]
    return [*libraries, *judge_direct(probe_direct())]


@contextmanager
def _probe_files(settings: Settings, disks: list[DiskFacts]) -> Iterator[dict[str, str]]:
    """By slab, something on its file system for cuFile to read."""
    with ExitStack() as files:
        yield {
            str(facts.path): str(files.enter_context(probe_file(facts.path)))
            for facts in disks
            if facts.direct and not facts.error and settings.cufile_provider != "off"
        }


def _one_gpu(settings: Settings, gpu: FoundGpu, slabs: dict[str, str]) -> list[Finding]:
    tried = try_gpu(
        gpu.uuid,
        gpu.name,
        {
            "kernel_cache": str(settings.kernel_cache or ""),
            "cufile": settings.cufile_provider,
            "compat_mode": settings.cufile_allow_compat_mode,
            "slabs": slabs,
            "page_bytes": min(settings.page_bytes, PAGE_BYTES_DEFAULT),
        },
    )
    return [*_bar(settings, tried), *judge_gpu(tried)]


def _bar(settings: Settings, tried: TriedGpu) -> list[Finding]:
    context = tried.step("context")
    if context is None or context.get("error") or settings.cufile_provider == "off":
        return []
    bar = probe_bar(context["bus"])
    memory, staging = context["memory_bytes"], settings.gpu_staging_bytes
    return [judge_bar(BarFacts(str(tried), bar, memory, staging))]

"""One GPU, tried by a child process, and what its steps come to.

Layer: doctor. `try_gpu` runs `gpu_child` and collects its steps; `judge_gpu` is pure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from racerd.doctor.finding import Finding, failed, ok, slower
from racerd.gpu.identity import uuid_text
from racerd.units import format_bytes

SECONDS_MAX = 120.0
_CUDA_MAJOR_MIN = 13

Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TriedGpu:
    """`steps` in the order in which they ended. `stuck` is the step that began and did not end,
    "" where all did; `end` says how the process ended then."""

    uuid: str
    name: str
    steps: tuple[Step, ...] = field(default=())
    stuck: str = ""
    end: str = ""

    def step(self, name: str) -> Step | None:
        return next((step for step in self.steps if step["step"] == name), None)

    def __str__(self) -> str:
        return f"{self.name} {uuid_text(self.uuid)}"


def try_gpu(
    uuid: str, name: str, order: Mapping[str, object], seconds_max: float = SECONDS_MAX
) -> TriedGpu:
    """Runs the child. `order` is the rest of its `Order`. What it said counts, however it ended."""
    asked = json.dumps({"gpu": uuid, **order}).encode()
    child = subprocess.Popen(
        [sys.executable, "-m", "racerd.doctor.gpu_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with child:
        try:
            output, errors = child.communicate(asked, seconds_max)
            said = errors.decode(errors="replace").strip().rpartition("\n")[2]
            end = f"ended with {child.returncode}: {said[-200:]}" if child.returncode else ""
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
            end = f"did not end within {seconds_max:g} s"
    return collected(uuid, name, output, end)


def collected(uuid: str, name: str, output: bytes, end: str) -> TriedGpu:
    """What a child said, and how it ended ("" in order). The last line may be cut off."""
    steps: list[Step] = []
    begun: str = "start"
    for line in output.splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if "begins" in told:
            begun = told["begins"]
        else:
            steps.append(told)
            begun = ""
    return TriedGpu(uuid, name, tuple(steps), (begun or "end") if end else "", end)


def judge_gpu(tried: TriedGpu) -> list[Finding]:
    """A finding for each step that came to something, and one where the process did not."""
    found = []
    for step in tried.steps:
        judge = _JUDGES[step["step"]]
        if step.get("error"):
            found.append(_judge_error(tried, step))
        else:
            found.append(judge(tried, step))
    if tried.end:
        found.append(
            failed(
                "gpu",
                f"{tried}: trying it stopped at `{tried.stuck}`: the process {tried.end}",
                "see the kernel log for an Xid and whether `nvidia-smi` answers; then restart what"
                " holds the GPU, or the node",
            )
        )
    return found


def _judge_error(tried: TriedGpu, step: Step) -> Finding:
    name: str = step["step"]
    where = f"{tried}" if "slab" not in step else f"{tried}, {step['slab']}"
    # Without cuFile the host path serves; without the rest the GPU does not.
    judge = slower if name.startswith("cufile") else failed
    remedy: str = step.get("remedy") or _REMEDIES.get(name, "see the kernel log for an Xid")
    return judge(_CHECKS.get(name, name), f"{where}: {step['error']}", remedy)


_CHECKS = {"context": "gpu", "ipc": "gpu-ipc"}
_REMEDIES = {
    "ipc": "let the containers of racerd and its clients see the same GPUs, with one driver",
    "kernels": "run `python -m racerd.gpu.build`, and keep its folder as RACER_KERNEL_CACHE",
}


def _judge_context(tried: TriedGpu, step: Step) -> Finding:
    major, minor = divmod(step["driver_cuda"], 1000)
    memory, architecture = format_bytes(step["memory_bytes"]), step["architecture"]
    text = f"{tried}, {architecture}, {memory}, driver for CUDA {major}.{minor // 10}"
    if major < _CUDA_MAJOR_MIN:
        return failed("gpu", text, f"install a driver for CUDA {_CUDA_MAJOR_MIN} (580 or newer)")
    return ok("gpu", text)


def _judge_ipc(tried: TriedGpu, step: Step) -> Finding:
    if step["same"]:
        return ok("gpu-ipc", f"{tried}: memory of one process was written by another")
    return failed(
        "gpu-ipc",
        f"{tried}: what another process wrote to exported memory is not there",
        "let racerd and its clients see the same GPUs (same driver, no MIG slice of one alone)",
    )


def _judge_kernels(tried: TriedGpu, step: Step) -> Finding:
    if step["cached"]:
        return ok("kernels", f"{tried}: compiled, in {step['folder']}")
    return slower(
        "kernels",
        f"{tried}: were not compiled yet, which took {step['seconds']:.1f} s now",
        "run `python -m racerd.gpu.build` when the image is built, and keep RACER_KERNEL_CACHE",
    )


def _judge_decrypt(tried: TriedGpu, step: Step) -> Finding:
    rate = step["bytes"] / max(step["best_seconds"], 1e-9) / 1e9
    if not step["same"]:
        return failed(
            "decrypt",
            f"{tried}: a page that was opened on the GPU is not what was sealed",
            "take this GPU out of use (--gpu=off meanwhile) and run its diagnostics (dcgmi diag)",
        )
    if not step["refused"]:
        return failed(
            "decrypt",
            f"{tried}: a page with a flipped bit was not refused",
            "take this GPU out of use (--gpu=off meanwhile) and run its diagnostics (dcgmi diag)",
        )
    size, shown = format_bytes(step["bytes"]), f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
    return ok("decrypt", f"{tried}: {size} verified and decrypted, {shown} GB/s with the launch")


def _judge_cufile(tried: TriedGpu, step: Step) -> Finding:
    return ok("cufile", f"{tried}: the driver opened in {step['seconds']:.1f} s")


def _judge_read(tried: TriedGpu, step: Step) -> Finding:
    if step["same"]:
        return ok("cufile-read", f"{tried}, {step['slab']}: read straight into GPU memory")
    return failed(
        "cufile-read",
        f"{tried}, {step['slab']}: cuFile read other bytes than are there",
        "set --cufile-provider=off, and report it",
    )


_JUDGES: Mapping[str, Callable[[TriedGpu, Step], Finding]] = {
    "context": _judge_context,
    "ipc": _judge_ipc,
    "kernels": _judge_kernels,
    "decrypt": _judge_decrypt,
    "cufile": _judge_cufile,
    "cufile-read": _judge_read,
}

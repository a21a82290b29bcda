"""Counts what the compiled kernels execute per 16-byte block: `tools/sass_counts.py [--gpu H200]`.

Compiles with NVRTC for each architecture, disassembles with nvdisasm (of the wheel
nvidia-cuda-nvdisasm, or of a toolkit, found on PATH or named by $NVDISASM), finds the loops that
run over blocks by what they load, and divides by the blocks that one turn handles. Prints a table
in Markdown: `docs/gpu.md` holds one. No GPU is needed, and nothing here is a measurement.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass

from racerd.gpu import build

KERNEL = "racer_open_frames"
LANES = 32

# Operations of one SM and clock, in threads: CUDA programming guide, arithmetic throughput.
LOGIC_LANES = 64  # LOP3, SHF, PRMT, IADD3: the ALU pipe
MULTIPLY_LANES = 64  # IMAD: the FMA pipe
ISSUE_LANES = 128
SHARED_BYTES = 128  # shared memory and L1 data path

_MULTIPLY = re.compile(r"IMAD|VIADD|FFMA")
_LOGIC = re.compile(r"LOP3|SHF|PRMT|IADD|LEA|ISETP|SEL|VIMNMX|IMNMX|PLOP3|MOV")
_WIDTH = {"": 4, "64": 8, "128": 16}


@dataclass(frozen=True)
class Loop:
    """Instructions of one turn of a loop over `blocks` 16-byte blocks."""

    name: str
    blocks: int
    counts: Counter[str]

    def of(self, pattern: re.Pattern[str]) -> float:
        return sum(n for op, n in self.counts.items() if pattern.match(op)) / self.blocks

    @property
    def instructions(self) -> float:
        return sum(self.counts.values()) / self.blocks

    @property
    def memory_bytes(self) -> float:
        """Bytes a thread moves through the shared-memory and L1 path for a block.

        Of stores only one width runs: the others are there for unaligned destinations.
        """
        total = 0
        for op, n in self.counts.items():
            if op.split(".")[0] in ("LDS", "LDG"):
                width = re.search(r"\.(64|128)\b", op)
                total += n * _WIDTH[width.group(1) if width else ""]
        stores = (
            16 * self.blocks
            if any(op.startswith(("ST.E.128", "STG.E.128")) for op in self.counts)
            else 0
        )
        return (total + stores) / self.blocks

    def clocks(self) -> dict[str, float]:
        """SM clocks for a block of every thread's, per pipe."""
        unaligned = self.counts["ST.E.U8"] + self.counts["ST.E"] + self.counts["STG.E.U8"]
        logic = self.of(_LOGIC) - 0.75 * self.counts["ST.E.U8"] / self.blocks
        return {
            "shared": self.memory_bytes / SHARED_BYTES,
            "logic": logic / LOGIC_LANES,
            "multiply": self.of(_MULTIPLY) / MULTIPLY_LANES,
            "issue": (self.instructions - unaligned / self.blocks) / ISSUE_LANES,
        }


def disassembler() -> str:
    named = os.environ.get("NVDISASM") or shutil.which("nvdisasm")
    if named is None:
        sys.exit("nvdisasm was not found: pip install nvidia-cuda-nvdisasm and set NVDISASM to it")
    return named


def disassemble(architecture: str) -> tuple[list[str], dict[str, int]]:
    """The kernel's instructions in order, and at which of them each label stands."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(build.load_module(architecture))
        file.flush()
        command = [disassembler(), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions: list[str] = []
    labels: dict[str, int] = {}
    inside = False
    for line in text.splitlines():
        if line.startswith(("//----", ".text.")):
            inside = line.startswith(f".text.{KERNEL}:")
        if not inside:
            continue
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label.group(1)] = len(instructions)
        elif code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(re.sub(r"^@!?U?P\w+ ", "", code.group(1).strip()))
    return instructions, labels


def loops(architecture: str) -> list[Loop]:
    """The two loops that take the time: verify (GHASH and CRC) and decrypt (AES)."""
    instructions, labels = disassemble(architecture)
    found: dict[str, Loop] = {}
    for i, text in enumerate(instructions):
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
        start = labels.get(jump.group(1), i + 1) if jump else i + 1
        if start > i:
            continue
        counts = Counter(body.split()[0] for body in instructions[start : i + 1])
        if counts["LDS.128"] >= 32 and counts["LDS.64"] >= 32:
            found.setdefault("verify", Loop("verify", counts["LDS.64"] // 32, counts))
        elif counts["LDS"] > 700:
            found.setdefault("decrypt", Loop("decrypt", counts["LDS"] // 197, counts))
    return [found["verify"], found["decrypt"]]


GPUS = {"A100": (108, 1.41), "H100": (132, 1.98), "H200": (132, 1.98)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gpu", choices=GPUS, default="H200")
    parser.add_argument("architectures", nargs="*", default=list(build.ARCHITECTURES))
    options = parser.parse_args()
    multiprocessors, gigahertz = GPUS[options.gpu]
    columns = "architecture | pass | instructions | shared | logic | multiply | issue"
    print(f"| {columns} | bound, {options.gpu} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for architecture in options.architectures:
        total = 0.0
        for loop in loops(architecture):
            clocks = loop.clocks()
            worst = max(clocks.values())
            total += worst
            cells = " | ".join(f"{value:.2f}" for value in clocks.values())
            print(f"| {architecture} | {loop.name} | {loop.instructions:.0f} | {cells} | |")
        rate = multiprocessors * gigahertz * 16 / total
        print(f"| {architecture} | both | | | | | {total:.2f} clocks | {rate:.0f} GB/s |")


if __name__ == "__main__":
    main()

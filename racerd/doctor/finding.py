"""What the doctor says: findings, each with its verdict and, unless all is well, its remedy.

Layer: doctor, pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How bad it is. `SLOWER` works, and could work better; `FAILED` does not work."""

    OK = "ok"
    SLOWER = "slower"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


_WANTS_REMEDY = (Verdict.SLOWER, Verdict.FAILED)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `check` is stable, for programs; `text` is for people; `remedy` is one sentence
    and there where the verdict is SLOWER or FAILED, and nowhere else."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if (self.verdict in _WANTS_REMEDY) != bool(self.remedy):
            raise ValueError(f"{self.check}: {self.verdict.value}, and the remedy {self.remedy!r}")


def ok(check: str, text: str) -> Finding:
    return Finding(check, Verdict.OK, text)


def slower(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Verdict.SLOWER, text, remedy)


def failed(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Verdict.FAILED, text, remedy)


def not_applicable(check: str, why: str) -> Finding:
    return Finding(check, Verdict.NOT_APPLICABLE, why)


def exit_status(findings: Sequence[Finding]) -> int:
    """0 where nothing failed, else 1. What is only slower is no failure."""
    return int(any(finding.verdict is Verdict.FAILED for finding in findings))

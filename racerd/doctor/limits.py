"""Limits of the process that matter once memory is pinned.

Layer: doctor.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

from racerd.doctor.finding import Finding, not_applicable, ok, slower
from racerd.units import format_bytes


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """`memlock_bytes` is None where there is no limit. `pinned_bytes` is what will be pinned."""

    memlock_bytes: int | None
    pinned_bytes: int


def probe_limits(pinned_bytes: int) -> LimitFacts:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return LimitFacts(None if soft == resource.RLIM_INFINITY else soft, pinned_bytes)


def judge_limits(facts: LimitFacts, *, why_unused: str | None) -> Finding:
    """`why_unused` is why nothing will be pinned, if nothing will."""
    check = "memlock"
    limit = "no limit" if facts.memlock_bytes is None else format_bytes(facts.memlock_bytes)
    if why_unused is not None:
        return not_applicable(check, f"{why_unused} (the limit is {limit})")
    if facts.memlock_bytes is None or facts.memlock_bytes >= facts.pinned_bytes:
        return ok(check, f"{limit} for {format_bytes(facts.pinned_bytes)} to pin")
    return slower(
        check,
        f"{limit} of memory may be locked, and {format_bytes(facts.pinned_bytes)} are to be pinned"
        " for GPUs: a driver or a NIC that counts them refuses",
        "set LimitMEMLOCK=infinity (systemd), or `ulimit -l unlimited` of the container runtime",
    )

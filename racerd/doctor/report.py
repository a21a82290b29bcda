"""Findings as text and as JSON.

Layer: doctor, pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from racerd import __version__
from racerd.doctor.finding import Finding, Verdict, exit_status

_MARKS = {
    Verdict.OK: "ok",
    Verdict.SLOWER: "slower",
    Verdict.FAILED: "FAILED",
    Verdict.NOT_APPLICABLE: "-",
}


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, the remedy below it, and the sum at the end."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        text = finding.text
        if finding.verdict is Verdict.NOT_APPLICABLE:
            text = f"not applicable: {text}"
        lines.append(f"{_MARKS[finding.verdict]:<6}  {finding.check:<{width}}  {text}")
        if finding.remedy:
            lines.append(f"{'':<6}  {'':<{width}}  -> {finding.remedy}")
    counts = [
        f"{sum(finding.verdict is verdict for finding in findings)} {verdict.value}"
        for verdict in Verdict
    ]
    return "\n".join([*lines, f"racerd {__version__}: {', '.join(counts)}"])


def as_json(findings: Sequence[Finding]) -> str:
    """One object: `version`, `ok` (whether nothing failed) and `findings`."""
    told = [
        {
            "check": finding.check,
            "verdict": finding.verdict.value,
            "text": finding.text,
            "remedy": finding.remedy or None,
        }
        for finding in findings
    ]
    value = {"version": __version__, "ok": exit_status(findings) == 0, "findings": told}
    return json.dumps(value, indent=2, ensure_ascii=False)

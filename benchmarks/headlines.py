"""The claims that README.md shows, of three machines: a row for each, and in all rows of ratios greater is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from benchmarks.report import bar_of, marked
from benchmarks.scenario import Check

BEGIN, END = "<!-- measured: written by `python -m benchmarks --publish` -->", "<!-- end of measured -->"
MACHINES = {
    "AMD EPYC, family 25 model 17": "AMD EPYC, 2 cores",
    "Intel(R) Xeon(R) Processor": "Intel Xeon, 2 cores",
    "NVIDIA H200": "NVIDIA H200",
}
"""Machines that README.md shows, each with its column's head: a CPU of each maker, and a GPU. benchmarks/README.md has
all that were measured.
"""
STREAMS = (1, 8, 32, 64, 256)
"""Numbers of streams: CPUs are measured with up to 64, GPUs with 1, 64 and 256."""

ROWS: dict[str, str] = {
    "four programs: one UMA, or a llama-server for each": ("sharing: time of a llama-server for each program ÷ UMA's"),
    "eight prompts with the same beginning": "shared prefix, cold: times faster than llama-server's better layout",
    "four long prompts while a stream runs": "storm: time until all prompts are read, of llama-server's",
    "longest pause of that stream": "storm: times better than llama-server's worst gap",
    "that pause on UMA, in milliseconds": "storm: the stream's worst gap",
    **{
        f"{count} stream{'s' if count > 1 else ''}, tokens/s": (
            f"{count} stream{'s' if count > 1 else ''}: tokens/s of llama-server's better layout"
        )
        for count in STREAMS
    },
}
"""What README.md calls a row, and the claim that it shows."""


def markdown(found: Mapping[str, Sequence[Check]]) -> str:
    """The rows, each machine a column; bold falls short of its bar. Each ratio is greater where UMA is better."""
    known = {machine: {check.claim: check for check in checks if check.is_known} for machine, checks in found.items()}
    every = {claim: check for checks in known.values() for claim, check in checks.items()}
    lines = [
        "| UMA's speed ÷ llama-server's | goal | " + " | ".join(known) + " |",
        "| --- |" + " ---: |" * (len(known) + 1),
    ]
    for name, claim in ROWS.items():
        goal = _plain(bar_of(_upright(every[claim]))) if claim in every else ""
        cells = [_plain(marked(_upright(checks[claim]))) if claim in checks else "-" for checks in known.values()]
        lines.append(f"| {name} | {goal} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _upright(check: Check) -> Check:
    """A ratio that is better when it is smaller, turned over, so that greater is better in all rows of ratios."""
    if check.relation == "≥" or check.unit != "x":
        return check
    return attrs.evolve(check, value=1 / check.value, relation="≥", bar=1 / check.bar)


def _plain(figure: str) -> str:
    """Without the units, which the row and the table's head have."""
    return figure.replace(" x", "").replace(" ms", "")

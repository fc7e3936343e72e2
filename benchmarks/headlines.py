"""The claims that README.md shows, of three machines: a few rows, each with the figures of one question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.report import bar_of, marked
from benchmarks.scenario import Check

BEGIN, END = "<!-- measured: written by `python -m benchmarks --publish` -->", "<!-- end of measured -->"
MACHINES = ("AMD EPYC, family 25 model 17", "Intel(R) Xeon(R) Processor", "NVIDIA H200")
"""Machines that README.md shows: a CPU of each maker, and a GPU. benchmarks/README.md has all that were measured."""
STREAMS = {"CPU": (1, 8, 32, 64), "GPU": (1, 64, 256)}
"""Numbers of streams that are measured on each."""
PEER = "tokens/s of llama-server's better layout"

ROWS: dict[str, tuple[str, ...]] = {
    "four programs use one model: time with a llama-server for each ÷ time with one UMA": (
        "sharing: time of a llama-server for each program ÷ UMA's",
    ),
    "a stream while four long prompts arrive: its longest gap": ("storm: the stream's worst gap",),
    "the four long prompts: time until all are read ÷ llama-server's": (
        "storm: time until all prompts are read, of llama-server's",
    ),
    "eight prompts that begin alike: llama-server's time until all are done ÷ UMA's": (
        "shared prefix, cold: times faster than llama-server's better layout",
    ),
    **{
        f"{'/'.join(map(str, counts))} streams, {where}: tokens/s ÷ llama-server's": tuple(
            f"{count} stream{'s' if count > 1 else ''}: {PEER}" for count in counts
        )
        for where, counts in STREAMS.items()
    },
}
"""What README.md calls a row, and the claims in it."""


def markdown(found: Mapping[str, Sequence[Check]]) -> str:
    """The rows, each machine a column; what falls short of its bar is bold."""
    known = {machine: {check.claim: check for check in checks if check.is_known} for machine, checks in found.items()}
    every = {claim: check for checks in known.values() for claim, check in checks.items()}
    columns = {"target": [_bars([every[claim] for claim in claims if claim in every]) for claims in ROWS.values()]}
    for machine, checks in known.items():
        columns[machine] = [_cell([checks.get(claim) for claim in claims]) for claims in ROWS.values()]
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name, *cells in zip(ROWS, *columns.values(), strict=True):
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _bars(checks: Sequence[Check]) -> str:
    """One for all where they have one, and which side of it is the better."""
    bars = [bar_of(check).removesuffix(" x") for check in checks]
    if len(set(bars)) < 2:
        return "".join(bars[:1])
    return f"{checks[0].relation} {' / '.join(bar.removeprefix(checks[0].relation).strip() for bar in bars)}"


def _cell(checks: Sequence[Check | None]) -> str:
    return " / ".join(marked(each).replace(" x", "") for each in checks if each) if all(checks) else "-"

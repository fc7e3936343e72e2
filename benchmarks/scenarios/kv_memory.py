"""Changes of the KV layout: what it is worth that their memory is in huge pages.

llama.cpp does not ask for huge pages, and UMA does (`uma.llama.hugepages`). Two processes take turns, one of which is
forbidden them; where Linux gives them to all memory, it computes without them too.
"""

from __future__ import annotations

import json
import sys

import trio

from benchmarks import remake
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from uma.llama import hugepages

TURNS, REPEATS = 3, 3
SMALL, HUGE = "pages of the usual size", "huge pages"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Each process in turn, several times: a machine's slow moments hit both alike."""
    for turn in range(bench.pick(TURNS, 1)):
        for pages in rotated([SMALL, HUGE] if hugepages.available() else [SMALL], index + turn):
            command = [sys.executable, "-m", remake.__name__, str(bench.model.path), str(bench.threads)]
            command += [
                "--turns",
                str(bench.pick(REPEATS, 1)),
                *(["--small-pages"] if pages == SMALL and hugepages.available() else []),
            ]
            finished = await trio.run_process(command, capture_stdout=True)
            for line in finished.stdout.splitlines():
                figures = json.loads(line)
                emit(figures.pop("layout"), pages, figures)


def checks(summary: Summary) -> list[Check]:
    """A change takes half the time at most."""
    shares = {case: summary.get(case, HUGE, "made_ms") / summary.get(case, SMALL, "made_ms") for case in summary.cases}
    return [
        Check(f"change to {case}, in huge pages: time, of usual pages", share, "≤", 0.5, "x")
        for case, share in shares.items()
    ]


SCENARIO = Scenario(
    name="kv_memory",
    about="KV memory made anew for another layout, and the first batch there, in usual pages and in huge ones.",
    columns=("made_ms", "first_batch_ms"),
    measure=measure,
    checks=checks,
    round_limit_s=120,
)

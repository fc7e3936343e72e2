"""Changes of the KV layout: what it is worth that their memory is filled with pages before it is cleared.

llama.cpp has each page when it first writes there. UMA fills the memory before that, with huge pages where those are
had sooner (`uma.llama.hugepages`). Two processes differ in nothing else, and take turns.
"""

from __future__ import annotations

import json
import sys

import trio

from benchmarks import remake
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated

TURNS, REPEATS = 3, 3
PAUSE_S = 3.0
"""Before each process: some hosts take back what a guest has freed, which then takes longer to be had."""
COMES, FILLED = "as it comes", "filled"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Each process in turn, several times: a machine's slow moments hit both alike."""
    for turn in range(bench.pick(TURNS, 1)):
        for kind in rotated([COMES, FILLED], index + turn):
            await trio.sleep(PAUSE_S)
            command = [sys.executable, "-m", remake.__name__, str(bench.model.path), str(bench.threads)]
            command += ["--turns", str(bench.pick(REPEATS, 1)), *(["--as-it-comes"] if kind == COMES else [])]
            finished = await trio.run_process(command, capture_stdout=True)
            for line in finished.stdout.splitlines():
                figures = json.loads(line)
                emit(figures.pop("layout"), kind, figures)


def checks(summary: Summary) -> list[Check]:
    """No change takes longer."""
    shares = {
        case: summary.get(case, FILLED, "made_ms") / summary.get(case, COMES, "made_ms") for case in summary.cases
    }
    return [
        Check(f"change to {case}, filled first: time, of as it comes", share, "≤", 1, "x")
        for case, share in shares.items()
    ]


SCENARIO = Scenario(
    name="kv_memory",
    about="KV memory made anew for another layout, and the first batch there: memory as it comes, and filled first.",
    columns=("made_ms", "first_batch_ms"),
    measure=measure,
    checks=checks,
    round_limit_s=120,
)

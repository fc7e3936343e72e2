"""Rows: what a decode step takes by its number of rows, and whether it pays to fill it up to a multiple of four.

By `llama_decode` alone. Kernels that compute rows in tiles can take longer for seven rows than for eight; then a server
would gain by adding rows that nothing is wanted of. UMA adds none, and this shows what that costs on this CPU.
"""

from __future__ import annotations

import math
from random import Random

from benchmarks.measure import Measures
from benchmarks.raw import RowsJob
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.llama_server import LAYOUTS
from benchmarks.targets.raw import raw

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
TILE, PROMPT, REPEATS = 4, 128, 30
MOST = max(ROWS)


def filling(rows: int) -> int:
    """Rows that are missing to a full tile; none of one row, which llama.cpp computes in another way."""
    return -rows % TILE if rows > 1 else 0


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """All sizes in turn, filled up and not, with each layout."""
    rng = Random(f"rows {index}")
    batches = [(rows, extra) for rows in ROWS for extra in sorted({0, filling(rows)})]
    for layout in rotated(list(LAYOUTS), index):
        prompts = [list(bench.model.prompt(rng, PROMPT)) for _ in range(MOST)]
        async with raw(bench.model, streams=MOST, n_ctx=256 * MOST, layout=layout, threads=bench.threads) as baseline:
            found = await baseline.run_rows(RowsJob(prompts, batches, bench.pick(REPEATS, 3)))
        took_ms = dict(zip(batches, found.batch_ms, strict=True))
        for rows in ROWS:
            measures: Measures = {"batch_ms": took_ms[rows, 0]}
            if filling(rows):
                measures |= {"rows_filled": rows + filling(rows), "filled_ms": took_ms[rows, filling(rows)]}
            emit(f"{rows} rows" if rows > 1 else "1 row", baseline.name, measures)


def checks(summary: Summary) -> list[Check]:
    """Filling up is worth nothing, at any number of rows, in the layout where it is worth most."""
    saved = {
        (case, target): summary.get(case, target, "batch_ms") / summary.get(case, target, "filled_ms")
        for case in summary.cases
        for target in summary.targets(case)
    }
    known = {key: times for key, times in saved.items() if not math.isnan(times)}
    case, target = max(known, key=lambda key: known[key], default=("", ""))
    most = known.get((case, target), math.nan)
    return [
        Check("a batch of rows over the same filled up to a tile, at most", most, "≤", 1.05, "x", f"{case}, {target}")
    ]


SCENARIO = Scenario(
    name="rows",
    about=f"Decode steps of 1 to {MOST} rows behind {PROMPT} tokens each, by `llama_decode` alone, and the same filled "
    f"up to a multiple of {TILE} with rows whose logits are not wanted.",
    columns=("batch_ms", "rows_filled", "filled_ms"),
    measure=measure,
    checks=checks,
    round_limit_s=120,
)

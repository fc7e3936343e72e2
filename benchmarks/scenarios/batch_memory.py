"""A million rows: the memory of a job does not grow with them, nor does that of the same job which finds them all done.

The built-in model answers with a token each, in the job's own process, so that its memory is all that there is.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import trio

from benchmarks.measure import Measures, rss_mb
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.targets.batch import Job, batch_job

ROWS = 1_000_000
LOOK_SEC = 1.0
EARLY_SHARE, LATE_SHARE = 0.05, 0.95
"""Up to here it is young, and from here on old."""
CASE, FIRST, AGAIN = f"{ROWS:,} tiny rows", "uma batch", "again, all done"
OPTIONS = ("--local", "--model", "builtin", "--raw", "--max-tokens", "1", "--temperature", "0", "--ignore-eos")


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """All rows, and the same command again."""
    n_rows = bench.pick(ROWS, 2_000)
    with tempfile.TemporaryDirectory(prefix="uma-bench-") as folder:
        rows, out = Path(folder) / "rows.jsonl", Path(folder) / "out.jsonl"
        with rows.open("w") as file:
            file.writelines(f'{{"prompt":"{number}"}}\n' for number in range(n_rows))
        for target in (FIRST, AGAIN):
            async with batch_job(rows, out, *OPTIONS) as job:
                found = await _watched(job)
            emit(CASE, target, {**found, **_checked(out, n_rows)})


async def _watched(job: Job) -> Measures:
    """Memory of a job while it runs, by how far it is."""
    began, seen = time.perf_counter(), list[tuple[float, float]]()

    async def look() -> None:
        while True:
            await trio.sleep(LOOK_SEC)
            told = job.newest()
            if told is not None and told["event"] == "progress":
                with suppress(psutil.Error):  # it has ended just now
                    seen.append((told["share"], rss_mb(job.pid)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await job.ended()
        nursery.cancel_scope.cancel()
    wall_s = time.perf_counter() - began
    last = job.newest() or {}
    measures = {"wall_s": wall_s, "rows_per_s": last["rows"] / wall_s, "failed": last["failed"]}
    early = [rss for share, rss in seen if share <= EARLY_SHARE]
    late = [rss for share, rss in seen if share >= LATE_SHARE]
    if early and late:
        measures |= {"early_rss_mb": max(early), "late_rss_mb": max(late), "growth_mb": max(late) - max(early)}
    if seen:
        measures["peak_rss_mb"] = max(rss for _, rss in seen)
    return measures


def _checked(out: Path, n_rows: int) -> Measures:
    """Results that are not where they belong, or missing."""
    found = wrong = 0
    with out.open("rb") as lines:
        for found, line in enumerate(lines, 1):
            wrong += not line.startswith(b'{"id":"batch_req_%d"' % found)
    return {"misplaced": wrong + abs(n_rows - found)}


def checks(summary: Summary) -> list[Check]:
    """Flat."""
    peak = summary.get(CASE, FIRST, "peak_rss_mb")
    return [
        Check(
            f"uma batch, {ROWS:,} rows: memory at the end over that of the beginning",
            summary.get(CASE, FIRST, "growth_mb"),
            "≤",
            16,
            "MiB",
            f"{peak:.0f} MiB at most",
        ),
        Check(
            f"uma batch, {ROWS:,} rows: results that are not where they belong",
            summary.get(CASE, FIRST, "misplaced"),
            "≤",
            0,
        ),
        Check(
            f"uma batch, {ROWS:,} rows that are all done: memory, of that of the run that did them",
            summary.get(CASE, AGAIN, "peak_rss_mb") / peak,
            "≤",
            1.1,
            "x",
        ),
    ]


SCENARIO = Scenario(
    name="batch_memory",
    about=f"`uma batch` with {ROWS:,} rows of a word, a token each by the built-in model: resident memory of the one "
    "process.",
    columns=("wall_s", "rows_per_s", "early_rss_mb", "late_rss_mb", "growth_mb", "peak_rss_mb", "misplaced"),
    measure=measure,
    checks=checks,
    round_limit_s=5_400,
)

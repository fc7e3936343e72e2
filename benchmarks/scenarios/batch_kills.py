"""Kills: a job that is killed at random moments, and its server with it now and then, against one that is left alone.

Every row has one result, whatever happens. That these are the results of a run that was left alone is certain of rows
that are reproducible, and all but certain with F32 weights, an F32 cache and no flash attention: there the last bits of
a sum depend on which cells its tokens have, and two tokens that are so nearly tied hardly occur. Counts are measured,
and no times, so a busy machine does not matter.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random

import attrs
import trio

from benchmarks.conversations import words
from benchmarks.f32 import f32_model
from benchmarks.measure import Measures
from benchmarks.reference import fetch_model
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.targets.batch import batch_job, chat_row
from benchmarks.targets.uma import uma_server

WORDS, ANSWER = 6, 12
KILLS_OF_A_SERVER = 5
"""Kills of the job until one takes the server, too."""
MAX_LATE_SEC = 2.0
"""Maximum time from the row at which a kill is due: a job that goes on needs half of it to begin."""
LAST_SHARE = 0.8
"""Of the rows, up to where a kill is due: a job that has ended cannot be killed."""
TARGET = "uma batch"


@attrs.frozen
class Job:
    """What is killed."""

    case: str
    rows: int
    kills: int
    is_f32: bool
    settings: Mapping[str, object] = attrs.field(factory=dict)
    options: tuple[str, ...] = ()


F32 = Job(
    "SmolLM2, F32", 2_000, 20, is_f32=True,
    settings={"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"},
)  # fmt: skip
REPRODUCIBLE = Job("SmolLM2, reproducible", 300, 10, is_f32=False, options=("--reproducible",))
QUICK_ROWS, QUICK_KILLS = 60, 3


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """The same rows twice: killed again and again, and left alone."""
    for job in (F32, REPRODUCIBLE):
        emit(job.case, TARGET, await _killed(job, bench, Random(f"batch kills {index}")))


async def _killed(job: Job, bench: Bench, chance: Random) -> Measures:
    n_rows, n_kills = bench.pick(job.rows, QUICK_ROWS), bench.pick(job.kills, QUICK_KILLS)
    model = attrs.evolve(bench.model, path=f32_model("smollm2") if job.is_f32 else fetch_model("smollm2"))
    due = sorted(chance.randrange(int(LAST_SHARE * n_rows)) for _ in range(n_kills))
    kills = 0
    with tempfile.TemporaryDirectory(prefix="uma-bench-") as folder:
        rows, killed, whole = (Path(folder) / name for name in ("rows.jsonl", "killed.jsonl", "whole.jsonl"))
        texts = (f"{number}: {words(chance, WORDS)}" for number in range(n_rows))
        rows.write_text("".join(chat_row(number, text, max_tokens=ANSWER) for number, text in enumerate(texts)))
        for start in range(0, n_kills, KILLS_OF_A_SERVER):
            async with uma_server(model, job.settings, threads=bench.default_threads) as uma:
                for number, row in enumerate(due[start : start + KILLS_OF_A_SERVER], 1):
                    async with batch_job(rows, killed, "--socket", str(uma.socket), *job.options) as running:
                        if await running.reached(row):
                            await trio.sleep(chance.uniform(0, MAX_LATE_SEC))
                        if number == KILLS_OF_A_SERVER:
                            uma.process.popen.kill()
                        kills += running.kill()
        for out in (killed, whole):
            async with (
                uma_server(model, job.settings, threads=bench.default_threads) as uma,
                batch_job(rows, out, "--socket", str(uma.socket), *job.options) as running,
            ):
                await running.ended()
        return {"kills": kills, **_compared(_results(killed), _results(whole), n_rows)}


def _results(out: Path) -> list[tuple[int, str]]:
    """Rows by number, and what was said to each, as far as it was answered."""
    found = []
    for line in out.read_text().splitlines():
        result = json.loads(line)
        choices = result["response"]["body"].get("choices")
        found.append((int(result["custom_id"]), choices[0]["message"]["content"] if choices else ""))
    return found


def _compared(killed: list[tuple[int, str]], whole: list[tuple[int, str]], n_rows: int) -> Measures:
    times, expected = Counter(number for number, _ in killed), dict(whole)
    return {
        "rows": n_rows,
        "lost": sum(times[number] == 0 for number in range(n_rows)),
        "twice": sum(count > 1 for count in times.values()),
        "out_of_order": sum(after[0] < before[0] for before, after in itertools.pairwise(killed)),
        "other_text": sum(text != expected.get(number) for number, text in killed),
        "failed": sum(not text for _, text in killed),
    }


def checks(summary: Summary) -> list[Check]:
    """Nothing is lost, nothing is there twice, and nothing tells that there were kills."""
    counts = {
        "lost": "rows without a result",
        "twice": "rows with two",
        "out_of_order": "results out of order",
        "other_text": "results unlike those of a run that was left alone",
        "failed": "rows that failed",
    }
    found: list[Check] = []
    for job in (F32, REPRODUCIBLE):
        of_job = {name: summary.get(job.case, TARGET, name) for name in ("kills", "rows", *counts)}
        if not math.isnan(of_job["kills"]):
            beside = f"{of_job['kills']:.0f} kills, {of_job['rows']:,.0f} rows"
            claims = {f"{job.case}, killed batch: {claim}": of_job[name] for name, claim in counts.items()}
            found += [Check(claim, value, "≤", 0, "", beside) for claim, value in claims.items()]
    return found


SCENARIO = Scenario(
    name="batch_kills",
    about=f"`uma batch`, {F32.rows:,} rows on SmolLM2, killed (SIGKILL) {F32.kills} times at random, each "
    f"{KILLS_OF_A_SERVER}th time with its server, against the same left alone: in F32, and {REPRODUCIBLE.rows} rows "
    "that are reproducible.",
    columns=("kills", "rows", "lost", "twice", "out_of_order", "other_text", "failed"),
    measure=measure,
    checks=checks,
    round_limit_s=3_600,
)

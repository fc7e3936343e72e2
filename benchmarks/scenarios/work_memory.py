"""Work memory: what it is worth that it begins at a page, by `llama_decode` alone.

malloc gives llama.cpp the memory in which attention keeps its tiles 16 bytes behind a page, and UMA has it begin at one
(`uma.llama.work_memory`). Two processes differ in nothing else, and take turns.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from random import Random

from benchmarks.raw import PieceJob
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.raw import raw

DEPTHS, QUICK_DEPTHS = (0, 1024, 4096), (0, 512)
PIECE, REPEATS, TURNS = 512, 3, 3
MALLOC, PAGE = "as malloc gives it", "from a page on"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Each depth in turn, several times: a machine's slow moments hit both alike."""
    depths = bench.pick(DEPTHS, QUICK_DEPTHS)
    async with AsyncExitStack() as stack:
        targets = {}
        for place in rotated([MALLOC, PAGE], index):
            targets[place] = await stack.enter_async_context(
                raw(
                    bench.model,
                    streams=1,
                    n_ctx=max(depths) + 2 * PIECE,
                    layout="unified",
                    threads=bench.threads,
                    is_aligned=place == PAGE,
                )
            )
        rng = Random(f"work memory {index}")
        for depth in depths:
            prompt = list(bench.model.prompt(rng, depth + PIECE))
            job = PieceJob(prompt[:depth], prompt[depth:], bench.pick(REPEATS, 1))
            took_ms: dict[str, list[float]] = {place: [] for place in targets}
            for _ in range(bench.pick(TURNS, 1)):
                for place, target in targets.items():
                    took_ms[place].append((await target.run_piece(job)).piece_ms)
            for place, times in took_ms.items():
                emit(f"{PIECE} tokens behind {depth}", place, {"piece_ms": sorted(times)[len(times) // 2]})


def checks(summary: Summary) -> list[Check]:
    """It costs nothing at any depth."""
    shares = {
        case: summary.get(case, PAGE, "piece_ms") / summary.get(case, MALLOC, "piece_ms") for case in summary.cases
    }
    return [
        Check(f"{case}, work memory from a page on: time, of malloc's", share, "≤", 1.02, "x")
        for case, share in shares.items()
    ]


SCENARIO = Scenario(
    name="work_memory",
    about=f"{PIECE} tokens of a prompt read behind others, by `llama_decode` alone, with work memory as malloc gives "
    "it and from a page on.",
    columns=("piece_ms",),
    measure=measure,
    checks=checks,
    round_limit_s=240,
)

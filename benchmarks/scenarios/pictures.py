"""Storm of pictures: one stream is read as it comes, and four questions arrive, each about a picture of its own. They
are the first pictures that the server sees.
"""

from __future__ import annotations

from random import Random

from benchmarks.load import warm_up
from benchmarks.measure import Measures
from benchmarks.projector import TOKENS, picture, projector
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.scenarios.storm import N_CTX, SLOTS, storm_of
from benchmarks.targets.base import Target
from benchmarks.targets.llama_server import llama_server
from benchmarks.targets.uma import uma_server

PICTURES, ANSWER = 4, 8
UMA, PEER = "UMA defaults", "llama-server unified"
CASE = f"{PICTURES} pictures"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """The storm on each target, one after another."""
    file = projector(bench.model)
    for kind in rotated([UMA, *([PEER] if bench.has_llama_server else [])], index):
        rng = Random(f"pictures {index} {kind}")
        if kind == UMA:
            wanted = {"mmproj": file}
            async with uma_server(bench.model, wanted, threads=bench.default_threads, label="defaults") as uma:
                emit(CASE, uma.name, await storm(uma, bench, rng))
        else:
            more = ("--mmproj", str(file))
            threads = bench.threads
            async with llama_server(
                bench.model, slots=SLOTS, n_ctx=N_CTX, layout="unified", threads=threads, extra=more
            ) as peer:
                emit(CASE, peer.name, await storm(peer, bench, rng))


async def storm(target: Target, bench: Bench, rng: Random) -> Measures:
    """One storm of questions about pictures."""
    await warm_up(target, bench.model)
    asks = [Ask((), ANSWER, picture=picture(rng)) for _ in range(PICTURES)]
    return await storm_of(asks, PICTURES * TOKENS, target, bench, rng)


def checks(summary: Summary) -> list[Check]:
    """The stream goes on while pictures are encoded and read."""
    gap, peer = (summary.get(CASE, target, "worst_gap_ms") for target in (UMA, PEER))
    read, peer_read = (summary.get(CASE, target, "all_read_s") for target in (UMA, PEER))
    return [
        Check("pictures: the stream's worst gap", gap, "≤", 250, "ms", f"llama-server: {peer:.3g} ms"),
        Check("pictures: time until all are read, of llama-server's", read / peer_read, "≤", 1.15, "x"),
    ]


SCENARIO = Scenario(
    name="pictures",
    about=(
        f"One stream decodes while {PICTURES} questions arrive, each with a picture of {TOKENS} tokens, which a "
        "projector of 11 million parameters encodes. No picture comes before them."
    ),
    columns=(
        *("calm_gap_p50_ms", "gap_p50_ms", "gap_p95_ms", "worst_gap_ms"),
        *("all_read_s", "prompt_tokens_per_s", "failed"),
    ),
    measure=measure,
    checks=checks,
    round_limit_s=240,
)

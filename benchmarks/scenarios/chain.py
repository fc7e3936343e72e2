"""Agent chain: ten turns that grow one conversation, while others keep the server busy in the background.

Each turn's prompt is all that went before, the model's own answers included, and something new (a tool's result). A
server that keeps what it computed reads only the new part.
"""

from __future__ import annotations

from random import Random

from benchmarks.load import beside, one
from benchmarks.measure import CpuMeter, Measures, latency
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.targets.base import Target
from benchmarks.targets.contenders import OURS, contenders, open_contender

TURNS, OPENING, NEW, ANSWER = 10, 512, 96, 32
BACKGROUND_STREAMS, BACKGROUND_PROMPT, BACKGROUND_ANSWER = 2, 256, 64
N_CTX, SLOTS = 16_384, 4


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """The same chain on each target."""
    for kind in contenders(bench, index):
        async with open_contender(kind, bench, n_ctx=N_CTX, slots=SLOTS) as target:
            emit(f"{TURNS} turns", target.name, await _chain(target, bench, index))


async def _chain(target: Target, bench: Bench, index: int) -> Measures:
    rng, others = Random(f"chain {index}"), Random(f"chain beside {index}")

    def background() -> Ask:
        return Ask(bench.model.prompt(others, BACKGROUND_PROMPT), BACKGROUND_ANSWER, priority=-1)

    turns: list[Sample] = []
    meter = CpuMeter(target.pid)
    async with beside(target, background, streams=BACKGROUND_STREAMS) as running:
        meter.start()
        conversation = bench.model.prompt(rng, OPENING)
        for _ in range(bench.pick(TURNS, 3)):
            turn = await one(target, Ask(conversation, ANSWER, priority=1))
            turns.append(turn)
            conversation += (*turn.token_ids, *bench.model.prompt(rng, NEW))
    chain_s = (turns[-1].ended_s or 0) - turns[0].sent_s
    beside_tokens = sum(len(sample.token_s) for sample in running)
    return {
        "chain_s": chain_s,
        "cached_tokens": sum(turn.cached_tokens for turn in turns),
        "background_tokens_per_s": beside_tokens / chain_s,
        "failed": sum(turn.error is not None for turn in turns),
        **latency(turns[1:]),
        **meter.stop(beside_tokens + sum(len(turn.token_s) for turn in turns)),
    }


def checks(summary: Summary) -> list[Check]:
    """At least level with llama-server's better layout, by each figure."""
    case = f"{TURNS} turns"
    found: list[Check] = []
    for claim, measure in (("time", "chain_s"), ("later turns' TTFT p50", "ttft_p50_ms")):
        peer = summary.best(case, "llama-server", measure, "low")
        ratio = summary.get(case, OURS, measure) / peer
        found.append(Check(f"agent chain: {claim}, of llama-server's", ratio, "≤", 1, "x"))
    return found


SCENARIO = Scenario(
    name="chain",
    about=f"{TURNS} turns of one conversation ({OPENING} tokens, then {NEW} new ones a turn, {ANSWER} generated) "
    f"beside {BACKGROUND_STREAMS} streams of background requests; TTFT from the second turn on.",
    columns=("chain_s", "ttft_p50_ms", "ttft_p95_ms", "inter_token_p95_ms", "cached_tokens", "background_tokens_per_s"),
    measure=measure,
    checks=checks,
    round_limit_s=180,
)

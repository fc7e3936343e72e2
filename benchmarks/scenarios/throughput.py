"""Throughput sweep: how much of raw `llama_decode` is left when a server does it, from 1 to 64 streams, on a GPU to
256.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from random import Random

import trio

from benchmarks.load import burst, until_quiet
from benchmarks.measure import CpuMeter, Measures, latency, throughput
from benchmarks.models import BenchModel, parameters
from benchmarks.raw import Result
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, by_decode_alone, rotated
from benchmarks.targets.base import Target
from benchmarks.targets.batched_bench import batched_bench
from benchmarks.targets.contenders import OURS, contenders, open_contender
from benchmarks.targets.llama_server import LAYOUTS
from benchmarks.targets.raw import Raw, raw
from uma.engine.sizing import RULES

PROMPT, GENERATED, CELLS_A_STREAM = 16, 128, 256
MIN_TOKENS = 1024
"""A burst of few streams is over in half a second: it is repeated until so many tokens were generated."""
MIN_BURSTS = 3
"""Of each target with each number of streams: single bursts differ by a tenth."""
LARGE_PARAMETERS = 300_000_000
"""Parameters of a model from which on one burst of more than 1,024 tokens has to do: on 2 cores it takes a minute."""
WARM_UP_TOKENS = 4
SETTLE_S = 0.1
"""Before each burst: threads that wait for more work still spin for a moment."""
"""For more streams UMA is told how many."""
SLOW_PEER_STREAMS = (1, 8)
"""llama_cpp.server takes one request after another; more of them only take longer."""

BARS = (
    ("1 stream", 0.97, 1.05),
    ("8 streams", 0.96, 1.03),
    ("32 streams", 0.95, 1.05),
    ("64 streams", 0.92, 1.0),
    ("256 streams", 0.92, 1.0),
)
"""Least shares of raw's tokens/s, and of llama-server's."""

Prompts = list[tuple[int, ...]]
Burst = Callable[[Prompts, int], Awaitable[Measures]]
"""Sends all prompts at once, each for so many tokens, and waits until the last has ended."""


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Every number of streams with every target, each made to measure."""
    counts = bench.pick((1, 64, 256) if bench.has_gpu else (1, 2, 4, 8, 16, 32, 64), (1, 8, 32))
    for streams in counts:
        await _with_streams(bench, index, streams, emit)
    if index == 0 and bench.has_llama_server:
        await _batched_bench(bench, counts, emit)


async def _with_streams(bench: Bench, index: int, streams: int, emit: Emit) -> None:
    case = f"{streams} streams" if streams > 1 else "1 stream"
    rng = Random(f"throughput {index} {streams}")
    n_ctx = streams * CELLS_A_STREAM
    model, threads = bench.model, bench.threads
    kinds = [*(f"raw {layout}" for layout in LAYOUTS), *contenders(bench, 0, with_slow=streams in SLOW_PEER_STREAMS)]
    async with AsyncExitStack() as stack:
        ask: dict[str, Burst] = {}
        for kind in rotated(kinds, index):
            if kind.startswith("raw"):
                layout = kind.removeprefix("raw ")
                baseline = await stack.enter_async_context(
                    raw(model, streams=streams, n_ctx=n_ctx, layout=layout, threads=threads)
                )
                ask[kind] = partial(decode, baseline)
            else:
                settings = {} if streams <= RULES.sequences else {"max_sequences": streams}
                target = await stack.enter_async_context(
                    open_contender(
                        kind, bench, n_ctx=n_ctx, slots=streams, n_ctx_slow=CELLS_A_STREAM, settings=settings
                    )
                )
                ask[kind] = partial(serve, target)
        for kind, measures in await in_turn(ask, streams, model, rng, least_tokens(bench, streams)):
            emit(case, kind, measures)


def least_tokens(bench: Bench, streams: int) -> int:
    """Tokens that all bursts of a target generate at least."""
    bursts = 1 if parameters(bench.model.shape) >= LARGE_PARAMETERS else bench.pick(MIN_BURSTS, 1)
    return max(MIN_TOKENS, bursts * streams * GENERATED)


async def in_turn(
    ask: Mapping[str, Burst], streams: int, model: BenchModel, rng: Random, least: int
) -> list[tuple[str, Measures]]:
    """Each target's bursts, which generate `least` tokens in all. They are in turn, with all targets loaded: within a
    minute the machine's speed changes.
    """
    found: list[tuple[str, Measures]] = []
    for kind in ask:
        # All streams at once: the first batch of a size touches memory for the first time.
        await ask[kind]([model.prompt(rng, PROMPT // 2) for _ in range(streams)], WARM_UP_TOKENS)
    await until_quiet()
    for number in range(max(1, least // (streams * GENERATED))):
        for kind in rotated(list(ask), number):
            await trio.sleep(SETTLE_S)
            found.append((kind, await ask[kind]([model.prompt(rng, PROMPT) for _ in range(streams)], GENERATED)))
    return found


async def decode(baseline: Raw, prompts: Prompts, max_tokens: int) -> Measures:
    """A `Burst` of the baseline."""
    return raw_measures(await baseline.run(prompts, max_tokens), len(prompts))


async def serve(target: Target, prompts: Prompts, max_tokens: int) -> Measures:
    """A `Burst` of a server."""
    meter = CpuMeter(target.pid)
    meter.start()
    samples = await burst(target, [Ask(prompt, max_tokens) for prompt in prompts])
    rate = throughput(samples)
    return {**rate, **latency(samples), **meter.stop(int(rate["tokens"])), **failures(samples)}


def failures(samples: list[Sample]) -> Measures:
    """How many requests did not end as they should; 0 everywhere or the round is void."""
    return {"failed": sum(sample.error is not None for sample in samples)}


def raw_measures(result: Result, streams: int) -> Measures:
    """The baseline's figures under the names the servers' have."""
    steps = result.generated / streams - 1
    return {
        "tokens_per_s": result.generated / result.total_s,
        "tokens": result.generated,
        "wall_s": result.total_s,
        "ttft_p50_ms": result.first_s * 1000,
        "inter_token_p50_ms": (result.total_s - result.first_s) / steps * 1000,
        "in_decode_share": result.decode_call_s / result.total_s,
    }


async def _batched_bench(bench: Bench, counts: tuple[int, ...], emit: Emit) -> None:
    for layout in LAYOUTS:
        lines = await batched_bench(
            bench.model,
            streams=counts,
            prompt=PROMPT,
            generated=GENERATED,
            layout=layout,
            threads=bench.threads,
        )
        for line in lines:
            case = f"{line.streams} streams" if line.streams > 1 else "1 stream"
            # It times prefill and decode apart; joined here, for the others' figures have both in them.
            wall_s = line.streams * (PROMPT / line.prefill_tokens_per_s + GENERATED / line.decode_tokens_per_s)
            measures = {"tokens_per_s": line.streams * GENERATED / wall_s, "wall_s": wall_s}
            emit(case, f"llama-batched-bench {layout}", measures)


def checks(summary: Summary) -> list[Check]:
    """UMA with its defaults: shares of raw and ratios to llama-server, each of these in its better layout."""
    found: list[Check] = []
    for case, of_raw, of_server in (each for each in BARS if each[0] in summary.cases):
        ours = summary.best_target(case, OURS, "tokens_per_s", "high")  # its name tells where it has more sequences
        best = {peer: summary.best_target(case, peer, "tokens_per_s", "high") for peer in ("raw", "llama-server")}
        raw_ratio = summary.ratio(case, best["raw"], best["llama-server"], "tokens_per_s")
        for peer, bar, beside in (("raw", of_raw, ""), ("llama-server", of_server, by_decode_alone(raw_ratio))):
            ratio = summary.ratio(case, ours, best[peer], "tokens_per_s")
            found.append(Check(f"{case}: tokens/s of {peer}'s better layout", ratio, "≥", bar, "x", beside))
    return [*found, _admission(summary)]


def _admission(summary: Summary) -> Check:
    """How soon all of 64 requests that come at once have their first token. `llama_decode` alone reads all of them
    before it decodes any, so that its median says the same.
    """
    case = "64 streams"
    peer = summary.best(case, "llama-server", "ttft_p95_ms", "low")
    by_raw = by_decode_alone(summary.best(case, "raw", "ttft_p50_ms", "low") / peer)
    medians = summary.get(case, OURS, "ttft_p50_ms"), summary.best(case, "llama-server", "ttft_p50_ms", "low")
    known = "" if any(map(math.isnan, medians)) else f"; p50 {medians[0] / medians[1]:.3g} x"
    ratio = summary.get(case, OURS, "ttft_p95_ms") / peer
    return Check(f"{case}: TTFT p95, of llama-server's better layout", ratio, "≤", 1, "x", by_raw + known)


SCENARIO = Scenario(
    name="throughput",
    about=f"N requests at once, {PROMPT} tokens in, {GENERATED} out each: tokens a second, first send to last token; "
    "burst by burst in turn, and the median of a round's. "
    "Ratios are those of the same turn.",
    columns=(
        "tokens_per_s",
        "ttft_p50_ms",
        "ttft_p95_ms",
        "inter_token_p50_ms",
        "inter_token_p99_ms",
        "server_cpu_us",
        "client_cpu_us",
        "rss_mb",
    ),
    measure=measure,
    checks=checks,
    round_limit_s=2400,
)

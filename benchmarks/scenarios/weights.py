"""Where the weights lie: mapped from their file, or in memory of huge pages, which is what `--use-mmap` decides.

What UMA's `--use-mmap auto` goes by, and how much of its lead over the others comes from that alone: left to
themselves the baseline and llama-server map the file. Here all of them do both.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from random import Random

from benchmarks.scenario import Bench, Emit, Scenario, rotated
from benchmarks.scenarios.throughput import (
    CELLS_A_STREAM,
    GENERATED,
    PROMPT,
    Burst,
    decode,
    in_turn,
    least_tokens,
    serve,
)
from benchmarks.targets.contenders import uma_layout
from benchmarks.targets.llama_server import llama_server
from benchmarks.targets.raw import raw
from benchmarks.targets.uma import uma_server

LAYOUT = "split"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """One stream and eight, each target with its weights here and there."""
    for streams in bench.pick((1, 8), (8,)):
        rng = Random(f"weights {index} {streams}")
        n_ctx = streams * CELLS_A_STREAM
        ask: dict[str, Burst] = {}
        async with AsyncExitStack() as stack:
            for is_huge in (False, True):
                where = "in huge pages" if is_huge else "mapped"
                baseline = await stack.enter_async_context(
                    raw(
                        bench.model,
                        streams=streams,
                        n_ctx=n_ctx,
                        layout=LAYOUT,
                        threads=bench.threads,
                        in_huge_pages=is_huge,
                    )
                )
                ask[f"raw {where}"] = partial(decode, baseline)
                settings = {**uma_layout(LAYOUT, n_ctx=n_ctx, slots=streams), "use_mmap": "off" if is_huge else "on"}
                uma = await stack.enter_async_context(
                    uma_server(bench.model, settings, threads=bench.threads, label=where)
                )
                ask[f"UMA {where}"] = partial(serve, uma)
                if bench.has_llama_server:
                    server = await stack.enter_async_context(
                        llama_server(
                            bench.model,
                            slots=streams,
                            n_ctx=n_ctx,
                            layout=LAYOUT,
                            threads=bench.threads,
                            in_huge_pages=is_huge,
                            label=where,
                        )
                    )
                    ask[server.name] = partial(serve, server)
            ask = {kind: ask[kind] for kind in rotated(list(ask), index)}
            for kind, measures in await in_turn(ask, streams, bench.model, rng, least_tokens(bench, streams)):
                emit(f"{streams} streams" if streams > 1 else "1 stream", kind, measures)


SCENARIO = Scenario(
    name="weights",
    about=f"Weights mapped from their file, or in memory of huge pages: N requests at once, {PROMPT} tokens in, "
    f"{GENERATED} out each, burst by burst in turn.",
    columns=("tokens_per_s", "ttft_p50_ms", "inter_token_p99_ms", "server_cpu_us", "rss_mb"),
    measure=measure,
    round_limit_s=120,
)

"""What UMA itself costs: CPU time a token that is not `llama_decode`, the client's included.

Threads tell it apart. The server's main thread is all its I/O; the decode thread counts its own time outside
`llama_decode` (wall time, so waiting for a core or for the interpreter is in it: an upper bound); what is left are
llama.cpp's compute threads, which belong to `llama_decode`. The client is this process.
"""

from __future__ import annotations

import time
from random import Random

from benchmarks.load import burst, warm_up
from benchmarks.measure import Measures, thread_cpu_s, throughput
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.targets.uma import Uma, uma_server

PROMPT, GENERATED = 16, 128


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """The same load as the throughput sweep's, at 1, 8 and 32 streams."""
    async with uma_server(bench.model, {"n_ctx": 32 * 256}, threads=bench.threads) as uma:
        await warm_up(uma, bench.model)
        for streams in (1, 8, 32):
            case = f"{streams} streams" if streams > 1 else "1 stream"
            emit(case, uma.name, await _with_streams(uma, bench, index, streams))


async def _with_streams(uma: Uma, bench: Bench, index: int, streams: int) -> Measures:
    rng = Random(f"overhead {index} {streams}")
    asks = [Ask(bench.model.prompt(rng, PROMPT), GENERATED) for _ in range(streams)]
    before, io_before, client_before = await uma.metrics(), thread_cpu_s(uma.pid)[uma.pid], time.process_time()
    samples = await burst(uma, asks)
    client_s = time.process_time() - client_before
    io_s = thread_cpu_s(uma.pid)[uma.pid] - io_before
    after = await uma.metrics()
    rate = throughput(samples)
    outside_s = (after["outside_decode_ms_total"] - before["outside_decode_ms_total"]) / 1000
    parts = {"decode_thread_us": outside_s, "server_io_us": io_s, "client_us": client_s}
    measures = {name: seconds / rate["tokens"] * 1e6 for name, seconds in parts.items()}
    in_decode_s = (after["decode_ms_sum"] - before["decode_ms_sum"]) / 1000
    return {
        **measures,
        "outside_decode_us": sum(measures.values()),
        "in_decode_share": in_decode_s / rate["wall_s"],
        "tokens_per_s": rate["tokens_per_s"],
    }


def checks(summary: Summary) -> list[Check]:
    """A tenth of a millisecond a token."""
    used = summary.get("32 streams", "UMA", "outside_decode_us")
    return [Check("32 streams: CPU time a token outside llama_decode, client included", used, "≤", 100, "µs")]


SCENARIO = Scenario(
    name="overhead",
    about="CPU time a token outside `llama_decode`: decode thread, server's I/O thread and client.",
    columns=("outside_decode_us", "decode_thread_us", "server_io_us", "client_us", "in_decode_share", "tokens_per_s"),
    measure=measure,
    checks=checks,
    round_limit_s=120,
)

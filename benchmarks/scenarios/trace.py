"""A trace: what recording every step takes of the tokens a second of streams, its delivery included."""

from __future__ import annotations

import math
from random import Random

import trio

from benchmarks.load import until_quiet, warm_up
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.contenders import DEFAULTS
from benchmarks.targets.uma import uma_server
from benchmarks.windows import CASE, DECODE_THREAD, IO_THREAD, STREAMS, WINDOW_S, streams_running, thread_costs, window

GENERATED, WINDOWS = 1_024, 20
WITHOUT, WITH = "no trace", "a trace"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Pairs of windows while the streams run."""
    rng, seconds = Random(f"trace {index}"), bench.pick(WINDOW_S, 1.0)
    async with uma_server(bench.model, {}, threads=bench.default_threads, label=DEFAULTS) as uma:
        await warm_up(uma, bench.model)
        await until_quiet()
        async with streams_running(uma, bench, rng, generated=GENERATED, begun=32):
            for number in range(bench.pick(WINDOWS, 2)):
                for kind in rotated([WITHOUT, WITH], number):
                    trace = ""
                    async with window(uma) as measures:
                        if kind == WITH:
                            trace = await uma.clients[0].trace(seconds)
                        else:
                            await trio.sleep(seconds)
                    emit(CASE, kind, {**measures, "trace_mb": len(trace) / 2**20})


def checks(summary: Summary) -> list[Check]:
    """Next to nothing."""
    io, decode = thread_costs(summary, WITH, WITHOUT)
    note = f"I/O thread {io:+.2f} %, decode thread outside `llama_decode` {decode:+.2f} %"
    return [
        Check(
            f"a trace, {CASE}: tokens/s of those without",
            summary.ratio(CASE, WITH, WITHOUT, "tokens_per_s"),
            "≥",
            0.99,
            "x",
            "" if math.isnan(io + decode) else note,
        )
    ]


SCENARIO = Scenario(
    name="trace",
    about=f"{STREAMS} streams run, with and without a trace of all steps, in turn, {WINDOWS} windows of {WINDOW_S:g} s "
    "each.",
    columns=("tokens_per_s", IO_THREAD, DECODE_THREAD, "trace_mb"),
    measure=measure,
    checks=checks,
    round_limit_s=420,
)

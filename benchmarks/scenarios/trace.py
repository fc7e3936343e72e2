"""A trace: what recording every step takes of the tokens a second of streams, its delivery included.

Windows with and without one take turns. Tokens a second differ from window to window by more than a trace takes, so
many are needed, and what the server's two threads spend beside `llama_decode` is told too, which differs less.
"""

from __future__ import annotations

import math
import time
from random import Random

import trio

from benchmarks.load import beside, until_quiet, warm_up
from benchmarks.measure import Measures, thread_cpu_s
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.contenders import DEFAULTS
from benchmarks.targets.uma import Uma, uma_server

STREAMS, PROMPT, GENERATED = 8, 16, 1_024
WINDOW_S, WINDOWS = 4.0, 20
CASE = f"{STREAMS} streams"
WITHOUT, WITH = "no trace", "a trace"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Pairs of windows while the streams run, each followed by another."""
    rng = Random(f"trace {index}")
    async with uma_server(bench.model, {}, threads=bench.default_threads, label=DEFAULTS) as uma:
        await warm_up(uma, bench.model)
        await until_quiet()

        def another() -> Ask:
            return Ask(bench.model.prompt(rng, PROMPT), GENERATED)

        async with beside(uma, another, streams=STREAMS) as running:
            while len(running) < STREAMS:
                await trio.lowlevel.checkpoint()
            for sample in running:
                await sample.reached(32)
            for number in range(bench.pick(WINDOWS, 2)):
                for kind in rotated([WITHOUT, WITH], number):
                    emit(CASE, kind, await _window(uma, bench.pick(WINDOW_S, 1.0), is_traced=kind == WITH))


async def _window(uma: Uma, seconds: float, *, is_traced: bool) -> Measures:
    began, io_s, before = time.perf_counter(), thread_cpu_s(uma.pid)[uma.pid], await uma.metrics()
    trace = ""
    if is_traced:
        trace = await uma.clients[0].trace(seconds)
    else:
        await trio.sleep(seconds)
    after, io_s = await uma.metrics(), thread_cpu_s(uma.pid)[uma.pid] - io_s
    wall_s = time.perf_counter() - began
    outside_s = (after["outside_decode_ms_total"] - before["outside_decode_ms_total"]) / 1000
    return {
        "tokens_per_s": (after["tokens_generated_total"] - before["tokens_generated_total"]) / wall_s,
        "io_thread_percent": 100 * io_s / wall_s,
        "decode_thread_percent": 100 * outside_s / wall_s,
        "trace_mb": len(trace) / 2**20,
    }


def checks(summary: Summary) -> list[Check]:
    """Next to nothing."""
    names = ("io_thread_percent", "decode_thread_percent")
    io, decode = (summary.get(CASE, WITH, name) - summary.get(CASE, WITHOUT, name) for name in names)
    beside = (
        ""
        if math.isnan(io + decode)
        else f"I/O thread {io:+.2f} %, decode thread outside `llama_decode` {decode:+.2f} %"
    )
    return [
        Check(
            f"a trace, {CASE}: tokens/s of those without",
            summary.ratio(CASE, WITH, WITHOUT, "tokens_per_s"),
            "≥",
            0.99,
            "x",
            beside,
        )
    ]


SCENARIO = Scenario(
    name="trace",
    about=f"{STREAMS} streams run, with and without a trace of all steps, in turn, {WINDOWS} windows of {WINDOW_S:g} s "
    "each.",
    columns=("tokens_per_s", "io_thread_percent", "decode_thread_percent", "trace_mb"),
    measure=measure,
    checks=checks,
    round_limit_s=420,
)

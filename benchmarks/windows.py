"""What something takes of a server whose streams go on: windows of time with it and without, in turn.

Tokens a second differ from window to window by more than it takes, so what the server's two threads spend beside
`llama_decode` is measured too. The I/O thread does the work, and the decode thread can wait for the interpreter
meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import trio

from benchmarks.load import beside
from benchmarks.measure import Measures, thread_cpu_s
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Summary
from benchmarks.targets.uma import Uma

STREAMS, PROMPT = 8, 16
CASE = f"{STREAMS} streams"
WINDOW_S = 4.0
IO_THREAD, DECODE_THREAD = "io_thread_percent", "decode_thread_percent"


@asynccontextmanager
async def streams_running(uma: Uma, bench: Bench, rng: Random, *, generated: int, begun: int) -> AsyncIterator[None]:
    """A block in which `STREAMS` streams run, each followed by another. It begins when each has `begun` tokens."""

    def another() -> Ask:
        return Ask(bench.model.prompt(rng, PROMPT), generated)

    async with beside(uma, another, streams=STREAMS) as running:
        while len(running) < STREAMS:
            await trio.lowlevel.checkpoint()
        for sample in running:
            await sample.reached(begun)
        yield


@asynccontextmanager
async def window(uma: Uma) -> AsyncIterator[Measures]:
    """A block whose figures are in what it is given, once it is left."""
    measures: Measures = {}
    began, io_s, before = time.perf_counter(), thread_cpu_s(uma.pid)[uma.pid], await uma.metrics()
    yield measures
    after, io_s = await uma.metrics(), thread_cpu_s(uma.pid)[uma.pid] - io_s
    wall_s = time.perf_counter() - began
    outside_s = (after["outside_decode_ms_total"] - before["outside_decode_ms_total"]) / 1000
    measures["tokens_per_s"] = (after["tokens_generated_total"] - before["tokens_generated_total"]) / wall_s
    measures[IO_THREAD] = 100 * io_s / wall_s
    measures[DECODE_THREAD] = 100 * outside_s / wall_s


def thread_costs(summary: Summary, measured: str, without: str) -> tuple[float, float]:
    """Share of the wall clock (%) that the I/O and the decode thread spend more in the windows `measured`."""
    io, decode = (
        summary.get(CASE, measured, name) - summary.get(CASE, without, name) for name in (IO_THREAD, DECODE_THREAD)
    )
    return io, decode

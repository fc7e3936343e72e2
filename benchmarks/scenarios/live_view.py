"""The live view: what its frames, four a second, take of the server's time while streams run.

The server's I/O thread makes them; the decode thread is never asked, but can wait for the interpreter meanwhile. So
both count: CPU time of the first, and time of the second outside `llama_decode`, each with a viewer over that without.
Throughput would tell nothing: it differs from second to second by ten times as much.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from statistics import median

import attrs
import trio

from benchmarks.http_stream import HOST
from benchmarks.load import beside, warm_up
from benchmarks.measure import Measures, thread_cpu_s
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.targets.contenders import DEFAULTS
from benchmarks.targets.uma import Uma, uma_both

STREAMS, PROMPT, GENERATED = 8, 16, 256
WINDOW_S, WINDOWS = 4.0, 6
"""Of each kind, in turn: one without a viewer, one with, and the other way round."""
CASE = f"{STREAMS} streams"
WITHOUT, WITH = "no viewer", "a viewer"


@attrs.define
class Viewer:
    """A browser's connection to the live view, as far as the server notices."""

    frames: int = 0

    async def watch(self, port: int, began: trio.Event) -> None:
        """Count frames until cancelled. `began` is set at the first."""
        async with await trio.open_tcp_stream(HOST, port) as stream:
            await stream.send_all(f"GET /ui/api/live HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
            async for data in stream:
                self.frames += data.count(b"event: frame")
                if self.frames:
                    began.set()


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Windows in turn while the streams run, each followed by another."""
    rng = Random(f"live view {index}")
    found: dict[str, list[Measures]] = {WITHOUT: [], WITH: []}
    async with uma_both(bench.model, {}, threads=bench.default_threads, label=DEFAULTS) as (by_socket, by_http):
        await warm_up(by_socket, bench.model)

        def another() -> Ask:
            return Ask(bench.model.prompt(rng, PROMPT), GENERATED)

        async with beside(by_socket, another, streams=STREAMS) as running:
            while len(running) < STREAMS:
                await trio.lowlevel.checkpoint()
            for sample in running:
                await sample.reached(4)
            for number in range(bench.pick(WINDOWS, 1)):
                for kind in (WITHOUT, WITH) if number % 2 == 0 else (WITH, WITHOUT):
                    found[kind].append(await _window(by_socket, by_http.port, bench, is_watched=kind == WITH))
    for kind, windows in found.items():
        emit(CASE, kind, {name: median(each[name] for each in windows) for name in windows[0]})


async def _window(uma: Uma, port: int, bench: Bench, *, is_watched: bool) -> Measures:
    async with _watching(port) if is_watched else _unwatched() as viewer:
        frames, began = viewer.frames, time.perf_counter()
        io_s, before = thread_cpu_s(uma.pid)[uma.pid], await uma.metrics()
        await trio.sleep(bench.pick(WINDOW_S, 1.0))
        after, io_s = await uma.metrics(), thread_cpu_s(uma.pid)[uma.pid] - io_s
        wall_s = time.perf_counter() - began
        outside_s = (after["outside_decode_ms_total"] - before["outside_decode_ms_total"]) / 1000
        return {
            "io_thread_percent": 100 * io_s / wall_s,
            "decode_thread_percent": 100 * outside_s / wall_s,
            "frames_per_s": (viewer.frames - frames) / wall_s,
            "tokens_per_s": (after["tokens_generated_total"] - before["tokens_generated_total"]) / wall_s,
        }


@asynccontextmanager
async def _watching(port: int) -> AsyncIterator[Viewer]:
    viewer, began = Viewer(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(viewer.watch, port, began)
        await began.wait()
        yield viewer
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _unwatched() -> AsyncIterator[Viewer]:
    yield Viewer()


def checks(summary: Summary) -> list[Check]:
    """A viewer costs next to nothing."""
    names = ("io_thread_percent", "decode_thread_percent")
    io, decode = (summary.get(CASE, WITH, name) - summary.get(CASE, WITHOUT, name) for name in names)
    cost = (
        math.nan if math.isnan(io + decode) else max(0.0, io) + max(0.0, decode)
    )  # chance on one makes up for nothing
    return [
        Check(
            "live view, 8 streams: share of the server's time for a viewer", cost, "≤", 0.5, "%",
            f"I/O thread {io:+.2f}, decode thread outside `llama_decode` {decode:+.2f}",
        )
    ]  # fmt: skip


SCENARIO = Scenario(
    name="live_view",
    about=f"{STREAMS} streams run, with and without a viewer of the live view, in turn: CPU time of the server's I/O "
    "thread and the decode thread's time outside `llama_decode`, in per cent of the wall clock.",
    columns=("io_thread_percent", "decode_thread_percent", "frames_per_s", "tokens_per_s"),
    measure=measure,
    checks=checks,
    round_limit_s=120,
)

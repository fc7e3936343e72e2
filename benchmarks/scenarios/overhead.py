"""What UMA itself costs: CPU time a token that is not `llama_decode`, the client's included.

Threads tell it apart. The server's main thread is all its I/O; the decode thread counts its own time outside
`llama_decode` (wall time, so waiting for a core or for the interpreter is in it: an upper bound); what is left are
llama.cpp's compute threads, which belong to `llama_decode`. The client is this process.

What pacing costs shows beside prompts that are read: streams get their tokens one by one when they are due, where a
server without pace hands over all that a batch gave. The prompts' own requests are accepted before the time is taken:
with pace fewer tokens come meanwhile, so that taking a prompt in would count for more of each.

A token that is due comes in the middle of a batch, which has taken the caches; without pace tokens go out as the next
batch begins. What is due to that alone shows without pace and with a bell that rings later (`targets.late_bell`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from random import Random
from typing import Any

import attrs
import trio

from benchmarks.load import beside, burst, start, warm_up
from benchmarks.measure import Measures, thread_cpu_s, throughput
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.uma import Uma, uma_server

PROMPT, GENERATED = 16, 128
STREAMS, STREAM_TOKENS, PROMPTS, PROMPT_TOKENS = 8, 1_024, 4, 1_500
BESIDE_PROMPTS = f"{STREAMS} streams beside prompts"
PACED, UNPACED, LATE = "UMA", "UMA --pace off", "UMA --pace off, in mid-batch"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """The same load as the throughput sweep's, at 1, 8 and 32 streams; then 8 beside prompts: with pace, without, and
    without but told in mid-batch.
    """
    async with uma_server(bench.model, {"n_ctx": 32 * 256}, threads=bench.threads) as uma:
        await warm_up(uma, bench.model)
        for streams in (1, 8, 32):
            case = f"{streams} streams" if streams > 1 else "1 stream"
            emit(case, uma.name, await _with_streams(uma, bench, index, streams))
    for label in rotated([PACED, UNPACED, LATE], index):
        settings = {"n_ctx": 16_384, **({} if label == PACED else {"pace": "off"})}
        module = "benchmarks.targets.late_bell" if label == LATE else "uma"
        async with uma_server(bench.model, settings, threads=bench.threads, module=module) as uma:
            await warm_up(uma, bench.model)
            emit(BESIDE_PROMPTS, label, await _beside_prompts(uma, bench, index))


@attrs.frozen
class Counters:
    """CPU time and tokens so far."""

    metrics: Mapping[str, Any]
    io_s: float
    client_s: float

    @classmethod
    async def read(cls, uma: Uma) -> Counters:
        """Now."""
        return cls(await uma.metrics(), thread_cpu_s(uma.pid)[uma.pid], time.process_time())

    def until(self, later: Counters, tokens: float) -> Measures:
        """What each of so many tokens took since."""
        outside_ms = later.metrics["outside_decode_ms_total"] - self.metrics["outside_decode_ms_total"]
        parts = {
            "decode_thread_us": outside_ms / 1000,
            "server_io_us": later.io_s - self.io_s,
            "client_us": later.client_s - self.client_s,
        }
        measures = {name: seconds / tokens * 1e6 for name, seconds in parts.items()}
        return {**measures, "outside_decode_us": sum(measures.values())}


async def _with_streams(uma: Uma, bench: Bench, index: int, streams: int) -> Measures:
    rng = Random(f"overhead {index} {streams}")
    asks = [Ask(bench.model.prompt(rng, PROMPT), GENERATED) for _ in range(streams)]
    before = await Counters.read(uma)
    samples = await burst(uma, asks)
    after = await Counters.read(uma)
    rate = throughput(samples)
    in_decode_s = (after.metrics["decode_ms_sum"] - before.metrics["decode_ms_sum"]) / 1000
    return {
        **before.until(after, rate["tokens"]),
        "in_decode_share": in_decode_s / rate["wall_s"],
        "tokens_per_s": rate["tokens_per_s"],
    }


async def _beside_prompts(uma: Uma, bench: Bench, index: int) -> Measures:
    """Streams that never end, while long prompts are read."""
    rng = Random(f"overhead {index} beside prompts")

    def stream() -> Ask:
        return Ask(bench.model.prompt(rng, PROMPT), STREAM_TOKENS, priority=1)

    async with beside(uma, stream, streams=STREAMS) as running:
        while len(running) < STREAMS:
            await trio.lowlevel.checkpoint()
        for sample in running:
            await sample.reached(4)
        prompts = [Ask(bench.model.prompt(rng, PROMPT_TOKENS), 1) for _ in range(bench.pick(PROMPTS, 1))]
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                start(nursery, uma, prompt)
            await _until_active(uma, STREAMS + len(prompts))
            had, began, before = _tokens(running), time.perf_counter(), await Counters.read(uma)
        tokens, wall_s, after = _tokens(running) - had, time.perf_counter() - began, await Counters.read(uma)
    return {**before.until(after, tokens), "tokens_per_s": tokens / wall_s}


async def _until_active(uma: Uma, sequences: int) -> None:
    active = 0
    while active < sequences:
        await trio.sleep(0.01)
        active = int((await uma.metrics())["active_sequences"])


def _tokens(samples: list[Sample]) -> int:
    return sum(len(sample.token_s) for sample in samples)


def checks(summary: Summary) -> list[Check]:
    """A tenth of a millisecond a token, and next to nothing for its pace."""
    used = summary.get("32 streams", "UMA", "outside_decode_us")
    paced, unpaced, late = (summary.get(BESIDE_PROMPTS, label, "server_io_us") for label in (PACED, UNPACED, LATE))
    return [
        Check("32 streams: CPU time a token outside llama_decode, client included", used, "≤", 100, "µs"),
        Check(
            f"{BESIDE_PROMPTS}: the server's I/O time a token, over that without pace", paced - unpaced, "≤", 20, "µs"
        ),
        Check(f"{BESIDE_PROMPTS}: the same, where both are told in mid-batch", paced - late, "≤", 20, "µs"),
    ]


SCENARIO = Scenario(
    name="overhead",
    about="CPU time a token outside `llama_decode`: decode thread, server's I/O thread and client; "
    f"then while {PROMPTS} prompts of {PROMPT_TOKENS:,} tokens are read, with pace and without.",
    columns=("outside_decode_us", "decode_thread_us", "server_io_us", "client_us", "in_decode_share", "tokens_per_s"),
    measure=measure,
    checks=checks,
    round_limit_s=480,
)

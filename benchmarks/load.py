"""Ways of putting load on a target: all requests at once, one after another, at a rate, or all the while."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from random import Random

import psutil
import trio

from benchmarks.models import BenchModel
from benchmarks.samples import Ask, Sample
from benchmarks.targets.base import Target
from uma import Request
from uma.types import Finished, Source

QUIET_PERCENT, MAX_WAITED_S = 10.0, 20.0
"""What all CPUs do of what they could, on a machine that is quiet, and for how long that is waited for."""


async def burst(target: Target, asks: Iterable[Ask], *, spacing_s: float = 0) -> list[Sample]:
    """Send all, `spacing_s` apart, and wait until the last has ended."""
    samples: list[Sample] = []
    async with trio.open_nursery() as nursery:
        for ask in asks:
            if samples and spacing_s:
                await trio.sleep(spacing_s)
            samples.append(start(nursery, target, ask))
    return samples


async def one(target: Target, ask: Ask) -> Sample:
    """Send one request and wait for its end."""
    return (await burst(target, [ask]))[0]


async def finish_all(engine: Source, requests: Iterable[Request]) -> list[Finished]:
    """Generate for all requests at once, on an engine in this process; their ends, in the order in which they came."""
    finished: list[Finished] = []

    async def read(request: Request) -> None:
        async with engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    finished.append(event)

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(read, request)
    return finished


def start(nursery: trio.Nursery, target: Target, ask: Ask) -> Sample:
    """Send one request as a task of `nursery`; the sample fills as tokens come."""
    sample = Sample()
    nursery.start_soon(target.ask, ask, sample)
    return sample


@asynccontextmanager
async def beside(target: Target, next_ask: Callable[[], Ask], *, streams: int) -> AsyncIterator[list[Sample]]:
    """Keep `streams` requests running for the block, each followed by another; hang up on them after."""
    samples: list[Sample] = []

    async def keep_running() -> None:
        while True:
            sample = Sample()
            samples.append(sample)
            await target.ask(next_ask(), sample)
            if sample.error:
                return

    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(keep_running)
        yield samples
        nursery.cancel_scope.cancel()


async def open_loop(
    target: Target, asks: Sequence[Ask], *, per_second: float, rng: Random, patience_s: float
) -> list[Sample]:
    """Send at random moments, `per_second` on average, whatever comes back; hang up `patience_s` after the last."""
    samples: list[Sample] = []
    async with trio.open_nursery() as nursery:
        due = trio.current_time()
        for ask in asks:
            await trio.sleep_until(due)
            samples.append(start(nursery, target, ask))
            due += rng.expovariate(per_second)
        nursery.cancel_scope.deadline = trio.current_time() + patience_s
    return samples


async def until_quiet() -> None:
    """Wait until this machine's CPUs have had nothing to do for a while: a process that has just started goes on
    loading for some time after it says that it is ready. Bounded, for some machine is never quiet.
    """
    with trio.move_on_after(MAX_WAITED_S):
        psutil.cpu_percent()
        busy = 100.0
        while busy > QUIET_PERCENT:
            await trio.sleep(1)
            busy = psutil.cpu_percent()


async def warm_up(target: Target, model: BenchModel) -> None:
    """One small request that nothing else shares, so that no measurement pays for a first time."""
    await one(target, Ask(model.prompt(Random("warm-up"), 32), 8))

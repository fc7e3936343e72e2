"""KV events for routers: what telling of blocks costs the decode thread, and whether a subscriber misses any."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable
from random import Random

import attrs
import trio

from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from uma import open_engine
from uma.config import RuntimeConfig
from uma.contracts.blocks import chain
from uma.contracts.event_log import BlockIndex
from uma.engine.engine import Engine
from uma.engine.kv.events import KvListener, Run, Tier
from uma.engine.kv.feed import BlockLedger, KvFeed
from uma.types import Request, SamplingParams

STREAMS, PROMPT, GENERATED, CELLS_A_STREAM = 32, 64, 128, 256
BLOCK_SIZE = 16
PAUSE_SEC = 0.2
"""Between two looks at all that is held, so that the burst has the decode thread most of the time."""


@attrs.define
class Timed:
    """Passes events on, and adds up the time that takes."""

    listener: KvListener
    spent_s: float = 0.0

    def stored(self, tier: Tier, run: Run) -> None:
        """See `KvListener`."""
        began = time.perf_counter()
        self.listener.stored(tier, run)
        self.spent_s += time.perf_counter() - began

    def removed(self, tier: Tier, run: Run) -> None:
        """See `KvListener`."""
        began = time.perf_counter()
        self.listener.removed(tier, run)
        self.spent_s += time.perf_counter() - began

    def cleared(self, tier: Tier) -> None:
        """See `KvListener`."""
        began = time.perf_counter()
        self.listener.cleared(tier)
        self.spent_s += time.perf_counter() - began


@attrs.define
class Subscriber:
    """Applies every change as it comes."""

    index: BlockIndex = attrs.field(factory=BlockIndex)
    sequence: int = 0
    events: int = 0
    snapshots: int = 0
    """Times it had missed events."""

    async def follow(self, feed: KvFeed) -> None:
        """Until cancelled."""
        while True:
            await self.take(feed)

    async def take(self, feed: KvFeed) -> None:
        """The changes that there are now."""
        found = await feed.changes(self.sequence)
        self.snapshots += found.is_snapshot
        self.events += len(found.events)
        self.sequence = found.sequence
        for event in found.events:
            self.index.apply(event)


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Streams at once, over and over in a pool that has to evict, with one subscriber."""
    rng = Random(f"kv_events {index}")
    config = RuntimeConfig(
        model=str(bench.model.path), threads=bench.threads,
        n_ctx=STREAMS * CELLS_A_STREAM, max_sequences=STREAMS,
    )  # fmt: skip
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        feed = KvFeed(engine.mailbox.call)
        timed = Timed(BlockLedger(BLOCK_SIZE, "xxh3", feed.post))
        engine.listen_to_kv(timed)
        engine.worker.commands.call(feed.begin)
        subscriber = Subscriber()
        nursery.start_soon(subscriber.follow, feed)
        await _burst(engine, bench, rng)
        timed.spent_s, began, events = 0.0, time.perf_counter(), subscriber.events
        for _ in range(bench.pick(3, 1)):
            await _burst(engine, bench, rng)
        wall_s, spent_s, events = time.perf_counter() - began, timed.spent_s, subscriber.events - events
        measures = {
            "decode_thread_share": 100 * spent_s / wall_s,
            "events_per_s": events / wall_s,
            "blocks_lost": await _most_wrong(engine, feed, subscriber, bench, rng)
            + (math.inf if subscriber.snapshots else 0),
        }
        emit(f"{STREAMS} streams", "UMA", measures)
        nursery.cancel_scope.cancel()


async def _most_wrong(engine: Engine, feed: KvFeed, subscriber: Subscriber, bench: Bench, rng: Random) -> int:
    """Blocks that the subscriber has wrong, at the worst of many moments of a burst and at its end.

    A burst by itself: to look at all that is held takes the decode thread longer than the events do.
    """
    found: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_look_again_and_again, engine, feed, subscriber, found)
        await _burst(engine, bench, rng)
        nursery.cancel_scope.cancel()
    return max(*found, await _wrong(engine, feed, subscriber))


async def _look_again_and_again(engine: Engine, feed: KvFeed, subscriber: Subscriber, found: list[int]) -> None:
    while True:
        found.append(await _wrong(engine, feed, subscriber))
        await trio.sleep(PAUSE_SEC)


async def _wrong(engine: Engine, feed: KvFeed, subscriber: Subscriber) -> int:
    """Blocks that are held at this moment and not known from the events until then, or the other way round."""
    held: set[int] = set()
    looked = trio.Event()
    wrong = 0

    def look(sequences: Iterable[array[int]]) -> None:
        for tokens in sequences:
            held.update(chain(tokens, BLOCK_SIZE))
        feed.post(compare)

    def compare() -> None:
        nonlocal wrong
        index = BlockIndex(dict(subscriber.index.blocks))
        for event in feed.log.catch_up(subscriber.sequence).events:
            index.apply(event)
        wrong = len(index.blocks.keys() ^ held)
        looked.set()

    engine.inspect_kv(look)
    await looked.wait()
    return wrong


async def _burst(engine: Engine, bench: Bench, rng: Random) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(STREAMS):
            nursery.start_soon(_answer, engine, str(number), bench.model.prompt(rng, PROMPT))


async def _answer(engine: Engine, name: str, prompt: tuple[int, ...]) -> None:
    sampling = SamplingParams(max_tokens=GENERATED, ignore_eos=True)
    async with engine.generate(Request(name, token_ids=prompt, sampling=sampling)) as stream:
        async for _ in stream:
            pass


def checks(summary: Summary) -> list[Check]:
    """The two claims."""
    case = f"{STREAMS} streams"
    return [
        Check(
            f"{case}: share of the decode thread's time for events",
            summary.get(case, "UMA", "decode_thread_share"), "≤", 0.5, "%",
        ),
        Check(f"{case}: blocks that a subscriber has wrong", summary.get(case, "UMA", "blocks_lost"), "≤", 0),
    ]  # fmt: skip


SCENARIO = Scenario(
    name="kv_events",
    about=f"{STREAMS} streams of {GENERATED} tokens, again and again, with one view of blocks of {BLOCK_SIZE} tokens "
    "and one subscriber to it: what that takes of the decode thread's time in per cent, and the most blocks that the "
    "subscriber has wrong at any of many moments.",
    columns=("decode_thread_share", "events_per_s", "blocks_lost"),
    measure=measure,
    checks=checks,
)

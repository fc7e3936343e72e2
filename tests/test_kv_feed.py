"""A subscriber that applies the KV events knows exactly which whole blocks the engine can reuse, at any moment."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import trio
from engine_world import answers, ask, config_for, tokens_for
from hypothesis.stateful import invariant, run_state_machine_as_test
from kv_histories import Subscription
from test_kv import PoolLives, SplitPoolLives, StatePoolLives

from harness import PATIENCE_SEC
from uma.contracts.blocks import chain
from uma.contracts.event_log import BlockIndex
from uma.contracts.events import BlockRemoved, BlockStored, KvEvent
from uma.engine import Engine, open_engine
from uma.engine.kv import pool as pool_module
from uma.engine.kv.feed import BlockLedger, KvFeed

BLOCK = 4


@lru_cache(maxsize=100_000)
def names(tokens: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The names of the whole blocks of one sequence; kept, as each step of a life asks for nearly the same."""
    return tuple(chain(tokens, size))


def tokens_to(index: BlockIndex, name: int) -> tuple[int, ...]:
    """All tokens from a sequence's beginning to the end of a block."""
    block = index.blocks[name]
    return (() if block.parent is None else tokens_to(index, block.parent)) + block.token_ids


def names_of(sequences: Iterable[Any], size: int) -> set[int]:
    """The names of all whole blocks of these sequences."""
    return {name for tokens in sequences for name in names(tuple(tokens), size)}


class TestPool:
    """The pool's whole life by hypothesis: requests, forks, preemption, eviction, snapshots, roll-back."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("MIN_SHARED_TOKENS", "MIN_GAIN_TOKENS", "MIN_EVICTED_TOKENS"):
            monkeypatch.setattr(pool_module, name, 1)

    @pytest.mark.parametrize("machine", [PoolLives, SplitPoolLives, StatePoolLives])
    def test_the_events_add_up_to_what_cells_and_memory_hold(self, machine: type[PoolLives]) -> None:
        class Watched(machine):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__()
                self.index = BlockIndex()
                self.told: list[KvEvent] = []
                self.pool.listen(BlockLedger(BLOCK, "xxh3", self.told.append))

            @invariant()
            def subscriber_knows_what_is_held(self) -> None:
                for event in self.told:
                    self.index.apply(event)
                self.told.clear()
                assert self.index.blocks.keys() == names_of(self.pool.held(), BLOCK)
                assert all(names(tokens_to(self.index, name), BLOCK)[-1] == name for name in self.index.blocks)

        run_state_machine_as_test(Watched)

    def test_it_is_told_once_that_a_checkpoint_and_all_it_stood_behind_are_gone(self) -> None:
        life, told = StatePoolLives(), list[KvEvent]()
        life.pool.listen(BlockLedger(BLOCK, "xxh3", told.append))
        life.admit(computes=True, tokens=[0] * BLOCK)
        life.stop(choice=0)
        life.preempt(choice=0)
        life.teardown()
        assert list(map(type, told)) == [BlockStored, BlockRemoved]


async def compared(engine: Engine, feed: KvFeed, subscription: Subscription, size: int) -> tuple[set[int], set[int]]:
    """The blocks that the subscriber knows of and those that are held, both at one moment between two batches."""
    known, held = set[int](), set[int]()
    looked = trio.Event()

    def look(sequences: Iterable[Any]) -> None:
        held.update(names_of(sequences, size))
        feed.post(compare)

    def compare() -> None:
        subscription.catch_up(feed.log.catch_up(subscription.sequence))
        known.update(subscription.index.blocks)
        looked.set()

    engine.inspect_kv(look)
    with trio.fail_after(PATIENCE_SEC):
        await looked.wait()
    return known, held


async def test_under_load_with_eviction_and_preemption_subscribers_know_what_the_engine_holds(tiny: Path) -> None:
    common = tokens_for(0, 40)
    requests = [ask((*common, *tokens_for(each, 60)), 40, id=str(each), priority=each % 3 - 1) for each in range(40)]
    async with open_engine(config_for(tiny, n_ctx=768, cache_ram_mb=1)) as engine, trio.open_nursery() as nursery:
        feed, early, moments = engine.kv_events(8), Subscription(), 0

        async def look_again_and_again() -> None:
            nonlocal moments
            while True:
                known, held = await compared(engine, feed, early, 8)
                assert known == held
                moments += 1

        nursery.start_soon(look_again_and_again)
        with trio.fail_after(PATIENCE_SEC):
            await answers(engine, requests)
        nursery.cancel_scope.cancel()
        # More moments than the idle engine before and after has batches: in the midst of streams too.
        assert moments > 10
        late = Subscription()
        known, held = await compared(engine, feed, late, 8)
        assert known == held != set()
        assert engine.snapshot()["cache_evictions"] > 0


async def test_a_feed_that_is_asked_for_late_begins_with_all_that_is_held_by_then_at_once(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        await answers(engine, [ask(tokens_for(each, 50), 10, id=str(each)) for each in range(12)])
        feed = engine.kv_events(16)
        with trio.fail_after(PATIENCE_SEC):
            first = await feed.changes()
        begun = BlockIndex()
        for event in first.events:
            begun.apply(event)
        known, held = await compared(engine, feed, Subscription(), 16)
        assert begun.blocks.keys() == known == held != set()


async def test_the_answer_s_blocks_are_told_of_too_and_the_names_follow_the_algorithm(tiny: Path) -> None:
    prompt = tokens_for(1, 8)
    async with open_engine(config_for(tiny)) as engine:
        feed = engine.kv_events(4, "fnv1a")
        told: list[KvEvent] = []
        (got,) = await answers(engine, [ask(prompt, 12)])
        with trio.fail_after(PATIENCE_SEC):
            sequence = 0
            while sum(len(each.token_ids) for each in told if isinstance(each, BlockStored)) < 16:
                missed = await feed.changes(sequence)
                told, sequence = [*told, *missed.events], missed.sequence
    names = [name for each in told if isinstance(each, BlockStored) for name in each.block_hashes]
    assert names[:4] == chain((*prompt, *got.token_ids[:8]), 4, "fnv1a")

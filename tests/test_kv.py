"""The pool of cells and sequence ids through random lives: a sequence has the tokens that it was told of.

llama.cpp's memory is a plain account here: for each sequence id its cells, each with the token computed into it. A
snapshot is a copy of that account, and a copy between separate buffers happens with the next batch, as it really does.
"""

from __future__ import annotations

import pickle
import sys
from array import array
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from uma.engine.kv import leaving, snapshot_copies, snapshots
from uma.engine.kv import pool as kv
from uma.engine.kv.leaving import Left, Pays
from uma.engine.kv.pool import Holding, KvPool
from uma.engine.kv.prefix_tree import common_length
from uma.engine.kv.snapshots import Snapshot, SnapshotStore
from uma.llama.context import Context

N_IDS, N_CELLS = 5, 60
Cells = list[tuple[int, int]]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=25)


class FakeContext:
    """Which sequence holds which cell, with llama.cpp's rules."""

    def __init__(self, *, unified: bool) -> None:
        self.params = SimpleNamespace(kv_unified=unified, cache_type_k="f16", cache_type_v="f16", guards_window=False)
        self.n_ctx_seq = N_CELLS
        info = SimpleNamespace(architecture="llama")
        self.model = SimpleNamespace(kv_bytes_per_token=lambda *_: 1, memory="attention", window_tokens=0, info=info)
        self.n_sequences, self.n_ctx = N_IDS, N_CELLS
        self.held: dict[int, Cells] = {seq_id: [] for seq_id in range(N_IDS)}
        self.first: dict[int, int] = dict.fromkeys(range(N_IDS), 0)
        """The position of the first of them."""
        self.queued: list[tuple[int, int]] = []
        self._serial = count()

    def compute(self, work: dict[int, list[int]]) -> None:
        """A batch."""
        self.queued.clear()
        for seq_id, tokens in work.items():
            self.held[seq_id] = self.held[seq_id] + [(next(self._serial), token) for token in tokens]
        assert not self.params.kv_unified or self.used() <= N_CELLS, "a batch without room"

    def used(self) -> int:
        return len({cell for cells in self.held.values() for cell in cells})

    def tokens(self, seq_id: int) -> list[int]:
        return [token for _, token in self.held[seq_id]]

    def seq_cp(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        if self.params.kv_unified and end < 0:
            assert self.first[source] == self.first[target] + len(self.held[target]), "a part out of its place"
            self.held[target] = self.held[target] + self.held[source]
            return
        assert self.params.kv_unified == (end >= 0)
        if self.held[target]:
            assert max(start, 0) == 0 and self.first[target] == end, "copied over cells"
            self.held[target] = self.held[source][:end] + self.held[target]
            self.first[target] = 0
        elif end >= 0:
            self.first[target] = max(start, 0)
            self.held[target] = self.held[source][self.first[target] : end]
        else:
            self.held[target] = [(next(self._serial), token) for _, token in self.held[source]]
            self.queued.append((source, target))

    def seq_rm(self, seq_id: int, start: int = -1, end: int = -1) -> bool:
        assert end == -1
        self.held[seq_id] = self.held[seq_id][: max(start - self.first[seq_id], 0)]
        if not self.held[seq_id]:
            self.first[seq_id] = 0
        return True

    def state_size(self, seq_id: int) -> int:
        return len(self.state_get(seq_id))

    def state_get(self, seq_id: int) -> bytes:
        assert all(seq_id != target for _, target in self.queued), "saved what has not been copied yet"
        return pickle.dumps((self.first[seq_id], self.tokens(seq_id)))

    def state_set(self, seq_id: int, data: bytes) -> bool:
        assert all(seq_id not in pair for pair in self.queued), "a queued copy would write over it"
        self.held[seq_id] = []
        first, tokens = pickle.loads(data)
        if self.params.kv_unified and self.used() + len(tokens) > N_CELLS:
            return False
        self.first[seq_id] = first
        self.held[seq_id] = [(next(self._serial), token) for token in tokens]
        return True


def always(freed: int, kept: int, tokens: int, *, has_snapshot: bool) -> bool:
    """Cache leaves its cells whenever it can."""
    return True


def never(freed: int, kept: int, tokens: int, *, has_snapshot: bool) -> bool:
    """Only what is copied quickly does."""
    return False


def if_it_frees_more(freed: int, kept: int, tokens: int, *, has_snapshot: bool) -> bool:
    """Where it frees more than it shares."""
    assert freed + kept == tokens and freed > 0
    return freed > kept


class PoolLives(RuleBasedStateMachine):
    """Sequences are admitted, computed, preempted and ended, as the worker does it."""

    unified = True
    exact_ends = False
    leaves_early = False

    def __init__(self) -> None:
        super().__init__()
        self.context = FakeContext(unified=self.unified)
        self.store = SnapshotStore(2_000, exact_ends=self.exact_ends)
        context: Any = self.context
        self.pool = KvPool(
            context, self.store, shares=not self.exact_ends, cache_cells=20, leaves_early=self.leaves_early
        )
        self.running: list[Holding] = []
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1
        return self.now

    def compute(self, holding: Holding, tokens: list[int]) -> None:
        self.pool.make_room(len(tokens))
        self.context.compute({holding.seq_id: tokens})
        self.pool.batch_done()
        self.pool.extend(holding, tokens)

    @precondition(lambda self: any(each.tip.end for each in self.running))
    @rule(choice=st.integers(0, 9), less=st.integers(0, 30))
    def roll_back(self, choice: int, less: int) -> None:
        computed = [each for each in self.running if each.tip.end]
        holding = computed[choice % len(computed)]
        length = max(1, holding.tip.end - less)
        before = self.context.tokens(holding.seq_id)
        assert self.pool.truncate(holding, length)
        assert list(holding.tip.whole()) == self.context.tokens(holding.seq_id) == before[:length]

    @precondition(lambda self: self.pool.has_id())
    @rule(tokens=TOKENS, computes=st.booleans())
    def admit(self, tokens: list[int], computes: bool) -> None:
        wanted = array("i", tokens)
        needed = self.pool.cells_needed(wanted)
        if needed > self.pool.free_cells:
            return
        holding, length = self.pool.acquire(wanted, self.tick())
        assert 0 <= length < len(tokens)
        assert self.context.tokens(holding.seq_id) == tokens[:length], "told that tokens are there which are not"
        self.running.append(holding)
        while self.leaves_early and self.pool.make_way(if_it_frees_more, 4, [wanted]).has_more:
            pass
        assert len(tokens) - length <= self.pool.free_cells, "what was promised does not fit"
        if computes:
            self.compute(holding, tokens[length:])

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, N_IDS), tokens=TOKENS)
    def go_on(self, choice: int, tokens: list[int]) -> None:
        if len(tokens) <= self.pool.free_cells:
            self.compute(self.running[choice % len(self.running)], tokens)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, N_IDS), keep=st.booleans())
    def end(self, choice: int, keep: bool) -> None:
        self.pool.release(self.running.pop(choice % len(self.running)), self.tick(), keep=keep)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, N_IDS))
    def preempt(self, choice: int) -> None:
        holding = self.running.pop(choice % len(self.running))
        before = self.pool.free_cells
        own = self.pool.own_cells(holding)
        self.pool.save(holding, self.tick())
        self.pool.release(holding, self.now, keep=False)
        assert not self.context.params.kv_unified or self.pool.free_cells == before + own

    @rule()
    def use_idle_time(self) -> None:
        for _ in range(100 * N_IDS):
            if not self.pool.save_cached():
                break
        else:
            raise AssertionError("snapshots push each other out for ever")
        self.pool.trim_cache()

    @rule(parts=st.integers(1, 4))
    def use_a_moment(self, parts: int) -> None:
        for _ in range(parts):
            self.pool.save_cached()

    @rule()
    def drop_cache(self) -> None:
        self.pool.drop_cache()
        assert self.pool.used_cells == self.pool.tree.protected_tokens

    def cache(self) -> dict[tuple[int, ...], tuple[int, float]]:
        """What can be evicted: how often each was reused, and when it was used last."""
        leaves = [self.pool.tree.cached[seq_id] for seq_id in self.pool.tree.leaves()]
        return {tuple(each.whole()): (each.reuses, each.used_at) for each in leaves}

    @precondition(lambda self: not self.pool.is_copying)
    @rule(unified=st.booleans(), keeps_cache=st.booleans())
    def change_layout(self, unified: bool, keeps_cache: bool) -> None:
        before, cached = self.context.used(), len(self.pool.tree.cached)
        held = [self.context.tokens(each.seq_id) for each in self.running]
        kept = self.cache()
        # Two sequences can have computed the same tokens side by side; where they are taken once, either's count holds.
        reuses = {(tuple(node.whole()), node.reuses) for node in self.pool.tree.nodes()}
        is_apart = not self.context.params.kv_unified
        most_cache = N_CELLS if keeps_cache else 0
        running, rest = self.pool.carry_out(self.running, self.tick(), shares=unified, most_cache=most_cache)
        assert (self.context.used(), self.pool.used_cells, self.pool.used_ids) == (0, 0, 0)
        assert len(rest) <= cached * (keeps_cache and unified and not is_apart)
        self.context.params.kv_unified = unified
        self.pool.attach(is_for_now=False)
        holdings = [self.pool.carry_in(each, self.tick()) for each in running]
        self.pool.carry_in_cached(rest, self.tick())
        for holding, tokens in zip(holdings, held, strict=True):
            if holding is None:
                assert is_apart and (unified or len(tokens) > N_CELLS), "there was space for it"
            else:
                assert self.context.tokens(holding.seq_id) == tokens
                assert not tokens or (tuple(tokens), holding.tip.reuses) in reuses
        if unified and not is_apart:
            assert self.context.used() <= before, "what was shared is there several times"
            cache = self.cache()
            assert cache.items() <= (kept if keeps_cache else {}).items(), "cache grew younger, or came from nowhere"
            held_now = [array("i", tokens) for tokens in (*held, *cache)]
            for lost in (kept.keys() if keeps_cache else set()) - cache.keys():
                common = max(common_length(array("i", lost), tokens) for tokens in [array("i"), *held_now])
                assert len(lost) - common < leaving.WORTH_RESTORING_TOKENS, (
                    "cache was lost that takes long to compute again"
                )
        self.running = [each for each in holdings if each is not None]

    @invariant()
    def books_are_right(self) -> None:
        holders = {seq_id for seq_id, cells in self.context.held.items() if cells}
        assert holders <= {holding.seq_id for holding in self.running} | set(self.pool.tree.cached)
        assert self.pool.used_ids == len(self.running) + len(self.pool.tree.cached)
        for seq_id, node in [*self.pool.tree.cached.items(), *((each.seq_id, each.tip) for each in self.running)]:
            assert list(node.whole()) == self.context.tokens(seq_id)
        if self.context.params.kv_unified:
            assert self.pool.used_cells == self.context.used() <= N_CELLS
        assert self.store.size_bytes <= 2_000

    def teardown(self) -> None:
        for holding in self.running:
            self.pool.release(holding, self.now, keep=False)
        self.pool.drop_cache()
        assert (self.pool.used_ids, self.pool.used_cells, self.context.used()) == (0, 0, 0)


class EarlyPoolLives(PoolLives):
    """Where cache leaves its cells as soon as a sequence begins that has no use for it."""

    leaves_early = True


class SplitPoolLives(PoolLives):
    """With a buffer for each sequence."""

    unified = False


class UncuttablePoolLives(PoolLives):
    """With a memory that cannot be cut, so that nothing is shared but whole snapshots."""

    exact_ends = True


class TestPool:
    """The lives, with what is worth sharing and keeping made as small as they are."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, name, value in (
            (kv, "LEAST_SHARED_TOKENS", 2),
            (kv, "WORTH_RESTORING_TOKENS", 3),
            (leaving, "WORTH_RESTORING_TOKENS", 3),
            (leaving, "MOST_QUICK_BYTES", 100),
            (kv, "LEAST_EVICTED_TOKENS", 3),
            (snapshot_copies, "MOST_IDLE_BYTES", 7),
            (snapshots, "LEAST_WORTH", 2.0),
        ):
            monkeypatch.setattr(module, name, value)

    @pytest.mark.parametrize("machine", [PoolLives, EarlyPoolLives, SplitPoolLives, UncuttablePoolLives])
    def test_tokens_that_are_told_to_be_there_really_are(self, machine: type[PoolLives]) -> None:
        run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=30, deadline=None))


class TestTrimming:
    """Cache beyond its limit that could not leave while sequences decoded."""

    @pytest.mark.parametrize(("until", "stays"), [(None, 1), (lambda: False, 1), (lambda: True, 3)])
    def test_no_more_of_it_leaves_once_that_is_enough(
        self, monkeypatch: pytest.MonkeyPatch, until: Callable[[], bool] | None, stays: int
    ) -> None:
        monkeypatch.setattr(sys.modules[__name__], "N_CELLS", 400)
        monkeypatch.setattr(kv, "MOST_STALL_BYTES", 0)
        monkeypatch.setattr(snapshots, "LEAST_WORTH", 2.0)
        context = FakeContext(unified=True)
        pool = KvPool(cast(Context, context), SnapshotStore(10**6), shares=True, cache_cells=20)
        pool.has_decoding_rows = True
        for number in range(4):
            tokens = array("i", range(100 * number, 100 * number + 90))
            holding, _ = pool.acquire(tokens, number)
            context.compute({holding.seq_id: list(tokens)})
            pool.extend(holding, tokens)
            pool.release(holding, number, keep=True)
        assert len(pool.tree.cached) == 4
        pool.has_decoding_rows = False
        pool.trim_cache(until)
        assert len(pool.tree.cached) == stays


class TestCarrying:
    """A conversation in the cache, and two running sequences that begin like it, on their way to another layout."""

    common, cached = array("i", range(100)), array("i", range(160))
    running = array("i", [*range(100), 7, 7]), array("i", [*range(100), 8, 8, 8])

    @pytest.fixture
    def context(self, monkeypatch: pytest.MonkeyPatch) -> FakeContext:
        monkeypatch.setattr(sys.modules[__name__], "N_CELLS", 400)
        return FakeContext(unified=True)

    @pytest.fixture
    def pool(self, context: FakeContext) -> KvPool:
        return KvPool(cast(Context, context), SnapshotStore(10**6), shares=True, cache_cells=400)

    def compute(self, pool: KvPool, context: FakeContext, tokens: array[int], now_ms: float) -> Holding:
        holding, found = pool.acquire(tokens, now_ms)
        context.compute({holding.seq_id: list(tokens[found:])})
        pool.extend(holding, tokens[found:])
        return holding

    def carry(self, pool: KvPool, context: FakeContext, *, unified: bool, most_cache: int) -> list[Holding | None]:
        pool.release(self.compute(pool, context, self.cached, 1.0), 2.0, keep=True)
        holdings = [self.compute(pool, context, tokens, 3.0) for tokens in self.running]
        assert context.used() == pool.used_cells == 100 + 60 + 2 + 3
        running, rest = pool.carry_out(holdings, 4.0, shares=unified, most_cache=most_cache)
        context.params.kv_unified = unified
        pool.attach(is_for_now=True)
        found = [pool.carry_in(each, 5.0) for each in running]
        pool.carry_in_cached(rest, 6.0)
        return found

    def assert_all_are_there(self, holdings: list[Holding | None], context: FakeContext) -> None:
        for holding, tokens in zip(holdings, self.running, strict=True):
            assert holding is not None and context.tokens(holding.seq_id) == list(tokens)

    def test_what_they_share_is_there_once_and_cache_is_as_old_as_before(
        self, pool: KvPool, context: FakeContext
    ) -> None:
        holdings = self.carry(pool, context, unified=True, most_cache=60)
        assert context.used() == pool.used_cells == 100 + 60 + 2 + 3
        self.assert_all_are_there(holdings, context)
        (cached,) = pool.tree.cached.values()
        assert (cached.whole(), cached.used_at) == (self.cached, 2.0)
        assert [node.reuses for node in cached.path()][-2] == 2, "two began like it"
        assert not len(pool.store)

    def test_cache_that_does_not_come_along_is_in_memory_and_found_there(
        self, pool: KvPool, context: FakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(snapshots, "LEAST_WORTH", 20.0)
        self.carry(pool, context, unified=True, most_cache=0)
        assert context.used() == 100 + 2 + 3 and not pool.tree.cached
        assert pool.store.covers(self.cached)

    def test_cache_that_holds_little_more_than_running_sequences_is_worth_no_snapshot(
        self, pool: KvPool, context: FakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kv, "WORTH_RESTORING_TOKENS", 61)
        self.carry(pool, context, unified=True, most_cache=0)
        assert not len(pool.store), "all but its end is carried over"

    def test_each_has_all_of_it_in_a_buffer_of_its_own(self, pool: KvPool, context: FakeContext) -> None:
        holdings = self.carry(pool, context, unified=False, most_cache=0)
        assert context.used() == 100 + 2 + 100 + 3
        self.assert_all_are_there(holdings, context)

    def test_cache_of_more_cells_than_are_to_be_carried_is_left(self, pool: KvPool, context: FakeContext) -> None:
        self.carry(pool, context, unified=True, most_cache=59)
        assert context.used() == 100 + 2 + 3 and not pool.tree.cached

    def test_cache_that_is_sooner_computed_again_than_carried_is_left(
        self, pool: KvPool, context: FakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kv, "WORTH_RESTORING_TOKENS", 61)
        self.assert_all_are_there(self.carry(pool, context, unified=True, most_cache=400), context)
        assert context.used() == 100 + 2 + 3 and not pool.tree.cached


class TestCacheThatLeavesEarly:
    """A pool with room to spare in cells and memory, in which one conversation has ended and another begins."""

    ended, other = array("i", range(200)), array("i", range(1_000, 1_010))

    def ended_pool(
        self, monkeypatch: pytest.MonkeyPatch, **options: bool
    ) -> tuple[KvPool, FakeContext, list[Snapshot]]:
        monkeypatch.setattr(sys.modules[__name__], "N_CELLS", 1_000)
        context, archived = FakeContext(unified=True), list[Snapshot]()
        pool = KvPool(
            cast(Context, context),
            SnapshotStore(10**6, on_added=archived.append),
            shares=True,
            cache_cells=1_000,
            **options,
        )
        self.run(pool, context, self.ended)
        return pool, context, archived

    def run(self, pool: KvPool, context: FakeContext, tokens: array[int]) -> int:
        """A sequence from its beginning to its end; how many of its tokens it found."""
        holding, found = pool.acquire(tokens, 1.0)
        context.compute({holding.seq_id: list(tokens[found:])})
        pool.batch_done()
        pool.extend(holding, tokens[found:])
        pool.release(holding, 2.0, keep=True)
        return found

    def begin(self, pool: KvPool, tokens: array[int], *, pays: Pays = never, most_tokens: int = 1_000) -> Holding:
        """A sequence begins, and way is made for it."""
        holding, _ = pool.acquire(tokens, 3.0)
        pool.make_way(pays, most_tokens, [tokens])
        return holding

    def slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No cached sequence is copied quickly."""
        monkeypatch.setattr(leaving, "MOST_QUICK_BYTES", 0)

    def test_it_is_in_memory_and_found_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, context, archived = self.ended_pool(monkeypatch, leaves_early=True)
        holding = self.begin(pool, self.other)
        assert context.used() == 0, "cells of cache that the new sequence's rows would go over in vain"
        assert not archived, "what is used once is worth no disk"
        pool.release(holding, 4.0, keep=False)
        assert self.run(pool, context, self.ended + array("i", [7])) == len(self.ended)

    def test_what_the_new_sequence_uses_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, context, _ = self.ended_pool(monkeypatch, leaves_early=True)
        holding = self.begin(pool, self.ended + array("i", [7]), pays=always)
        assert holding.tip.end == context.used() == len(self.ended)

    def test_what_begins_like_it_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, _, _ = self.ended_pool(monkeypatch, leaves_early=True)
        half = self.ended[:100]
        self.begin(pool, half + array("i", [7]))
        assert pool.continuation(half, 4) == self.ended[100:104], "what another sequence went on with is a draft"

    def test_what_begins_with_all_of_it_stays_whatever_it_costs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, _, _ = self.ended_pool(monkeypatch, leaves_early=True)
        half = self.ended[:100]
        self.begin(pool, half, pays=always)
        assert pool.continuation(half, 4) == self.ended[100:104], "what another sequence went on with is a draft"

    def test_of_what_begins_like_it_the_rest_leaves_where_that_pays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, context, _ = self.ended_pool(monkeypatch, leaves_early=True)
        prompt = self.ended[:50] + array("i", [7, 7])
        holding = self.begin(pool, prompt, pays=if_it_frees_more)
        assert context.used() == 50, "what both begin with"
        pool.release(holding, 4.0, keep=False)
        assert self.run(pool, context, self.ended + array("i", [7])) == len(self.ended)

    def test_what_takes_long_to_copy_or_would_not_come_back_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, context, _ = self.ended_pool(monkeypatch, leaves_early=True)
        short = array("i", range(2_000, 2_000 + leaving.WORTH_RESTORING_TOKENS - 1))
        self.run(pool, context, short)
        monkeypatch.setattr(leaving, "MOST_QUICK_BYTES", len(self.ended) - 1)
        self.begin(pool, self.other)
        assert context.used() == len(self.ended) + len(short)

    @pytest.mark.parametrize("is_in_memory", [True, False])
    def test_what_takes_long_to_copy_leaves_where_that_pays(
        self, monkeypatch: pytest.MonkeyPatch, *, is_in_memory: bool
    ) -> None:
        pool, context, archived = self.ended_pool(monkeypatch, leaves_early=True)
        self.slow(monkeypatch)
        if is_in_memory:
            pool.store.add(Snapshot(self.ended, (context.state_get(next(iter(pool.tree.cached))),)), is_lasting=False)
        asked = []

        def pays(freed: int, kept: int, tokens: int, *, has_snapshot: bool) -> bool:
            asked.append((freed, kept, tokens, has_snapshot))
            return has_snapshot or not is_in_memory

        holding = self.begin(pool, self.other, pays=pays)
        expected = [(200, 0, 200, True)] if is_in_memory else [(200, 0, 200, True), (200, 0, 200, False)]
        assert asked == expected, "a snapshot that is there is not paid for"
        assert context.used() == 0 and not archived
        pool.release(holding, 4.0, keep=False)
        assert self.run(pool, context, self.ended + array("i", [7])) == len(self.ended)

    def test_no_more_is_copied_at_a_time_than_is_allowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, context, _ = self.ended_pool(monkeypatch, leaves_early=True)
        self.slow(monkeypatch)
        other = array("i", range(3_000, 3_100))
        self.run(pool, context, other)
        pool.acquire(self.other, 3.0)
        steps = list[Left]()
        while not steps or steps[-1].has_more:
            steps.append(pool.make_way(always, 70, [self.other]))
        assert [each.copied for each in steps] == [70, 70, 70, 70, 20], "the second begins in what the first leaves"
        assert context.used() == 0
        for tokens in (self.ended, other):
            assert pool.known_tokens(tokens + array("i", [7])) == len(tokens)

    def test_a_sequence_that_goes_on_before_its_copy_is_whole_is_not_lost(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool, context, _ = self.ended_pool(monkeypatch, leaves_early=True)
        self.slow(monkeypatch)
        assert pool.make_way(always, 150, [self.other]).has_more
        longer = self.ended + array("i", range(5_000, 5_050))
        assert self.run(pool, context, longer) == len(self.ended)
        while pool.make_way(always, 150, [self.other]).has_more:
            pass
        assert context.used() == 0 and self.run(pool, context, longer + array("i", [7])) == len(longer)

    def test_nothing_is_lost_where_memory_has_no_place_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, context, _ = self.ended_pool(monkeypatch, leaves_early=True)
        worth_more = Snapshot(array("i", range(9_000, 9_300)), (bytes(10**6 - 1_300),), reuses=9)
        assert pool.store.add(worth_more)
        holding = self.begin(pool, self.other, pays=always)
        assert context.used() == len(self.ended) and list(pool.store) == [worth_more]
        pool.release(holding, 4.0, keep=False)
        assert self.run(pool, context, self.ended + array("i", [7])) == len(self.ended)

    def test_it_stays_where_its_cells_were_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, context, _ = self.ended_pool(monkeypatch)
        self.begin(pool, self.other, pays=always)
        assert context.used() == len(self.ended)


def snapshot(tokens: list[int], size: int, *, is_pinned: bool = False) -> Snapshot:
    """A snapshot of `size` bytes of data."""
    return Snapshot(array("i", tokens), (bytes(size),), is_pinned=is_pinned)


@pytest.mark.parametrize("exact_ends", [False, True])
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_snapshot_of_the_same_tokens_is_counted_once(exact_ends: bool, is_pinned: bool) -> None:
    store = SnapshotStore(10_000, exact_ends=exact_ends)
    first, second = snapshot([1, 2, 3], 1_000, is_pinned=is_pinned), snapshot([1, 2, 3], 2_000)
    assert store.add(first)
    assert store.add(second)
    # The owner of a pinned one waits for it, so it stays.
    kept = first if is_pinned else second
    assert (len(store), store.size_bytes) == (1, kept.size_bytes)
    assert store.find(array("i", [1, 2, 3, 4]), 0) == (kept, 3)

"""The pool of cells and sequence ids through random lives: a sequence has the tokens that it was told of.

llama.cpp's memory is a plain account here: for each sequence id its cells, each with the token computed into it. A
snapshot is a copy of that account.
"""

from __future__ import annotations

import pickle
import sys
import weakref
from array import array
from collections.abc import Callable
from itertools import chain, count
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

from uma.engine.kv import checkpoints, memory_kinds, snapshots
from uma.engine.kv import pool as kv
from uma.engine.kv.pictures import ids_of, outside, position_in, runs_in
from uma.engine.kv.pool import Holding, KvPool
from uma.engine.kv.snapshots import Snapshot, SnapshotStore
from uma.llama.context import Context

N_IDS, N_CELLS = 6, 60
Cells = list[tuple[int, int]]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=25)


class FakeContext:
    """Which sequence holds which cell, with llama.cpp's rules."""

    def __init__(self, *, unified: bool, has_state: bool = False) -> None:
        self.params = SimpleNamespace(kv_unified=unified, cache_type_k="f16", cache_type_v="f16", guards_window=False)
        self.n_ctx_seq = N_CELLS
        shape = SimpleNamespace(
            architecture="llama",
            bytes_per_token=lambda *_: 1,
            memory="hybrid" if has_state else "attention",
            has_states=has_state,
            window_tokens=0,
            state_bytes=0,
        )
        self.model = SimpleNamespace(shape=shape)
        self.has_state = has_state
        self.states: dict[int, list[int]] = {seq_id: [] for seq_id in range(N_IDS)}
        """What each has read, where that cannot be cut."""
        self.n_sequences, self.n_ctx, self.rolled_back = N_IDS, N_CELLS, 0
        self.held: dict[int, Cells] = {seq_id: [] for seq_id in range(N_IDS)}
        self.first: dict[int, int] = dict.fromkeys(range(N_IDS), 0)
        """The position of the first of them."""
        self._serial = count()

    def compute(self, work: dict[int, list[int]]) -> None:
        """A batch."""
        for seq_id, tokens in work.items():
            self.assert_at_its_end(seq_id)
            self.held[seq_id] = self.held[seq_id] + [(next(self._serial), token) for token in tokens]
            self.states[seq_id] = self.tokens(seq_id)
        assert not self.params.kv_unified or self.used() <= N_CELLS, "a batch without room"

    def assert_at_its_end(self, seq_id: int) -> None:
        assert not self.has_state or self.states[seq_id] == self.tokens(seq_id), "a state of other tokens"

    def part_size(self, seq_id: int) -> int:
        return len(self.part_get(seq_id))

    def part_get(self, seq_id: int) -> bytes:
        self.assert_at_its_end(seq_id)
        return pickle.dumps(self.states[seq_id])

    def part_set(self, seq_id: int, data: bytes) -> bool:
        self.states[seq_id] = pickle.loads(data)
        return True

    def used(self) -> int:
        return len({cell for cells in self.held.values() for cell in cells})

    def tokens(self, seq_id: int) -> list[int]:
        return [token for _, token in self.held[seq_id]]

    def seq_cp(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        self.states[target] = list(self.states[source])
        if self.params.kv_unified and end < 0:
            assert self.first[source] == self.first[target] + len(self.held[target]), "a part out of its place"
            self.held[target] = self.held[target] + self.held[source]
            return
        assert self.params.kv_unified and end >= 0
        if self.held[target]:
            assert max(start, 0) == 0 and self.first[target] == end, "copied over cells"
            self.held[target] = self.held[source][:end] + self.held[target]
            self.first[target] = 0
        else:
            self.first[target] = max(start, 0)
            self.held[target] = self.held[source][self.first[target] : end]

    def seq_rm(self, seq_id: int, start: int = -1, end: int = -1) -> bool:
        assert end == -1
        if self.has_state and 0 < start < len(self.states[seq_id]):
            return False
        if start <= 0:
            self.states[seq_id] = []
        self.held[seq_id] = self.held[seq_id][: max(start - self.first[seq_id], 0)]
        if not self.held[seq_id]:
            self.first[seq_id] = 0
        return True

    def seq_pos_max(self, seq_id: int) -> int:
        end = self.first[seq_id] + len(self.held[seq_id])
        return min(end, len(self.states[seq_id])) - 1 if self.has_state else end - 1

    def state_size(self, seq_id: int) -> int:
        return len(self.state_get(seq_id))

    def state_get(self, seq_id: int) -> bytes:
        self.assert_at_its_end(seq_id)
        return pickle.dumps((self.first[seq_id], self.tokens(seq_id)))

    def state_set(self, seq_id: int, data: bytes) -> bool:
        self.held[seq_id] = []
        first, tokens = pickle.loads(data)
        if self.params.kv_unified and self.used() + len(tokens) > N_CELLS:
            return False
        self.first[seq_id] = first
        self.held[seq_id] = [(next(self._serial), token) for token in tokens]
        self.states[seq_id] = tokens
        return True


class PoolLives(RuleBasedStateMachine):
    """Sequences are admitted, computed, preempted and ended, as the worker does it."""

    unified = True
    has_state = False

    def __init__(self) -> None:
        super().__init__()
        self.context = FakeContext(unified=self.unified, has_state=self.has_state)
        self.store = SnapshotStore(2_000)
        context: Any = self.context
        self.pool = KvPool(context, self.store, cache_cells=20)
        self.running: list[Holding] = []
        self.begins: dict[int, list[int]] = {}
        """What sequences begin with, by their ids, whose snapshots are still loaded."""
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1
        return self.now

    def compute(self, holding: Holding, tokens: list[int]) -> None:
        self.pool.make_room(len(tokens))
        self.context.compute({holding.seq_id: tokens})
        self.pool.extend(holding, tokens)

    @precondition(lambda self: not self.has_state and any(each.tip.end for each in self.running))
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
        self.running.append(holding)
        assert len(tokens) - length <= self.pool.free_cells, "what was promised does not fit"
        if holding.loading is not None:
            self.begins[holding.seq_id] = tokens[:length]
            return
        assert self.context.tokens(holding.seq_id) == tokens[:length], "told that tokens are there which are not"
        if computes:
            borders, start = self.pool.checkpoints.positions(wanted, len(tokens), length, ()), length
            while borders:
                self.compute(holding, tokens[start : borders[-1]])
                start = borders.pop()
                self.pool.checkpoints.take(holding.tip, holding.seq_id)
            self.compute(holding, tokens[start:])

    @precondition(lambda self: any(each.loading for each in self.running))
    @rule(choice=st.integers(0, N_IDS))
    def load(self, choice: int) -> None:
        loading = [each for each in self.running if each.loading is not None]
        holding = loading[choice % len(loading)]
        assert self.pool.load_next(holding)
        if holding.loading is None:
            begins = self.begins.pop(holding.seq_id)
            assert self.context.tokens(holding.seq_id) == begins, "told that tokens are there which are not"

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, N_IDS), tokens=TOKENS)
    def go_on(self, choice: int, tokens: list[int]) -> None:
        holding = self.running[choice % len(self.running)]
        if len(tokens) <= self.pool.free_cells and holding.loading is None:
            self.compute(holding, tokens)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, N_IDS))
    def stop(self, choice: int) -> None:
        holding = self.running[choice % len(self.running)]
        self.pool.checkpoints.take(holding.tip, holding.seq_id)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, N_IDS))
    def fail(self, choice: int) -> None:
        """A batch is broken off, and what it had of one is not known."""
        holding = self.running.pop(choice % len(self.running))
        for seq_id in (holding.seq_id, *self.pool.tree.cached):
            self.context.states[seq_id] = [-1] * self.has_state
        self.pool.invalidate_cached_states()
        self.pool.release_after_abort(holding, self.tick())

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
            if not self.pool.copies.go_on():
                break
        else:
            raise AssertionError("snapshots push each other out for ever")
        self.pool.trim_cache()

    @rule(parts=st.integers(1, 4))
    def use_a_moment(self, parts: int) -> None:
        for _ in range(parts):
            self.pool.copies.go_on()

    @rule()
    def drop_cache(self) -> None:
        self.pool.drop_cache()
        loading = sum(each.loading_cells for each in self.running)
        assert self.pool.used_cells == self.pool.tree.protected_tokens + loading

    @invariant()
    def books_are_right(self) -> None:
        holders = {seq_id for seq_id, cells in self.context.held.items() if cells}
        assert holders <= {holding.seq_id for holding in self.running} | set(self.pool.tree.cached)
        assert self.pool.cells.used_ids == len(self.running) + len(self.pool.tree.cached)
        whole = [each for each in self.running if each.loading is None]
        for seq_id, node in [*self.pool.tree.cached.items(), *((each.seq_id, each.tip) for each in whole)]:
            assert list(node.whole()) == self.context.tokens(seq_id)
            self.context.assert_at_its_end(seq_id)
        taken = [each.checkpoint for each in self.pool.tree.nodes() if each.checkpoint is not None]
        assert self.pool.tree.checkpoint_bytes == sum(map(len, taken)) <= 1_000
        if self.context.params.kv_unified:
            loading = [each for each in self.running if each.loading is not None]
            kept = sum(each.loading_cells - len(self.context.tokens(each.seq_id)) for each in loading)
            assert self.pool.used_cells == self.context.used() + kept <= N_CELLS
        if self.has_state:
            for node in self.pool.tree.nodes():
                if node.is_reported and not any(child.is_reported for child in node.every_child()):
                    asked = array("i", [*node.whole(), 2])
                    _, begins = self.pool.cells.resume_point(asked, self.pool.tree.match(asked))
                    assert begins == node.end, "told of what no sequence can begin behind"
        assert self.store.reserved_bytes() == self.pool.tree.checkpoint_bytes
        assert self.store.size_bytes + self.pool.tree.checkpoint_bytes <= 2_000

    def teardown(self) -> None:
        for holding in self.running:
            self.pool.release(holding, self.now, keep=False)
        self.pool.drop_cache()
        assert (self.pool.cells.used_ids, self.pool.used_cells, self.context.used()) == (0, 0, 0)


class SplitPoolLives(PoolLives):
    """With a buffer for each sequence."""

    unified = False


class StatePoolLives(PoolLives):
    """With a state for each sequence that cannot be cut, so that others begin at ends and checkpoints."""

    has_state = True


class SplitStatePoolLives(StatePoolLives):
    """Likewise, with a buffer for each sequence."""

    unified = False


class TestPool:
    """The lives, with what is worth sharing and keeping made as small as they are."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, name, value in (
            (kv, "MIN_SHARED_TOKENS", 2),
            (kv, "MIN_GAIN_TOKENS", 3),
            (kv, "MIN_EVICTED_TOKENS", 3),
            (memory_kinds, "MAX_COPY_BYTES", 7),
            (kv, "MAX_COPY_BYTES", 60),
            (snapshots, "MIN_WORTH", 2.0),
            (snapshots, "MAX_LOST_TOKENS", 3),
            (checkpoints, "MIN_SAVED_TOKENS", 2),
            (checkpoints, "INTERVAL_TOKENS", 7),
        ):
            monkeypatch.setattr(module, name, value)

    @pytest.mark.parametrize("machine", [PoolLives, SplitPoolLives, StatePoolLives, SplitStatePoolLives])
    def test_tokens_that_are_told_to_be_there_really_are(self, machine: type[PoolLives]) -> None:
        run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=30))

    @pytest.mark.parametrize("refuses", [False, True])
    def test_where_llama_takes_no_copy_of_a_state_a_sequence_begins_with_nothing(
        self, monkeypatch: pytest.MonkeyPatch, refuses: bool
    ) -> None:
        context = FakeContext(unified=True, has_state=True)
        pool = KvPool(cast(Context, context), SnapshotStore(2_000), cache_cells=20)
        tokens = array("i", range(20))
        first, _ = pool.acquire(tokens, 0)
        for part in (tokens[:7], tokens[7:]):
            context.compute({first.seq_id: list(part)})
            pool.extend(first, part)
            pool.checkpoints.take(first.tip, first.seq_id)
        if refuses:
            monkeypatch.setattr(context, "part_set", lambda *_: False)
        second, known = pool.acquire(tokens[:7] + array("i", [99]), 1)
        assert (known, context.tokens(second.seq_id)) == ((0, []) if refuses else (7, list(range(7))))
        assert pool.used_cells == context.used() == 20


class TestTrimming:
    """Cache beyond its limit that could not leave while sequences decoded."""

    @pytest.mark.parametrize(("until", "stays"), [(None, 1), (lambda: False, 1), (lambda: True, 3)])
    def test_no_more_of_it_leaves_once_that_is_enough(
        self, monkeypatch: pytest.MonkeyPatch, until: Callable[[], bool] | None, stays: int
    ) -> None:
        monkeypatch.setattr(sys.modules[__name__], "N_CELLS", 400)
        monkeypatch.setattr(kv, "MAX_COPY_BYTES", 0)
        monkeypatch.setattr(snapshots, "MIN_WORTH", 2.0)
        context = FakeContext(unified=True)
        pool = KvPool(cast(Context, context), SnapshotStore(10**6), cache_cells=20)
        decoding, _ = pool.acquire(array("i", [9_999, 9_998]), 0)
        context.compute({decoding.seq_id: [9_999]})
        pool.append(decoding, 9_999)
        held = []
        for number in range(4):
            tokens = array("i", range(100 * number, 100 * number + 90))
            holding, _ = pool.acquire(tokens, number)
            context.compute({holding.seq_id: list(tokens)})
            pool.extend(holding, tokens)
            held.append(holding)
        for number, holding in enumerate(held):
            pool.release(holding, 1 + number, keep=True)
        assert len(pool.tree.cached) == 4
        monkeypatch.setattr(pool, "_cache_cells", 400)
        pool.release(decoding, 4, keep=False)
        monkeypatch.setattr(pool, "_cache_cells", 20)
        pool.trim_cache(until)
        assert len(pool.tree.cached) == stays

    def ended(self, pool: KvPool, context: FakeContext, *, spare_from: int | None = None) -> Holding:
        """A sequence that decodes, beside which four of 90 tokens have ended without a batch between them."""
        decoding, _ = pool.acquire(array("i", [9_999, 9_998]), 0)
        context.compute({decoding.seq_id: [9_999]})
        held = []
        for number in range(4):
            tokens = array("i", range(100 * number, 100 * number + 90))
            holding, _ = pool.acquire(tokens, 1)
            context.compute({holding.seq_id: list(tokens)})
            pool.extend(holding, tokens)
            held.append(holding)
        pool.append(decoding, 9_999)
        for number, holding in enumerate(held):
            pool.release(holding, 1 + number, keep=True, spare_from=spare_from)
        return decoding

    def test_of_sequences_that_end_together_one_is_copied_between_two_batches_while_others_decode(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules[__name__], "N_CELLS", 400)
        monkeypatch.setattr(snapshots, "MIN_WORTH", 2.0)
        context = FakeContext(unified=True)
        store = SnapshotStore(10**6)
        pool = KvPool(cast(Context, context), store, cache_cells=20)
        monkeypatch.setattr(kv, "MAX_COPY_BYTES", pool.cells.state_size(90))
        decoding = self.ended(pool, context)
        for copied in (1, 2, 3):
            assert len(store) == copied
            context.compute({decoding.seq_id: [copied]})
            pool.append(decoding, copied)
            pool.trim_cache()

    def test_what_is_spare_leaves_without_a_copy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys.modules[__name__], "N_CELLS", 400)
        monkeypatch.setattr(snapshots, "MIN_WORTH", 2.0)
        context = FakeContext(unified=True)
        store = SnapshotStore(10**6)
        pool = KvPool(cast(Context, context), store, cache_cells=20)
        self.ended(pool, context, spare_from=0)
        assert (len(store), len(pool.tree.cached)) == (0, 1)


def test_what_is_expected_to_be_gone_on_from_is_kept_like_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "N_CELLS", 400)
    context, lasting = FakeContext(unified=True), list[int]()
    store = SnapshotStore(10**6, on_added=lambda kept: lasting.append(kept.tokens[0]))
    pool = KvPool(cast(Context, context), store, cache_cells=400)
    for start, is_expected in ((1_000, True), (2_000, False)):
        tokens = array("i", range(start, start + 110))
        holding, _ = pool.acquire(tokens, start)
        context.compute({holding.seq_id: list(tokens)})
        pool.extend(holding, tokens)
        pool.release(holding, start, keep=True, is_expected=is_expected)
    pool.make_room(400)
    assert lasting == [1_000]


class TestRestoring:
    """A snapshot that cannot be put back into cells."""

    def held(self, pool: KvPool, context: FakeContext, start: int) -> Holding:
        """A sequence with 10 tokens of its own."""
        tokens = array("i", range(start, start + 10))
        holding, _ = pool.acquire(tokens, start)
        context.compute({holding.seq_id: list(tokens)})
        pool.extend(holding, tokens)
        return holding

    def test_parts_that_have_no_id_to_pass_through_evict_nothing_and_come_once_there_is_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory_kinds, "MAX_SEQUENCES", N_IDS)
        store, context = SnapshotStore(10_000), FakeContext(unified=True)
        pool = KvPool(cast(Context, context), store, cache_cells=N_CELLS)
        parts = tuple(pickle.dumps((at, list(range(at, at + 25)))) for at in (0, 25))
        store.add(Snapshot(array("i", range(50)), parts))
        running = [self.held(pool, context, 100 * number) for number in range(1, N_IDS)]
        for holding in running[:2]:
            pool.release(holding, 0, keep=True)
        holding, length = pool.acquire(array("i", range(51)), 0)
        assert (length, len(pool.tree.cached), len(store)) == (0, 2, 1)
        for ended in (holding, *running[2:]):
            pool.release(ended, 0, keep=False)
        holding, length = pool.acquire(array("i", range(51)), 0)
        assert length == 50
        assert context.tokens(holding.seq_id) == list(range(50))

    @pytest.mark.parametrize("is_on_disk", [False, True])
    @pytest.mark.parametrize("common", [60, 50])  # all of it, which is loaded; or less, which is cut
    def test_one_that_fails_is_not_tried_again(
        self, monkeypatch: pytest.MonkeyPatch, common: int, is_on_disk: bool
    ) -> None:
        store, context, tried = SnapshotStore(10_000), FakeContext(unified=True), list[int]()
        pool = KvPool(cast(Context, context), store, cache_cells=N_CELLS)
        remove = context.seq_rm

        def load(seq_id: int, data: bytes) -> bool:
            tried.append(common)
            return common < 60

        monkeypatch.setattr(context, "state_set", load)
        monkeypatch.setattr(
            context, "seq_rm", lambda seq_id, start=-1, end=-1: start < 0 and remove(seq_id, start, end)
        )
        kept = Snapshot(array("i", range(60)), (b"state",), is_on_disk=is_on_disk)
        is_read = weakref.ref(kept)
        store.add(kept)
        del kept
        for _ in range(2):
            holding, length = pool.acquire(array("i", (*range(common), 99)), 0)
            assert length == 0
            pool.release(holding, 0, keep=False)
        assert tried == [common]
        assert (len(store), store.size_bytes) == (0, 0)
        assert (is_read() is not None) == is_on_disk  # by which the disk tier knows not to read it again


def test_two_preempted_sequences_of_the_same_tokens_wait_for_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MIN_WORTH", 1)
    store, context = SnapshotStore(1_000), FakeContext(unified=True)
    pool, tokens = KvPool(cast(Context, context), store, cache_cells=0), array("i", range(20))
    saved = []
    for _ in range(2):  # as the worker preempts them
        holding, length = pool.acquire(tokens, 0)
        context.compute({holding.seq_id: list(tokens[length:])})
        pool.extend(holding, tokens[length:])
        kept = pool.save(holding, 0)
        assert kept is not None
        kept.pins += 1
        saved.append(kept)
        pool.release(holding, 0, keep=False)
    saved[0].pins -= 1  # the first begins again
    for number in range(3):
        store.add(Snapshot(array("i", range(100 * number, 100 * number + 90)), (bytes(500),), reuses=3))
    assert store.covering(tokens) is saved[1], "the second is read again"


def snapshot(tokens: list[int], size: int, *, pins: int = 0) -> Snapshot:
    """A snapshot of `size` bytes of data."""
    return Snapshot(array("i", tokens), (bytes(size),), pins=pins)


@pytest.mark.parametrize("pins", [0, 1])
def test_a_snapshot_of_the_same_tokens_is_counted_once(pins: int) -> None:
    store = SnapshotStore(10_000)
    first, second = snapshot([1, 2, 3], 1_000, pins=pins), snapshot([1, 2, 3], 2_000)
    assert store.add(first)
    assert store.add(second)
    # The owner of a pinned one waits for it, so it stays.
    kept = first if pins else second
    assert (len(store), store.size_bytes) == (1, kept.size_bytes)
    assert store.find(array("i", [1, 2, 3, 4]), 0) == (kept, 3)


def test_a_picture_of_several_parts_that_share_positions_is_cut_nowhere() -> None:
    parts = [ids_of(bytes([part]), 8, positions) for part, positions in enumerate((0, 0, 5))]
    tokens = array("i", [1, 2, *chain(*parts), 3])
    assert [(run.start, run.end, run.positions) for run in runs_in(tokens)] == [(2, 10, 0), (10, 18, 0), (18, 26, 5)]
    assert [outside(tokens, length) for length in range(28)] == [0, 1, *[2] * 24, 26, 27]
    assert outside(tokens[:18], 18) == 2, "not all of it is there"
    assert position_in(tokens, 26) == 7

"""The radix tree of KV cells against a naive account of what each sequence holds, through random lives."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from uma.engine.kv.events import KvEvents, Run, Tier
from uma.engine.kv.memory_kinds import Attention
from uma.engine.kv.prefix_tree import Node, Prefix, PrefixTree, common_length

N_IDS = 6
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
"""Few and short, so that prefixes meet, split and cover each other all the time."""


class FakeCells:
    """What llama.cpp would hold: for each sequence id its cells, each with its token; shared ones are the same."""

    def __init__(self) -> None:
        self.held: dict[int, list[tuple[int, int]]] = {}
        self.running: set[int] = set()
        self.fails = False
        """Whether memory can be copied and cut no more."""
        self._serial = count()

    def compute(self, seq_id: int, tokens: list[int]) -> None:
        self.held[seq_id] += [(next(self._serial), token) for token in tokens]

    can_be_cut = True
    end_before = Attention.end_before

    def copy(self, source: int, target: int, prefix: Prefix) -> bool:
        length = prefix.length
        assert len(self.held[source]) >= length, "copied cells that the source does not hold"
        assert not self.held[target], "copied over a sequence that holds cells"
        if not self.fails:
            self.held[target] = self.held[source][:length]
        return not self.fails

    def cut(self, seq_id: int, prefix: Prefix) -> bool:
        assert seq_id not in self.running, "dropped cells of a running sequence"
        assert 0 < prefix.length < len(self.held[seq_id])
        if not self.fails:
            self.held[seq_id] = self.held[seq_id][: prefix.length]
        return not self.fails

    def free(self, seq_id: int) -> None:
        assert seq_id not in self.running, "dropped cells of a running sequence"
        del self.held[seq_id]

    def tokens(self, seq_id: int) -> list[int]:
        return [token for _, token in self.held[seq_id]]


class Counts:
    """A listener that counts, for each beginning of a sequence, how often it is held."""

    def __init__(self) -> None:
        self.held: Counter[tuple[int, ...]] = Counter()

    def stored(self, tier: Tier, run: Run) -> None:
        self.held.update(self.beginnings(run))

    def removed(self, tier: Tier, run: Run) -> None:
        self.held.subtract(self.beginnings(run))

    def cleared(self, tier: Tier) -> None:
        self.held.clear()

    @staticmethod
    def beginnings(run: Run) -> list[tuple[int, ...]]:
        tokens = tuple(run.tokens())
        assert run.start < run.end <= len(tokens)
        return [tokens[:length] for length in range(run.start + 1, run.end + 1)]


class TreeLives(RuleBasedStateMachine):
    """Sequences begin with what is there, grow, end, and are evicted; after each step all accounts must agree."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = FakeCells()
        events = KvEvents()
        events.listeners = (told := Counts(),)
        self.told = told
        self.tree = PrefixTree(self.cells, events)
        self.tips: dict[int, Node] = {}
        self.now = 0.0
        self.asked_again = array("i", (0, 1, 0, 0, 1, 1))

    def pick_running(self, choice: int) -> int:
        return sorted(self.tips)[choice % len(self.tips)]

    def free_id(self) -> int:
        return min(set(range(N_IDS)) - set(self.cells.held))

    @precondition(lambda self: len(self.cells.held) < N_IDS)
    @rule(tokens=TOKENS, less=st.integers(0, 3))
    def begin(self, tokens: list[int], less: int) -> None:
        node, length, _ = self.tree.match(array("i", tokens))
        length = max(0, length - less)
        while node.parent is not None and length <= node.start:
            node = node.parent
        seq_id = self.free_id()
        self.cells.held[seq_id] = []
        self.now += 1
        self.tips[seq_id] = self.tree.start(seq_id, node, length, self.now)
        self.cells.running.add(seq_id)
        begun = self.tips[seq_id].end
        assert begun == (0 if self.cells.fails else length)
        assert self.cells.tokens(seq_id) == tokens[:begun]

    @rule(fails=st.booleans())
    def memory_fails(self, fails: bool) -> None:
        """llama.cpp says that it cannot copy or cut."""
        self.cells.fails = fails

    @precondition(lambda self: self.tips)
    @rule(choice=st.integers(0, N_IDS), tokens=TOKENS)
    def grow(self, choice: int, tokens: list[int]) -> None:
        seq_id = self.pick_running(choice)
        self.cells.compute(seq_id, tokens)
        self.tips[seq_id] = self.tree.extend(self.tips[seq_id], seq_id, tokens)

    @precondition(lambda self: self.tips)
    @rule(choice=st.integers(0, N_IDS), token=st.integers(0, 1))
    def grow_by_one(self, choice: int, token: int) -> None:
        seq_id = self.pick_running(choice)
        self.cells.compute(seq_id, [token])
        self.tips[seq_id] = self.tree.append(self.tips[seq_id], seq_id, token)

    @precondition(lambda self: any(tip.end for tip in self.tips.values()))
    @rule(choice=st.integers(0, N_IDS), less=st.integers(0, 15))
    def truncate(self, choice: int, less: int) -> None:
        long = sorted(seq_id for seq_id, tip in self.tips.items() if tip.end)
        seq_id = long[choice % len(long)]
        length = max(1, self.tips[seq_id].end - less)
        self.cells.held[seq_id] = self.cells.held[seq_id][:length]
        self.tips[seq_id] = self.tree.truncate(self.tips[seq_id], seq_id, length)

    @precondition(lambda self: self.tips)
    @rule(choice=st.integers(0, N_IDS), keep=st.booleans())
    def end(self, choice: int, keep: bool) -> None:
        seq_id = self.pick_running(choice)
        tokens = self.cells.tokens(seq_id)
        self.cells.running.discard(seq_id)
        self.now += 1
        holds = self.tree.finish(self.tips.pop(seq_id), seq_id, self.now, keep=keep)
        assert holds == (seq_id in self.cells.held)
        if keep:
            assert self.tree.match(array("i", tokens))[1] == len(tokens), "a finished sequence is not all there"
        else:
            assert not holds

    @precondition(lambda self: self.tree.cached)
    @rule()
    def drop_one(self) -> None:
        seq_id = next(iter(self.tree.cached))
        self.tree.drop(seq_id)
        assert seq_id not in self.cells.held

    @precondition(lambda self: self.tree.leaves())
    @rule(tokens=st.integers(1, 15))
    def shorten_the_oldest_leaf(self, tokens: int) -> None:
        before = self.tree.total_tokens
        seq_id = self.tree.leaves()[0]
        holds = self.tree.shorten(seq_id, tokens)
        assert holds == (seq_id in self.cells.held)
        freed = before - self.tree.total_tokens
        assert freed > 0
        assert freed <= tokens or self.cells.fails  # what cannot be cut goes whole

    @precondition(lambda self: self.tree.cached and not self.tips)
    @rule()
    def make_all_the_room_there_is(self) -> None:
        while leaves := self.tree.leaves():
            self.tree.shorten(leaves[0], 4)
        assert self.tree.total_tokens == 0

    @rule(tokens=TOKENS)
    def match_is_the_longest(self, tokens: list[int]) -> None:
        node, length, _ = self.tree.match(array("i", tokens))
        held = [self.cells.tokens(seq_id) for seq_id in self.cells.held]
        assert length == max((common_length(array("i", tokens), array("i", each)) for each in held), default=0)
        assert list(node.whole())[:length] == tokens[:length]
        assert node.start < length <= node.end or length == 0

    @invariant()
    def the_same_question_has_the_answer_of_now(self) -> None:
        node, length, _ = self.tree.match(self.asked_again)
        held = [array("i", self.cells.tokens(seq_id)) for seq_id in self.cells.held]
        assert length == max((common_length(self.asked_again, each) for each in held), default=0)
        assert node is self.tree.root or node in self.tree.nodes()

    @invariant()
    def totals_are_exact(self) -> None:
        def distinct(ids: set[int]) -> int:
            return len({cell for seq_id in ids for cell in self.cells.held[seq_id]})

        assert self.tree.total_tokens == distinct(set(self.cells.held))
        assert self.tree.protected_tokens == distinct(self.cells.running)
        assert self.tree.evictable_tokens == self.tree.total_tokens - self.tree.protected_tokens
        assert self.tree.node_count == len(list(self.tree.nodes()))

    @invariant()
    def listeners_know_every_prefix_and_no_other(self) -> None:
        held = {cell for seq_id in self.cells.held for cell in self.prefixes(seq_id)}
        expected = Counter(tokens for _, tokens in held)
        assert +self.told.held == expected and min(self.told.held.values(), default=0) >= 0

    def prefixes(self, seq_id: int) -> list[tuple[int, tuple[int, ...]]]:
        """Each of its cells, with the tokens up to it."""
        cells, tokens = self.cells.held[seq_id], tuple(self.cells.tokens(seq_id))
        return [(cell, tokens[: at + 1]) for at, (cell, _) in enumerate(cells)]

    @invariant()
    def every_id_is_where_its_tokens_are(self) -> None:
        ends = {seq_id: node for node in (self.tree.root, *self.tree.nodes()) for seq_id in node.ids}
        assert set(ends) == set(self.cells.held) == set(self.tips) | set(self.tree.cached)
        for seq_id, node in ends.items():
            assert list(node.whole()) == self.cells.tokens(seq_id)
        for seq_id, tip in (self.tips | self.tree.cached).items():
            assert ends[seq_id] is tip

    @invariant()
    def no_node_is_empty_or_without_a_holder(self) -> None:
        for node in self.tree.nodes():
            assert len(node.tokens) > 0
            assert node.ids or node.children
            running = sum(node in tip.path() for tip in self.tips.values())
            assert node.locks == running

    def teardown(self) -> None:
        for seq_id in list(self.tips):
            self.cells.running.discard(seq_id)
            self.tree.finish(self.tips.pop(seq_id), seq_id, self.now, keep=False)
        for cached in list(self.tree.cached):
            self.tree.drop(cached)
        assert not self.cells.held, "sequence ids leaked"
        assert (self.tree.total_tokens, self.tree.protected_tokens, self.tree.node_count) == (0, 0, 0)


TreeLives.TestCase.settings = settings(stateful_step_count=40)
TestTreeLives = TreeLives.TestCase


def tree_with(*finished: list[int]) -> tuple[PrefixTree, FakeCells]:
    cells = FakeCells()
    tree = PrefixTree(cells)
    for seq_id, tokens in enumerate(finished):
        cells.held[seq_id] = []
        tip = tree.start(seq_id, tree.root, 0, float(seq_id))
        cells.compute(seq_id, tokens)
        tip = tree.extend(tip, seq_id, tokens)
        tree.finish(tip, seq_id, float(seq_id), keep=True)
    return tree, cells


def test_a_longer_finish_takes_the_place_of_what_it_covers() -> None:
    tree, cells = tree_with([1, 2], [1, 2, 3])
    assert set(cells.held) == {1}
    assert tree.total_tokens == 3


def test_a_finish_that_adds_nothing_gives_its_cells_back() -> None:
    tree, cells = tree_with([1, 2, 3], [1, 2])
    assert set(cells.held) == {0}
    assert tree.total_tokens == 3


def test_the_longest_match_is_found_also_behind_a_shorter_run() -> None:
    """Two sequences computed the same beginning side by side, one in a single run, the other in two."""
    cells = FakeCells()
    tree = PrefixTree(cells)
    for seq_id, tokens in enumerate(([1, 2], [1, 2, 3])):
        cells.held[seq_id] = []
        tip = tree.extend(tree.start(seq_id, tree.root, 0, 0.0), seq_id, tokens)
        cells.compute(seq_id, tokens)
        if seq_id == 0:
            cells.held[9] = []
            branch = tree.extend(tree.start(9, tip, 2, 0.0), 9, [3, 4])
            cells.compute(9, [3, 4])
    assert list(branch.whole()) == [1, 2, 3, 4]
    node, length, _ = tree.match(array("i", [1, 2, 3, 4, 5]))
    assert (node, length) == (branch, 4)


def test_of_hundreds_of_sequences_only_those_that_begin_alike_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, _ = tree_with(*([token, 1, 2] for token in range(300)), [7, 1, 3])
    compared: list[array[int]] = []

    def noted(left: array[int], right: array[int], at: int = 0) -> int:
        compared.append(left)
        return common_length(left, right, at)

    monkeypatch.setattr("uma.engine.kv.prefix_tree.common_length", noted)
    assert tree.match(array("i", [7, 1, 3, 4]))[1] == 3
    assert len(compared) < 5

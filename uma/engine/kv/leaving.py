"""Cached sequences that leave their cells for host memory, because others have begun that have no use for them.

A snapshot costs no running sequence anything; cache in cells costs each a little, since attention goes over every cell
in use, also over those that are masked. On a CPU what leaves is worth most to a short sequence: with fewer than 512
cells llama.cpp's threads share the heads of attention, with more they share the cells, and masked cells leave some
threads without work (100 M parameters, one row of 100 tokens: 9.3 ms a step alone, 10.7 behind 500 cells of cache).
So what is copied quickly leaves at once, and of the rest what the caller says. Owned by the decode thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Protocol

import attrs

from uma.engine.kv.cells import SequenceCells
from uma.engine.kv.prefix_tree import Node, PrefixTree, common_length
from uma.engine.kv.snapshot_copies import SnapshotCopies
from uma.engine.kv.snapshots import SnapshotStore

WORTH_RESTORING_TOKENS = 48
"""Minimum tokens that a snapshot must save beyond what the cells do, to be restored, and cache, to be carried along."""
MOST_QUICK_BYTES = 8 * 2**20
"""Maximum size of a cached sequence that leaves its cells whatever begins: its copy is short beside any prompt."""


class Pays(Protocol):
    """Whether a cached sequence of `tokens` leaves, which frees so many cells, and shares `kept` with others."""

    def __call__(self, freed: int, kept: int, tokens: int, *, has_snapshot: bool) -> bool: ...


@attrs.frozen
class Left:
    """What has left."""

    copied: int = 0
    """Tokens whose state was copied."""
    has_more: bool = False
    """More would have been copied than the caller allowed."""


class EarlyLeaving:
    """Moves cached sequences out of one buffer of cells."""

    def __init__(self, cells: SequenceCells, tree: PrefixTree, store: SnapshotStore, copies: SnapshotCopies) -> None:
        self._cells = cells
        self._tree = tree
        self._store = store
        self._copies = copies

    def go_on(self, pays: Pays, most_tokens: int, running: Collection[array[int]]) -> Left:
        """Move what leaves, the longest unused first, and copy at most so many tokens for it.

        `running` are the tokens of all running sequences: a cached one that begins with all of one's stays, since
        drafts are made of it. What finds no place in memory stays too.
        """
        copied = 0
        for seq_id in self._tree.leaves():
            node = self._tree.cached.get(seq_id)
            if node is None or not self._leaves(node, pays, has_snapshot=True):
                continue
            whole = node.whole()
            if any(common_length(tokens, whole) == len(tokens) for tokens in running):
                continue
            if not self._store.covers(whole):
                if not self._leaves(node, pays, has_snapshot=False) or not self._has_place(seq_id, node):
                    continue
                if copied >= most_tokens:
                    return Left(copied, has_more=True)
                copied += self._copies.go_on_with(seq_id, most_tokens - copied)
            if self._store.covers(whole) and self._tree.cached.get(seq_id) is node:
                self._tree.drop(seq_id)
            elif copied >= most_tokens:
                return Left(copied, has_more=True)
        return Left(copied)

    def _leaves(self, node: Node, pays: Pays, *, has_snapshot: bool) -> bool:
        if node.end < WORTH_RESTORING_TOKENS:
            return False  # it would not be restored: it stays, as far as all such do (`KvPool.trim_cache`)
        is_quick = node.end * self._cells.bytes_per_token <= MOST_QUICK_BYTES
        if is_quick and not any(each.locks for each in node.path() if each.parent is not None):
            return True
        kept = node.alone()[-1].start
        return pays(node.end - kept, kept, node.end, has_snapshot=has_snapshot)

    def _has_place(self, seq_id: int, node: Node) -> bool:
        if self._cells.waits_for_copy(seq_id):
            return False
        return self._store.has_place_for(self._cells.state_size(seq_id), node.end, node.reuses, node.used_at)

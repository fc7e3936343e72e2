"""The pool of sequence ids and KV cells: who holds what, what is free, and what goes first when room runs short.

Owned by the decode thread. The radix tree counts cells exactly, so `llama_decode` is not asked for what cannot fit.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from uma.engine.prefix import Node, PrefixTree

if TYPE_CHECKING:
    from uma.llama.context import Context

PLENTY = 2**31 - 1
LEAST_SHARED_TOKENS = 8
"""A common prefix shorter than this is computed again: it costs less than keeping track."""


@attrs.define
class Holding:
    """What a running sequence holds: its id, and the node of the tree it ends in."""

    seq_id: int
    tip: Node


class KvPool:
    """Hands out sequence ids and cells, and keeps finished sequences as cache for as long as there is room."""

    def __init__(self, context: Context, *, shares: bool) -> None:
        self._context = context
        self._is_unified = context.params.kv_unified
        self.shares = shares
        """Whether a common prefix is computed once, and finished sequences stay as cache."""
        self._free_ids = list(range(context.n_seq_max))
        self.total_cells = context.n_ctx
        self.tree = PrefixTree(self)

    @property
    def used_cells(self) -> int:
        """Cells that hold something."""
        return self.tree.total_tokens

    @property
    def used_ids(self) -> int:
        """Sequence ids taken, by running sequences and by cache."""
        return self._context.n_seq_max - len(self._free_ids)

    @property
    def free_cells(self) -> int:
        """Cells that can be had at once: unused ones, and those that hold nothing but cache.

        With split KV every sequence has cells of its own, as many as its context is long: they never run short.
        """
        return self.total_cells - self.tree.protected_tokens if self._is_unified else PLENTY

    def cells_needed(self, tokens: array[int]) -> int:
        """Of `free_cells`, how many a sequence with these tokens takes: all but those it shares with a running one."""
        node, length = self.match(tokens)
        while node.parent is not None and (node.locks == 0 or node.start >= length):
            node = node.parent
        return len(tokens) - min(length, node.end)

    def has_id(self) -> bool:
        """Whether another sequence can begin."""
        return bool(self._free_ids or self.tree.cached)

    def match(self, tokens: array[int]) -> tuple[Node, int]:
        """The longest computed prefix of `tokens` worth sharing. The last token is always computed: it gives the logits."""
        if not self.shares:
            return self.tree.root, 0
        node, length = self.tree.match(tokens)
        length = min(length, len(tokens) - 1)
        return (node, length) if length >= LEAST_SHARED_TOKENS else (self.tree.root, 0)

    def acquire(self, tokens: array[int], now_ms: float) -> tuple[Holding, int]:
        """An id for a sequence that will compute `tokens`, and how many of them it need not compute."""
        node, length = self.match(tokens)
        seq_id = self._take_id(keep=node)
        if seq_id is None:
            node, length = self.tree.root, 0
            seq_id = self._take_id(keep=None)
            assert seq_id is not None, "asked for a sequence id when none can be had"
        while length <= node.start and node.parent is not None:
            node = node.parent
        return Holding(seq_id, self.tree.start(seq_id, node, length, now_ms)), length

    def acquire_empty(self, now_ms: float) -> Holding:
        """An id that holds nothing yet."""
        seq_id = self._take_id(keep=None)
        assert seq_id is not None, "asked for a sequence id when none can be had"
        return Holding(seq_id, self.tree.start(seq_id, self.tree.root, 0, now_ms))

    def extend(self, holding: Holding, tokens: Sequence[int]) -> None:
        """Count tokens that a batch has computed for the holder."""
        holding.tip = self.tree.extend(holding.tip, holding.seq_id, tokens)

    def append(self, holding: Holding, token: int) -> None:
        """Count one token that a batch has computed for the holder."""
        holding.tip = self.tree.append(holding.tip, holding.seq_id, token)

    def release(self, holding: Holding, now_ms: float, *, keep: bool) -> None:
        """The sequence ends; with `keep` what it computed stays as cache."""
        self.tree.finish(holding.tip, holding.seq_id, now_ms, keep=keep and self.shares)

    def own_cells(self, holding: Holding) -> int:
        """Cells that nobody but the holder uses."""
        count = 0
        for node in holding.tip.path():
            if node.locks > 1:
                break
            count += len(node.tokens)
        return count

    def make_room(self, cells: int) -> None:
        """Drop cache, the longest unused first, until `cells` cells are unused or no cache is left."""
        if not self._is_unified:
            return
        while (missing := cells - (self.total_cells - self.used_cells)) > 0:
            seq_id = self.tree.oldest_leaf()
            if seq_id is None:
                return
            self.tree.shorten(seq_id, missing)

    def drop_cache(self) -> bool:
        """Drop all cache; returns whether there was any."""
        had = bool(self.tree.cached)
        while (seq_id := self.tree.oldest()) is not None:
            self.tree.drop(seq_id)
        return had

    def _take_id(self, keep: Node | None) -> int | None:
        """A free id, if need be that of the cache unused longest; never one that alone holds `keep`."""
        if not self._free_ids:
            needed = set(self._holders(keep))
            spare = [seq_id for seq_id in self.tree.cached if seq_id not in needed]
            if not spare:
                return None
            self.tree.drop(min(spare, key=lambda seq_id: self.tree.cached[seq_id].used_at))
        return heapq.heappop(self._free_ids)

    def _holders(self, node: Node | None) -> list[int]:
        if node is None or node is self.tree.root:
            return []
        while not node.ids:
            node = node.children[0]
        return list(node.ids)

    def copy(self, source: int, target: int, length: int) -> None:
        """`prefix.Cells`: unified KV shares cells for nothing; split KV copies a whole stream, then cuts its end."""
        if self._is_unified:
            self._context.seq_cp(source, target, 0, length)
        else:
            self._context.seq_cp(source, target)
            self._context.seq_rm(target, length, -1)

    def trim(self, seq_id: int, length: int) -> None:
        """`prefix.Cells`: cut a sequence; one that is cut to nothing gives its id back."""
        self._context.seq_rm(seq_id, length, -1)
        if length == 0:
            heapq.heappush(self._free_ids, seq_id)

"""Snapshots of cached sequences, copied in parts while nothing runs.

Copying a large cache takes longer than a request can wait, so the worker looks for commands between two parts. Owned by
the decode thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import attrs

from uma.engine.kv.checkpoints import Checkpoints
from uma.engine.kv.memory_kinds import Attention
from uma.engine.kv.prefix_tree import Node, PrefixTree
from uma.engine.kv.snapshots import Snapshot, SnapshotStore


@attrs.define
class _Copy:
    """A cached sequence whose snapshot is being copied, and the parts so far."""

    seq_id: int
    node: Node
    tokens: array[int]
    to_come: Iterator[bytes]
    parts: list[bytes] = attrs.field(factory=list)


@attrs.define(eq=False)
class SnapshotCopies:
    """Copies cached sequences that are worth a snapshot and have none, in idle time."""

    _cells: Attention
    _tree: PrefixTree
    _store: SnapshotStore
    _checkpoints: Checkpoints
    _is_worth_saving: Callable[[Node], bool]
    _copy: _Copy | None = attrs.field(default=None, init=False)
    _refused: set[int] = attrs.field(factory=set, init=False)
    """Ids of cached sequences whose complete snapshot the store refused, since the last sequence began."""

    def try_all_again(self) -> None:
        """Note that a sequence begins: the store may now accept what it refused before."""
        self._refused.clear()

    def go_on(self) -> bool:
        """Copy the next part; False if there is nothing to do.

        Requests can be served between two parts. If the cells of a sequence have changed since, its copy begins again.
        """
        copy = self._copy if self._copy is not None and self._is_unchanged(self._copy) else self._begin()
        self._copy = copy
        if copy is None:
            return False
        if (part := next(copy.to_come, None)) is not None:
            copy.parts.append(part)
            return True
        self._copy, node = None, copy.node
        ends = self._checkpoints.of_snapshot(node)
        snapshot = Snapshot(copy.tokens, tuple(copy.parts), node.reuses, node.used_at, ends=ends)
        if not self._store.add(snapshot, is_lasting=self._is_worth_saving(node)):
            self._refused.add(copy.seq_id)
        return True

    def _begin(self) -> _Copy | None:
        for seq_id, node in self._tree.cached.items():
            # A copy evicts only snapshots worth less: otherwise copies would evict each other in every idle time.
            if seq_id not in self._refused and self._is_worth_saving(node) and self._has_place(node):
                return _Copy(seq_id, node, node.whole(), self._cells.states(seq_id))
        return None

    def _has_place(self, node: Node) -> bool:
        size = self._checkpoints.snapshot_size(node)
        return self._store.has_place_for(size, node.end, node.reuses, node.used_at)

    def _is_unchanged(self, copy: _Copy) -> bool:
        node = self._tree.cached.get(copy.seq_id)
        return node is copy.node and node.whole() == copy.tokens

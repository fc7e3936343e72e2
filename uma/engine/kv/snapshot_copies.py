"""Snapshots of cached sequences, taken in parts while nothing runs.

Copying a large cache takes longer than a request can wait, so a copy is made part by part, and the worker looks for
commands between two. Owned by the decode thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import attrs

from uma.engine.kv.cells import SequenceCells
from uma.engine.kv.checkpoints import Checkpoints
from uma.engine.kv.prefix_tree import Node, PrefixTree
from uma.engine.kv.snapshots import MOST_COPY_BYTES, Snapshot, SnapshotStore


@attrs.define
class _Copy:
    """A cached sequence of which a snapshot is being taken, and its parts so far."""

    seq_id: int
    node: Node
    tokens: array[int]
    parts: list[bytes] = attrs.field(factory=list)
    copied: int = 0
    """Tokens in the parts."""


@attrs.define(eq=False)
class SnapshotCopies:
    """Copies cached sequences that have no snapshot and are worth one."""

    _cells: SequenceCells
    _tree: PrefixTree
    _store: SnapshotStore
    _checkpoints: Checkpoints
    _is_worth_saving: Callable[[Node], bool]
    _spare_id: Callable[[Node], int | None]
    """An empty id other than those that a node needs, or None."""
    _copy: _Copy | None = attrs.field(default=None, init=False)
    _in_vain: set[int] = attrs.field(factory=set, init=False)
    """Ids of cached sequences whose snapshot found no place in the end, since the last sequence began."""

    def try_all_again(self) -> None:
        """A sequence begins, so what found no place before can find one."""
        self._in_vain.clear()

    def go_on(self) -> bool:
        """Copy the next `MOST_COPY_BYTES`; False if there is nothing to do.

        The snapshot is there once its last part is copied, however many requests were served meanwhile; one whose cells
        have changed since is begun again.
        """
        copy = self._copy if self._copy is not None and self._is_unchanged(self._copy) else self._begin()
        if copy is None:
            return False
        self._advance(copy, max(1, MOST_COPY_BYTES // self._cells.bytes_per_token))
        return True

    def _advance(self, copy: _Copy, most_tokens: int) -> None:
        self._copy = copy if self._copy_part(copy, most_tokens) else None
        if copy.copied == len(copy.tokens):
            self._copy = None
            node, ends = copy.node, self._checkpoints.of_snapshot(copy.node)
            snapshot = Snapshot(copy.tokens, tuple(copy.parts), node.reuses, node.used_at, ends=ends)
            if not self._store.add(snapshot, is_lasting=self._is_worth_saving(copy.node)):
                self._in_vain.add(copy.seq_id)

    def _begin(self) -> _Copy | None:
        for seq_id, node in self._tree.cached.items():
            # A copy replaces only snapshots worth less: else copies would push each other out in every idle time.
            if (
                not self._cells.waits_for_copy(seq_id)
                and seq_id not in self._in_vain
                and self._is_worth_saving(node)
                and self._has_place(seq_id, node)
            ):
                return _Copy(seq_id, node, node.whole())
        return None

    def _has_place(self, seq_id: int, node: Node) -> bool:
        size = self._checkpoints.snapshot_size(seq_id, node)
        return self._store.has_place_for(size, node.end, node.reuses, node.used_at)

    def _is_unchanged(self, copy: _Copy) -> bool:
        node = self._tree.cached.get(copy.seq_id)
        return node is copy.node and node.end == len(copy.tokens) and node.whole() == copy.tokens

    def _copy_part(self, copy: _Copy, most_tokens: int) -> bool:
        """Copy the next tokens of a sequence; False where its own id was taken for that."""
        end = min(len(copy.tokens), copy.copied + most_tokens)
        is_part = self._cells.has_parts and end - copy.copied < len(copy.tokens)
        spare = self._spare_id(copy.node) if is_part else None
        if spare is None:
            copy.parts, copy.copied = list(self._cells.states(copy.seq_id)), len(copy.tokens)
            return True
        is_there = self._tree.cached.get(copy.seq_id) is copy.node
        if is_there:
            copy.parts.append(self._cells.part(copy.seq_id, copy.copied, end, spare))
            copy.copied = end
        self._cells.trim(spare, 0)
        return is_there

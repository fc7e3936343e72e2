"""Checkpoints: where sequences can begin of models whose memory cannot be cut, beside the ends of others.

A recurrent state has no parts: only that of a sequence's end exists. So copies of it are taken at borders, where other
prompts are likely to part: behind a message, where two prompts were seen to part, shortly before a prompt's end. Its
attention cells are shared by the tree as all are. Copies are in host memory; which of them stay is decided by how many
tokens each saves for its size, and how lately it did: the value of what was given up last is added to that of what
comes and of what is used again (GreedyDual, Cao and Irani 1997). Owned by the decode thread.
"""

from __future__ import annotations

from uma.engine.kv.cells import SequenceCells
from uma.engine.kv.prefix_tree import Node, PrefixTree
from uma.engine.kv.snapshots import UNUSED_REUSES, SnapshotStore

LEAST_SAVED_TOKENS = 32
"""Minimum tokens between two checkpoints of a sequence: fewer are read again as quickly as a state is copied."""
STORE_SHARE = 2
"""Divisor of the memory for snapshots: checkpoints take at most half of it."""
MOST_IN_SNAPSHOT = 8
"""Maximum checkpoints that a snapshot takes along."""
LAST_IN_SNAPSHOT = 2
"""Number of last checkpoints that are kept though nothing has used them: the next turn, or the same prompt, begins
there."""


class Checkpoints:
    """Checkpoints of one tree."""

    def __init__(self, cells: SequenceCells, tree: PrefixTree, store: SnapshotStore) -> None:
        self._cells = cells
        self._tree = tree
        self._store = store
        store.reserved_bytes = lambda: tree.checkpoint_bytes
        self._last_worth = 0.0
        """Worth of the checkpoint that was given up last."""

    def take(self, tip: Node, seq_id: int) -> bool:
        """Take one of a sequence that ends in `tip` now; whether there is one now."""
        if tip.checkpoint is not None:
            return True
        if tip.parent is None or self._cells.waits_for_copy(seq_id):
            return False
        if not self._make_place(self._cells.checkpoint_size(seq_id)):
            return False
        self._put(tip, self._cells.checkpoint(seq_id))
        return True

    def put(self, tip: Node, checkpoint: bytes) -> None:
        """Give `tip` a checkpoint from a snapshot, if there is memory for it."""
        if tip.checkpoint is None and self._make_place(len(checkpoint)):
            self._put(tip, checkpoint)

    def used(self, node: Node) -> None:
        """A sequence begins behind this node."""
        if node.checkpoint is not None:
            node.worth = self._worth(node)

    def of_snapshot(self, node: Node) -> dict[int, bytes] | None:
        """Checkpoints that a snapshot of the path to `node` takes along, by their lengths; None where it can be cut."""
        if self._cells.can_be_cut:
            return None
        found = [each for each in node.path() if each.checkpoint is not None and each is not node]
        chosen = [each for index, each in enumerate(found) if index < LAST_IN_SNAPSHOT or each.reuses or each.branches][
            :MOST_IN_SNAPSHOT
        ]
        return {each.end: each.checkpoint for each in reversed(chosen) if each.checkpoint is not None}

    def snapshot_size(self, seq_id: int, node: Node) -> int:
        """Bytes of a snapshot of a sequence that ends in `node`, with these."""
        return self._cells.state_size(seq_id) + sum(map(len, (self.of_snapshot(node) or {}).values()))

    def _put(self, node: Node, checkpoint: bytes) -> None:
        self._tree.set_checkpoint(node, checkpoint)
        node.worth = self._worth(node)
        self._store.make_way()

    def _worth(self, node: Node) -> float:
        assert node.checkpoint is not None
        before = next((each for each in node.path() if each is not node and each.checkpoint is not None), None)
        saved = node.end - (before.end if before is not None else 0)
        return self._last_worth + saved * (node.reuses + UNUSED_REUSES) / len(node.checkpoint)

    def _make_place(self, size: int) -> bool:
        most, tree = self._store.capacity_bytes // STORE_SHARE, self._tree
        if size > most:
            return False
        while tree.checkpoint_bytes + size > most:
            least = min(tree.checkpoints, key=lambda each: each.worth)
            self._last_worth = least.worth
            tree.drop_checkpoint(least)
        return True

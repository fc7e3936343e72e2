"""Checkpoints: positions, beside the ends of sequences, at which others can resume if memory cannot be cut.

A recurrent state has no parts: only the state at a sequence's end exists. So copies of it are taken where other prompts
are likely to differ: behind a message and a picture, where two prompts have differed, and shortly before a prompt's
end; never inside of a picture. Its attention cells are shared by the prefix tree as always. Copies are in host memory.
Which of them stay depends on how many tokens each saves for its size, and how recently: the worth of the last evicted
one is added to the worth of a new or used one (GreedyDual, Cao and Irani 1997). Owned by the decode thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

from uma.engine.kv.memory_kinds import Attention
from uma.engine.kv.pictures import outside, runs_in
from uma.engine.kv.prefix_tree import Node, PrefixTree
from uma.engine.kv.snapshots import UNUSED_REUSES, SnapshotStore

MIN_SAVED_TOKENS = 32
"""Minimum tokens between two checkpoints of a sequence: fewer are computed as quickly as a state is copied."""
INTERVAL_TOKENS = 2_048
"""Maximum tokens of a long prompt between two checkpoints."""
FIRST_INTERVAL_TOKENS = 256
"""Tokens before the first regular checkpoint of a prompt; each next one is twice as far, up to `INTERVAL_TOKENS`. So if
two prompts differ where no message ends, the second computes at most about half of their common prefix again, and a
third nothing."""
LAST_TOKENS = 2
"""Tokens in the last batch of a prompt that is read alone: the fewest for which llama.cpp's attention does not depend
on the order of cells. With four, as in llama-server for models with windows, it does, and a repeated question gets
another answer. The last checkpoint of a prompt is this far before its end, unless a message ends there."""
STORE_SHARE = 2
"""Divisor of the memory for snapshots: checkpoints take at most half of it."""
MAX_IN_SNAPSHOT = 8
"""Maximum checkpoints that a snapshot includes."""
LAST_IN_SNAPSHOT = 2
"""Number of last checkpoints that a snapshot includes even if unused: the next turn, or the same prompt, resumes
there."""


class Checkpoints:
    """Checkpoints of one tree. There are none if memory can be cut."""

    def __init__(self, cells: Attention, tree: PrefixTree, store: SnapshotStore) -> None:
        self._cells = cells
        self._tree = tree
        self._store = store
        self._capacity_bytes = 0 if cells.can_be_cut else store.capacity_bytes // STORE_SHARE
        store.reserved_bytes = lambda: tree.checkpoint_bytes
        self._last_worth = 0.0
        """Worth of the checkpoint that was evicted last."""

    def positions(self, tokens: array[int], prompt_tokens: int, computed: int, ends: Collection[int]) -> list[int]:
        """Positions at which a sequence stops for a checkpoint, the next one last. Its first `computed` tokens are in
        memory, and messages of its prompt end at the lengths `ends`.
        """
        if not self._capacity_bytes:
            return []
        # Not an end behind the last tokens: no prompt can resume there, and it prevented the last one where a prompt
        # can: half of a prompt was computed again in the next turn.
        ends = [end for end in ends if end <= prompt_tokens - LAST_TOKENS]
        wanted = {*ends, *range(INTERVAL_TOKENS, prompt_tokens, INTERVAL_TOKENS)}
        position = FIRST_INTERVAL_TOKENS
        while position < INTERVAL_TOKENS:
            wanted.add(position)
            position *= 2
        if not any(prompt_tokens - end <= MIN_SAVED_TOKENS for end in ends):
            wanted.add(prompt_tokens - LAST_TOKENS)
        found: list[int] = []
        for end in sorted({outside(tokens, end) for end in wanted if end < prompt_tokens}):
            if end - (found[-1] if found else computed) >= MIN_SAVED_TOKENS:
                found.append(end)
        # Other questions are asked about a picture, however short the prompt is. (With several, about the last: a state
        # for each would evict those of other texts.)
        if (runs := runs_in(tokens)) and runs[-1].end - computed >= MIN_SAVED_TOKENS:
            found = sorted({*found, runs[-1].end})
        # Where another prompt has gone on differently, further ones can.
        branch = outside(tokens, min(self._tree.match(tokens).length, prompt_tokens - 1))
        if branch - computed >= MIN_SAVED_TOKENS:
            found = sorted({branch, *(end for end in found if abs(end - branch) >= MIN_SAVED_TOKENS)})
        return found[::-1]

    def take(self, tip: Node, seq_id: int) -> None:
        """Take a checkpoint of a sequence that ends in `tip` now, if there is memory for it."""
        if not self._capacity_bytes or tip.checkpoint is not None or tip.parent is None:
            return
        if self._make_place(self._cells.checkpoint_size(seq_id)):
            self._put(tip, self._cells.checkpoint(seq_id))

    def put(self, tip: Node, checkpoint: bytes) -> None:
        """Give `tip` a checkpoint from a snapshot, if there is memory for it."""
        if tip.checkpoint is None and self._make_place(len(checkpoint)):
            self._put(tip, checkpoint)

    def used(self, node: Node) -> None:
        """Note that a sequence resumes behind this node."""
        if node.checkpoint is not None:
            node.worth = self._worth(node)

    def of_snapshot(self, node: Node) -> dict[int, bytes] | None:
        """Checkpoints, by length, that a snapshot of the path to `node` includes; None where memory can be cut."""
        if not self._capacity_bytes:
            return None
        found = [above for above in node.path() if above.checkpoint is not None and above is not node]
        last, others = found[:LAST_IN_SNAPSHOT], found[LAST_IN_SNAPSHOT:]
        chosen = [*last, *(above for above in others if above.reuses or above.branches)][:MAX_IN_SNAPSHOT]
        return {above.end: above.checkpoint for above in reversed(chosen) if above.checkpoint is not None}

    def snapshot_size(self, node: Node) -> int:
        """Bytes of a snapshot of a sequence that ends in `node`, with its checkpoints."""
        return self._cells.state_size(node.end) + sum(map(len, (self.of_snapshot(node) or {}).values()))

    def _put(self, node: Node, checkpoint: bytes) -> None:
        self._tree.set_checkpoint(node, checkpoint)
        node.worth = self._worth(node)
        self._store.make_way()

    def _worth(self, node: Node) -> float:
        assert node.checkpoint is not None
        before = next((above for above in node.path() if above is not node and above.checkpoint is not None), None)
        saved = node.end - (before.end if before is not None else 0)
        return self._last_worth + saved * (node.reuses + UNUSED_REUSES) / len(node.checkpoint)

    def _make_place(self, size: int) -> bool:
        most, tree = self._capacity_bytes, self._tree
        if size > most:
            return False
        while tree.checkpoint_bytes + size > most:
            least = min(tree.checkpoints, key=lambda node: node.worth)
            self._last_worth = least.worth
            tree.drop_checkpoint(least)
        return True

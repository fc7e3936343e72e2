"""Sequences on their way from one layout of KV memory to another: out of all cells, and into those made anew.

What several have in common is taken once where the new memory is one buffer, with the first of them; the others are
their rest behind it. A buffer of its own needs the whole of a sequence. Owned by the decode thread.
"""

from __future__ import annotations

from array import array

import attrs

from uma.engine.kv.cells import SequenceCells
from uma.engine.kv.prefix_tree import Node, PrefixTree


@attrs.frozen
class Carried:
    """A sequence outside of cells."""

    tokens: array[int]
    start: int
    """How many of them others hold that were taken before it, and have to be put in before it."""
    state: bytes
    """Of the rest of its tokens; empty where there is none."""
    runs: list[tuple[int, int, float]]
    """Of its runs in the tree from the root on: where each ends, how often it was reused, and when it was used last."""


class Carrier:
    """Takes sequences out, one after the other, and puts them in again in the same order."""

    def __init__(self, cells: SequenceCells, tree: PrefixTree) -> None:
        self._cells = cells
        self._tree = tree
        self._taken: set[Node] = set()
        """Runs that those taken out hold."""
        self.shares = False
        """What sequences have in common is taken once."""

    def begin(self, *, shares: bool) -> None:
        """Sequences will be taken out; with `shares` what they have in common once, if cells can be had in parts."""
        self._taken.clear()
        self.shares = shares and self._cells.has_parts

    def common(self, tip: Node) -> int:
        """Tokens at the beginning of a sequence that others hold which were taken out."""
        return next((node.end for node in tip.path() if node in self._taken), 0)

    def take(self, seq_id: int, tip: Node) -> Carried:
        """Copy a sequence, which the caller gives up then, before the next is taken."""
        start = self.common(tip) if self.shares and self._cells.lowest_free_id is not None else 0
        if start == tip.end:
            state = b""
        elif start:
            spare = self._cells.take_id()
            state = self._cells.part(seq_id, start, tip.end, spare)
            self._cells.trim(spare, 0)
        else:
            state = self._cells.states(seq_id)[0]
        self.note(tip)
        runs = [(node.end, node.reuses, node.used_at) for node in tip.path()]
        return Carried(tip.whole(), start, state, runs[::-1])

    def note(self, tip: Node) -> None:
        """What this sequence holds is taken out, or kept in another way."""
        self._taken.update(node for node in tip.path() if node.parent is not None)

    def put(self, carried: Carried, now_ms: float, *, cached: bool = False) -> tuple[int, Node] | None:
        """Put a sequence into cells, as a running one or as cache: its id, and the node it ends in.

        None where there is no space for it, or what it has in common with another is missing.
        """
        cells, tree, tokens = self._cells, self._tree, carried.tokens
        space = cells.total - tree.total_tokens + carried.start if cells.is_unified else cells.share
        node, length = tree.match(tokens[: carried.start]) if carried.start else (tree.root, 0)
        if len(tokens) > min(space, cells.share) or length < carried.start or cells.lowest_free_id is None:
            return None
        seq_id = cells.take_id()
        if carried.state and not cells.load(seq_id, [carried.state], None):
            cells.trim(seq_id, 0)
            return None
        # The beginning comes last: a state can be put into an empty id only.
        tip = tree.start(seq_id, node, carried.start, now_ms)
        if carried.state:
            tip = tree.extend(tip, seq_id, tokens[carried.start :])
        path = [each for each in tip.path() if each.parent is not None]
        is_there = not cached or tree.finish(tip, seq_id, now_ms, keep=True)
        for each in path:
            _, each.reuses, each.used_at = next(run for run in carried.runs if run[0] >= each.end)
        return (seq_id, tip) if is_there else None

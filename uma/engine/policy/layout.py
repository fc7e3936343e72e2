"""Which layout of KV memory serves the sequences at hand: one buffer that all share, or a short one for each.

With one buffer any sequence can be as long as all memory, and a prefix is shared at no cost; but llama.cpp's attention
goes over every cell in use for every row, and rows of a crowd pay for each other's cells. With a buffer for each they
pay for their own, as long as they are short. Changing costs a pause, for the memory is recreated. So this is the ski
rental problem, and it is answered as usual: change once staying has cost as much as changing does there and back, so
that no more than twice the least possible time is lost, whatever comes. What the sequences at hand will probably lose
counts as lost: a crowd that comes together is given its buffers before anything is computed. Buffers that had to be
given up before they had spared what they cost make the next change dearer, twice each time: a client that alternates
crowds and long prompts brings about few changes.

What a pause takes and what a masked cell costs are measured: the first by making the context at the start and by each
change, the second by decode steps of this machine (`CostModel.cell_ms`).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from uma.engine.policy.lead import MAX_STEPS

LEAST_SEQUENCES = 8
"""Minimum sequences for a change: batches of fewer are short, and weights are most of their cost."""
CELL_NS = 3.0
"""Initial estimate of what a cell of another sequence costs a row, in each head of each layer, on one thread. It is
low: where more is lost, the first steps show it."""
LEARN = 0.5
"""Weight of the last change in the predicted cost of the next."""
MAX_RELUCTANCE = 64
"""Maximum gain, as a multiple of its cost, that is demanded of a change after others did not pay."""
HEADROOM_TOKENS = 2 * MAX_STEPS
"""Free cells of its share below which a sequence is about to outgrow it: time to decode ahead of the pause."""
MAX_CHANGE_MIB = 1_024
"""Maximum KV memory that a change recreates, so that its pause stays under a second. A larger KV keeps its layout."""
EXPECTED_TOKENS = 256
"""Output tokens that a sequence is given cells for in advance; one that goes on further can need a change."""


@attrs.frozen
class Layout:
    """How KV cells are divided."""

    ids: int
    """Sequences it can hold, the one of a health probe included."""
    share: int
    """Maximum cells of one sequence."""
    is_unified: bool = False


@attrs.frozen
class Crowd:
    """The sequences that have a slot or will soon, as far as their layout depends on them."""

    sequences: int
    longest: int
    """Tokens of the longest."""
    longest_soon: int
    """The same with `EXPECTED_TOKENS` more, or with all the output that it can have where that is less."""
    masked_soon: float = 0.0
    """Cells of others that their rows will go over in vain, if each writes half of that."""
    longest_next: int = 0
    """`longest` with `HEADROOM_TOKENS` more, or with all the output that it can have where that is less."""

    @classmethod
    def of(cls, tokens: Sequence[int], most_more: Sequence[int], *, shared: int, most: int) -> Crowd:
        """A crowd of sequences with so many tokens each, which can have so many more, and `shared` in common.

        Of them `most` can run at once.
        """
        more = [min(each, EXPECTED_TOKENS) for each in most_more]
        size = len(tokens)
        steps = sum(more) / 2 / max(1, size)
        cells = sum(tokens) - size * shared + size * steps / 2
        return cls(
            min(size, most),
            max(tokens, default=0),
            max(map(sum, zip(tokens, more, strict=True)), default=0),
            max(0, size - 1) * steps * cells,
            max((each + min(more, HEADROOM_TOKENS) for each, more in zip(tokens, most_more, strict=True)), default=0),
        )


def split_layouts(n_ctx: int, max_sequences: int) -> tuple[Layout, ...]:
    """The ways to divide `n_ctx` cells among all sequences, half, and a quarter of them.

    llama.cpp makes shares of multiples of 256 cells. All together are at most a sixteenth more than `n_ctx`.
    """
    found = []
    for sequences in (max_sequences, max_sequences // 2, max_sequences // 4):
        ids = sequences + 1
        share = -(-n_ctx // (ids * 256)) * 256
        if ids * share > n_ctx + n_ctx // 16:
            share -= 256
        if share and sequences >= LEAST_SEQUENCES:
            found.append(Layout(ids, share))
    return tuple(found)


class LayoutPolicy:
    """Chooses among `pool`, which holds whatever is admitted, and `splits`, those for most sequences first."""

    def __init__(self, pool: Layout, splits: Sequence[Layout], masked_cell_ms: float, pause_ms: float) -> None:
        """`masked_cell_ms`: what the cell of another sequence costs a row; `pause_ms`: what one change takes. Both are
        what is believed until more is known.
        """
        self.pool = pool
        self.current = pool
        self._splits = tuple(splits)
        self.masked_cell_ms = masked_cell_ms
        self.pause_ms = pause_ms
        """What the next change is expected to take."""
        self._reluctance = 1
        self._masked_before = 0
        self._lost_ms = 0.0
        """What staying in the pool has cost since the last change, or what having left it has spared."""

    @property
    def can_change(self) -> bool:
        """Whether there is anything to choose."""
        return bool(self._splits) or not self.current.is_unified

    def choose(self, crowd: Crowd, masked_cells: int) -> Layout:
        """The layout for the sequences of now. `masked_cells`: those that rows went over in vain since the start."""
        masked, self._masked_before = masked_cells - self._masked_before, masked_cells
        if not self.current.is_unified:
            self._lost_ms += masked * self.masked_cell_ms
            longest = max(crowd.longest, crowd.longest_next)
            is_fit = crowd.sequences < self.current.ids and longest <= self.current.share
            return self.current if is_fit else self._fitting(crowd) or self.pool
        wanted = self._fitting(crowd)
        if wanted is None or crowd.sequences < LEAST_SEQUENCES:
            return self.pool
        self._lost_ms += masked * self.masked_cell_ms
        will_lose_ms = crowd.masked_soon * self.masked_cell_ms
        return wanted if self._lost_ms + will_lose_ms >= self._reluctance * self._change_ms else self.pool

    def changed(self, layout: Layout, took_ms: float) -> None:
        """The memory has this layout now; to change it took so long."""
        if not self.current.is_unified:
            has_paid = self._lost_ms >= self._change_ms
            self._reluctance = max(1, self._reluctance // 2) if has_paid else min(2 * self._reluctance, MAX_RELUCTANCE)
        self.pause_ms += (took_ms - self.pause_ms) * LEARN
        self.current = layout
        self._lost_ms = 0.0

    @property
    def _change_ms(self) -> float:
        """A change there and back."""
        return 2 * self.pause_ms

    def give_up(self) -> Layout:
        """The last choice cannot be had: all that is left is what there was before it, and the pool."""
        self._splits = ()
        return self.current

    def _fitting(self, crowd: Crowd) -> Layout | None:
        fitting = (each for each in self._splits if crowd.sequences < each.ids and crowd.longest_soon <= each.share)
        return next(fitting, None)

"""Which layout of KV memory serves the sequences at hand, and which attention goes over it.

With one buffer (the pool) any sequence can be as long as all memory, and a prefix is shared at no cost; but attention
goes over every cell in use for every row, and a crowd pays for each other's cells. With a buffer for each sequence, as
long as they are short, rows pay for their own; and there llama.cpp's plain attention can be had too, which on a CPU
takes a quarter of flash attention's time for each cell of a decode row, and half as long again for a prompt's. In the
pool it is out of the question: it computes the cells of others in full.

Changing costs a pause, for the memory is recreated. So this is the ski rental problem, and it is answered as usual:
change once staying has cost as much as changing does there and back, so that no more than twice the least possible time
is lost, whatever comes. What the sequences at hand will probably lose counts as lost: a crowd that comes together need
not lose it first. Where prompts would take longer in the buffers, and nothing decodes yet, the pool reads them. Buffers
that had to be given up before they had spared what they cost make the next change dearer, twice each time: a client
that alternates crowds and long prompts brings about few changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from uma.engine.policy.lead import MAX_STEPS

LEAST_SEQUENCES = 8
"""Minimum sequences that get buffers of the largest shares: a fraction of all that can run at once."""
FEW_IDS = (12, 8, 4)
"""Numbers of sequence ids, one of which is a health probe's, for the few sequences that most machines serve at once."""
SHORT_SHARES = (512, 1_024, 2_048)
"""Shares of theirs below the largest: to recreate less memory is a shorter pause."""
LEAST_SHARE = 512
"""Minimum share of theirs."""
HEADROOM_TOKENS = 2 * MAX_STEPS
"""Free cells of its share below which a sequence is about to outgrow it: time to decode ahead of the pause."""
MAX_CHANGE_MIB = 1_024
"""Maximum KV memory that a change recreates, so that its pause stays under a second. A larger KV keeps its layout."""
EXPECTED_TOKENS = 256
"""Output tokens that a sequence is given cells for in advance; one that goes on further can need a change."""
MOST_SHARED = 0.5
"""Maximum tokens that sequences with buffers of their own have in common, as a share of the longest: llama.cpp copies a
whole buffer for each sequence that begins with what another has, and the pool copies nothing."""
SURE_TOKENS = 256
"""Carried tokens from which a change says more of what a token takes than of anything else."""
LEARN = 0.5
"""Weight of the last change in the predicted cost of the next."""
LEAST_GAIN_MS = 250.0
"""Minimum gain that is demanded of a change, however short its pause: what readers would not notice is not worth it,
and another attention rounds in another way, so that a near tie of two tokens may go either way.
"""
MAX_RELUCTANCE = 64
"""Maximum gain, as a multiple of its cost, that is demanded of a change after others did not pay."""


@attrs.frozen
class Layout:
    """How KV cells are divided."""

    ids: int
    """Sequences it can hold, the one of a health probe included."""
    share: int
    """Maximum cells of one sequence."""
    is_unified: bool = False
    is_plain: bool = False
    """Attention is llama.cpp's plain one instead of flash attention."""

    @property
    def cells(self) -> int:
        """All of them."""
        return self.share if self.is_unified else self.ids * self.share

    def holds(self, sequences: int, longest: int) -> bool:
        """Whether so many sequences fit, each of at most so many tokens. One id is left for health probes."""
        return sequences < self.ids and longest <= self.share


@attrs.frozen
class Attended:
    """Cells that attention goes over, summed over decode rows and over tokens of prompts."""

    rows_own: float = 0.0
    rows_masked: float = 0.0
    """Of other sequences, as each row does in the pool."""
    rows_longest: float = 0.0
    """With plain attention: as many for each row as the longest of them has."""
    reads_own: float = 0.0
    reads_masked: float = 0.0

    def __sub__(self, other: Attended) -> Attended:
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return Attended(*[mine - its for mine, its in pairs])

    @property
    def reads(self) -> Attended:
        """Those of prompts alone."""
        return Attended(reads_own=self.reads_own, reads_masked=self.reads_masked)


@attrs.frozen
class AttentionCost:
    """What a cell costs, in nanoseconds for each attention head of 64 values and each layer, on one thread.

    By `llama_decode` alone, on an Intel Xeon with AVX-512, in memory of f16: 1,500 cells more took a decode row 9.7 ms
    with flash attention and 2.3 ms with the plain one, 256 tokens of a prompt 170 and 244 ms, by two threads with 144
    heads in all layers.
    """

    flash_row_ns: float = 90.0
    plain_row_ns: float = 22.0
    masked_row_ns: float = 3.0
    flash_read_ns: float = 6.0
    plain_read_ns: float = 8.7
    masked_read_ns: float = 1.0

    def spared_ns(self, attended: Attended, layout: Layout) -> float:
        """What this layout spares of what the pool takes, in units of heads; below 0 where it takes longer."""
        if layout.is_unified:
            return 0.0
        masked_ns = self.masked_row_ns * attended.rows_masked + self.masked_read_ns * attended.reads_masked
        if not layout.is_plain:
            return masked_ns
        rows_ns = self.flash_row_ns * attended.rows_own - self.plain_row_ns * attended.rows_longest
        return masked_ns + rows_ns - (self.plain_read_ns - self.flash_read_ns) * attended.reads_own


@attrs.frozen
class Crowd:
    """The sequences that have a slot or will soon, as far as their layout depends on them."""

    sequences: int
    longest: int
    """Tokens of the longest."""
    longest_soon: int
    """The same with `EXPECTED_TOKENS` more, or with all the output that it can have where that is less."""
    soon: Attended = Attended()
    """What attention will go over until their prompts are read and each has written half of that."""
    longest_next: int = 0
    """`longest` with `HEADROOM_TOKENS` more, or with all the output that it can have where that is less."""
    decodes: bool = True
    """Some of them decode now."""
    is_one_prefix: bool = False
    """They have most of their tokens in common."""

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        most_more: Sequence[int],
        *,
        shared: int,
        most: int,
        unread: Sequence[int] = (),
        decodes: bool = True,
        cached: int = 0,
    ) -> Crowd:
        """A crowd of sequences with so many tokens each, which can have so many more, and `shared` in common.

        Of them `most` can run at once. `unread`: tokens that each has still to compute; what they share, one does.
        `cached`: cells that the pool holds for none of them.
        """
        size = len(tokens)
        more = [min(each, EXPECTED_TOKENS) for each in most_more]
        longest = max(tokens, default=0)
        steps = sum(more) / 2 / max(1, size)
        cells = sum(tokens) - size * shared + size * steps / 2
        reads = [left if not at else min(left, tokens[at] - shared) for at, left in enumerate(unread)]
        soon = Attended(
            sum(each / 2 * (own + each / 4) for own, each in zip(tokens, more, strict=True)),
            max(0, size - 1) * steps * cells + size * steps * cached,
            sum(more) / 2 * (longest + steps / 2),
            sum(left * (own - left / 2) for own, left in zip(tokens, reads, strict=False)),
            # While prompts are read half of the others' cells are there, on the average.
            sum(
                left * (cached + (sum(tokens) - own - (size - 1) * shared) / 2)
                for own, left in zip(tokens, reads, strict=False)
            ),
        )
        return cls(
            min(size, most),
            longest,
            max(map(sum, zip(tokens, more, strict=True)), default=0),
            soon,
            max((each + min(more, HEADROOM_TOKENS) for each, more in zip(tokens, most_more, strict=True)), default=0),
            decodes,
            size > 1 and MOST_SHARED * longest < shared,
        )


def split_layouts(n_ctx: int, max_sequences: int) -> tuple[Layout, ...]:
    """The ways to divide `n_ctx` cells among all sequences, half and a quarter of them, and among few.

    llama.cpp makes shares of multiples of 256 cells. All together are at most a sixteenth more than `n_ctx`.
    """
    found: dict[Layout, None] = {}
    for sequences in (max_sequences, max_sequences // 2, max_sequences // 4):
        if sequences >= LEAST_SEQUENCES and (share := _largest_share(n_ctx, sequences + 1)):
            found[Layout(sequences + 1, share)] = None
    for ids in FEW_IDS:
        largest = _largest_share(n_ctx, ids)
        # The most ids are for short sequences; with the fewest the next request would mean the next change.
        shares = [share for share in SHORT_SHARES if share < largest and ids > min(FEW_IDS)]
        shares += [largest] if ids < max(FEW_IDS) or ids == min(FEW_IDS) else []
        found |= {Layout(ids, share): None for share in shares if share >= LEAST_SHARE and ids <= max_sequences}
    return tuple(found)


def _largest_share(n_ctx: int, ids: int) -> int:
    return (n_ctx + n_ctx // 16) // (ids * 256) * 256


class PauseCost:
    """Predicts the pause of a change, from the cells that are made and the tokens whose state is carried over."""

    def __init__(self, cell_ms: float, token_ms: float) -> None:
        self._cell_ms = cell_ms
        self._token_ms = token_ms

    def ms(self, layout: Layout, tokens: int) -> float:
        """The pause until memory has this layout."""
        return self._cell_ms * layout.cells + self._token_ms * tokens

    def learn(self, layout: Layout, made_ms: float, tokens: int, carried_ms: float) -> None:
        """Take in a change: what the memory took to be made, and what carrying so many tokens took."""
        self._cell_ms += LEARN * (made_ms / max(1, layout.cells) - self._cell_ms)
        weight = LEARN * tokens / (tokens + SURE_TOKENS)
        self._token_ms += weight * (carried_ms / max(1, tokens) - self._token_ms)


class LayoutPolicy:
    """Chooses among `pool`, which holds whatever is admitted, and `splits`."""

    def __init__(
        self,
        pool: Layout,
        splits: Sequence[Layout],
        pause: PauseCost,
        *,
        head_ms: float,
        cost: AttentionCost | None = None,
    ) -> None:
        """`head_ms`: milliseconds of a nanosecond of `AttentionCost` in all heads, layers and threads of this model."""
        self.pool = pool
        self.current = pool
        self.pause = pause
        self._splits = tuple(splits)
        self._head_ms = head_ms
        self._cost = cost or AttentionCost()
        self._reluctance = 1
        self._before = Attended()
        self._lost_ms = 0.0
        """What staying in the pool has cost since the last change, or what having left it has spared."""
        self._change_ms = 0.0
        """What the last change costs, there and back."""

    @property
    def can_change(self) -> bool:
        """Whether there is anything to choose."""
        return bool(self._splits) or not self.current.is_unified

    def choose(self, crowd: Crowd, attended: Attended, tokens: int) -> Layout:
        """The layout for the sequences of now. `attended`: what attention went over since the start; `tokens`: those of
        all sequences in cells, whose state is carried over or kept.
        """
        since, self._before = attended - self._before, attended
        current = self.current
        if current.is_unified:
            return self._leaving_pool(crowd, since, tokens)
        self._lost_ms += self._spared_ms(since, current)
        if not current.holds(crowd.sequences, max(crowd.longest, crowd.longest_next)):
            return self._best(crowd, tokens)
        if -self._spared_ms(crowd.soon.reads, current) > self._reluctance * self._there_and_back_ms(current, tokens):
            return self.pool  # long prompts are read there, and then this comes back
        best = self._best(crowd, tokens)
        gain_ms = self._spared_ms(crowd.soon, best) - self._spared_ms(crowd.soon, current)
        return best if gain_ms > self._reluctance * self._there_and_back_ms(best, tokens) else current

    def changed(self, layout: Layout, tokens: int) -> None:
        """The memory has this layout now, and so many tokens were in cells."""
        if not self.current.is_unified:
            has_paid = self._lost_ms >= self._change_ms
            self._reluctance = max(1, self._reluctance // 2) if has_paid else min(2 * self._reluctance, MAX_RELUCTANCE)
        self._change_ms = self._there_and_back_ms(layout, tokens)
        self.current = layout
        self._lost_ms = 0.0

    def give_up(self) -> Layout:
        """The last choice cannot be had: all that is left is what there was before it, and the pool."""
        self._splits = ()
        return self.current

    def _leaving_pool(self, crowd: Crowd, since: Attended, tokens: int) -> Layout:
        best = self._best(crowd, tokens)
        if best.is_unified:
            return best
        will_spare_ms = self._spared_ms(crowd.soon, best)
        self._lost_ms = max(0.0, self._lost_ms + self._spared_ms(since, best))
        cost_ms = self._there_and_back_ms(best, tokens)
        reads_ms = -self._spared_ms(crowd.soon.reads, best)
        if will_spare_ms <= 0 or reads_ms > cost_ms or (reads_ms > 0 and not crowd.decodes):
            return self.pool  # prompts are read there first
        return best if self._lost_ms + will_spare_ms >= self._reluctance * cost_ms else self.pool

    def _best(self, crowd: Crowd, tokens: int) -> Layout:
        """Of the layouts that hold this crowd for a while, the one that spares most; the pool where none does."""
        splits = () if crowd.is_one_prefix else self._splits
        fitting = [each for each in splits if each.holds(crowd.sequences, crowd.longest_soon)]
        return max(
            fitting,
            key=lambda each: self._spared_ms(crowd.soon, each) - self.pause.ms(each, tokens),
            default=self.pool,
        )

    def _spared_ms(self, attended: Attended, layout: Layout) -> float:
        return self._head_ms * self._cost.spared_ns(attended, layout)

    def _there_and_back_ms(self, layout: Layout, tokens: int) -> float:
        return max(LEAST_GAIN_MS, self.pause.ms(layout, tokens) + self.pause.ms(self.pool, tokens))

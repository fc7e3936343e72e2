"""The layouts of KV memory, and what attention takes in each.

With one buffer (the pool) any sequence can be as long as all memory, and a prefix is shared at no cost; but attention
goes over every cell in use for every row, and a crowd pays for each other's cells. With a buffer for each sequence, as
long as they are short, rows pay for their own; and there llama.cpp's plain attention can be had too, which on a CPU
takes a fifth of flash attention's time for each cell of a decode row, a third as long again for a prompt's, and some
time for each row besides. It computes the cells of others in full, so in one buffer it is of use where that is small,
and holds one conversation or a crowd with a common prefix: a small pool. One with flash attention is made in place of
the pool, where that is not there any more, for those that it holds: with the pool the change takes twice as long.

This file says what each layout holds and takes; `layout_policy` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from uma.engine.policy.lead import MAX_STEPS

LEAST_SEQUENCES = 8
"""Minimum sequences that get buffers of the largest shares: a fraction of all that can run at once."""
FEW_IDS = (13, 8, 4)
"""Numbers of sequence ids, one of which is a health probe's, for the few sequences that most machines serve at once."""
SHORT_SHARES = (256, 512, 1_024, 2_048, 4_096)
"""Shares below the largest: to recreate less memory is a shorter pause."""
LEAST_SHARE = 512
"""Minimum share for few sequences. A share of 256 would save them little memory, and a text without a bound would soon
outgrow it."""
SMALL_POOLS = (2_048, 4_096)
"""Cells of the small pools."""
HEADROOM_TOKENS = 2 * MAX_STEPS
"""Free cells of its share below which a sequence is about to outgrow it: time to decode ahead of the pause."""
MAX_CHANGE_MIB = 1_024
"""Maximum KV memory that a change recreates, so that its pause stays under a second. A larger KV keeps its layout."""
EXPECTED_TOKENS = 256
"""Output tokens that a sequence is given cells for in advance; one that goes on further can need a change."""
EXPECTED_TURNS = 4
"""Next turns that a conversation whose reader returns is given cells for in advance, each as long as the last, or of
`EXPECTED_TOKENS`."""
MOST_SHARED = 0.5
"""Maximum tokens that sequences with buffers of their own have in common, as a share of the longest: llama.cpp copies a
whole buffer for each sequence that begins with what another has, and the pool copies nothing."""
SURE_TOKENS = 256
"""Carried tokens from which a change says more of what a token takes than of anything else."""
LEARN = 0.5
"""Weight of the last change in the predicted cost of the next."""
MOST_SURPRISE = 2.0
"""Maximum cost that is learnt from one change, as a multiple of the predicted one. Memory that a machine gives out for
the first time can take eight times as long to be made as ever after."""
GPU_MASK_NS = 4.0
"""A masked cell of a row or of a prompt's token where a GPU attends, all heads and layers together."""


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
    has_probe_id: bool = True
    """One id is left for health probes: llama.cpp has more ids than sequences can run."""

    @property
    def cells(self) -> int:
        """All of them."""
        return self.share if self.is_unified else self.ids * self.share

    @property
    def is_pool(self) -> bool:
        """It takes as long as the pool for what it holds: the pool itself, or a small one with flash attention."""
        return self.is_unified and not self.is_plain

    def holds(self, sequences: int, longest: int, cells: int) -> bool:
        """Whether so many sequences fit, each of at most so many tokens, which take so many cells in one buffer."""
        return sequences + self.has_probe_id <= self.ids and (cells if self.is_unified else longest) <= self.share


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
    rows_cached: float = 0.0
    """Of cache, which leaves its cells when the layout changes; what was measured counts it among the masked."""
    reads_cached: float = 0.0
    rows: float = 0.0
    """Decode rows, and below tokens of prompts: each takes plain attention some time whatever it attends to."""
    read_tokens: float = 0.0

    def __sub__(self, other: Attended) -> Attended:
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return Attended(*[mine - its for mine, its in pairs])

    @property
    def reads(self) -> Attended:
        """Those of prompts alone."""
        return Attended(
            reads_own=self.reads_own,
            reads_masked=self.reads_masked,
            reads_cached=self.reads_cached,
            read_tokens=self.read_tokens,
        )


@attrs.frozen
class AttentionCost:
    """What a cell costs, in nanoseconds for each attention head of 64 values and each layer, on one thread.

    The defaults are of an Intel Xeon with AVX-512; an engine measures those of its CPU (`uma.llama.attention`), but for
    plain attention's least; they differ by as much as five times. By `llama_decode` alone, in memory of f16, by two
    threads with 144 heads in all layers, milliseconds of a row in a batch of 8 that attends to so many cells:

    | | cells | 16 | 64 | 128 | 200 | 300 | 500 | 1,000 |
    | --- | --- | --- | --- | --- | --- | --- | --- | --- |
    | Intel Xeon | flash attention | 2.3 | 2.6 | 2.9 | 3.4 | 4.1 | 5.2 | 8.3 |
    | | plain attention | 2.7 | 2.8 | 2.7 | 2.7 | 3.1 | 3.1 | 4.0 |
    | AMD EPYC | flash attention | 1.5 | 1.7 | 1.7 | 1.9 | 1.9 | 2.2 | 2.7 |
    | | plain attention | 1.9 | 1.9 | 2.0 | 1.9 | 2.3 | 2.3 | 2.7 |

    Plain attention goes over multiples of 256 cells, and copies what it multiplies. 256 tokens of a prompt behind 1,500
    others took the Xeon 170 ms with flash attention and 244 with the plain one, 8 prompts of 16 tokens 131 and 154; the
    EPYC 251 and 267, 71 and 97. A cell that is masked took flash attention 4.9 ns in a batch of 8 rows and 3.4 in one
    of 32; the EPYC 0.8 ns. An EPYC of family 25 takes 1.3 ns where the cells of each sequence lie in a row, 1.9 where
    they lie among each other, and up to 4 where a large model's weights go through its caches in between. What plain
    attention takes besides the cells is alike on both, and not measured again: most of it is memory that a large
    model's weights have driven out of the caches.
    """

    flash_row_ns: float = 85.0
    plain_row_ns: float = 16.0
    masked_row_ns: float = 4.5
    flash_read_ns: float = 6.0
    plain_read_ns: float = 8.3
    masked_read_ns: float = 1.0
    plain_least_row_ns: float = 6_000.0
    """Of a decode row, besides its cells."""
    plain_least_read_ns: float = 1_400.0
    """The same of a prompt's token."""
    cached_row_ns: float = 4.5
    """For cells of cache, which lie in a row, what `masked_row_ns` is for a crowd's, which lie among each other."""

    @classmethod
    def on_gpu(cls) -> AttentionCost:
        """What a masked cell costs where a GPU attends, in nanoseconds for all heads and layers; whatever else there is
        costs the same in each layout.

        llama.cpp writes the mask on one CPU thread, for each row or token of a prompt an element for each cell in use,
        and only then does the GPU begin. With an H200 and an Intel Xeon, a model of 100 M parameters: 64 rows took 2.7
        to 5.7 ns a cell that was another's, and 1,024 tokens of prompts 3.8 to 5.2 ns a cell of cache.
        """
        return cls(
            flash_read_ns=GPU_MASK_NS,
            masked_row_ns=GPU_MASK_NS,
            masked_read_ns=GPU_MASK_NS,
            cached_row_ns=GPU_MASK_NS,
        )

    def spared_ns(self, attended: Attended, layout: Layout) -> float:
        """What this layout spares of what the pool takes, in units of heads; below 0 where it takes longer."""
        if not layout.is_plain:
            return 0.0 if layout.is_pool else self._masked_ns(attended)
        rows, reads = attended.rows_longest, attended.reads_own
        if layout.is_unified:
            rows, reads = attended.rows_own + attended.rows_masked, reads + attended.reads_masked
        flash_ns = self.flash_row_ns * attended.rows_own + self.flash_read_ns * attended.reads_own
        plain_ns = self.plain_row_ns * rows + self.plain_read_ns * reads
        least_ns = self.plain_least_row_ns * attended.rows + self.plain_least_read_ns * attended.read_tokens
        return self._masked_ns(attended) + flash_ns - plain_ns - least_ns

    def passing_ns(self, reads: float, rows: float, *, is_plain: bool) -> float:
        """What a masked cell takes with so many tokens of prompts and decode rows, in units of heads."""
        if is_plain:  # computes it in full
            return self.plain_read_ns * reads + self.plain_row_ns * rows
        return self.masked_read_ns * reads + self.cached_row_ns * rows

    @property
    def scattered_read_ns(self) -> float:
        """What a prompt's token takes more for a masked cell that lies among its sequence's own: llama.cpp skips a tile
        of cells only where all of them are masked.
        """
        return max(0.0, self.flash_read_ns - self.masked_read_ns)

    def _masked_ns(self, attended: Attended) -> float:
        rows_ns = self.masked_row_ns * attended.rows_masked + self.cached_row_ns * attended.rows_cached
        return rows_ns + self.masked_read_ns * (attended.reads_masked + attended.reads_cached)


@attrs.frozen
class Held:
    """Tokens whose state a change carries over."""

    cells: int = 0
    """What several sequences have in common counted once."""
    tokens: int = 0
    """The same counted for each."""

    def into(self, layout: Layout) -> int:
        """The states that this layout takes: in one buffer each cell's, else each sequence's."""
        return self.cells if layout.is_unified else self.tokens


@attrs.frozen
class Crowd:
    """The sequences that have a slot or will soon, as far as their layout depends on them."""

    sequences: int
    longest: int
    """Tokens of the longest."""
    longest_soon: int
    """The same with `EXPECTED_TOKENS` more, or with all the output that it can have where that is less."""
    soon: Attended = Attended()
    """What attention will go over until their prompts are read and each has written half of `EXPECTED_TOKENS`, or all
    that it can."""
    longest_next: int = 0
    """`longest` with `HEADROOM_TOKENS` more, or with all the output that it can have where that is less."""
    decodes: bool = True
    """Some of them decode now."""
    is_awaited: bool = False
    """A reader waits for the first token of one whose prompt is not read."""
    is_one_prefix: bool = False
    """They have most of their tokens in common."""
    held: Held = Held()
    """All their tokens."""
    cells_soon: int = 0
    """What `longest_soon` is for one, for all in one buffer, where what they have in common is kept once."""
    cells_next: int = 0
    """The same of `longest_next`."""

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        most_more: Sequence[int],
        *,
        shared: int,
        most: int,
        cells: int | None = None,
        unread: Sequence[int] = (),
        decodes: bool = True,
        is_awaited: bool = False,
        cached: int = 0,
        turns: Sequence[int] = (),
    ) -> Crowd:
        """A crowd of sequences with so many tokens each, which can have so many more, and `shared` in common.

        Of them `most` can run at once. `cells`: those that all take in one buffer, where that is known better.
        `unread`: tokens that each has still to compute; what they share, one does. `cached`: cells that the pool holds
        for none of them. `turns`: new tokens of each one's prompt, where its reader is expected back with as many more:
        that would be no time to find its buffer too short.
        """
        size = len(tokens)
        steps = [expected_steps(each) for each in most_more]
        more, little = _room(most_more, turns or [0] * size, unread or [0] * size)
        longest = max(tokens, default=0)
        distinct = sum(tokens) - max(0, size - 1) * shared if cells is None else cells
        mean_steps = sum(steps) / max(1, size)
        apart = sum(tokens) - size * shared + sum(steps) / 2
        reads = [left if not at else min(left, tokens[at] - shared) for at, left in enumerate(unread)]
        soon = Attended(
            sum(each * (own + each / 2) for own, each in zip(tokens, steps, strict=True)),
            max(0, size - 1) * mean_steps * apart,
            sum(steps) * (longest + mean_steps / 2),
            sum(left * (own - left / 2) for own, left in zip(tokens, reads, strict=False)),
            # While prompts are read half of the others' cells are there, on the average.
            sum(left * (sum(tokens) - own - (size - 1) * shared) / 2 for own, left in zip(tokens, reads, strict=False)),
            sum(steps) * cached,
            sum(reads) * cached,
            sum(steps),
            sum(reads),
        )
        return cls(
            min(size, most),
            longest,
            max(map(sum, zip(tokens, more, strict=True)), default=0),
            soon,
            max(map(sum, zip(tokens, little, strict=True)), default=0),
            decodes,
            is_awaited,
            size > 1 and MOST_SHARED * longest < shared,
            Held(distinct, sum(tokens)),
            distinct + sum(more),
            distinct + sum(little),
        )


def _room(most_more: Sequence[int], turns: Sequence[int], unread: Sequence[int]) -> tuple[list[int], list[int]]:
    """Further tokens that each sequence is given cells for in advance, and those that it must have cells for now.

    The next turn must have them only while this one decodes, when rows can run ahead of a change.
    """
    next_turn = [min(each, EXPECTED_TOKENS) for each in turns]
    more = [min(most, EXPECTED_TOKENS) + EXPECTED_TURNS * turn for most, turn in zip(most_more, next_turn, strict=True)]
    each_one = zip(most_more, next_turn, unread, strict=True)
    return more, [min(most, HEADROOM_TOKENS) + (0 if left else turn) for most, turn, left in each_one]


def expected_steps(most_more: int) -> float:
    """Decode steps that a sequence probably still takes, which can have so many more tokens.

    Half of `EXPECTED_TOKENS`, or the bound where it is lower: one as low as that is mostly reached.
    """
    return min(most_more, EXPECTED_TOKENS / 2)


def split_layouts(
    n_ctx: int, max_sequences: int, most_cells: int = 0, *, most_ids: int | None = None
) -> tuple[Layout, ...]:
    """The ways to divide `n_ctx` cells, and as many as `most_cells` where that is more, among all sequences, half and a
    quarter of them, and among few: to the full, or in shares that are short.

    Shares are as long as the longest sequence needs them, so that one long prompt beside short ones takes more cells in
    buffers of their own than in the pool. llama.cpp makes them of multiples of 256 cells. All together are at most a
    sixteenth more than these cells. There are `most_ids` ids at most.
    """
    found: dict[Layout, None] = {}
    for sequences in (max_sequences, max_sequences // 2, max_sequences // 4):
        if sequences >= LEAST_SEQUENCES:
            ids = min(sequences + 1, most_ids or sequences + 1)
            found |= _shares(ids, n_ctx, most_cells, SHORT_SHARES, has_probe_id=ids > sequences)
    for ids in FEW_IDS:
        if ids <= max_sequences:
            # With the fewest the next request would mean the next change.
            found |= _shares(ids, n_ctx, most_cells, SHORT_SHARES if ids > min(FEW_IDS) else ())
    return tuple(each for each in found if each.ids not in FEW_IDS or each.share >= LEAST_SHARE)


def _shares(
    ids: int, n_ctx: int, most_cells: int, shorter: Sequence[int], *, has_probe_id: bool = True
) -> dict[Layout, None]:
    largest = [_largest_share(cells, ids) for cells in (n_ctx, most_cells)]
    shares = [*(each for each in shorter if each < max(largest)), *largest]
    return dict.fromkeys(Layout(ids, share, has_probe_id=has_probe_id) for share in shares if share)


def small_pools(n_ctx: int, n_batch: int, ids: int) -> tuple[Layout, ...]:
    """The pools for one conversation, or for one prefix, that hold a batch and take less than `n_ctx` cells; those with
    plain attention first.
    """
    sizes = [each for each in SMALL_POOLS if n_batch <= each < n_ctx]
    return tuple(Layout(ids, each, is_unified=True, is_plain=is_plain) for is_plain in (True, False) for each in sizes)


def _largest_share(n_ctx: int, ids: int) -> int:
    return (n_ctx + n_ctx // 16) // (ids * 256) * 256


class PauseCost:
    """Predicts the pause of a change, from the cells that are made and the tokens whose state is carried over."""

    def __init__(self, cell_ms: float, token_ms: float) -> None:
        self._cell_ms = cell_ms
        self._token_ms = token_ms
        self._has_seen = False
        """A change in which cells were made."""

    def ms(self, cells: int, tokens: int) -> float:
        """The pause for so many."""
        return self._cell_ms * cells + self._token_ms * tokens

    def most_ms(self, cells: int, tokens: int) -> float:
        """The pause to be ready for: until one was seen, `MOST_SURPRISE` times as long as predicted."""
        return self.ms(cells, tokens) * (1.0 if self._has_seen or not cells else MOST_SURPRISE)

    def learn(self, cells: int, made_ms: float, tokens: int, carried_ms: float) -> None:
        """Take in a change: what so many cells took to be made, and what carrying so many tokens took."""
        if cells:
            self._has_seen = True
            self._cell_ms += LEARN * (min(made_ms / cells, MOST_SURPRISE * self._cell_ms) - self._cell_ms)
        weight = LEARN * tokens / (tokens + SURE_TOKENS)
        token_ms = min(carried_ms / max(1, tokens), MOST_SURPRISE * self._token_ms)
        self._token_ms += weight * (token_ms - self._token_ms)

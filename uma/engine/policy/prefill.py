"""Which prompts a tick reads, and how many tokens of each.

`piece` says how much is read in all. Here that is dealt out, in order of service and in the shapes that llama.cpp
computes well: whole tiles, and one batch with a decode step where that is faster.
"""

from __future__ import annotations

from itertools import takewhile

import attrs

from uma.engine.policy.cost import TILE_TOKENS, CostModel
from uma.engine.policy.crowd import ends_within, whole_crowd
from uma.engine.policy.lead import SAFETY, steps_before_mixed
from uma.engine.policy.mixed import MixedBatches, mixed_position
from uma.engine.policy.piece import NOTHING, Piece, PieceSizes, Prompts, Streams
from uma.engine.policy.state import PlainRow, Row, Targets

WORTH_REREADING = 1.25
"""Minimum time of a prompt's rest that fills no tile, as a multiple of a whole tile's, at which tokens before it are
computed again to fill one."""
DEFERRED_MS = 100.0
"""Maximum time since the last token of a row that waits while a prompt of a higher lane ends. The piece itself mostly
takes longer, so that between two such pieces there is a decode step."""


@attrs.frozen
class Prefill:
    """What a tick reads."""

    piece: Piece
    tokens: tuple[tuple[int, int], ...] = ()
    """See `Plan.prefill`."""


NO_PREFILL = Prefill(NOTHING)


class PrefillPolicy:
    """Chooses from what the cost model has learnt."""

    __slots__ = ("_cost", "_mixed", "_sizes")

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._sizes = PieceSizes(cost)
        self._mixed = MixedBatches()

    def choose(
        self, prompts: Prompts, streams: Streams, targets: Targets, free_cells: int, *, reads_on: bool = False
    ) -> Prefill:
        """What to read of `prompts` beside `streams`: something, unless a tick that only decodes comes first.

        With `reads_on` (`crowd`) no step of the streams comes before.
        """
        free_tokens = min(targets.batch_tokens, free_cells)
        together = _readable_together(prompts.rows, targets)
        prompts = prompts.replaced([_to_branch(row) for row in together] if targets.mixes_prompts else together)
        # No stream decodes, or only background ones, which slow down only the prompts of their own lane.
        if reads_on or all(not row.has_reader or row.lane < min(prompts.rows[0].lane, 0) for row in streams.rows):
            tokens = self._sizes.alone(self._in_a_tile(prompts, targets, free_tokens), targets)
            tokens = max(tokens, whole_crowd(prompts, streams, targets, free_tokens))
            prompts = prompts.replaced(_ending_together(prompts.rows, tokens))
            filled = self._in_a_tile(prompts, targets, free_tokens)
            if len(prompts.rows) == 1:
                tokens = min(tokens, self._sizes.of_one(filled, targets))
            goes_first = reads_on or _ends_before(prompts.rows[0], tokens, streams)
            piece = Piece(tokens, 0 if goes_first else 1)
        else:
            goes_first = False
            filled = self._in_a_tile(prompts, targets, free_tokens)
            piece = self._sizes.beside(streams, filled, targets, free_cells, _before_lower_lanes(filled.rows))
        if piece.tokens >= TILE_TOKENS:
            prompts = filled
        if not goes_first:
            piece = self._in_one_batch(piece, prompts, streams, targets, free_tokens)
        tokens = min(free_tokens - max(0, piece.steps - 1) * len(streams.rows), piece.tokens)
        return Prefill(piece, _allocate(tokens, prompts.rows, targets, is_mixed=piece.is_mixed))

    def _in_a_tile(self, prompts: Prompts, targets: Targets, free_tokens: int) -> Prompts:
        """The same prompts; where they fill no tile, one of them with tokens before its rest that are computed again,
        if a whole tile takes less time. Deep in a conversation that is several times less.
        """
        wanted = prompts.tokens
        extra = TILE_TOKENS - wanted
        if not targets.rereads or extra <= 0 or free_tokens < TILE_TOKENS:
            return prompts
        if len(prompts.rows) > 1 and not targets.mixes_prompts:
            return prompts
        deepest = max(prompts.rows, key=lambda row: row.rereadable)
        if not self._cost.has_read_rest(wanted) or deepest.rereadable < max(extra, TILE_TOKENS):
            return prompts
        filled = prompts.replaced([_reading_again(row, extra) if row is deepest else row for row in prompts.rows])
        return filled if WORTH_REREADING * filled.ms(TILE_TOKENS) < prompts.ms(wanted) else prompts

    def _in_one_batch(
        self, piece: Piece, prompts: Prompts, streams: Streams, targets: Targets, free_tokens: int
    ) -> Piece:
        """The same piece in one batch with a decode step, where that reads more tokens a millisecond than both apart.

        Rows and piece then fill what the piece alone would fill: a few tokens more would cost another tile.
        """
        rows = len(streams.rows)
        whole = min(piece.tokens, prompts.tokens, free_tokens)
        # The first token of a prompt that the piece ends does not wait for another piece.
        ends = ends_within(prompts.rows, whole - rows) < ends_within(prompts.rows, whole)
        tokens = whole if ends else whole - rows
        most = targets.solo_tokens if ends else targets.batch_tokens
        fits = rows + tokens <= min(most, targets.batch_tokens) and 2 * tokens >= whole
        is_possible = rows > 0 and fits and targets.mixes_prompts
        # What either takes alone has to be known first: it shows what they take together is worth.
        if not is_possible or not (self._cost.has_decoded(rows) and self._cost.has_read(rows + tokens)):
            return piece
        step_ms = self._cost.decode_ms(rows, streams.used_cells)
        apart_ms = (step_ms + prompts.ms(whole)) * tokens / whole
        position = prompts.position(tokens)
        if prompts.attended_cells is None:
            position = mixed_position(position, tokens, [row.position for row in streams.rows])
        mixed_ms = self._cost.mixed_ms(rows, streams.used_cells, tokens, position)
        feared_ms = apart_ms if mixed_ms is None else mixed_ms
        steps = steps_before_mixed(feared_ms, piece.lead_ms, piece.pace_ms, step_ms) if piece.pace_ms else 0
        if steps > piece.steps or tokens + steps * rows > free_tokens or not self._mixed.choose(mixed_ms, apart_ms):
            return piece
        needed_ms = SAFETY * feared_ms if piece.needed_ms else 0.0
        return attrs.evolve(piece, tokens=tokens, steps=steps, needed_ms=needed_ms, is_mixed=True)


def _ends_before(head: Row, tokens: int, streams: Streams) -> bool:
    """Whether the head's first token comes before the next tokens of rows of lower lanes: this piece ends its prompt,
    and none of them has been without a token for long.
    """
    since_ms = streams.now_ms - DEFERRED_MS
    can_wait = [row.lane < head.lane and row.last_token_ms > since_ms for row in streams.rows]
    return bool(can_wait) and all(can_wait) and head.remaining <= tokens


def _readable_together(rows: list[Row], targets: Targets) -> list[Row]:
    """Of the rows in their order, those that go well in one batch with the first."""
    if targets.mixes_prompts:
        return rows
    head = rows[0]
    others = (row for row in rows[1:] if row.remaining == head.remaining or row.position == head.position == 0)
    return [head, *others]


def _to_branch(row: Row) -> Row:
    """The row as it is up to where others share what it computes.

    A piece that ends there lets them begin, and what is left of it is read with theirs: in one batch, where each alone
    fills no tile. Not for less than a tile, which would cost nearly as much as one.
    """
    count = row.branch - row.position
    return row if count < TILE_TOKENS else _with_rest(row, row.branch, count)


def _before_lower_lanes(rows: list[Row]) -> int:
    """Tokens of the rows, in their order, before the first of a lower lane than the first; a tile is filled with those
    of any. More would delay first tokens for a prompt that can wait.
    """
    return max(TILE_TOKENS, sum(row.remaining for row in takewhile(lambda row: row.lane >= rows[0].lane, rows)))


def _ending_together(rows: list[Row], tokens: int) -> list[Row]:
    """Of the rows in their order, those of one lane that end in a batch as large as is computed at once.

    None of them waits for a piece of a prompt that ends later. Where already the first is longer, it comes alone.
    """
    chosen: list[Row] = []
    left = tokens
    for row in rows:
        left -= row.remaining
        if left < 0 or row.lane != rows[0].lane:
            break
        chosen.append(row)
    return chosen or rows[:1]


def _allocate(most: int, rows: list[Row], targets: Targets, *, is_mixed: bool) -> tuple[tuple[int, int], ...]:
    """At most so many tokens of the rows, in their order; see `Plan.prefill`."""
    chosen: list[tuple[int, int]] = []
    left = most
    for row in rows:
        if left <= 0:
            break
        count = min(row.remaining, left)
        if not is_mixed:
            # Not where that would leave this batch without a whole tile.
            fewer, read = _in_whole_tiles(row, count), most - left
            count = count if read and read + fewer < TILE_TOKENS <= read + count else fewer
        if chosen and count < row.remaining and not targets.mixes_prompts:
            break
        chosen.append((row.key, count))
        if count < row.remaining:
            break
        left -= count
    return tuple(chosen)


def _reading_again(row: Row, extra: int) -> Row:
    """The row as it is where so many of its tokens are computed again, with those that follow."""
    return _with_rest(row, row.position + row.remaining, row.remaining + extra)


def _with_rest(row: Row, end: int, remaining: int) -> Row:
    """The row as it is where it ends at `end` and so many tokens before that are missing."""
    return PlainRow(
        row.key,
        row.lane,
        row.arrived_ms,
        end,
        remaining,
        row.target_ttft_ms,
        row.target_tbt_ms,
        row.due_ms,
        cells=row.cells,
    )


def _in_whole_tiles(row: Row, tokens: int) -> int:
    """Nearly as many tokens of a prompt, so that whole tiles are left of it: what fills none is read at its beginning.

    There it costs what it is. At the end of a long prompt the same few tokens can cost as much as several tiles.
    """
    fewer = tokens - (tokens - row.remaining) % TILE_TOKENS
    return fewer if fewer >= TILE_TOKENS or (fewer > 0 and row.position < TILE_TOKENS) else tokens

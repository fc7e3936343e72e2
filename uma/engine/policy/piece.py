"""How much of the prompts one tick reads, and how far rows decode ahead for it.

A larger piece reads more tokens a millisecond, and keeps readers of streams and the next request waiting for longer.
`lead` says how long a piece can be without a reader noticing; this file chooses among those that are short enough.
"""

from __future__ import annotations

import math

import attrs

from uma.engine.policy.cost import SIZES, TILE_TOKENS, CostModel
from uma.engine.policy.lead import (
    BACKGROUND_TTFT_SHARE,
    MAX_STEPS,
    NEXT_REQUEST_TTFT_SHARE,
    SAFETY,
    TTFT_SHARE,
    can_be_covered,
    lead_ms,
    longest_piece_ms,
    steps_before,
)
from uma.engine.policy.pace import Pacing
from uma.engine.policy.state import Row, Targets

MOST_WAITS = 8
"""Maximum ticks in a row that read nothing, until what was decoded ahead covers the smallest piece."""
TRY_LARGER_EVERY = 16
"""Interval, in ticks whose chunk the budget limits, at which a larger one that promises more is tried."""
PATIENT = 2.0
"""Maximum time of a piece, as a multiple of the usual limit, where it reads faster."""
MOST_PATIENT = 4.0
"""The same of a whole tile deep in a prompt: in parts of one it would be read far more slowly."""
FAST_AGAIN = 0.5
"""Maximum time of a tile, as a share of `MOST_PATIENT`, at which lone prompts are read in tiles again."""
LEAST_TTFT_STEPS = 32
"""Minimum time to first token that a piece's limit is a share of (`lead.TTFT_SHARE`) beside streams that are late
anyway, in decode steps of one row. Such a step mostly reads the weights, as every batch does: with a large model on few
cores a quarter of a second would go on little else."""
WORTH_A_MOMENT = 0.25
"""Minimum gain in reading speed of a piece beyond the usual limit, as a multiple of its excess time, both as shares: a
piece of twice the limit must read 1.25 times as fast. Speed serves all requests that wait; excess time delays only
those that arrive meanwhile, and where readers of answers mostly do not ask again soon, any gain is worth it."""
SMALLEST_CHUNK = SIZES[0]
"""Minimum tokens of a prefill that runs at all, unless a whole prompt has fewer."""


@attrs.frozen
class Piece:
    """What to read of the prompts, and how far to decode ahead for it."""

    tokens: int
    steps: int = 1
    pace_ms: float = 0.0
    lead_ms: float = math.inf
    """Time (ms) that the tokens ahead of the readers cover."""
    needed_ms: float = 0.0
    """Minimum lead (ms) of every reader when the piece begins; 0 where no schedule supplies them."""
    is_mixed: bool = False


NOTHING = Piece(0)


@attrs.frozen
class Prompts:
    """Prompts in their order of service, and how long they take to read."""

    rows: list[Row]
    cost: CostModel
    attended_cells: int | None
    """Cells that every token attends to; None where it attends to the tokens before it alone."""
    reader_ended_ms: float = -math.inf
    """See `State.reader_ended_ms`."""
    do_readers_return: bool = True
    """See `State.do_readers_return`."""

    @property
    def tokens(self) -> int:
        """All that is left to read of them."""
        return sum(row.remaining for row in self.rows)

    @property
    def is_background(self) -> bool:
        """Whether all are of the background lane."""
        return all(row.lane < 0 for row in self.rows)

    @property
    def expects_next_request(self) -> bool:
        """Whether a reader was served of late, since the first of them arrived: its next request is expected soon."""
        return self.rows[0].arrived_ms < self.reader_ended_ms

    def ms(self, tokens: int) -> float:
        """Predicted time of a batch of the next `tokens` tokens."""
        return self.cost.prefill_ms(tokens, self.position(tokens))

    def position(self, tokens: int) -> float:
        """Tokens that each of the next `tokens` tokens attends to, on the average."""
        if self.attended_cells is not None:
            return self.attended_cells
        left, behind = tokens, 0
        for row in self.rows:
            count = min(row.remaining, left)
            behind += count * row.position
            left -= count
            if left <= 0:
                break
        return behind / max(1, tokens - left)

    def replaced(self, rows: list[Row]) -> Prompts:
        """Other rows of the same engine."""
        return attrs.evolve(self, rows=rows)


@attrs.frozen
class Streams:
    """The rows that decode while prompts are read."""

    rows: list[Row]
    pacing: Pacing
    step_ms: float
    """Predicted time of a decode step of them."""
    used_cells: int
    now_ms: float

    @property
    def lead_ms(self) -> float:
        """For how long all readers can go on from what is computed."""
        return lead_ms(self.pacing.readers, self.pacing.pace_ms, self.now_ms)


class PieceSizes:
    """Chooses the size of a piece from what the cost model has learnt, and tries larger sizes now and then."""

    __slots__ = ("_cost", "_is_slow", "_limited", "_waits")

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._is_slow = False
        """Whether lone prompts are read in pieces that have fewer tokens than a tile."""
        self._limited = 0
        """Pieces so far that the time limited."""
        self._waits = 0
        """Ticks in a row that read nothing until now."""

    def alone(self, prompts: Prompts, targets: Targets) -> int:
        """Prefill tokens of one batch while nothing decodes: as many as are computed at once, or fewer where another
        request is likely to wait for its end.

        That is so after a reader was served since the first prompt arrived, beside background prompts, and where tokens
        take time with the cells of others too.
        """
        if not (prompts.is_background or prompts.expects_next_request or targets.attends_all):
            return targets.solo_tokens
        if not self._cost.knows_prefill:
            return targets.start_chunk_tokens
        longest_ms = _ttft_share(prompts) * targets.slo_ttft_ms
        return self._tokens_for_cycle(longest_ms, math.inf, prompts, min(prompts.tokens, targets.solo_tokens))

    def of_one(self, prompts: Prompts, targets: Targets) -> int:
        """Maximum prefill tokens of one prompt in a batch while nothing decodes: as many as take `PATIENT` times as
        long as the usual piece, which is a quarter of `slo_ttft_ms`.

        For so long the next request waits, and the reader is not told how far its prompt is. A tile, or a last part of
        one, is read whole up to `MOST_PATIENT`: deep in a prompt a part takes as long, and attention of fewer rows than
        a tile has adds up otherwise, so that the answer would depend on how fast the machine was just then. Where that
        is too long, all of the prompt is read in fewer. Within that the next size is tried while it was seen too seldom
        to be believed, and now and then: in proportion to a smaller one, it mostly takes less.
        """
        wanted, usual_ms = min(prompts.tokens, targets.solo_tokens), TTFT_SHARE * targets.slo_ttft_ms
        if not self._cost.knows_prefill:
            return _in_tiles(targets.start_chunk_tokens, prompts.tokens)
        longest_ms = MOST_PATIENT * usual_ms
        self._is_slow = self._is_too_slow_for_tiles(prompts, wanted, longest_ms)
        if self._is_slow and self._cost.is_sure_of(TILE_TOKENS):
            # (Also each size a multiple of the rows of repacked weights that are multiplied together.)
            wanted = min(wanted, TILE_TOKENS // 2)
        whole = min(wanted, TILE_TOKENS)
        tokens = min(wanted, SMALLEST_CHUNK) if self._is_slow or prompts.ms(whole) > longest_ms else whole
        sizes = (*(size for size in SIZES if size < wanted), wanted)
        tokens = max(tokens, *(size for size in sizes if prompts.ms(size) <= PATIENT * usual_ms), 0)
        larger = next((size for size in sizes if size > tokens), tokens)
        self._limited += larger > tokens
        is_due = self._limited % TRY_LARGER_EVERY == 0 or not self._cost.is_sure_of(larger)
        tokens = larger if is_due and prompts.ms(tokens) * larger / tokens <= longest_ms else tokens
        return _in_tiles(tokens, prompts.tokens)

    def _is_too_slow_for_tiles(self, prompts: Prompts, wanted: int, longest_ms: float) -> bool:
        """Whether a lone prompt's pieces have fewer tokens than a tile: of its first piece and of its last, so that it
        is read in one way from its beginning to its end, and when it is asked again.
        """
        tile = _in_tiles(min(wanted, TILE_TOKENS), prompts.tokens)
        if tile < TILE_TOKENS:
            return self._is_slow
        end = prompts.rows[0].position + prompts.tokens if prompts.attended_cells is None else prompts.attended_cells
        return self._cost.prefill_ms(tile, end) > longest_ms * (FAST_AGAIN if self._is_slow else 1.0)

    def beside(self, streams: Streams, prompts: Prompts, targets: Targets, free_cells: int, most: int) -> Piece:
        """The piece of at most `most` tokens that reads most a millisecond of those that no reader has to wait for."""
        wanted = min(most, prompts.tokens, targets.batch_tokens, free_cells)
        pace, lead, step_ms = streams.pacing.pace_ms, streams.lead_ms, streams.step_ms
        if not self._cost.knows_prefill:
            return Piece(targets.start_chunk_tokens, 1, pace, lead)
        # Each step takes a cell for each row; half of the free ones are for the prompts.
        max_steps = max(1, min(MAX_STEPS, free_cells // max(1, 2 * len(streams.rows))))
        covered_ms = longest_piece_ms(lead, pace, step_ms, max_steps)
        if self._waits_for_lead(prompts.ms(min(SMALLEST_CHUNK, wanted)), covered_ms, pace, step_ms):
            return Piece(0, max_steps, pace, lead)
        aimed_ms = targets.slo_ttft_ms
        if streams.pacing.is_hopeless:
            aimed_ms = max(aimed_ms, LEAST_TTFT_STEPS * self._cost.decode_ms(1, 0))
        longest_ms = min(_ttft_share(prompts) * aimed_ms, covered_ms)
        tokens = self._tokens_for_cycle(longest_ms, min(covered_ms, MOST_PATIENT * longest_ms), prompts, wanted)
        # A piece costs at least the time that a step leaves spare: one that would take less is made larger.
        spare_ms = min(longest_ms, pace - step_ms)
        if prompts.ms(tokens) < spare_ms:
            tokens = max(tokens, self._cost.best_chunk(spare_ms, prompts.position, wanted, beside_ms=step_ms))
        piece_ms = prompts.ms(tokens)
        steps = min(max_steps, steps_before(piece_ms, lead, pace, step_ms))
        needed_ms = SAFETY * piece_ms + step_ms if piece_ms <= covered_ms else 0.0
        return Piece(tokens, steps, pace, lead, needed_ms)

    def _waits_for_lead(self, smallest_ms: float, covered_ms: float, pace: float, step_ms: float) -> bool:
        """Whether to decode ahead and read nothing in this tick, because a reader would wait for the smallest piece now
        and will not with a longer lead. That is bounded: prompts must be read even where no schedule meets the target.
        """
        is_early = smallest_ms > covered_ms and can_be_covered(smallest_ms, pace, step_ms)
        self._waits = self._waits + 1 if is_early and self._waits < MOST_WAITS else 0
        return self._waits > 0

    def _tokens_for_cycle(self, longest_ms: float, most_ms: float, prompts: Prompts, wanted: int) -> int:
        """Prefill tokens that take `longest_ms`, or up to `most_ms` where that reads much faster.

        Deep in a prompt a part of a tile costs as much as the whole or more, and how much is known less well: there no
        piece is less than a tile, and none is judged by what a part of one seems to take.
        """
        is_deep = prompts.position(TILE_TOKENS) >= TILE_TOKENS
        is_tiled = is_deep and wanted >= TILE_TOKENS and prompts.ms(TILE_TOKENS) <= most_ms
        least = TILE_TOKENS if is_tiled else min(SMALLEST_CHUNK, wanted)
        patient_ms = min(most_ms, PATIENT * longest_ms)
        tokens = self._tokens_within(longest_ms, patient_ms, prompts, wanted, least)
        tokens = self._larger(tokens, longest_ms, patient_ms, prompts, wanted, least)
        if TILE_TOKENS <= tokens < wanted < tokens + TILE_TOKENS and prompts.ms(wanted) <= most_ms:
            tokens = wanted  # the rest would fill no tile
        return tokens

    def _tokens_within(self, longest_ms: float, trial_ms: float, prompts: Prompts, wanted: int, least: int) -> int:
        """Prefill tokens for a batch of at most `longest_ms`, or `least`.

        A larger batch that was never tried, of at most `trial_ms`, is tried now and then, and one that was tried too
        seldom is tried again.
        """
        chunk = max(least, self._cost.best_chunk(longest_ms, prompts.position, wanted, least=least))
        if chunk < wanted:
            self._limited += 1
            if self._limited % TRY_LARGER_EVERY == 0 or not self._cost.has_tried_beyond(chunk):
                chunk = self._cost.worth_trying(chunk, trial_ms, prompts.position, wanted)
            else:
                chunk = self._cost.worth_knowing(chunk, trial_ms, prompts.position, wanted)
        return chunk

    def _larger(self, tokens: int, longest_ms: float, most_ms: float, prompts: Prompts, wanted: int, least: int) -> int:
        """A piece that takes longer than new requests should wait, where it reads so much faster that they gain too; at
        most `most_ms`.

        The longer it takes, the more it must gain.
        """
        rate = tokens / max(prompts.ms(tokens), 1e-9)
        worth_a_moment = WORTH_A_MOMENT if prompts.do_readers_return else 0.0
        while most_ms > longest_ms:
            larger = self._cost.best_chunk(most_ms, prompts.position, wanted, least=least)
            if larger <= tokens:
                break
            larger_ms = prompts.ms(larger)
            worth = 1 + worth_a_moment * (larger_ms / longest_ms - 1)
            if larger > worth * rate * larger_ms:
                return larger
            most_ms = 0.99 * larger_ms
        return tokens


def _in_tiles(tokens: int, wanted: int) -> int:
    """About as many of `wanted` tokens, so that whole tiles are left of them, and in no piece fewer than a tile has:
    the rest that fills none is read with the first.
    """
    if not TILE_TOKENS <= tokens < wanted:
        return tokens
    fewer = tokens - (tokens - wanted) % TILE_TOKENS
    return fewer if fewer >= TILE_TOKENS else fewer + TILE_TOKENS


def _ttft_share(prompts: Prompts) -> float:
    if prompts.expects_next_request:
        return NEXT_REQUEST_TTFT_SHARE
    return BACKGROUND_TTFT_SHARE if prompts.is_background else TTFT_SHARE

"""One tick: a token for each decoding sequence, and what is left of the time to prefill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import attrs

from uma.engine.policy.cost import SIZES, TILE_TOKENS, CostModel, Position
from uma.engine.policy.embed import EmbedDemand, EmbedTurns
from uma.engine.policy.guard import LatencyGuard
from uma.engine.policy.lead import (
    BACKGROUND_TTFT_SHARE,
    MAX_STEPS,
    TTFT_SHARE,
    can_be_covered,
    lead_ms,
    longest_piece_ms,
    max_lead_ms,
    steps_before,
    steps_before_mixed,
)
from uma.engine.policy.mixed import MixedBatches
from uma.engine.policy.order import first_token_first, preemption_order
from uma.engine.policy.pace import Pacing, choose_pacing
from uma.engine.policy.rows import OneByOne
from uma.engine.policy.speculation import DraftPolicy
from uma.engine.policy.state import PlainRow, Row, State, Targets

BACKGROUND_STARVES_MS = 2_000.0
"""Maximum time between two tokens of a background stream, whatever is at risk."""
MOST_WAITS = 8
"""Maximum ticks in a row that read nothing, until what was decoded ahead covers the smallest piece."""
TRY_LARGER_EVERY = 16
"""Interval, in ticks whose chunk the budget limits, at which a larger one that promises more is tried."""
WORTH_REREADING = 1.25
"""Times as long as a whole tile that the rest of a prompt must take for tokens before it to be computed again."""
PATIENT = 2.0
"""Maximum time of a piece, as a multiple of the usual limit, where it reads faster."""
WORTH_A_MOMENT = 0.25
"""How much faster a piece beyond the usual limit must read, as a multiple of how much longer it takes, both as shares:
a piece of 1.2 times the limit must read 1.05 times as fast. All requests that wait gain by the first, one that comes
meanwhile loses by the second."""
AT_RISK = 0.3
"""Spare time, as a share of its target, below which a first token counts as at risk."""
SMALLEST_CHUNK = SIZES[0]
"""Minimum tokens of a prefill that runs at all, unless a whole prompt has fewer."""


@attrs.frozen
class Plan:
    """What to compute in one tick: first the decode rows, then the prefill. Keys are `Row.key`."""

    decode: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...] = ()
    """Each a row and its number of tokens, in order of service. More than its `remaining`: so many of those before are
    computed again."""
    preempt: tuple[int, ...] = ()
    """Rows to take their KV cells from, before anything else. They are in no other part of the plan."""
    held: int = 0
    """Background rows that decode on another tick."""
    is_everyday: bool = False
    """One token a row, no prefill, none throttled: the plan is valid until a sequence arrives, ends or pauses."""
    is_one_by_one: bool = False
    """Each decode row is a batch of its own, because that is faster here."""
    steps: int = 1
    """Decode steps of each row before the prefill: at least one, or with `is_mixed` none."""
    is_mixed: bool = False
    """Each row has one more decode step in the batch of the prefill (a mixed batch), because here that is faster."""
    pace_ms: float = 0.0
    """Minimum time between two tokens of a row at its reader; 0: each goes out as it comes."""
    lead_ms: float = 0.0
    """For how long every reader could go on without another token when the plan was made; 0 without readers."""
    embed_tokens: int = 0
    """Tokens of texts to embed, instead of any prefill."""


@attrs.frozen
class Piece:
    """What to read of the prompts, and how far to decode ahead for it."""

    tokens: int
    steps: int = 1
    pace_ms: float = 0.0
    lead_ms: float = math.inf
    """For how long the readers can go on from what they have."""
    is_mixed: bool = False


class Scheduler:
    """The policy, with what it has learnt in `cost`."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self.cost = CostModel()
        self.embeds = EmbedTurns(targets, self.cost)
        self._guard = LatencyGuard()
        self._one_by_one = OneByOne(self.cost)
        self._mixed = MixedBatches()
        self.drafts = DraftPolicy(self.cost)
        self._limited = 0
        self._waits = 0

    def plan(self, state: State, now_ms: float, embeds: EmbedDemand | None = None, *, pause_ms: float = 0.0) -> Plan:
        """The next tick. Empty only if no row can run and there is nothing to embed.

        Before a pause of `pause_ms` rows only decode, as far ahead of their readers as it takes.
        """
        if pause_ms:
            return self._before_pause(state, now_ms, pause_ms)
        if embeds is None and self._is_everyday(state):
            keys = tuple([row.key for row in state.decoding])
            one_by_one = self._one_by_one.choose(len(keys), state.used_cells)
            return Plan(keys, is_everyday=not self._one_by_one.is_trying, is_one_by_one=one_by_one)
        rows, preempted = self._make_room(state)
        decode, held = self._choose_decode(rows, state, now_ms)
        free = state.free_cells + sum(row.cells for row in preempted) - len(decode)
        gone = {row.key for row in preempted}
        waiting = [row for row in state.prefilling if row.key not in gone and not row.is_paused]
        has_turn = embeds is not None and self.embeds.has_turn(embeds, waiting)
        nothing: tuple[Piece, tuple[tuple[int, int], ...]] = (NOTHING, ())
        piece, prefill = nothing if has_turn else self._choose_prefill(waiting, decode, state, free, now_ms)
        embed_tokens = 0
        if embeds is not None and not prefill:
            step_ms = self.cost.decode_ms(len(decode), state.used_cells)
            embed_tokens = self.embeds.tokens(embeds, decode, step_ms, now_ms)
        return Plan(
            tuple(row.key for row in decode),
            prefill,
            tuple(row.key for row in preempted),
            held,
            is_one_by_one=self._one_by_one.choose(len(decode), state.used_cells),
            steps=piece.steps,
            is_mixed=piece.is_mixed,
            pace_ms=piece.pace_ms,
            lead_ms=piece.lead_ms if piece.lead_ms < math.inf else 0.0,
            embed_tokens=embed_tokens,
        )

    def _before_pause(self, state: State, now_ms: float, pause_ms: float) -> Plan:
        rows, preempted = self._make_room(state)
        step_ms = self.cost.decode_ms(len(rows), state.used_cells)
        pacing = self._pacing(rows, step_ms, state.neighbour_load)
        readers, pace = pacing.readers, pacing.pace_ms
        lead = lead_ms(readers, pace, now_ms)
        free = state.free_cells + sum(row.cells for row in preempted)
        steps = steps_before(pause_ms, lead, pace, step_ms) if readers and step_ms > 0 else 1
        return Plan(
            tuple(row.key for row in rows),
            preempt=tuple(row.key for row in preempted),
            steps=max(1, min(steps, MAX_STEPS, free // max(1, len(rows)))),
            pace_ms=pace,
            lead_ms=lead if readers else 0.0,
        )

    def is_felt(
        self, pause_ms: float, rows: Sequence[Row], used_cells: int, now_ms: float, neighbour_load: float
    ) -> bool:
        """Whether readers of these rows would notice a pause that begins now, and not one after `_before_pause`."""
        step_ms = self.cost.decode_ms(len(rows), used_cells)
        pacing = self._pacing(rows, step_ms, neighbour_load)
        if pacing.is_hopeless:
            return False  # none waits for tokens, or decoding alone makes all of them late
        return lead_ms(pacing.readers, pacing.pace_ms, now_ms) < min(pause_ms + step_ms, max_lead_ms(pacing.pace_ms))

    def _pacing(self, decode: Sequence[Row], step_ms: float, neighbour_load: float) -> Pacing:
        budget_ms = self.targets.tick_budget_ms
        return choose_pacing(decode, step_ms, budget_ms=budget_ms, neighbour_load=neighbour_load)

    def _is_everyday(self, state: State) -> bool:
        """Whether all rows decode, there are cells for all, and none must be held back: the shortest way will do.

        Background rows among themselves hold nothing back; beside others they can be made to wait.
        """
        rows = state.decoding
        if state.prefilling or len(rows) > min(state.free_cells, self.targets.batch_tokens):
            return False
        background = sum(row.lane < 0 for row in rows)
        return background in (0, len(rows)) and not any(row.is_paused for row in rows)

    def _make_room(self, state: State) -> tuple[list[Row], list[Row]]:
        """The rows that can decode, and those to preempt so that each of them has a cell.

        The oldest of the highest lane is never preempted: it ends, and with its end there is room again.
        """
        decoding = [row for row in state.decoding if not row.is_paused]
        # Prefill waits for cells, but not for those of streams that wait for their readers.
        is_stuck = not decoding and any(not row.is_paused for row in state.prefilling)
        free = state.free_cells
        preempted: list[Row] = []
        if free < max(len(decoding), is_stuck):
            candidates = preemption_order([*state.decoding, *state.prefilling])[:-1]
            for row in candidates:
                if free >= max(len(decoding), is_stuck):
                    break
                if row.cells == 0:
                    continue
                preempted.append(row)
                free += row.cells
                decoding = [other for other in decoding if other is not row]
            if not preempted and free < max(len(decoding), is_stuck) and candidates:
                # Two that end in the same cells give nothing alone; once one has gone, the other gives all.
                preempted.append(candidates[0])
                decoding = [other for other in decoding if other is not candidates[0]]
        return decoding[: max(free, 0)], preempted

    def _choose_decode(self, rows: list[Row], state: State, now_ms: float) -> tuple[list[Row], int]:
        """All but the background rows that would make an interactive stream late."""
        if len(rows) > self.targets.batch_tokens:
            rows = sorted(rows, key=lambda row: (row.lane < 0, row.last_token_ms))[: self.targets.batch_tokens]
        background = [row for row in rows if row.lane < 0]
        if not background or not self._is_interactive_at_risk(rows, state, now_ms):
            return rows, 0
        chosen = [row for row in rows if row.lane >= 0 or now_ms - row.last_token_ms >= BACKGROUND_STARVES_MS]
        return chosen, len(rows) - len(chosen)

    def _is_interactive_at_risk(self, rows: list[Row], state: State, now_ms: float) -> bool:
        """Whether decoding all of `rows` would make an interactive stream late, or its first token."""
        tick_ms = self.cost.decode_ms(len(rows), state.used_cells)
        if any(row.lane > 0 and tick_ms > row.target_tbt_ms for row in rows):
            return True
        for row in state.prefilling:
            if row.lane > 0 and not row.is_paused:
                target_ms = row.target_ttft_ms or self.targets.slo_ttft_ms
                position = self._position([row], state)
                needed_ms = self.cost.prefill_ms(row.remaining, position(row.remaining))
                if now_ms + needed_ms > row.arrived_ms + (1 - AT_RISK) * target_ms:
                    return True
        return False

    def _choose_prefill(
        self, waiting: list[Row], decode: list[Row], state: State, free_cells: int, now_ms: float
    ) -> tuple[Piece, tuple[tuple[int, int], ...]]:
        room = min(self.targets.batch_tokens, free_cells)
        if not waiting or room <= 0:
            return NOTHING, ()
        pacing = self._pacing(decode, self.cost.decode_ms(len(decode), state.used_cells), state.neighbour_load)
        if not self._guard.allows_prefill(decode, now_ms, pacing.pace_ms):
            return NOTHING, ()
        waiting = self._readable_together(first_token_first(waiting))
        # No stream decodes, or only background ones, which slow down only the prompts of their own lane.
        if all(not row.has_reader or row.lane < min(waiting[0].lane, 0) for row in decode):
            solo_tokens = self._solo_tokens(waiting, state)
            waiting = self._ending_together(waiting, solo_tokens)
            filled = self._in_a_tile(waiting, state, room)
            piece = Piece(solo_tokens)
        else:
            filled = self._in_a_tile(waiting, state, room)
            piece = self._choose_piece(filled, decode, pacing, state, free_cells, now_ms)
        if piece.tokens >= TILE_TOKENS:
            waiting = filled
        piece = self._in_one_batch(piece, waiting, len(decode), state, room)
        most = left = min(room - max(0, piece.steps - 1) * len(decode), piece.tokens)
        chosen: list[tuple[int, int]] = []
        for row in waiting:
            if left <= 0:
                break
            count = min(row.remaining, left)
            if not piece.is_mixed:
                # Not where that would leave this batch without a whole tile.
                fewer, read = _in_whole_tiles(row, count), most - left
                count = count if read and read + fewer < TILE_TOKENS <= read + count else fewer
            if chosen and count < row.remaining and not self.targets.mixes_prompts:
                break
            chosen.append((row.key, count))
            if count < row.remaining:
                break
            left -= count
        return piece, tuple(chosen)

    def _in_a_tile(self, waiting: list[Row], state: State, room: int) -> list[Row]:
        """The same rows; where they fill no tile, one of them with tokens before its rest that are computed again, if a
        whole tile takes less time. Deep in a conversation that is several times less.
        """
        wanted = sum(row.remaining for row in waiting)
        extra = TILE_TOKENS - wanted
        if not self.targets.rereads or extra <= 0 or room < TILE_TOKENS:
            return waiting
        if len(waiting) > 1 and not self.targets.mixes_prompts:
            return waiting
        deepest = max(waiting, key=lambda row: row.rereadable)
        if not self.cost.has_read_rest(wanted) or deepest.rereadable < max(extra, TILE_TOKENS):
            return waiting
        rest_ms = self.cost.prefill_ms(wanted, self._position(waiting, state)(wanted))
        filled = [_reading_again(row, extra) if row is deepest else row for row in waiting]
        tile_ms = self.cost.prefill_ms(TILE_TOKENS, self._position(filled, state)(TILE_TOKENS))
        return filled if WORTH_REREADING * tile_ms < rest_ms else waiting

    def _in_one_batch(self, piece: Piece, waiting: list[Row], rows: int, state: State, room: int) -> Piece:
        """The same piece in one batch with a decode step, where that reads more tokens a millisecond than both apart.

        Rows and piece then fill what the piece alone would fill: a few tokens more would cost another tile.
        """
        wanted = sum(row.remaining for row in waiting)
        whole = min(piece.tokens, wanted, room)
        tokens = whole if whole == wanted and whole + rows <= self.targets.solo_tokens else whole - rows
        position = self._position(waiting, state)
        step_ms = self._one_by_one.step_ms(rows, state.used_cells)
        piece_ms = self.cost.prefill_ms(whole, position(whole))
        fits = rows + tokens <= self.targets.batch_tokens and 2 * tokens >= whole
        is_possible = rows > 0 and fits and self.targets.mixes_prompts
        # What either takes alone has to be known first: it shows what they take together is worth.
        if not is_possible or not (self.cost.has_decoded(rows) and self.cost.has_read(rows + tokens)):
            return piece
        apart_ms = (step_ms + piece_ms) * tokens / whole
        mixed_ms = self.cost.mixed_ms(rows, state.used_cells, tokens, position(tokens))
        feared_ms = apart_ms if mixed_ms is None else mixed_ms
        steps = steps_before_mixed(feared_ms, piece.lead_ms, piece.pace_ms, step_ms) if piece.pace_ms else 0
        if steps > piece.steps or tokens + steps * rows > room or not self._mixed.choose(mixed_ms, apart_ms):
            return piece
        return attrs.evolve(piece, tokens=tokens, steps=steps, is_mixed=True)

    def _readable_together(self, waiting: list[Row]) -> list[Row]:
        """Of the rows in their order, those that go well in one batch with the first."""
        if self.targets.mixes_prompts:
            return waiting
        head = waiting[0]
        others = (row for row in waiting[1:] if row.remaining == head.remaining or row.position == head.position == 0)
        return [head, *others]

    def _solo_tokens(self, waiting: list[Row], state: State) -> int:
        """Prefill tokens of one batch while nothing decodes, for whose end the next request waits.

        Where they take time with the cells of others too, or only background prompts wait, so many that they take no
        longer than a first token should; of background prompts no fewer than read nearly as fast as any.
        """
        most = self.targets.solo_tokens
        is_background = all(row.lane < 0 for row in waiting)
        if not (is_background or self.targets.attends_all):
            return most
        position = self._position(waiting, state)
        longest_ms = (BACKGROUND_TTFT_SHARE if is_background else TTFT_SHARE) * self.targets.slo_ttft_ms
        fitting = [size for size in SIZES if size <= most and self._reads_within(longest_ms, position, size)]
        least = self.cost.fast_chunk(position, most) if is_background else SMALLEST_CHUNK
        return max([*fitting, least])

    def _ending_together(self, waiting: list[Row], solo_tokens: int) -> list[Row]:
        """Of the rows in their order, those of one lane that end in a batch as large as is computed at once.

        None of them waits for a piece of a prompt that ends later. Where already the first is longer, it comes alone.
        """
        chosen: list[Row] = []
        left = solo_tokens
        for row in waiting:
            left -= row.remaining
            if left < 0 or row.lane != waiting[0].lane:
                break
            chosen.append(row)
        return chosen or waiting[:1]

    def _choose_piece(
        self, waiting: list[Row], decode: list[Row], pacing: Pacing, state: State, free_cells: int, now_ms: float
    ) -> Piece:
        """The piece that reads most tokens a millisecond of those that no reader has to wait for."""
        wanted = min(sum(row.remaining for row in waiting), self.targets.batch_tokens, free_cells)
        position = self._position(waiting, state)
        step_ms = self.cost.decode_ms(len(decode), state.used_cells)
        pace, lead = pacing.pace_ms, lead_ms(pacing.readers, pacing.pace_ms, now_ms)
        if not self.cost.knows_prefill:
            return Piece(self.targets.start_chunk_tokens, 1, pace, lead)
        # Each step takes a cell for each row; half of the free ones are for the prompts.
        max_steps = max(1, min(MAX_STEPS, free_cells // max(1, 2 * len(decode))))
        covered_ms = longest_piece_ms(lead, pace, step_ms, max_steps)
        if self._waits_for_lead(min(SMALLEST_CHUNK, wanted), covered_ms, position, pace, step_ms):
            return Piece(0, max_steps, pace, lead)
        share = BACKGROUND_TTFT_SHARE if all(row.lane < 0 for row in waiting) else TTFT_SHARE
        longest_ms = min(share * self.targets.slo_ttft_ms, covered_ms)
        tokens = self._tokens_for_cycle(longest_ms, covered_ms, position, wanted)
        # A piece costs at least the time that a step leaves spare: one that would take less is made larger.
        spare_ms = min(longest_ms, pace - step_ms)
        if self.cost.prefill_ms(tokens, position(tokens)) < spare_ms:
            tokens = max(tokens, self.cost.best_chunk(spare_ms, position, wanted, beside_ms=step_ms))
        piece_ms = self.cost.prefill_ms(tokens, position(tokens))
        return Piece(tokens, min(max_steps, steps_before(piece_ms, lead, pace, step_ms)), pace, lead)

    def _waits_for_lead(
        self, smallest: int, covered_ms: float, position: Position, pace: float, step_ms: float
    ) -> bool:
        """Whether to decode ahead and read nothing in this tick, because a reader would wait for the smallest piece now
        and will not with a longer lead. That is bounded: prompts must be read even where no schedule meets the target.
        """
        piece_ms = self.cost.prefill_ms(smallest, position(smallest))
        is_early = piece_ms > covered_ms and can_be_covered(piece_ms, pace, step_ms)
        self._waits = self._waits + 1 if is_early and self._waits < MOST_WAITS else 0
        return self._waits > 0

    def _position(self, waiting: list[Row], state: State) -> Position:
        """By tokens read next, the tokens that each of them attends to, on the average."""
        if self.targets.attends_all:
            return lambda _: state.used_cells
        return partial(_mean_position, waiting)

    def _tokens_for_cycle(self, longest_ms: float, covered_ms: float, position: Position, wanted: int) -> int:
        """Prefill tokens that take `longest_ms`, or up to `covered_ms` where that reads much faster.

        Deep in a prompt a part of a tile costs as much as the whole or more, and how much is known less well.
        """
        tokens = self._tokens_within(longest_ms, min(covered_ms, PATIENT * longest_ms), position, wanted)
        is_deep = position(TILE_TOKENS) >= TILE_TOKENS
        if is_deep and tokens < TILE_TOKENS <= wanted and self._reads_within(covered_ms, position, TILE_TOKENS):
            tokens = TILE_TOKENS
        tokens = self._larger(tokens, longest_ms, covered_ms, position, wanted)
        if TILE_TOKENS <= tokens < wanted < tokens + TILE_TOKENS and self._reads_within(covered_ms, position, wanted):
            tokens = wanted  # the rest would fill no tile
        return tokens

    def _larger(self, tokens: int, longest_ms: float, covered_ms: float, position: Position, wanted: int) -> int:
        """A piece that takes longer than new requests should wait, where it reads so much faster that they gain too.

        The longer it takes, the more it must gain.
        """
        rate = tokens / max(self.cost.prefill_ms(tokens, position(tokens)), 1e-9)
        most_ms = min(covered_ms, PATIENT * longest_ms)
        while most_ms > longest_ms:
            larger = self.cost.best_chunk(most_ms, position, wanted)
            if larger <= tokens:
                break
            larger_ms = self.cost.prefill_ms(larger, position(larger))
            worth = 1 + WORTH_A_MOMENT * (larger_ms / longest_ms - 1)
            if larger > worth * rate * larger_ms:
                return larger
            most_ms = 0.99 * larger_ms
        return tokens

    def _reads_within(self, longest_ms: float, position: Position, tokens: int) -> bool:
        return self.cost.prefill_ms(tokens, position(tokens)) <= longest_ms

    def _tokens_within(self, longest_ms: float, trial_ms: float, position: Position, wanted: int) -> int:
        """Prefill tokens for a batch of at most `longest_ms`, or the fewest that are read at all.

        A larger batch that was never tried, of at most `trial_ms`, is tried now and then.
        """
        chunk = self.cost.best_chunk(longest_ms, position, wanted)
        if chunk < wanted:
            self._limited += 1
            if self._limited % TRY_LARGER_EVERY == 0 or not self.cost.has_tried_beyond(chunk):
                chunk = self.cost.worth_trying(chunk, trial_ms, position, wanted)
        return max(chunk, min(SMALLEST_CHUNK, wanted))


NOTHING = Piece(0)


def _reading_again(row: Row, extra: int) -> Row:
    """The row as it is where so many of its tokens are computed again, with those that follow."""
    return PlainRow(
        row.key,
        row.lane,
        row.arrived_ms,
        row.position + row.remaining,
        row.remaining + extra,
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


def _mean_position(rows: list[Row], tokens: int) -> float:
    """Where the next `tokens` tokens of these rows stand in their prompts, on the average."""
    left, behind = tokens, 0
    for row in rows:
        count = min(row.remaining, left)
        behind += count * row.position
        left -= count
        if left <= 0:
            break
    return behind / max(1, tokens - left)

"""What the next tick computes: a token for each decoding row, and what is left of the time to read prompts.

The idea is one sentence: rows decode as far ahead as it takes for their readers not to notice the next piece of a
prompt, and the piece is the one that reads most tokens a millisecond. `lead` has the arithmetic of
decoding ahead, `order` says whose prompt is read, `cost` what a batch takes, and `tuning` has all numbers.

Pure: no clock, no llama, no I/O. Time comes in as an argument, so the decode thread, tests and a simulator drive the
same code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile

import attrs

from uma.engine.policy.cost import ROWS, SIZES, TILE_TOKENS, CostModel
from uma.engine.policy.lead import (
    Pacing,
    choose_pacing,
    lateness,
    lead_ms,
    longest_piece_ms,
    steps_before,
    steps_before_mixed,
)
from uma.engine.policy.order import in_order, preemption_order
from uma.engine.policy.state import Row, State, Targets
from uma.engine.policy.tuning import TUNING

MAX_SUSPENDED = 3
"""Maximum consecutive ticks without prefill because a stream is late: a machine too slow for its targets must still
read prompts."""
FAST_AGAIN = 0.5
"""Predicted time of a tile, as a share of its limit, below which a lone prompt is read in whole tiles again."""
MIN_RATE = 0.5
"""Minimum throughput of a piece below a tile, where a tile takes too long, as a share of the tile's."""
MIN_TURN_STEPS, MAX_TURN_STEPS = 2, 8
"""Bounds of the decode steps that one set of adapters runs before the next set has its turn."""
EMBED_MIN_SHARE = 0.5
"""Minimum time for texts to embed after a decode step, as a share of the step, where streams miss their targets
anyway."""
EMBED_TURNS = {1: 0.75, 0: 0.5, -1: 0.25}
"""Share of ticks that embed instead of reading prompts, if the lane of the texts is higher (1), equal, or lower."""


@attrs.frozen
class Plan:
    """What to compute in one tick: first the decode rows, then the prefill. Keys are `Row.key`."""

    decode: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...] = ()
    """Each a row and its number of tokens, in order of service."""
    preempt: tuple[int, ...] = ()
    """Rows to preempt before anything else. They are in no other part of the plan."""
    is_decode_only: bool = False
    """Rows only decode, and none is held back: the executor can run several steps (a stride)."""
    steps: int = 1
    """Decode steps of each row before the prefill: at least one. None are possible with `is_mixed`, and before the end
    of a prompt of a higher lane than all rows."""
    is_mixed: bool = False
    """Each row has one more decode step in the batch of the prefill (a mixed batch), because here that is faster."""
    pace_ms: float = 0.0
    """Minimum time between two tokens of a row at its reader; 0: each goes out as it comes."""
    lead_ms: float = 0.0
    """Lead of the readers when the plan was made: for how long all have tokens to read; 0 without readers."""
    needed_ms: float = 0.0
    """Minimum lead (ms) of every reader when the prefill begins. Where decode steps take longer than predicted, more of
    them come before it (`lead.steps_lacking`). 0: no schedule keeps the readers supplied, or there are none."""
    embed_tokens: int = 0
    """Tokens of texts to embed, instead of any prefill."""


@attrs.frozen
class Streams:
    """The rows that decode in this tick."""

    rows: Sequence[Row]
    pacing: Pacing
    step_ms: float
    """Predicted time of one decode step of these rows."""
    lead_ms: float
    """Time for which tokens that are computed already supply every reader; infinite where there is no reader."""


@attrs.frozen
class PromptRow:
    """A row whose prompt is read, and how many tokens of it this tick can read."""

    row: Row
    left: int


@attrs.frozen
class EmbedDemand:
    """The texts that wait to be embedded, as the policy sees them."""

    tokens: int
    """Tokens of these texts that one batch can hold."""
    least_tokens: int
    """Minimum tokens that can be computed: a whole text, where the model cannot read one in pieces."""
    lane: int
    """The highest of their lanes."""
    position: float
    """Tokens computed of the text that is read in pieces, which the batch attends to."""


class EmbedTurns:
    """Says when texts to embed have their turn, and how many tokens of them. What batches take is learnt in `cost`.

    Embedding takes turns with the reading of prompts, within the same budget of time. So a stream's gap is no longer
    with a thousand texts waiting than with a long prompt.
    """

    def __init__(self, targets: Targets, prompts: CostModel) -> None:
        """`prompts` is the cost model of prefill: it predicts the first batch of texts, before `cost` knows any."""
        self._targets = targets
        self._prompts = prompts
        self.cost = CostModel()
        self._credit = 0.0

    def has_turn(self, demand: EmbedDemand, waiting: Sequence[Row]) -> bool:
        """Whether this tick embeds, and leaves the prompts of `waiting` to the next."""
        if not waiting:
            return True
        lane = max(row.lane for row in waiting)
        self._credit += EMBED_TURNS[(demand.lane > lane) - (demand.lane < lane)]
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True

    def tokens(self, demand: EmbedDemand, decode: Iterable[Row], step_ms: float, now_ms: float) -> int:
        """Tokens of one batch, after a decode step of `step_ms`; 0 where a stream is late."""
        rows = [row for row in decode if row.lane >= 0 and row.has_reader]
        if lateness(rows, now_ms, step_ms) > TUNING.late:
            return 0
        least = max(demand.least_tokens, min(SIZES[0], demand.tokens))
        cost = self.cost if self.cost.knows_prefill else self._prompts
        if not cost.knows_prefill:
            return max(least, min(self._targets.start_tokens, demand.tokens))
        longest_ms = TUNING.piece_share * self._targets.slo_ttft_ms
        if rows:
            target_ms = min(self._targets.tick_budget_ms, *(row.target_tbt_ms for row in rows))
            longest_ms = max(target_ms - step_ms, EMBED_MIN_SHARE * step_ms)
        return max(least, cost.best_size(demand.tokens, lambda _tokens: demand.position, longest_ms))


class Scheduler:
    """The policy, and what it has learnt: `cost`, and the cost model of `embeds`."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self.cost = CostModel()
        self.embeds = EmbedTurns(targets, self.cost)
        self._suspended = 0
        """Consecutive ticks, until now, that read nothing because a stream is late."""
        self._is_slow = False
        """Whether a lone prompt is read in parts of a tile, because a tile takes too long."""

    def plan(self, state: State, now_ms: float, embeds: EmbedDemand | None = None, *, pause_ms: float = 0.0) -> Plan:
        """Plan the next tick. The plan is empty only if no row can run and there is nothing to embed.

        Before other work of `pause_ms` on the decode thread, rows only decode, as far ahead of readers as covers it.
        """
        if not pause_ms and embeds is None and self._is_decode_only(state):
            return Plan(tuple([row.key for row in state.decoding]), is_decode_only=True)
        rows, preempted = self._make_room(state)
        gone = {row.key for row in preempted}
        free = state.free_cells + sum(row.cells for row in preempted)
        waiting = [row for row in state.prefilling if row.key not in gone and not row.is_paused]
        decode = rows if pause_ms else self._choose_decode(rows, state, now_ms)
        streams = self._streams(decode, waiting, state, now_ms)
        plan = Plan(tuple(row.key for row in decode), preempt=tuple(row.key for row in preempted))
        if pause_ms:
            return self._before_pause(plan, streams, free, pause_ms)
        readable = [row for row in waiting if row.key not in state.unreadable]
        if readable and not (embeds is not None and self.embeds.has_turn(embeds, readable)):
            plan = self._with_prefill(plan, readable, streams, state, free - len(decode), now_ms)
        elif state.has_sets and decode and not readable and embeds is None:
            plan = self._in_turns(plan, streams, free)
        if embeds is not None and not plan.prefill:
            plan = attrs.evolve(plan, embed_tokens=self.embeds.tokens(embeds, decode, streams.step_ms, now_ms))
        return plan

    @property
    def encode_ms(self) -> float:
        """Time (ms) of a piece of a picture's encoding beside streams: at least as long as a decode step."""
        return max(TUNING.encode_ms, self.cost.decode_ms(1, 0))

    # What decodes

    def _is_decode_only(self, state: State) -> bool:
        """Fast path: whether all rows decode, each has a cell, and none can be held back.

        Background rows can be held back only beside rows of other lanes.
        """
        rows = state.decoding
        if state.has_sets or state.prefilling or len(rows) > min(state.free_cells, self.targets.batch_tokens):
            return False
        background = sum(row.lane < 0 for row in rows)
        return background in (0, len(rows)) and not any(row.is_paused for row in rows)

    def _make_room(self, state: State) -> tuple[list[Row], list[Row]]:
        """The rows that can decode, and those to preempt so that each of them has a cell.

        The oldest row of the highest lane is never preempted: it ends, and frees its cells by that.
        """
        decoding = [row for row in state.decoding if not row.is_paused]
        # Prefill waits for decoding rows to end and free cells. Where all are paused, one is preempted instead.
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
                # Rows that share all their cells free nothing until the last of them is preempted.
                preempted.append(candidates[0])
                decoding = [other for other in decoding if other is not candidates[0]]
        return decoding[: max(free, 0)], preempted

    def _choose_decode(self, rows: list[Row], state: State, now_ms: float) -> list[Row]:
        """All rows but the background rows that would make an interactive stream, or its first token, late. As many of
        these decode as fit, those first that have waited longest.
        """
        if len(rows) > self.targets.batch_tokens:
            rows = sorted(rows, key=lambda row: (row.lane < 0, row.last_token_ms))[: self.targets.batch_tokens]
        if not any(row.lane < 0 for row in rows):
            return rows
        first = [row for row in rows if row.lane >= 0]
        background = sorted((row for row in rows if row.lane < 0), key=lambda row: row.last_token_ms)
        target_ms = min((row.target_tbt_ms for row in first if row.lane > 0), default=math.inf)
        fitting = self._fitting(len(first), len(background), target_ms, state)
        for row in state.prefilling:
            if row.lane > 0 and not row.is_paused:
                # Once the predicted TTFT exceeds two thirds of the target, no background row decodes beside the prompt.
                read_ms = self._read_ms([PromptRow(row, row.prefill_left)], row.prefill_left, state)
                if 1.5 * (now_ms + read_ms - row.arrived_ms) > (row.target_ttft_ms or self.targets.slo_ttft_ms):
                    fitting = 0
        late = sum(now_ms - row.last_token_ms >= TUNING.held_ms for row in background)
        # At least one row that has waited too long decodes, even if it makes a stream late. Not all of them: 56
        # background rows at once made a chat wait 207 ms for its next token, not 102.
        least = min(late, max(1, self._fitting(len(first), late, target_ms, state)))
        return first + background[: max(fitting, least)]

    def _fitting(self, first: int, background: int, target_ms: float, state: State) -> int:
        """How many background rows decode with the `first` rows in a step that is no longer than `target_ms`."""
        if self.cost.decode_ms(first + background, state.used_cells) <= target_ms:
            return background
        sizes = [size for size in ROWS if first < size <= first + background]
        fits = [size - first for size in sizes if self.cost.decode_ms(size, state.used_cells) <= target_ms]
        return max(fits, default=0)

    def _streams(self, decode: list[Row], waiting: list[Row], state: State, now_ms: float) -> Streams:
        # The queued prompt counts as well: it is read next, beside the same streams.
        coming = [*waiting, state.queued] if waiting and state.queued is not None else waiting
        sets = Counter(row.adapters for row in decode).values() if state.has_sets else (len(decode),)
        step_ms = sum(self.cost.decode_ms(rows, state.used_cells) for rows in sets)
        load, budget_ms = state.neighbour_load, self.targets.tick_budget_ms
        pacing = choose_pacing(decode, step_ms, budget_ms=budget_ms, neighbour_load=load, prompts=coming)
        return Streams(decode, pacing, step_ms, lead_ms(pacing.readers, pacing.pace_ms, now_ms))

    def _before_pause(self, plan: Plan, streams: Streams, free_cells: int, pause_ms: float) -> Plan:
        steps, lead, pace = 1, streams.lead_ms, streams.pacing.pace_ms
        if lead < math.inf and streams.step_ms > 0:
            steps = steps_before(pause_ms, lead, pace, streams.step_ms)
        steps = max(1, min(steps, free_cells // max(1, len(plan.decode))))
        return attrs.evolve(plan, steps=steps, pace_ms=pace, lead_ms=lead if lead < math.inf else 0.0)

    def _in_turns(self, plan: Plan, streams: Streams, free_cells: int) -> Plan:
        """Run several steps of each set of adapters in turn, as many as fit the readers' pace, because changing the set
        takes time. Their tokens are given at even intervals.
        """
        if streams.step_ms <= 0:
            return plan
        fitting = int(min(streams.pacing.pace_ms, self.targets.tick_budget_ms) / streams.step_ms)
        steps = min(max(fitting, MIN_TURN_STEPS), MAX_TURN_STEPS, max(1, free_cells // len(plan.decode)))
        lead = streams.lead_ms if streams.lead_ms < math.inf else 0.0
        return attrs.evolve(plan, steps=steps, pace_ms=streams.step_ms, lead_ms=lead)

    # What is read

    def _with_prefill(
        self, plan: Plan, waiting: list[Row], streams: Streams, state: State, free_cells: int, now_ms: float
    ) -> Plan:
        """The plan with a piece of the prompts; without one where no cell is free, or late streams need the tick."""
        free_tokens = min(self.targets.batch_tokens, free_cells)
        if free_tokens <= 0 or self._suspends(streams, now_ms):
            return plan
        waiting = in_order(waiting, now_ms)
        if state.has_sets:
            waiting = [row for row in waiting if row.adapters == waiting[0].adapters]
        prompts = self._readable_together(waiting)
        head = prompts[0].row
        share = TUNING.piece_share
        if now_ms - state.answered_ms <= TUNING.expected_ms and head.arrived_ms < state.answered_ms:
            share *= TUNING.shorter
        # Background rows slow down only prompts of their own lane.
        if all(not row.has_reader or row.lane < min(head.lane, 0) for row in streams.rows):
            return self._alone(plan, prompts, streams, state, share, free_tokens, now_ms)
        return self._beside(plan, prompts, streams, state, share, free_cells)

    def _suspends(self, streams: Streams, now_ms: float) -> bool:
        """Whether a stream is so late that this tick reads no prompt."""
        readers = [row for row in streams.rows if row.lane >= 0 and row.has_reader]
        worst = lateness(readers, now_ms, streams.pacing.pace_ms)
        is_late = worst > TUNING.late
        self._suspended = self._suspended + 1 if is_late and self._suspended < MAX_SUSPENDED else 0
        return self._suspended > 0

    def _readable_together(self, rows: list[Row]) -> list[PromptRow]:
        """Rows, in their order, that can share one batch with the first.

        A leader is read up to its branch, where its followers begin, and then the rests of all are read together. Not
        where that is less than a tile, which would cost nearly as much as a whole one.
        """
        if self.targets.mixes_prompts:
            parts = [(row, row.branch - row.position) for row in rows]
            return [PromptRow(row, part if part >= TILE_TOKENS else row.prefill_left) for row, part in parts]
        head = rows[0]
        others = [
            row for row in rows[1:] if row.prefill_left == head.prefill_left or row.position == head.position == 0
        ]
        return [PromptRow(row, row.prefill_left) for row in (head, *others)]

    def _alone(
        self,
        plan: Plan,
        prompts: list[PromptRow],
        streams: Streams,
        state: State,
        share: float,
        free_tokens: int,
        now_ms: float,
    ) -> Plan:
        """Prefill while no reader waits for a token: the fastest piece, as long as the next request can wait for."""
        most = min(self.targets.solo_tokens, free_tokens)
        prompts = _ending_together(prompts, most)
        wanted = sum(prompt.left for prompt in prompts)
        if self.cost.knows_prefill:
            most = min(most, self._longest(prompts, min(wanted, most), state, share))
        else:
            most = min(most, self.targets.start_tokens)
        # A prompt's last piece comes before the next tokens of lower lanes, but for rows that have waited too long.
        head = prompts[0]
        if streams.rows and head.left <= most and all(row.lane < head.row.lane for row in streams.rows):
            late = self._late(streams.rows, state, now_ms)
            decode = tuple(row.key for row in late) or plan.decode
            return attrs.evolve(plan, decode=decode, prefill=self._allocated(prompts, most), steps=min(1, len(late)))
        return self._mixed(plan, prompts, most, streams, state, free_tokens) or attrs.evolve(
            plan, prefill=self._allocated(prompts, most)
        )

    def _late(self, rows: Sequence[Row], state: State, now_ms: float) -> list[Row]:
        """Rows of a lower lane that have been without a token for long: as many as decode within a tick's budget, or
        the one that has waited longest.
        """
        normal_ms = TUNING.piece_share * self.targets.slo_ttft_ms
        late = [row for row in rows if now_ms - row.last_token_ms >= (TUNING.held_ms if row.lane < 0 else normal_ms)]
        late.sort(key=lambda row: row.last_token_ms)
        return late[: max(1, self._fitting(0, len(late), self.targets.tick_budget_ms, state))]

    def _longest(self, prompts: list[PromptRow], wanted: int, state: State, share: float) -> int:
        """Size of the piece where no stream runs beside it: whole tiles, or, once a tile takes too long, always half a
        tile or less. Attention over fewer rows than a tile sums in another order, so that with both the answer would
        depend on how fast the machine was at the moment.
        """
        usual_ms = share * self.targets.slo_ttft_ms
        tile_ms = 2 * TUNING.patience * TUNING.piece_share * self.targets.slo_ttft_ms
        whole = min(wanted, TILE_TOKENS)
        if len(prompts) == 1 and whole == TILE_TOKENS and self.cost.is_sure_of(TILE_TOKENS):
            end = prompts[0].row.position + prompts[0].left if not self.targets.attends_all else state.used_cells
            slowest_ms = self.cost.prefill_ms(TILE_TOKENS, end)
            self._is_slow = slowest_ms > tile_ms * (FAST_AGAIN if self._is_slow else 1.0)
        if self._is_slow and whole == TILE_TOKENS and (least := self._least_size(prompts, whole, state)) < whole:
            parts = [size for size in SIZES if least <= size < whole]
            return max((size for size in parts if self._read_ms(prompts, size, state) <= tile_ms), default=least)
        size = self._best_size(prompts, wanted, state, usual_ms, TUNING.patience * usual_ms, tile_ms)
        larger = next((tile for tile in SIZES if tile > size), size)
        if larger <= wanted and not self.cost.is_sure_of(larger) and self._read_ms(prompts, larger, state) <= tile_ms:
            size = larger  # no reader waits for a token while it is tried
        size = max(size, whole if len(prompts) == 1 else self._least_size(prompts, whole, state))
        fewer = size - (size - prompts[0].left) % TILE_TOKENS
        is_cut = len(prompts) == 1 and TILE_TOKENS <= size < prompts[0].left
        return fewer + TILE_TOKENS * (fewer < TILE_TOKENS) if is_cut else size

    def _beside(
        self, plan: Plan, prompts: list[PromptRow], streams: Streams, state: State, share: float, free_cells: int
    ) -> Plan:
        """Prefill beside streams: the piece with the highest throughput of those that keep every reader supplied."""
        pace, lead, step_ms = streams.pacing.pace_ms, streams.lead_ms, streams.step_ms
        plan = attrs.evolve(plan, pace_ms=pace, lead_ms=lead if lead < math.inf else 0.0)
        # Prompts of lower lanes only fill the first tile up: first tokens do not wait for more of them.
        first = sum(prompt.left for prompt in takewhile(lambda prompt: prompt.row.lane >= prompts[0].row.lane, prompts))
        wanted = sum(prompt.left for prompt in prompts)
        wanted = min(wanted, max(first, TILE_TOKENS), self.targets.batch_tokens, free_cells)
        if not self.cost.knows_prefill:
            return attrs.evolve(plan, prefill=self._allocated(prompts, min(wanted, self.targets.start_tokens)))
        # Each step takes a cell for each row; half of the free ones are for the prompts.
        max_steps = max(1, free_cells // max(1, 2 * len(streams.rows)))
        covered_ms = longest_piece_ms(lead, pace, step_ms, max_steps)
        usual_ms = share * self.targets.slo_ttft_ms
        if streams.pacing.is_late:
            # With a large model on few cores a shorter piece would spend most of its time reading the weights.
            usual_ms = max(usual_ms, TUNING.piece_steps * self.cost.decode_ms(1, 0))
        usual_ms = min(usual_ms, covered_ms)
        most_ms, tile_ms = (min(covered_ms, factor * TUNING.patience * usual_ms) for factor in (1, 2))
        size = self._best_size(prompts, wanted, state, usual_ms, most_ms, tile_ms)
        size = size or self._least_size(prompts, min(wanted, TILE_TOKENS), state)
        piece_ms = self._read_ms(prompts, size, state)
        # Not in decode-only ticks before the piece: in the simulator (29 loads on five machines) that made no gap
        # shorter, and prompts beside a target that is barely kept were read 5 % later.
        steps = min(max_steps, steps_before(piece_ms, lead, pace, step_ms))
        needed_ms = TUNING.safety * piece_ms + step_ms if piece_ms <= covered_ms else 0.0
        plan = attrs.evolve(plan, steps=steps, needed_ms=needed_ms)
        free_tokens = min(self.targets.batch_tokens, free_cells)
        size = min(size, free_tokens - (steps - 1) * len(streams.rows))
        return self._mixed(plan, prompts, size, streams, state, free_tokens) or attrs.evolve(
            plan, prefill=self._allocated(prompts, size)
        )

    def _mixed(
        self, plan: Plan, prompts: list[PromptRow], size: int, streams: Streams, state: State, free_tokens: int
    ) -> Plan | None:
        """The plan with decode rows and piece in one batch, where that is predicted to be no slower than both apart;
        else None. Both together have the size that the piece would have alone.
        """
        rows, whole = len(streams.rows), min(size, sum(prompt.left for prompt in prompts))
        # The whole piece is kept where making space for the rows would leave the end of a prompt to another piece.
        tokens = whole if _ends_within(prompts, whole - rows) < _ends_within(prompts, whole) else whole - rows
        fits = rows + tokens <= min(self.targets.batch_tokens, free_tokens) and 2 * tokens >= whole > 0
        # The times of both apart must be known: a mixed batch is judged by them.
        known = self.cost.has_decoded(rows) and self.cost.has_read(rows + tokens)
        if state.has_sets or not (rows and fits and known and self.targets.mixes_prompts):
            return None
        # Learnt by trial. Never mixing costs an overloaded GPU 9 % of its tokens (simulated), and a slow CPU's prompts
        # 8 % of their speed; mixing wherever that is predicted to be no slower costs an overloaded CPU first tokens.
        self.cost.considered_mixed()
        apart_ms = (streams.step_ms + self._read_ms(prompts, whole, state)) * tokens / whole
        position = self._position(prompts, tokens, state)
        if not self.targets.attends_all:
            position = mixed_position(position, tokens, [row.position for row in streams.rows])
        mixed_ms = self.cost.mixed_ms(rows, state.used_cells, tokens, position)
        feared_ms = apart_ms if mixed_ms is None else mixed_ms
        steps = steps_before_mixed(feared_ms, plan.lead_ms, plan.pace_ms, streams.step_ms) if plan.pace_ms else 0
        # Not tried where it is slower even if the rows cost nothing: a row deep in its text slows its whole tile down.
        expected_ms = self.cost.prefill_ms(rows + tokens, position) if mixed_ms is None else mixed_ms
        is_slower = expected_ms > apart_ms
        if is_slower or steps > plan.steps or tokens + steps * rows > free_tokens:
            return None
        needed_ms = TUNING.safety * feared_ms if plan.needed_ms else 0.0
        prefill = self._allocated(prompts, tokens, is_mixed=True)
        return attrs.evolve(plan, prefill=prefill, steps=steps, needed_ms=needed_ms, is_mixed=True)

    def _best_size(
        self, prompts: list[PromptRow], wanted: int, state: State, usual_ms: float, most_ms: float, tile_ms: float
    ) -> int:
        def position(tokens: int) -> float:
            return self._position(prompts, tokens, state)

        return self.cost.best_size(
            wanted, position, usual_ms, most_ms=most_ms, tile_ms=tile_ms, worth=TUNING.worth_waiting
        )

    def _least_size(self, prompts: list[PromptRow], most: int, state: State) -> int:
        """Minimum size of a piece, at most `most` tokens, where none is read in time: the smallest with at least half
        of the throughput of `most`.
        """
        # Not simply the smallest: 8 tokens deep in a prompt took a busy machine 1.0 s where a tile took 1.3, and 40
        # questions were read in 233 s, not in 25.
        least_rate = MIN_RATE * most / max(1e-9, self._read_ms(prompts, most, state))
        sizes = [size for size in SIZES if size < most]
        return next((size for size in sizes if size >= least_rate * self._read_ms(prompts, size, state)), most)

    def _read_ms(self, prompts: list[PromptRow], tokens: int, state: State) -> float:
        """Predicted time of a batch with the next `tokens` tokens of these prompts."""
        return self.cost.prefill_ms(tokens, self._position(prompts, tokens, state))

    def _position(self, prompts: list[PromptRow], tokens: int, state: State) -> float:
        """Mean number of tokens that each of the next `tokens` tokens attends to."""
        if self.targets.attends_all:
            return state.used_cells
        left, behind = tokens, 0
        for prompt in prompts:
            count = min(prompt.left, left)
            behind += count * prompt.row.position
            left -= count
            if left <= 0:
                break
        return behind / max(1, tokens - left)

    def _allocated(self, prompts: list[PromptRow], most: int, *, is_mixed: bool = False) -> tuple[tuple[int, int], ...]:
        """Allocate at most `most` tokens to the prompts, in their order; see `Plan.prefill`."""
        chosen: list[tuple[int, int]] = []
        left = most
        for prompt in prompts:
            if left <= 0:
                break
            count = min(prompt.left, left)
            if not is_mixed:
                # Keep the full count where rounding would drop the batch below one tile.
                fewer, read = _in_whole_tiles(prompt, count), most - left
                count = count if read and read + fewer < TILE_TOKENS <= read + count else fewer
            if chosen and count < prompt.left and not self.targets.mixes_prompts:
                break
            chosen.append((prompt.row.key, count))
            if count < prompt.left:
                break
            left -= count
        return tuple(chosen)


def mixed_position(position: float, tokens: int, rows: Sequence[int]) -> float:
    """Mean number of tokens that each token of a mixed batch attends to: of `tokens` prompt tokens at `position`, and
    of decode rows at the positions `rows`.

    In a mixed batch a decode row shares a tile, and attention takes as long as if the whole tile attended to the row's
    text: a row deep in a document can cost more than the rest of the batch.
    """
    return position + TILE_TOKENS * sum(rows) / (tokens + len(rows))


def _ends_within(prompts: list[PromptRow], tokens: int) -> int:
    """How many prompts end within their first `tokens` tokens."""
    return sum(end <= tokens for end in accumulate(prompt.left for prompt in prompts))


def _ending_together(prompts: list[PromptRow], tokens: int) -> list[PromptRow]:
    """The first prompts, all of one lane, that end within one batch of `tokens` tokens.

    So none of them waits for a piece of a prompt that ends later. A first one longer than the batch comes alone.
    """
    lane = prompts[0].row.lane
    same = list(takewhile(lambda prompt: prompt.row.lane == lane, prompts))
    return same[: max(1, _ends_within(same, tokens))]


def _in_whole_tiles(prompt: PromptRow, tokens: int) -> int:
    """`tokens`, rounded down so that whole tiles are left of the prompt: its partial tile is read at its beginning.

    There a partial tile costs little. At the end of a long prompt it can cost as much as several tiles.
    """
    fewer = tokens - (tokens - prompt.left) % TILE_TOKENS
    is_first = fewer > 0 and prompt.row.position < TILE_TOKENS
    return fewer if fewer >= TILE_TOKENS or is_first else tokens

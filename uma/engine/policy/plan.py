"""One tick: a token for each decoding sequence, and what is left of the time to prefill."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from uma.engine.policy.cost import CostModel
from uma.engine.policy.crowd import reads_on
from uma.engine.policy.embed import EmbedDemand, EmbedTurns
from uma.engine.policy.guard import LatencyGuard
from uma.engine.policy.lead import MAX_STEPS, lead_ms, steps_before
from uma.engine.policy.order import first_token_first, preemption_order
from uma.engine.policy.pace import Pacing, choose_pacing
from uma.engine.policy.piece import Prompts, Streams
from uma.engine.policy.prefill import NO_PREFILL, Prefill, PrefillPolicy
from uma.engine.policy.speculation import DraftPolicy
from uma.engine.policy.state import Row, State, Targets

BACKGROUND_STARVES_MS = 2_000.0
"""Maximum time between two tokens of a background stream, whatever is at risk."""
AT_RISK = 0.3
"""Spare time, as a share of its target, below which a first token counts as at risk."""


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
    steps: int = 1
    """Decode steps of each row before the prefill: at least one, or none with `is_mixed`, where the lead covers the
    prefill at a pace beyond `MOST_PACE_MS`, and where a prompt of a higher lane than the rows' ends."""
    is_mixed: bool = False
    """Each row has one more decode step in the batch of the prefill (a mixed batch), because here that is faster."""
    pace_ms: float = 0.0
    """Minimum time between two tokens of a row at its reader; 0: each goes out as it comes."""
    lead_ms: float = 0.0
    """For how long every reader could go on without another token when the plan was made; 0 without readers."""
    needed_ms: float = 0.0
    """Minimum lead (ms) of every reader when the prefill begins. Where decode steps take longer than predicted, more of
    them come before it (`lead.steps_lacking`). 0: no schedule keeps the readers supplied, or there are none."""
    embed_tokens: int = 0
    """Tokens of texts to embed, instead of any prefill."""


class Scheduler:
    """The policy, with what it has learnt in `cost`."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self.cost = CostModel()
        self.embeds = EmbedTurns(targets, self.cost)
        self._guard = LatencyGuard()
        self._prefill = PrefillPolicy(self.cost)
        self.drafts = DraftPolicy(self.cost)

    def plan(self, state: State, now_ms: float, embeds: EmbedDemand | None = None, *, pause_ms: float = 0.0) -> Plan:
        """The next tick. Empty only if no row can run and there is nothing to embed.

        Before a pause of `pause_ms` rows only decode, as far ahead of their readers as it takes.
        """
        if pause_ms:
            return self._before_pause(state, now_ms, pause_ms)
        if embeds is None and self._is_everyday(state):
            return Plan(tuple([row.key for row in state.decoding]), is_everyday=True)
        rows, preempted = self._make_room(state)
        decode, held = self._choose_decode(rows, state, now_ms)
        free = state.free_cells + sum(row.cells for row in preempted) - len(decode)
        gone = {row.key for row in preempted}
        waiting = [row for row in state.prefilling if row.key not in gone and not row.is_paused]
        has_turn = embeds is not None and self.embeds.has_turn(embeds, waiting)
        prefill = NO_PREFILL if has_turn else self._choose_prefill(waiting, decode, state, free, now_ms)
        piece, embed_tokens = prefill.piece, 0
        if embeds is not None and not prefill.tokens:
            step_ms = self.cost.decode_ms(len(decode), state.used_cells)
            embed_tokens = self.embeds.tokens(embeds, decode, step_ms, now_ms)
        return Plan(
            tuple(row.key for row in decode),
            prefill.tokens,
            tuple(row.key for row in preempted),
            held,
            steps=piece.steps,
            is_mixed=piece.is_mixed,
            pace_ms=piece.pace_ms,
            lead_ms=piece.lead_ms if piece.lead_ms < math.inf else 0.0,
            needed_ms=piece.needed_ms if prefill.tokens else 0.0,
            embed_tokens=embed_tokens,
        )

    def _before_pause(self, state: State, now_ms: float, pause_ms: float) -> Plan:
        rows, preempted = self._make_room(state)
        step_ms = self.cost.decode_ms(len(rows), state.used_cells)
        waiting = [row for row in state.prefilling if not row.is_paused]
        pacing = self._pacing(rows, step_ms, state.neighbour_load, waiting)
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

    def _pacing(
        self, decode: Sequence[Row], step_ms: float, neighbour_load: float, prompts: Sequence[Row] = ()
    ) -> Pacing:
        budget_ms = self.targets.tick_budget_ms
        return choose_pacing(decode, step_ms, budget_ms=budget_ms, neighbour_load=neighbour_load, prompts=prompts)

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
                needed_ms = self._prompts([row], state).ms(row.remaining)
                if now_ms + needed_ms > row.arrived_ms + (1 - AT_RISK) * target_ms:
                    return True
        return False

    def _choose_prefill(
        self, waiting: list[Row], decode: list[Row], state: State, free_cells: int, now_ms: float
    ) -> Prefill:
        free_tokens = min(self.targets.batch_tokens, free_cells)
        if not waiting or free_tokens <= 0:
            return NO_PREFILL
        # What begins next waits with the others, or they would slow the streams down that it waits for.
        coming = waiting if state.queued is None else [*waiting, state.queued]
        step_ms = self.cost.decode_ms(len(decode), state.used_cells)
        pacing = self._pacing(decode, step_ms, state.neighbour_load, coming)
        prompts = self._prompts(first_token_first(waiting), state)
        streams = Streams(decode, pacing, step_ms, state.used_cells, now_ms)
        if reads_on(prompts, streams, self.targets):
            return self._prefill.choose(prompts, streams, self.targets, free_cells, reads_on=True)
        if not self._guard.allows_prefill(decode, now_ms, pacing.pace_ms):
            return NO_PREFILL
        return self._prefill.choose(prompts, streams, self.targets, free_cells)

    def _prompts(self, waiting: list[Row], state: State) -> Prompts:
        attended_cells = state.used_cells if self.targets.attends_all else None
        return Prompts(waiting, self.cost, attended_cells, state.reader_ended_ms, state.do_readers_return)

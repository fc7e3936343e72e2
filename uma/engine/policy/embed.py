"""Embedding work beside generation: how much of it a tick computes, and which request's text comes next.

Embedding takes turns with the reading of prompts, within the same budget of time, so a stream's gap is no longer with a
thousand texts waiting than with a long prompt. Among themselves, requests share the batches by start-time fair queueing
(Goyal, Vin, Cheng 1996): each has a virtual clock that its tokens move on, and the one furthest behind is served next.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import attrs

from uma.engine.policy.cost import SIZES, CostModel
from uma.engine.policy.lead import lateness
from uma.engine.policy.state import Row, Targets
from uma.engine.policy.tuning import TUNING

LEAST_SHARE = 0.5
"""Minimum time for texts after a decode step, as a share of the step, where streams miss their targets anyway."""
TURNS = {1: 0.75, 0: 0.5, -1: 0.25}
"""Share of turns that embedding has beside prompts, by whether its lane is higher than theirs, the same, or lower."""
WEIGHTS = {1: 16.0, 0: 4.0, -1: 1.0}
"""Tokens of a lane's request that count as much as one of a background request's."""


@attrs.frozen
class EmbedDemand:
    """The texts that wait to be embedded, as the policy sees them."""

    tokens: int
    """Tokens that one batch can hold of them."""
    least_tokens: int
    """Fewest tokens that can be computed: a whole text, where the model cannot read one in pieces."""
    lane: int
    """The highest of their lanes."""
    position: float
    """Cells in use, which a batch attends over."""


class EmbedTurns:
    """Says when embedding has its turn and how many tokens of it. It learns in `cost`."""

    def __init__(self, targets: Targets, prompts: CostModel) -> None:
        """`prompts`: what the same model's prompts take, by which the first batch of texts is judged."""
        self._targets = targets
        self._prompts = prompts
        self.cost = CostModel()
        self._credit = 0.0

    def has_turn(self, demand: EmbedDemand, waiting: Sequence[Row]) -> bool:
        """Whether this tick embeds, and leaves the prompts of `waiting` to the next."""
        if not waiting:
            return True
        lane = max(row.lane for row in waiting)
        self._credit += TURNS[(demand.lane > lane) - (demand.lane < lane)]
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
            longest_ms = max(target_ms - step_ms, LEAST_SHARE * step_ms)
        return max(least, cost.best_size(demand.tokens, lambda _tokens: demand.position, longest_ms))


class FairQueue:
    """Requests, by their own keys, in the order in which they are served: the one furthest behind first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._weights: dict[int, float] = {}
        self._clock = 0.0

    def add(self, key: int, lane: int) -> None:
        """A request that comes now starts level with those that are served now: it neither waits for what they had
        before, nor catches up on it.
        """
        self._weights[key] = WEIGHTS[lane]
        heapq.heappush(self._heap, (self._clock, key))

    def discard(self, key: int) -> None:
        """Forget a request."""
        self._weights.pop(key, None)

    def take(self) -> tuple[float, int] | None:
        """The next request and its clock, out of the queue until `put`; None where none is left."""
        while self._heap:
            at, key = heapq.heappop(self._heap)
            if key in self._weights:
                self._clock = max(self._clock, at)
                return at, key
        return None

    def put(self, at: float, key: int, tokens: int) -> None:
        """Back into the queue, served so many tokens."""
        if key in self._weights:
            heapq.heappush(self._heap, (at + tokens / self._weights[key], key))

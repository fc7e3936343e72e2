"""Whether to compute few decode rows at once, or one after another where that is faster.

llama.cpp computes a batch of one token in another way than larger ones, and for some weights on some processors that
way is so much faster that two or three rows take less time one by one (Q8_0 weights with AVX-512: one row 3.5 ms, two
9.5, three 12). No property of a model or machine says so; only measuring does.
"""

from __future__ import annotations

from uma.engine.policy.cost import CostModel

MOST_APART = 4
"""Maximum rows that are computed one by one: from more on, reading the weights once for all of them has paid."""
BATCH_MS = 0.2
"""Cost of a batch besides its computing: to fill it, to sample, to book it."""
WORTH = 0.95
"""Maximum time of rows one by one, as a share of their time together: a smaller gain changes nothing."""
TRY_EVERY = 16
"""Interval, in choices, at which the other way is measured again."""
TRY_WITHIN = 1.5
"""Maximum predicted time of such a trial, as a multiple of the better way's."""


class OneByOne:
    """Chooses from what the cost model has learnt, and sees to it that it learns both ways."""

    __slots__ = ("_choices", "_cost", "is_trying")

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._choices = 0
        self.is_trying = False
        """Whether the last choice was made to learn from it: it is good for one tick."""

    def step_ms(self, rows: int, cells: int) -> float:
        """What a decode step takes in the faster way of those that were measured."""
        at_once_ms = self._cost.decode_ms(rows, cells)
        if not 1 < rows <= MOST_APART or not self._cost.has_decoded(1):
            return at_once_ms
        return min(at_once_ms, rows * self._cost.decode_ms(1, cells) + (rows - 1) * BATCH_MS)

    def choose(self, rows: int, cells: int) -> bool:
        """Whether to compute `rows` one by one, with so many KV cells in use."""
        cost, self.is_trying = self._cost, False
        if not 1 < rows <= MOST_APART or not cost.has_decoded(rows):
            return False
        at_once_ms, more_ms = cost.decode_ms(rows, cells), (rows - 1) * BATCH_MS
        if at_once_ms <= more_ms:
            return False
        if not cost.has_decoded(1):
            self.is_trying = True
            return True
        apart_ms = rows * cost.decode_ms(1, cells) + more_ms
        is_faster = apart_ms < WORTH * at_once_ms
        self._choices += 1
        if self._choices % TRY_EVERY == 0 and max(apart_ms, at_once_ms) < TRY_WITHIN * min(apart_ms, at_once_ms):
            self.is_trying = True
        return is_faster != self.is_trying

"""Whether a decode step and a piece of the prompts are computed in one batch (a mixed batch) or in two.

One batch reads the weights once where two read them twice, which is most of what a step takes on a GPU. On a CPU a few
rows more than a tile holds cost another tile, and rows beside a piece go another way through attention. No property of
a model or machine says which counts for more; only measuring does.
"""

from __future__ import annotations

from collections.abc import Sequence

from uma.engine.policy.cost import TILE_TOKENS

WORTH = 0.98
"""Maximum time of a mixed batch, as a share of what both parts take apart."""
TRY_EVERY = 32
"""Interval, in choices, at which the other way is measured again."""
TRY_WITHIN = 1.3
"""Maximum predicted time of such a trial, as a multiple of the better way's."""


def mixed_position(position: float, tokens: int, rows: Sequence[int]) -> float:
    """Tokens that each of a mixed batch attends to, on the average: `tokens` of prompts at `position`, and decode rows
    that stand at `rows`.

    By itself a row attends to its own tokens alone. In a mixed batch it shares a tile, and attention takes as long as
    if all of the tile attended to them: a row deep in a document can cost more than the rest of the batch.
    """
    return position + TILE_TOKENS * sum(rows) / (tokens + len(rows))


class MixedBatches:
    """Chooses from what the cost model has learnt, and sees to it that it learns both ways."""

    __slots__ = ("_choices",)

    def __init__(self) -> None:
        self._choices = 0

    def choose(self, mixed_ms: float | None, apart_ms: float) -> bool:
        """Whether to compute one batch of `mixed_ms`, None where no such was seen yet, instead of two."""
        if mixed_ms is None:
            return True
        is_faster = mixed_ms < WORTH * apart_ms
        self._choices += 1
        is_trying = self._choices % TRY_EVERY == 0 and max(mixed_ms, apart_ms) < TRY_WITHIN * min(mixed_ms, apart_ms)
        return is_faster != is_trying

"""How many drafted tokens of each row are verified: as many as make the expected time per token shortest, often none.

A batch of a row's last token and a draft behind it gives one token, and one more for each drafted token that holds.
What it takes is not proportional to its size: on a GPU a batch of 8 costs hardly more than one of 1, on a CPU with some
weights one of 2 costs nearly three times as much, and one of 16 little more than that. So the sizes are measured, as
decode rows are, and one that was never seen is tried where it could pay if it took no longer than smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from uma.engine.policy.cost import FORGET_AFTER, ROWS, SURE_SEEN, CostModel
from uma.engine.sizing import RULES

MAX_TOKENS = 64
"""Maximum tokens of a batch that holds drafts."""
STEP_MS = 0.3
"""Cost of a batch with drafts besides its computing: to guess, to sample one by one, to book. Decode steps without
drafts run as a stride, and pay a fraction of that."""
WORTH = 1.08
"""Minimum expected gain, as a factor, for which tokens are drafted: estimates are this uncertain."""
TRY_WITHIN = 1.3
"""Maximum predicted time a token at which a size that was slow is tried again, once in `FORGET_AFTER` chances, as a
multiple of the time without drafts."""
SLOWER = 1.1
"""Maximum wait of a row for its token, as a multiple of that without drafts."""
HOPELESS = 1.5
"""Maximum time of a step with drafts, as a multiple of one without, where that one alone misses a stream's target."""


@attrs.frozen
class Candidate:
    """A row and its draft, as far as the policy is concerned."""

    likelihoods: Sequence[float]
    """Chance of each drafted token that it and all before it hold; falling. Empty: there is no draft."""
    target_tbt_ms: float


@attrs.frozen
class Drafting:
    """What to verify in one batch."""

    lengths: tuple[int, ...]
    """Drafted tokens of each row; 0: its last token alone."""
    plain_ms: float
    """What a step without drafts would take."""
    batch_ms: float
    """What the batch is expected to take."""


class DraftPolicy:
    """Chooses draft lengths from what the cost model has learnt, and sees to it that it learns."""

    __slots__ = ("_cost", "_without")

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._without = 0

    def can_pay(self, rows: int, cells: int, target_tbt_ms: float) -> bool:
        """Whether drafts would be verified for `rows` decode rows if all of them were certain."""
        certain = Candidate((1.0,) * min(RULES.max_draft, MAX_TOKENS // rows), target_tbt_ms)
        return self._choose([certain] * rows, cells, MAX_TOKENS) is not None

    def choose(
        self,
        rows: Sequence[Candidate],
        cells: int,
        free_cells: int,
        *,
        step_ms: float = 0.0,
    ) -> Drafting | None:
        """Draft lengths for decode rows of one batch, with so many KV cells in use; None: no drafts.

        `free_cells` is how many more tokens than rows there can be in all. `step_ms` is what it takes
        to guess one more token for each row.
        """
        found = self._choose(rows, cells, free_cells, step_ms=step_ms)
        if found is None and any(row.likelihoods for row in rows):
            self._without += 1
            if self._without % FORGET_AFTER == 0:
                worth = 1 / TRY_WITHIN
                return self._choose(rows, cells, free_cells, step_ms=step_ms, worth=worth)
        return found

    def plain_ms(self, rows: int, cells: int) -> float:
        """What a step without drafts takes; 0 while nothing is known."""
        return self._cost.decode_ms(rows, cells)

    def _choose(
        self,
        rows: Sequence[Candidate],
        cells: int,
        free_cells: int,
        *,
        step_ms: float = 0.0,
        worth: float = WORTH,
    ) -> Drafting | None:
        cost, count = self._cost, len(rows)
        if not count or not cost.has_decoded(count):
            return None
        plain_ms = self.plain_ms(count, cells)
        if plain_ms <= 0:
            return None
        limit_ms = min(row.target_tbt_ms for row in rows)
        if plain_ms > limit_ms:
            limit_ms = HOPELESS * plain_ms
        # Best chances first. The tokens of one row keep their order, because their chances fall.
        ranked = sorted(
            ((chance, -index, row) for row, each in enumerate(rows) for index, chance in enumerate(each.likelihoods)),
            reverse=True,
        )[: min(free_cells, MAX_TOKENS - count)]
        best: Drafting | None = None
        most = worth * count / plain_ms
        for size in _sizes(count, len(ranked)):
            taken = ranked[: size - count]
            lengths = [0] * count
            gained = [1.0] * count
            for chance, _, row in taken:
                lengths[row] += 1
                gained[row] += chance
            guess_ms = step_ms * max(lengths)
            batch_ms = cost.verify_ms(size, cells, count)
            if guess_ms + batch_ms > limit_ms:
                continue
            is_known = cost.times_verified(size) >= SURE_SEEN
            believed_ms = guess_ms + (batch_ms if is_known else cost.least_verify_ms(size, cells, count))
            rate = sum(gained) / (believed_ms + STEP_MS)
            if rate > most and min(gained) * SLOWER * plain_ms >= believed_ms:
                best, most = Drafting(tuple(lengths), plain_ms, batch_ms), rate
        return best


def _sizes(rows: int, drafted: int) -> list[int]:
    """Sizes of batches that are considered: those that the cost model tells apart, and the largest there can be."""
    largest = rows + drafted
    return [*(size for size in ROWS if rows < size < largest), *([largest] if drafted else [])]


def saved_ms(tokens: int, drafting: Drafting, took_ms: float) -> float:
    """Time that a row's reader was spared by a batch that gave it `tokens` tokens; negative where it took longer."""
    return tokens * drafting.plain_ms - took_ms if math.isfinite(took_ms) else 0.0

"""How many tokens of each row's draft are worth verifying. Pure.

A verification pass over a row's last token and its draft gives one token, and one more for each drafted token that is
accepted. Its time is not proportional to its size: on a GPU a pass of 8 tokens costs hardly more than one of 1; on a
CPU with some weights a pass of 2 costs nearly three times as much, and one of 16 little more than that. It takes as
long as a decode step of as many rows, so the cost model has one table for both. An unknown size is tried where it would
pay if it took no longer than smaller ones.

If sequences have states, llama.cpp computes only rows of equal length together: each draft length is then a pass of its
own (`ModelRunner.verify`), and all drafted rows have one length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from uma.engine.policy.cost import FORGET_AFTER, ROWS, CostModel
from uma.engine.sizing import RULES

MAX_TOKENS = 64
"""Maximum tokens of one verification pass."""
STEP_MS = 0.3
"""Time (ms) of a step with drafts beside its computing: guessing, sampling one by one, booking. Decode steps without
drafts run as a stride, and take a fraction of that."""
WORTH = 1.08
"""Minimum expected gain, as a factor, for drafting: estimates are this uncertain."""
SLOWER = 1.1
"""Maximum wait of a row for its token, as a multiple of that without drafts."""
HOPELESS = 1.5
"""Maximum time of a step with drafts, as a multiple of one without, if already the latter misses a stream's target."""


@attrs.frozen
class Candidate:
    """A row and its draft, as the policy sees them."""

    likelihoods: Sequence[float]
    """Probability of each drafted token that it and all before it are accepted; falling. Empty: there is no draft."""
    target_tbt_ms: float


@attrs.frozen
class Drafting:
    """What to verify in one step."""

    lengths: tuple[int, ...]
    """Drafted tokens to verify of each row; 0: its last token alone."""
    plain_ms: float
    """Predicted time of a step without drafts."""
    batch_ms: float
    """Predicted time of the step."""


class DraftPolicy:
    """Chooses draft lengths by the cost model, and tries sizes that this does not know."""

    __slots__ = ("_cost", "_needs_equal", "_without")

    def __init__(self, cost: CostModel, *, needs_equal: bool = False) -> None:
        """`needs_equal`: each draft length is a pass of its own."""
        self._cost = cost
        self._needs_equal = needs_equal
        self._without = 0
        """Times that there were drafts, and none was worth its time."""

    def can_pay(self, rows: int, cells: int, target_tbt_ms: float) -> bool:
        """Whether drafts would be verified for `rows` decode rows if all of their tokens were certain."""
        certain = Candidate((1.0,) * min(RULES.max_draft, MAX_TOKENS // rows), target_tbt_ms)
        return any(True for _ in self._worthwhile([certain] * rows, cells, MAX_TOKENS))

    def choose(
        self, rows: Sequence[Candidate], cells: int, free_cells: int, *, step_ms: float = 0.0
    ) -> Drafting | None:
        """Draft lengths for decode rows, with `cells` KV cells in use; None: no drafts.

        `free_cells` is the maximum of drafted tokens in all. `step_ms` is the time to guess one more token for each
        row. A choice that was too slow is tried again once in `FORGET_AFTER` calls.
        """
        found = [*self._worthwhile(rows, cells, free_cells, step_ms=step_ms)]
        if not found and any(row.likelihoods for row in rows):
            self._without += 1
            if self._without % FORGET_AFTER == 0:
                found = [*self._worthwhile(rows, cells, free_cells, step_ms=step_ms, is_trial=True)]
        return max(found, key=lambda option: option[0])[1] if found else None

    def plain_ms(self, rows: int, cells: int) -> float:
        """Predicted time of a step without drafts; 0 while nothing is known."""
        return self._cost.decode_ms(rows, cells)

    def _worthwhile(
        self,
        rows: Sequence[Candidate],
        cells: int,
        free_cells: int,
        *,
        step_ms: float = 0.0,
        is_trial: bool = False,
    ) -> Iterator[tuple[float, Drafting]]:
        """Draft lengths that are faster than none, each with its tokens per millisecond."""
        count = len(rows)
        plain_ms = self.plain_ms(count, cells) if count and self._cost.has_decoded(count) else 0.0
        if plain_ms <= 0:
            return
        limit_ms = min(row.target_tbt_ms for row in rows)
        if plain_ms > limit_ms:
            limit_ms = HOPELESS * plain_ms
        for lengths in self._options(rows, min(free_cells, MAX_TOKENS - count)):
            sizes = [count + sum(lengths)]
            if self._needs_equal:
                sizes = [n * (1 + length) for length, n in Counter(lengths).items()]
            guess_ms = step_ms * max(lengths)
            batch_ms = sum(self._cost.decode_ms(size, cells) for size in sizes)
            if guess_ms + batch_ms > limit_ms:
                continue
            # By the table of decode rows: a pass of as many tokens takes as long, and a table of its own learnt the
            # same.
            hoped_ms = sum(self._cost.hoped_decode_ms(size, cells, is_trial=is_trial) for size in sizes)
            believed_ms = guess_ms + max(plain_ms, hoped_ms)
            gained = [1 + sum(row.likelihoods[:length]) for row, length in zip(rows, lengths, strict=True)]
            rate = sum(gained) / (believed_ms + STEP_MS)
            if rate > WORTH * count / plain_ms and min(gained) * SLOWER * plain_ms >= believed_ms:
                yield rate, Drafting(lengths, plain_ms, batch_ms)

    def _options(self, rows: Sequence[Candidate], most: int) -> Iterator[tuple[int, ...]]:
        """Draft lengths to consider, of at most `most` drafted tokens in all."""
        if self._needs_equal:
            for length in range(1, max(len(row.likelihoods) for row in rows) + 1):
                lengths = tuple(length if len(row.likelihoods) >= length else 0 for row in rows)
                if sum(lengths) <= most:
                    yield lengths
            return
        # The likeliest tokens first. Those of one row keep their order, because their probabilities fall.
        ranked = sorted(
            (
                (chance, -index, row)
                for row, candidate in enumerate(rows)
                for index, chance in enumerate(candidate.likelihoods)
            ),
            reverse=True,
        )[:most]
        drafted, by_row = 0, [0] * len(rows)
        for size in _sizes(len(rows), len(ranked)):
            for _, _, row in ranked[drafted : size - len(rows)]:
                by_row[row] += 1
            drafted = size - len(rows)
            yield tuple(by_row)


def _sizes(rows: int, drafted: int) -> list[int]:
    """Sizes of passes to consider: those with a bucket in the cost model, and the largest possible one."""
    largest = rows + drafted
    return [*(size for size in ROWS if rows < size < largest), *([largest] if drafted else [])]


def saved_ms(tokens: int, drafting: Drafting, took_ms: float) -> float:
    """Time (ms) that a step of `tokens` tokens has saved a row; negative where it took longer than without drafts."""
    return tokens * drafting.plain_ms - took_ms if math.isfinite(took_ms) else 0.0

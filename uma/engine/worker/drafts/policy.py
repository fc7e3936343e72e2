"""How many tokens of each row's guess are worth verifying. Pure.

A pass over a row's last token and a draft behind it gives one token, and one more for each drafted token that holds.
Its time is not proportional to its size: on a GPU a pass of 8 tokens costs hardly more than one of 1, on a CPU with
some weights one of 2 costs nearly three times as much, and one of 16 little more than that. It takes as long as a
decode step of as many rows, so the cost model has one table for both. A size that was never seen is tried where it
could pay if it took no longer than smaller ones.

Where a sequence has a state, llama.cpp computes only rows of equal length together: each draft length is a pass of its
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
"""Maximum tokens that are verified in one step."""
STEP_MS = 0.3
"""Cost of a step with drafts besides its computing: to guess, to sample one by one, to book. Decode steps without
drafts run as a stride, and pay a fraction of that."""
WORTH = 1.08
"""Minimum expected gain, as a factor, for which tokens are drafted: estimates are this uncertain."""
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
    """What to verify in one step."""

    lengths: tuple[int, ...]
    """Drafted tokens of each row; 0: its last token alone."""
    plain_ms: float
    """What a step without drafts would take."""
    batch_ms: float
    """What the step is expected to take."""


class DraftPolicy:
    """Chooses draft lengths from what the cost model has learnt, and sees to it that it learns."""

    __slots__ = ("_cost", "_needs_equal", "_without")

    def __init__(self, cost: CostModel, *, needs_equal: bool = False) -> None:
        """`needs_equal`: each draft length takes a pass of its own."""
        self._cost = cost
        self._needs_equal = needs_equal
        self._without = 0
        """Times that drafts were possible and not worth it."""

    def can_pay(self, rows: int, cells: int, target_tbt_ms: float) -> bool:
        """Whether drafts would be verified for `rows` decode rows if all of them were certain."""
        certain = Candidate((1.0,) * min(RULES.max_draft, MAX_TOKENS // rows), target_tbt_ms)
        return any(True for _ in self._worthwhile([certain] * rows, cells, MAX_TOKENS))

    def choose(
        self, rows: Sequence[Candidate], cells: int, free_cells: int, *, step_ms: float = 0.0
    ) -> Drafting | None:
        """Draft lengths for decode rows, with so many KV cells in use; None: no drafts.

        `free_cells` is how many more tokens than rows there can be in all. `step_ms` is what it takes to guess one more
        token for each row. What was too slow is tried again once in `FORGET_AFTER` times.
        """
        found = [*self._worthwhile(rows, cells, free_cells, step_ms=step_ms)]
        if not found and any(row.likelihoods for row in rows):
            self._without += 1
            if self._without % FORGET_AFTER == 0:
                found = [*self._worthwhile(rows, cells, free_cells, step_ms=step_ms, is_trial=True)]
        return max(found, key=lambda option: option[0])[1] if found else None

    def plain_ms(self, rows: int, cells: int) -> float:
        """What a step without drafts takes; 0 while nothing is known."""
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
        """Lengths that are faster than none, each with its tokens a millisecond."""
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
            # By the decode rows' own table: a pass of as many tokens takes as long, and a second one learnt the same
            # twice.
            hoped_ms = sum(self._cost.hoped_decode_ms(size, cells, is_trial=is_trial) for size in sizes)
            believed_ms = guess_ms + max(plain_ms, hoped_ms)
            gained = [1 + sum(row.likelihoods[:length]) for row, length in zip(rows, lengths, strict=True)]
            rate = sum(gained) / (believed_ms + STEP_MS)
            if rate > WORTH * count / plain_ms and min(gained) * SLOWER * plain_ms >= believed_ms:
                yield rate, Drafting(lengths, plain_ms, batch_ms)

    def _options(self, rows: Sequence[Candidate], most: int) -> Iterator[tuple[int, ...]]:
        """Lengths that are considered, of at most so many drafted tokens in all."""
        if self._needs_equal:
            for length in range(1, max(len(row.likelihoods) for row in rows) + 1):
                lengths = tuple(length if len(row.likelihoods) >= length else 0 for row in rows)
                if sum(lengths) <= most:
                    yield lengths
            return
        # Best chances first. The tokens of one row keep their order, because their chances fall.
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
    """Sizes of passes that are considered: those that the cost model tells apart, and the largest there can be."""
    largest = rows + drafted
    return [*(size for size in ROWS if rows < size < largest), *([largest] if drafted else [])]


def saved_ms(tokens: int, drafting: Drafting, took_ms: float) -> float:
    """Time that a row's reader was spared by a step that gave it `tokens` tokens; negative where it took longer."""
    return tokens * drafting.plain_ms - took_ms if math.isfinite(took_ms) else 0.0

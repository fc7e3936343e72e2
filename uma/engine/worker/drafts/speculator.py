"""Drafts: guessed tokens that are verified together with a row's last token in one batch.

The target's own sampler decides at every position, so a draft changes only the time. Drafters guess; the policy says
how much of each draft is worth verifying. Belongs to the decode thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Rows
from typing import NamedTuple

from uma.config import Speculate
from uma.engine.clock import now_ms
from uma.engine.kv.pool import KvPool
from uma.engine.policy.cost import CostModel
from uma.engine.sizing import RULES
from uma.engine.worker.drafts.drafter import NOTHING, Drafter, Guess
from uma.engine.worker.drafts.policy import MAX_TOKENS, Candidate, Drafting, DraftPolicy
from uma.engine.worker.sequence import Sequence
from uma.llama.context import Context
from uma.metrics import EngineMetrics

_log = logging.getLogger("uma.engine")

READ_SHARE = 0.5
"""Share of the time left between two tokens, after the batch, in which a drafter can read texts."""


class Draft(NamedTuple):
    """A row, and its draft, which can be empty."""

    sequence: Sequence
    tokens: list[int]


class Drafts(NamedTuple):
    """Drafts to verify in one batch, and what the policy expects of it."""

    rows: list[Draft]
    drafting: Drafting
    spent_ms: float = 0.0
    """Time (ms) that guessing took."""


class Speculator:
    """Drafts for the decode rows of one engine. `always` verifies every draft in full, whatever it costs, for tests and
    measurements.
    """

    def __init__(
        self,
        cost: CostModel,
        pool: KvPool,
        context: Context,
        mode: Speculate,
        drafters: Rows[Drafter],
        metrics: EngineMetrics,
    ) -> None:
        self._policy = DraftPolicy(cost, needs_equal=context.model.shape.has_states)
        self._pool = pool
        self._n_batch = context.n_batch
        self._most = context.rolled_back or RULES.max_draft
        """Maximum drafted tokens of a row."""
        self._mode = mode
        self._drafters = drafters
        """Drafters; each row uses the one with the most tokens expected to be accepted, of equals the first."""
        self._metrics = metrics
        self.fault = ""
        """Why drafts are off; empty where no drafter has failed. Any thread can read it."""
        self._can_pay_now = False
        """Whether drafts could pay for the rows of this tick."""

    def draft(self, rows: Rows[Sequence]) -> Drafts | None:
        """Drafts to verify with the next tokens of these decode rows; None where plain steps are expected to be faster.

        An exception in a drafter turns drafts off.
        """
        try:
            return self._draft(rows)
        except Exception as fault:  # noqa: BLE001  (whatever it is, texts are the same without drafts)
            self._give_up(fault)
            return None

    def _give_up(self, fault: Exception) -> None:
        _log.error("drafts are off from now on: a fault in the engine", exc_info=fault)
        self._mode, self._can_pay_now = "off", False
        self.fault = f"a fault ended drafts ({type(fault).__name__}: {fault}); the log has the traceback"

    def _draft(self, rows: Rows[Sequence]) -> Drafts | None:
        self._can_pay_now = self._mode != "off" and self._is_possible(rows) and self._can_pay(rows)
        if not self._can_pay_now:
            return None
        free = self._pool.free_cells - len(rows)
        room = min(self._most, min(self._n_batch, free) // len(rows) - 1)
        began = now_ms()
        drafters, expected = self._expected(rows, room)
        wanted = self._choose(rows, expected, free, self._step_ms(drafters))
        if wanted is None:
            return None
        guesses = self._guess(rows, drafters, wanted)
        guessed = [guess.probabilities for guess in guesses]
        drafting = self._choose(rows, guessed, free, 0.0)
        spent_ms = now_ms() - began if self._step_ms(drafters) else 0.0
        if drafting is None:
            self._count_wasted([row for row, guess in zip(rows, guesses, strict=True) if guess.tokens], spent_ms)
            return None
        parts = zip(rows, guesses, drafting.lengths, strict=True)
        return Drafts([Draft(row, guess.tokens[:length]) for row, guess, length in parts], drafting, spent_ms)

    def should_end_stride(self, rows: Rows[Sequence], tokens: Rows[int]) -> bool:
        """Whether to end a stride that has given each row a token, because a draft would be faster."""
        if not self._can_pay_now:
            return False
        # `any` ends at the first such row; the next tick catches up with the tokens of the rows behind it.
        pairs = zip(rows, tokens, strict=True)
        try:
            return any(drafter.on_token(row, token) for row, token in pairs for drafter in self._drafters)
        except Exception as fault:  # noqa: BLE001  (as in `draft`)
            self._give_up(fault)
            return False

    def _is_possible(self, rows: Rows[Sequence]) -> bool:
        # With split KV llama.cpp computes only rows of equal length together.
        if not rows or (self._pool.cells.is_split and len(rows) > 1):
            return False
        # Cells for drafts must not be missing for another row.
        if self._pool.free_cells < MAX_TOKENS * len(rows):
            return False
        return all(sequence.uncomputed == 1 and not sequence.choice.forced for sequence in rows)

    def _can_pay(self, rows: Rows[Sequence]) -> bool:
        target_ms = min(sequence.target_tbt_ms for sequence in rows)
        return self._mode == "always" or self._policy.can_pay(len(rows), self._pool.used_cells, target_ms)

    def _expected(self, rows: Rows[Sequence], room: int) -> tuple[list[Drafter | None], list[Rows[float]]]:
        """The drafter of each row, and the probabilities that it expects."""
        drafters: list[Drafter | None] = []
        probabilities: list[Rows[float]] = []
        for sequence in rows:
            most = _most(sequence, room)
            best: tuple[Drafter | None, Rows[float]] = (None, ())
            for drafter in self._drafters if most > 0 else ():
                expected = drafter.expected(sequence, most)
                if sum(expected) > sum(best[1]):
                    best = drafter, expected
            drafters.append(best[0])
            probabilities.append(best[1])
        return drafters, probabilities

    def _step_ms(self, drafters: Rows[Drafter | None]) -> float:
        """Time to guess one more token for each row."""
        return sum(drafter.step_ms(drafters.count(drafter)) for drafter in self._drafters if drafter in drafters)

    def _choose(
        self, rows: Rows[Sequence], probabilities: Rows[Rows[float]], free: int, step_ms: float
    ) -> Drafting | None:
        """How many tokens of each row's draft are worth their time; None: no drafts."""
        if not any(probabilities):
            return None
        cells = self._pool.used_cells
        if self._mode == "always":
            plain_ms = self._policy.plain_ms(len(rows), cells)
            return Drafting(tuple(map(len, probabilities)), plain_ms, plain_ms)
        candidates = [Candidate(found, row.target_tbt_ms) for found, row in zip(probabilities, rows, strict=True)]
        return self._policy.choose(candidates, cells, free, step_ms=step_ms)

    def _guess(self, rows: Rows[Sequence], drafters: Rows[Drafter | None], wanted: Drafting) -> list[Guess]:
        """A draft of the wanted length, or a shorter one, for each row."""
        guesses = [NOTHING] * len(rows)
        for drafter in self._drafters:
            own = [index for index, chosen in enumerate(drafters) if chosen is drafter and wanted.lengths[index]]
            if not own:
                continue
            plain_ms, within_ms = self._terms(rows, wanted)
            found = drafter.guess([(rows[index], wanted.lengths[index]) for index in own], plain_ms, within_ms)
            for index, guess in zip(own, found, strict=True):
                guesses[index] = guess
        return guesses

    def _terms(self, rows: Rows[Sequence], wanted: Drafting) -> tuple[float, float]:
        """Time of a row's token without drafts, and how long a drafter can read a text that it has not read."""
        if self._mode == "always":
            return math.inf, math.inf
        target_ms = min(row.target_tbt_ms for row in rows)
        return wanted.plain_ms, READ_SHARE * (target_ms - wanted.batch_ms)

    def _count_wasted(self, rows: Rows[Sequence], took_ms: float) -> None:
        """Count time after which no draft was verified: every row has waited for it."""
        if took_ms:
            self._metrics.draft_saved_ms_total -= took_ms * len(rows)
            for row in rows:
                row.batches.saved_ms -= took_ms


def _most(sequence: Sequence, room: int) -> int:
    """Maximum tokens of a draft, by the limits of the row."""
    most = min(room, sequence.left_tokens - 1)
    return min(most, sequence.credits - 1) if sequence.request.stream else most

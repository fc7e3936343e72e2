"""Drafts: tokens that are guessed, and verified together with a row's last token in one batch.

The target's own sampler decides at every position, so a draft can change nothing but the time. Each decode row's text
is followed by a `Lookup` for as long as drafts could pay here; the policy says how much of its guess is verified.
Belongs to the decode thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

from uma.config import Speculate
from uma.engine.kv.pool import KvPool
from uma.engine.policy.speculation import MAX_DRAFT, Candidate, Drafting, DraftPolicy
from uma.engine.worker.lookup import Lookup
from uma.engine.worker.sequence import Sequence
from uma.llama.context import Context

LEAST_FREE_CELLS = 64
"""Free cells for each row under which nothing is drafted: what a draft takes could make another row wait."""


class Draft(NamedTuple):
    """A row, and what is guessed to come behind its last token: possibly nothing."""

    sequence: Sequence
    tokens: list[int]


class Drafts(NamedTuple):
    """What to verify in one batch, and what the policy expects of it."""

    rows: list[Draft]
    drafting: Drafting


class Drafter:
    """Guesses for the decode rows of one engine. `always` verifies every guess in full, whatever it costs: it is there
    to test and to measure with.
    """

    def __init__(self, policy: DraftPolicy, pool: KvPool, context: Context, mode: Speculate) -> None:
        self._policy = policy
        self._pool = pool
        self._vocab = context.model.vocab
        self._n_batch = context.n_batch
        self._mode = mode
        self.is_on = mode != "off"

    def draft(self, rows: Rows[Sequence], *, is_one_by_one: bool) -> Drafts | None:
        """What to verify with the next token of these decode rows; None where plain steps are expected to be faster."""
        if not self.is_on or not self._is_possible(rows) or not self._can_pay(rows, is_one_by_one=is_one_by_one):
            return None
        free = self._pool.free_cells - len(rows)
        room = min(MAX_DRAFT, min(self._n_batch, free) // len(rows) - 1)
        guesses = [self._guess(sequence, room) for sequence in rows]
        if not any(guesses):
            return None
        candidates = [
            Candidate(sequence.lookup.chances(len(guess)) if sequence.lookup else (), sequence.target_tbt_ms)
            for sequence, guess in zip(rows, guesses, strict=True)
        ]
        cells = self._pool.used_cells
        drafting: Drafting | None
        if self._mode == "always":
            plain_ms = self._policy.plain_ms(len(rows), cells, is_one_by_one=is_one_by_one)
            drafting = Drafting(tuple(map(len, guesses)), plain_ms, plain_ms)
        else:
            drafting = self._policy.choose(candidates, cells, free, is_one_by_one=is_one_by_one)
        if drafting is None:
            return None
        parts = zip(rows, guesses, drafting.lengths, strict=True)
        return Drafts([Draft(sequence, guess[:length]) for sequence, guess, length in parts], drafting)

    def _is_possible(self, rows: Rows[Sequence]) -> bool:
        # With a buffer of KV for each sequence llama.cpp computes only rows of equal length together.
        if not rows or (self._pool.in_id_order and len(rows) > 1):
            return False
        if self._pool.free_cells < LEAST_FREE_CELLS * len(rows):
            return False
        return all(sequence.missing == 1 and not sequence.forced for sequence in rows)

    def _can_pay(self, rows: Rows[Sequence], *, is_one_by_one: bool) -> bool:
        target_ms = min(sequence.target_tbt_ms for sequence in rows)
        return self._mode == "always" or self._policy.can_pay(
            len(rows), self._pool.used_cells, target_ms, is_one_by_one=is_one_by_one
        )

    def _guess(self, sequence: Sequence, room: int) -> list[int]:
        """The next tokens of a sequence, as far as its bounds and its grammar allow."""
        lookup = self._lookup(sequence)
        most = min(room, sequence.max_tokens - sequence.generated - 1)
        if sequence.request.stream:
            most = min(most, sequence.credits - 1)
        guess = lookup.guess(most) if most > 0 else []
        for index, token in enumerate(guess):
            if token in self._vocab.eog:
                guess = guess[:index]
                break
        if guess and sequence.grammar is not None:
            guess = guess[: sequence.grammar.common(guess)]
        return guess

    def _lookup(self, sequence: Sequence) -> Lookup:
        lookup = sequence.lookup
        if lookup is None:
            lookup = sequence.lookup = Lookup(sequence.tokens)
            if ahead := self._pool.continuation(sequence.tokens, sequence.max_tokens):
                lookup.follow(ahead)
        else:
            lookup.catch_up(sequence.tokens)
        return lookup

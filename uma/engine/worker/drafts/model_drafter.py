"""A small model as a drafter: it continues each row's text for some tokens, which the target verifies in one batch.

It has a context of its own on the decode thread. Its KV memory is kept in step with each row by comparing tokens:
tokens that the row did not get are cut off, and missing ones are read with the next draft. Drafted tokens that were not
verified stay valid as long as the row's own tokens agree with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Rows
from contextlib import suppress
from functools import partial
from itertools import takewhile

import attrs

from uma.engine.policy.cost import TILE_TOKENS
from uma.engine.worker.drafts.drafter import Calibration, Guess
from uma.engine.worker.drafts.guessing import GuessedText, GuessingDrafter, GuessInProgress
from uma.engine.worker.sequence import Sequence
from uma.errors import UmaError
from uma.llama.batch import Batch
from uma.llama.context import Context
from uma.llama.grammar import GrammarState
from uma.llama.vocab import Vocab
from uma.metrics import EngineMetrics

NEAR_TOKENS = 16
"""Maximum tokens that are read together with a draft; more are read before it, in pieces that keep readers supplied."""
GAIN_SHARE = 0.3
"""Usual gain of a draft, as a share of a token's time."""


@attrs.define(eq=False, slots=True)
class _DraftContext(GuessedText):
    """A row's text in the small model's memory, and the guess behind it."""

    seq_id: int = attrs.field(kw_only=True)
    held: array[int] = attrs.field(factory=lambda: array("i"))
    """Tokens whose KV is in memory: the row's, then possibly guessed ones."""


_Draft = GuessInProgress[_DraftContext]


def _uncomputed(draft: _Draft) -> int:
    """Tokens of the row and of its draft that the small model has not read."""
    return len(draft.sequence.tokens) + draft.ahead - len(draft.text.held)


def _missing(sequence: Sequence, text: _DraftContext | None) -> int:
    """Tokens of a row that the small model has not read: at least the last one, whose logits give the next guess."""
    return len(sequence.tokens) - (len(text.held) if text is not None else 0)


class ModelDrafter(GuessingDrafter[_DraftContext]):
    """A `Drafter` that lets a small model guess."""

    def __init__(self, context: Context, target: Vocab, threads: Callable[[], int], metrics: EngineMetrics) -> None:
        super().__init__(context, target, threads, metrics)
        self._batch = Batch(context.n_batch)
        self._free_ids = list(range(context.n_seq_max))

    def expected(self, sequence: Sequence, most: int) -> Rows[float]:
        """See `GuessingDrafter.expected`. None behind a picture, of which the small model has no embeddings."""
        return () if sequence.pictures else super().expected(sequence, most)

    def guess(self, rows: Rows[tuple[Sequence, int]], plain_ms: float, within_ms: float) -> list[Guess]:
        """Read what is missing of each text, then draft."""
        self._drop_ended()
        sequences = [sequence for sequence, _ in rows]
        for sequence in sequences:
            within_ms -= self._follow(sequence, sequences, plain_ms, within_ms)
        drafts = [
            GuessInProgress(sequence, text, wanted, self._grammar_of(sequence, text))
            for sequence, wanted in rows
            if (text := self._texts.get(sequence)) is not None and _missing(sequence, text) <= NEAR_TOKENS
        ]
        return self._guess_on(drafts, rows, plain_ms)

    # Memory

    @property
    def _used_cells(self) -> int:
        return sum(len(text.held) for text in self._texts.values())

    def _catch_up(self, sequence: Sequence, text: _DraftContext) -> None:
        """Compare with the row's new tokens, and cut off what disagrees with them."""
        agreed = min(text.known, len(text.held))  # guesses stand only behind these
        text.compare(sequence.tokens)
        ahead = [*sequence.tokens[agreed : len(text.held)], *text.guess]
        pairs = zip(text.held[agreed:], ahead, strict=False)
        agreed += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._cut(text, agreed)

    def _cut(self, text: _DraftContext, length: int) -> None:
        if length < len(text.held):
            self._context.seq_rm(text.seq_id, length, -1)
            del text.held[length:]

    def _has_place(self, sequence: Sequence, count: int, rows: Rows[Sequence]) -> bool:
        """Whether `count` more tokens of a row fit. For them, texts of rows that do not decode now are dropped."""
        needed = count + NEAR_TOKENS * (1 + len(rows))
        idle = [other for other in self._texts if other not in rows]
        while idle and not (self._used_cells + needed <= self._context.n_ctx and self._has_id(sequence)):
            self._drop(idle.pop(0))
        if self._used_cells + needed > self._context.n_ctx or not self._has_id(sequence):
            return False
        if sequence not in self._texts:
            calibration = Calibration(self._of_all)
            self._texts[sequence] = _DraftContext(calibration, known=len(sequence.tokens), seq_id=self._free_ids.pop())
        return True

    def _has_id(self, sequence: Sequence) -> bool:
        return sequence in self._texts or bool(self._free_ids)

    def _drop(self, sequence: Sequence) -> None:
        text = self._texts.pop(sequence)
        self._context.seq_rm(text.seq_id)
        self._free_ids.append(text.seq_id)

    # Computing

    def _follow(self, sequence: Sequence, rows: Rows[Sequence], plain_ms: float, within_ms: float) -> float:
        """Read what is missing of a text, as far as time allows; returns the milliseconds that it took.

        A text is read once drafts could have saved as much as reading it takes (the ski rental rule): for a request
        that ends after some tokens nothing is read.
        """
        text = self._texts.get(sequence)
        missing = _missing(sequence, text)
        if text is not None and missing <= NEAR_TOKENS:
            return 0.0
        held = len(sequence.tokens) - missing
        if self._cost.prefill_ms(missing, held) > GAIN_SHARE * plain_ms * sequence.generated:
            return 0.0
        if not self._has_place(sequence, missing, rows):
            return 0.0
        text, took_ms = self._texts[sequence], 0.0
        while (missing := _missing(sequence, text)) > NEAR_TOKENS and sequence in self._texts:
            count = self._piece(missing - 1, len(text.held), within_ms - took_ms)
            if count < 1:
                break
            took_ms += self._read(sequence, count)
        return took_ms

    def _piece(self, missing: int, held: int, within_ms: float) -> int:
        """Number of a text's next tokens to read in this tick."""
        most = min(missing, self._batch.capacity)
        if not self._cost.knows_prefill:
            return min(most, TILE_TOKENS)
        return self._cost.best_size(most, lambda _: held, within_ms)

    def _read(self, sequence: Sequence, count: int) -> float:
        text = self._texts[sequence]
        first = len(text.held)
        tokens = sequence.tokens[first : first + count]
        self._batch.clear()
        self._batch.add(tokens, first, text.seq_id, last_logits=False)
        took_ms = self._timed([sequence], partial(self._context.decode, self._batch))
        if took_ms is None:
            return 0.0
        text.held.extend(tokens)
        self._cost.observe_prefill(count, first, took_ms)
        return took_ms

    def _step(self, drafts: list[_Draft]) -> list[_Draft]:
        for draft in drafts:
            # A text that does not end with a guess is computed from its last token on again, for the logits.
            self._cut(draft.text, len(draft.sequence.tokens) + draft.ahead - 1)
        left, fitting = min(self._context.n_ctx - self._used_cells, self._batch.capacity), list[_Draft]()
        for draft in drafts:
            if (tokens := _uncomputed(draft)) <= left:
                fitting.append(draft)
                left -= tokens
        return self._compute(fitting) if fitting else []

    def _compute(self, drafts: list[_Draft]) -> list[_Draft]:
        """Compute one more token for each draft, in one batch. Empty if that failed."""
        fed = []
        self._batch.clear()
        for draft in drafts:
            text = draft.text
            whole = [*draft.sequence.tokens[len(text.held) :], *text.guess]
            missing = whole[max(0, len(text.held) - len(draft.sequence.tokens)) :]
            self._batch.add(missing, len(text.held), text.seq_id, last_logits=True)
            fed.append(missing)

        def keep() -> None:
            for draft, missing in zip(drafts, fed, strict=True):
                draft.text.held.extend(missing)

        return self._choose_all(drafts, partial(self._context.decode, self._batch), keep)

    def _grammar_of(self, sequence: Sequence, text: _DraftContext) -> GrammarState | None:
        """State of a row's grammar behind its draft. What the grammar does not allow is cut off the draft."""
        if sequence.choice.grammar is None:
            return None
        allowed = sequence.choice.grammar.common(text.guess) if text.guess else 0
        text.forget(allowed)
        self._catch_up(sequence, text)
        fork = sequence.choice.grammar.fork(renews=False)
        with suppress(UmaError):  # it became too complex: the fork allows no token from here on
            for token in text.guess:
                fork.accept(token)
        return fork

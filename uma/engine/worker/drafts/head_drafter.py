"""The model's own prediction heads as a drafter (multi-token prediction, MTP).

The heads know each row's text already (`llama.heads`): a draft begins with the row's last token, and each step takes
the heads' own hidden row of the step before. Drafted tokens are cut off again at once: when the model has verified
them, the heads compute them from the model's hidden rows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial

import attrs

from uma.engine.worker.drafts.drafter import Calibration, Guess
from uma.engine.worker.drafts.guessing import GuessedText, GuessingDrafter, GuessInProgress
from uma.engine.worker.sequence import Sequence
from uma.llama.heads import DraftInput, HiddenRow, PredictionHeads
from uma.metrics import EngineMetrics


@attrs.define(eq=False, slots=True)
class _HeadText(GuessedText):
    """The guess behind a row's text."""

    hidden: list[HiddenRow] = attrs.field(factory=list)
    """The hidden row of the token before the row's last one, and of each that is drafted before the next step's."""


_Draft = GuessInProgress[_HeadText]


class HeadDrafter(GuessingDrafter[_HeadText]):
    """A `Drafter` that has the model's prediction heads guess."""

    def __init__(self, heads: PredictionHeads, threads: Callable[[], int], metrics: EngineMetrics) -> None:
        super().__init__(heads.context, heads.vocab, threads, metrics)
        self._heads = heads

    def expected(self, sequence: Sequence, most: int) -> Rows[float]:
        """See `GuessingDrafter.expected`. Several heads guess one token each."""
        return super().expected(sequence, min(most, self._heads.count) if self._heads.count > 1 else most)

    def guess(self, rows: Rows[tuple[Sequence, int]], plain_ms: float, within_ms: float) -> list[Guess]:
        """See `Drafter.guess`. The heads need no text read first."""
        self._drop_ended()
        for sequence, _ in rows:
            if sequence not in self._texts:
                self._texts[sequence] = _HeadText(Calibration(self._of_all), known=len(sequence.tokens))
        drafts = [self._begun(sequence, wanted) for sequence, wanted in rows]
        guesses = self._guess_on(drafts, rows, plain_ms)
        for sequence, _ in rows:
            self._heads.cut(sequence.slot.seq_id, sequence.next_position)
        return guesses

    def _begun(self, sequence: Sequence, wanted: int) -> _Draft:
        text, grammar = self._texts[sequence], sequence.choice.grammar
        self._catch_up(sequence, text)
        text.hidden = [self._heads.hidden_before(sequence.slot.seq_id, sequence.next_position)]
        return GuessInProgress(sequence, text, wanted, None if grammar is None else grammar.fork(renews=False))

    @property
    def _used_cells(self) -> int:
        return sum(len(sequence.tokens) for sequence in self._texts)

    def _catch_up(self, sequence: Sequence, text: _HeadText) -> None:
        text.compare(sequence.tokens)
        text.forget(0)

    def _drop(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)

    def _step(self, drafts: list[_Draft]) -> list[_Draft]:
        head, first = (drafts[0].ahead, 0) if self._heads.count > 1 else (0, drafts[0].ahead)
        rows = [row for draft in drafts for row in self._rows(draft, first)]

        def keep() -> None:
            for draft, row in zip(drafts, self._heads.hidden(len(drafts)).copy(), strict=True):
                draft.text.hidden.append(row)

        return self._choose_all(drafts, partial(self._heads.predict, head, rows), keep)

    def _rows(self, draft: _Draft, first: int) -> list[DraftInput]:
        """Input of a step: the row's last token and the guessed ones behind it, from the token `first` on."""
        sequence, text = draft.sequence, draft.text
        begins, step = sequence.next_position, 0 if self._heads.reads_cells else 1
        return [
            DraftInput(sequence.slot.seq_id, token, begins + at * step, text.hidden[at], is_last=at == draft.ahead)
            for at, token in enumerate((sequence.tokens[-1], *text.guess))
            if at >= first
        ]

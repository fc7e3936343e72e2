"""The model's own prediction head as a drafter (multi-token prediction, MTP).

The head knows each row's text already (`llama.heads`): a guess begins with the row's last token, and each step takes
the head's own hidden row of the step before. What is guessed is forgotten at once: the head computes it anew, with the
model's hidden rows, once the model has verified it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial

import attrs

from uma.engine.worker.drafts.drafter import Calibration, Guess
from uma.engine.worker.drafts.guessing import GuessedText, GuessingDrafter, GuessInProgress
from uma.engine.worker.sampling import Logits
from uma.engine.worker.sequence import Sequence
from uma.llama.heads import HiddenRow, PredictionHeads
from uma.metrics import EngineMetrics


@attrs.define(eq=False, slots=True)
class _HeadText(GuessedText):
    """The guess behind a row's text."""

    hidden: HiddenRow | None = None
    """The hidden row of the token before the one that the next step begins with."""


_Draft = GuessInProgress[_HeadText]


class HeadDrafter(GuessingDrafter[_HeadText]):
    """A `Drafter` that has the model's prediction head guess."""

    def __init__(self, heads: PredictionHeads, threads: Callable[[], int], metrics: EngineMetrics) -> None:
        super().__init__(heads.context, heads.context.model.vocab, threads, metrics)
        self._heads = heads

    def guess(self, rows: Rows[tuple[Sequence, int]], plain_ms: float, within_ms: float) -> list[Guess]:
        """See `Drafter.guess`. Nothing has to be read before."""
        self._drop_ended()
        for sequence, _ in rows:
            if sequence not in self._texts:
                self._texts[sequence] = _HeadText(Calibration(self._of_all), known=len(sequence.tokens))
        drafts = [self._begun(sequence, wanted) for sequence, wanted in rows]
        guesses = self._guess_on(drafts, rows, plain_ms)
        for sequence, _ in rows:
            self._heads.cut(_seq_id(sequence), sequence.next_position)
        return guesses

    def _begun(self, sequence: Sequence, wanted: int) -> _Draft:
        text, grammar = self._texts[sequence], sequence.choice.grammar
        self._catch_up(sequence, text)
        text.hidden = self._heads.hidden_before(_seq_id(sequence), sequence.next_position)
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
        rows, hidden = [], []
        for draft in drafts:
            last = draft.text.guess[-1] if draft.ahead else draft.sequence.tokens[-1]
            rows.append((_seq_id(draft.sequence), last, draft.sequence.next_position + draft.ahead))
            assert draft.text.hidden is not None
            hidden.append(draft.text.hidden)

        def compute() -> Logits | None:
            sequences = [draft.sequence for draft in drafts]
            took_ms = self._timed(sequences, partial(self._heads.predict, rows, hidden))
            if took_ms is None:
                return None
            self._cost.observe_decode(len(drafts), self._used_cells, took_ms)
            for draft, row in zip(drafts, self._heads.hidden(len(drafts)).copy(), strict=True):
                draft.text.hidden = row
            return self._context.logits(len(drafts))

        return self._choose_all(drafts, compute)


def _seq_id(sequence: Sequence) -> int:
    assert sequence.holding is not None
    return sequence.holding.seq_id

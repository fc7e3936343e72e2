"""Common base of drafters that compute: they guess one token a step, for all rows in one batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Generic, TypeVar

import attrs
import numpy as np

from uma.engine.clock import now_ms
from uma.engine.policy.cost import CostModel
from uma.engine.worker.drafts.drafter import NOTHING, Calibration, Guess
from uma.engine.worker.sampling import Logits
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.status import Status
from uma.errors import DecodeFailed, UmaError
from uma.llama.context import ABORTED, DONE, Context
from uma.llama.grammar import GrammarMasks, GrammarState
from uma.llama.vocab import Vocab
from uma.metrics import EngineMetrics

USUAL = 0.7
"""Probability of a token that is not guessed yet, before any calibration."""
MEASURE_AGAIN = 2_048
"""Calls of `step_ms` without a computed draft after which the cost is measured again: the machine can have been busy
when it was."""


@attrs.define(eq=False, slots=True)
class GuessedText:
    """Draft behind a row's text, and what earlier ones have shown."""

    calibration: Calibration
    guess: list[int] = attrs.field(factory=list)
    """Tokens that are guessed to follow the row's tokens."""
    sureness: list[float] = attrs.field(factory=list)
    """Probability of each guessed token, as the drafter finds it."""
    known: int = 0
    """Number of the row's tokens that were compared with guesses."""

    def probabilities(self) -> list[float]:
        """Probability of each guessed token that it and all before it are accepted."""
        whole, found = 1.0, []
        for probability in self.sureness:
            whole *= self.calibration.of(probability)
            found.append(whole)
        return found

    def compare(self, tokens: array[int]) -> None:
        """Learn from the tokens that were added to the row, and keep the part of the guess that agrees with them."""
        for token in tokens[self.known :]:
            if not self.guess:
                break
            is_accepted = self.guess[0] == token
            self.calibration.learn(self.sureness[0], is_accepted=is_accepted)
            if is_accepted:
                del self.guess[0], self.sureness[0]
            else:
                self.forget(0)
        self.known = len(tokens)

    def forget(self, kept: int) -> None:
        """Forget the guess but for its first `kept` tokens."""
        del self.guess[kept:], self.sureness[kept:]


TextT = TypeVar("TextT", bound=GuessedText)


@attrs.define(eq=False, slots=True)
class GuessInProgress(Generic[TextT]):
    """A draft that is being computed."""

    sequence: Sequence
    text: TextT
    wanted: int
    grammar: GrammarState | None
    """State of the grammar behind the guess so far."""

    @property
    def ahead(self) -> int:
        return len(self.text.guess)

    def goes_on(self, least_probability: float) -> bool:
        """Whether one more token is wanted and possible, and the last one is likely enough to be accepted."""
        is_over = self.grammar is not None and self.grammar.is_over
        return self.ahead < self.wanted and not is_over and self.text.probabilities()[-1] >= least_probability


class GuessingDrafter(ABC, Generic[TextT]):
    """A `Drafter` with a context of its own. The owner of the context closes it, after the decode thread has ended."""

    def __init__(self, context: Context, target: Vocab, threads: Callable[[], int], metrics: EngineMetrics) -> None:
        self._context = context
        self._vocab = target
        self._n_common = min(target.n_tokens, context.model.vocab.n_tokens)
        self._threads = threads
        self._metrics = metrics
        self._cost = CostModel()
        self._masks = GrammarMasks(target.n_tokens)
        self._most_tokens = min(context.n_ctx_seq, context.model.n_ctx_train or context.n_ctx_seq)
        self._texts: dict[Sequence, TextT] = {}
        """Texts by row, the oldest first."""
        self._of_all = Calibration()
        """Calibration by all texts, with which a new text begins."""
        self._is_off = False
        """The engine stops."""
        self._asked = 0
        """Times that `step_ms` was asked for since the last batch."""

    # Drafter

    def expected(self, sequence: Sequence, most: int) -> Rows[float]:
        """Probabilities of the present guess, then those that this text has shown, or all texts if it is new."""
        grammar = sequence.choice.grammar
        if self._is_off or len(sequence.tokens) + most > self._most_tokens or (grammar and grammar.is_over):
            return ()
        text = self._texts.get(sequence)
        expected: list[float] = []
        if text is not None:
            self._catch_up(sequence, text)
            expected = text.probabilities()[:most]
        calibration = self._of_all if text is None else text.calibration
        calibration.fade()
        while len(expected) < most:
            expected.append((expected[-1] if expected else 1.0) * calibration.of(USUAL))
        return expected

    def step_ms(self, rows: int) -> float:
        """Measured time of a step, unless the measurement is too old."""
        self._asked += 1
        if self._asked > MEASURE_AGAIN:
            self._asked = 0
            self._cost = CostModel()
            self._cost.use(self._context.threads)
        return self._cost.decode_ms(rows, self._used_cells)

    @abstractmethod
    def guess(self, rows: Rows[tuple[Sequence, int]], plain_ms: float, within_ms: float) -> list[Guess]:
        """See `Drafter.guess`."""

    def on_token(self, sequence: Sequence, token: int) -> bool:
        """False always: a draft that pays would have been verified instead of the stride."""
        return False

    def abort(self) -> None:
        """End the batch that runs, and every later one. Any thread."""
        self._context.request_abort()

    def close(self) -> None:
        """End the helper thread, if grammars made one."""
        self._masks.close()

    # For subclasses

    @property
    @abstractmethod
    def _used_cells(self) -> int:
        """Cells that a step's batch can attend to."""

    @abstractmethod
    def _catch_up(self, sequence: Sequence, text: TextT) -> None:
        """Bring the guess up to date with the row's tokens."""

    @abstractmethod
    def _drop(self, sequence: Sequence) -> None:
        """Forget a row's text."""

    @abstractmethod
    def _step(self, drafts: list[GuessInProgress[TextT]]) -> list[GuessInProgress[TextT]]:
        """Compute one more token for each draft, as far as cells suffice. Returns the drafts that got one."""

    def _drop_ended(self) -> None:
        for sequence in [sequence for sequence in self._texts if sequence.status is Status.ENDED]:
            self._drop(sequence)

    def _guess_on(
        self, drafts: list[GuessInProgress[TextT]], rows: Rows[tuple[Sequence, int]], plain_ms: float
    ) -> list[Guess]:
        """Guess for all rows together, step by step, until each has enough tokens, or is so unsure that another one is
        not worth its time.
        """
        least_probability = self._cost.decode_ms(len(drafts), self._used_cells) / plain_ms
        left = [draft for draft in drafts if draft.ahead < draft.wanted]
        while left:
            left = [draft for draft in self._step(left) if draft.goes_on(least_probability)]
        guesses = {draft.sequence: draft.text for draft in drafts if draft.sequence in self._texts}
        return [
            Guess(text.guess[:wanted], text.probabilities()[:wanted]) if (text := guesses.get(sequence)) else NOTHING
            for sequence, wanted in rows
        ]

    def _choose_all(
        self, drafts: list[GuessInProgress[TextT]], compute: Callable[[], int], keep: Callable[[], None]
    ) -> list[GuessInProgress[TextT]]:
        """Append the likeliest token to each draft, by the logits of the batch that `compute` computes. Then `keep`
        takes what else is needed of the batch. Empty if the batch failed.
        """
        masked = [draft for draft in drafts if draft.grammar is not None]
        if masked:
            self._masks.begin([draft.grammar for draft in masked if draft.grammar is not None])
        took_ms = self._timed([draft.sequence for draft in drafts], compute)
        masks = self._masks.wait() if masked else None
        if took_ms is None:
            return []
        self._cost.observe_decode(len(drafts), self._used_cells, took_ms)
        keep()
        logits = self._context.logits(len(drafts))
        for row, draft in enumerate(drafts):
            mask = None if masks is None or draft.grammar is None else masks[masked.index(draft)]
            self._choose(draft, logits[row], mask)
        return drafts

    def _choose(self, draft: GuessInProgress[TextT], logits: Logits, mask: Logits | None) -> None:
        """Append the likeliest token that the row can be given. An end-of-text token ends the draft."""
        sequence, text, ahead = draft.sequence, draft.text, draft.ahead
        logits = logits[: self._n_common]
        if sequence.choice.bias is not None:
            tokens, values = sequence.choice.bias
            is_common = tokens < self._n_common
            logits[tokens[is_common]] += values[is_common]
        if mask is not None:
            logits += mask[: self._n_common]
        ends = self._vocab.eog_ids
        if sequence.suppresses_end(ahead):
            logits[ends[ends < self._n_common]] = -np.inf
        token = int(logits.argmax())
        top = float(logits[token])
        if token in self._vocab.eog or top == -np.inf:
            draft.wanted = ahead
            return
        if draft.grammar is not None:
            try:
                draft.grammar.accept(token)
            except UmaError:  # it became too complex: the row's own grammar says so if the text comes to here
                draft.wanted = ahead
                return
        text.guess.append(token)
        text.sureness.append(1.0 / float(np.exp(logits - top).sum()))

    def _timed(self, sequences: list[Sequence], compute: Callable[[], int]) -> float | None:
        """Milliseconds that the batch took. None if it failed: these texts are then forgotten, and read again."""
        threads = self._threads()
        self._context.set_threads(threads)
        self._cost.use(threads)
        self._asked = 0
        began = now_ms()
        code = compute()
        took_ms = now_ms() - began
        self._metrics.draft_model_ms_total += took_ms
        if code == DONE:
            return took_ms
        for sequence in sequences:
            self._drop(sequence)
        if code < 0:
            raise DecodeFailed(f"llama_decode failed with {code} in the draft model")
        self._is_off = self._is_off or code == ABORTED
        return None

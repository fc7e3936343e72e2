"""A small model as a drafter: it goes on with each row's text for some tokens, which the target then verifies at once.

It has a context of its own on the decode thread. Its KV memory is kept in step with each row by comparing tokens: what
the row was given otherwise than guessed is cut off, what is missing is read with the next guess. Guesses that were not
verified stay good for as long as the row's own tokens agree with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Rows
from contextlib import suppress
from itertools import takewhile

import attrs
import numpy as np

from uma.engine.clock import now_ms
from uma.engine.policy.cost import CostModel
from uma.engine.worker.drafts.drafter import NOTHING, Calibration, Guess
from uma.engine.worker.sampling import Logits
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.status import Status
from uma.errors import DecodeFailed, UmaError
from uma.llama.batch import Batch
from uma.llama.context import ABORTED, DONE, Context
from uma.llama.grammar import GrammarMasks, GrammarState
from uma.llama.vocab import Vocab
from uma.metrics import EngineMetrics

USUAL = 0.7
"""Probability of a token that is not guessed yet, before any text has shown its own."""
NEAR_TOKENS = 16
"""Maximum tokens that are read together with a guess; more are read before it, in pieces that keep readers supplied."""
FIRST_PIECE_TOKENS = 64
"""Tokens of such a piece before it is known what one takes."""
GAIN_SHARE = 0.3
"""Usual gain of a draft, as a share of a token's time."""
MEASURE_AGAIN = 2_048
"""Ticks that ask for the cost of a guess, without one computed, after which it is measured again: the machine can have
been busy when it was."""


@attrs.define(eq=False, slots=True)
class _DraftContext:
    """A row's text in the small model's memory, and the guess behind it."""

    seq_id: int
    calibration: Calibration
    held: array[int] = attrs.field(factory=lambda: array("i"))
    """Tokens whose KV is in memory: the row's, then perhaps guessed ones."""
    guess: list[int] = attrs.field(factory=list)
    """What is guessed to come behind the row's tokens."""
    sureness: list[float] = attrs.field(factory=list)
    """Probability of each guessed token, as the small model finds it."""
    known: int = 0
    """Tokens of the row that were compared with guesses."""

    def probabilities(self) -> list[float]:
        """Probability of each token of the guess that it and all before it are accepted."""
        whole, found = 1.0, []
        for probability in self.sureness:
            whole *= self.calibration.of(probability)
            found.append(whole)
        return found

    def compare(self, tokens: array[int]) -> None:
        """Learn from the tokens that the row was given since, and keep of the guess what still can hold."""
        for token in tokens[self.known :]:
            if not self.guess:
                break
            is_accepted = self.guess[0] == token
            self.calibration.learn(self.sureness[0], is_accepted=is_accepted)
            if is_accepted:
                del self.guess[0], self.sureness[0]
            else:
                self.guess.clear()
                self.sureness.clear()
        self.known = len(tokens)


@attrs.define(eq=False, slots=True)
class _DraftInProgress:
    """A guess that is being made."""

    sequence: Sequence
    text: _DraftContext
    wanted: int
    grammar: GrammarState | None
    """State of the grammar behind the guess so far."""

    @property
    def ahead(self) -> int:
        return len(self.text.guess)

    @property
    def missing(self) -> int:
        """Tokens of the row and of the guess that the small model has not read."""
        return len(self.sequence.tokens) + self.ahead - len(self.text.held)

    def goes_on(self, least_probability: float) -> bool:
        """Whether one more token is wanted and possible, and the one before it is likely enough to be accepted."""
        is_over = self.grammar is not None and self.grammar.is_over
        return self.ahead < self.wanted and not is_over and self.text.probabilities()[-1] >= least_probability


def _missing(sequence: Sequence, text: _DraftContext | None) -> int:
    """Tokens of a row that the small model has not read. At least the last one: its logits are the next guess."""
    return len(sequence.tokens) - (len(text.held) if text is not None else 0)


class ModelDrafter:
    """A `Drafter` that has a small model guess. Its context is closed by the owner, after the decode thread."""

    def __init__(self, context: Context, target: Vocab, threads: Callable[[], int], metrics: EngineMetrics) -> None:
        self._context = context
        self._vocab = target
        self._n_common = min(target.n_tokens, context.model.vocab.n_tokens)
        self._threads = threads
        self._metrics = metrics
        self._cost = CostModel()
        self._batch = Batch(context.n_batch)
        self._masks = GrammarMasks(target.n_tokens)
        self._most_tokens = min(context.n_ctx_seq, context.model.n_ctx_train or context.n_ctx_seq)
        self._texts: dict[Sequence, _DraftContext] = {}
        """Oldest first."""
        self._free_ids = list(range(context.n_seq_max))
        self._of_all = Calibration()
        """What all texts have shown: what a new one begins with."""
        self._is_off = False
        """The engine stops."""
        self._threads_in_force = 0
        self._asked = 0
        """Times that `step_ms` was asked for since the last batch."""

    # Drafter

    def expected(self, sequence: Sequence, most: int) -> Rows[float]:
        """Probabilities of what is guessed already, then by what this text has shown, or all texts where it is new.
        None behind a picture, which the small model has no embeddings of.
        """
        grammar = sequence.choice.grammar
        is_over = grammar is not None and grammar.is_over
        if self._is_off or is_over or sequence.pictures or len(sequence.tokens) + most > self._most_tokens:
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
        """Time of a step as measured, unless that was long ago."""
        self._asked += 1
        if self._asked > MEASURE_AGAIN:
            self._asked = 0
            self._cost = CostModel()
            self._cost.use(self._threads_in_force)
        return self._cost.decode_ms(rows, self._used_cells)

    def guess(self, rows: Rows[tuple[Sequence, int]], plain_ms: float, within_ms: float) -> list[Guess]:
        """Read what is missing of each text, then guess all rows' next tokens together, step by step, until each has
        enough or is so unsure that one token more is not worth its time.
        """
        self._drop_ended()
        sequences = [sequence for sequence, _ in rows]
        for sequence in sequences:
            within_ms -= self._follow(sequence, sequences, plain_ms, within_ms)
        drafts = [
            _DraftInProgress(sequence, text, wanted, self._grammar_of(sequence, text))
            for sequence, wanted in rows
            if (text := self._texts.get(sequence)) is not None and _missing(sequence, text) <= NEAR_TOKENS
        ]
        least_probability = self._cost.decode_ms(len(drafts), self._used_cells) / plain_ms
        left = [draft for draft in drafts if draft.ahead < draft.wanted]
        while left:
            left = [draft for draft in self._step(left) if draft.goes_on(least_probability)]
        guesses = {draft.sequence: draft.text for draft in drafts if draft.sequence in self._texts}
        return [
            Guess(text.guess[:wanted], text.probabilities()[:wanted]) if (text := guesses.get(sequence)) else NOTHING
            for sequence, wanted in rows
        ]

    def on_token(self, sequence: Sequence, token: int) -> bool:
        """False always: a guess that paid would have been verified instead of the stride."""
        return False

    def abort(self) -> None:
        """End the batch that runs, and every later one. Any thread."""
        self._context.request_abort()

    def close(self) -> None:
        """End the helper thread, if grammars made one."""
        self._masks.close()

    # Memory

    @property
    def _used_cells(self) -> int:
        return sum(len(text.held) for text in self._texts.values())

    def _catch_up(self, sequence: Sequence, text: _DraftContext) -> None:
        """Compare with what the row was given since, and cut off what it was not given."""
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
        """Whether so many more tokens of a row can be read. Texts of rows that do not decode now give way."""
        needed = count + NEAR_TOKENS * (1 + len(rows))
        idle = [other for other in self._texts if other not in rows]
        while idle and not (self._used_cells + needed <= self._context.n_ctx and self._has_id(sequence)):
            self._drop(idle.pop(0))
        if self._used_cells + needed > self._context.n_ctx or not self._has_id(sequence):
            return False
        if sequence not in self._texts:
            calibration = Calibration(self._of_all)
            self._texts[sequence] = _DraftContext(self._free_ids.pop(), calibration, known=len(sequence.tokens))
        return True

    def _has_id(self, sequence: Sequence) -> bool:
        return sequence in self._texts or bool(self._free_ids)

    def _drop(self, sequence: Sequence) -> None:
        text = self._texts.pop(sequence)
        self._context.seq_rm(text.seq_id)
        self._free_ids.append(text.seq_id)

    def _drop_ended(self) -> None:
        for sequence in [sequence for sequence in self._texts if sequence.status is Status.ENDED]:
            self._drop(sequence)

    # Computing

    def _follow(self, sequence: Sequence, rows: Rows[Sequence], plain_ms: float, within_ms: float) -> float:
        """Read what is missing of a text, as far as it is worth it and time allows: the milliseconds that it took.

        It is worth it once drafts could have saved as much as it takes (the ski rental rule): a request that ends
        after some tokens is not read for them.
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
        """Tokens of a text that are read in one tick."""
        most = min(missing, self._batch.capacity)
        if not self._cost.knows_prefill:
            return min(most, FIRST_PIECE_TOKENS)
        return self._cost.best_size(most, lambda _: held, within_ms)

    def _read(self, sequence: Sequence, count: int) -> float:
        text = self._texts[sequence]
        first = len(text.held)
        tokens = sequence.tokens[first : first + count]
        self._batch.clear()
        self._batch.add(tokens, first, text.seq_id, last_logits=False)
        took_ms = self._decode([sequence])
        if took_ms is None:
            return 0.0
        text.held.extend(tokens)
        self._cost.observe_prefill(count, first, took_ms)
        return took_ms

    def _step(self, drafts: list[_DraftInProgress]) -> list[_DraftInProgress]:
        """One more token for each guess for which there are cells. Returns those that it was computed for."""
        for draft in drafts:
            # A text that ends with a token that is no guess is computed from that token on too: it gives the logits.
            self._cut(draft.text, len(draft.sequence.tokens) + draft.ahead - 1)
        cells, room = self._context.n_ctx - self._used_cells, 0
        parts: list[list[_DraftInProgress]] = []
        for draft in drafts:
            tokens = draft.missing
            if tokens > min(cells, self._batch.capacity):
                continue
            if tokens > room:
                parts.append([])
                room = self._batch.capacity
            parts[-1].append(draft)
            cells -= tokens
            room -= tokens
        return [draft for part in parts for draft in self._compute(part)]

    def _compute(self, drafts: list[_DraftInProgress]) -> list[_DraftInProgress]:
        """One more token for each of these guesses, in one batch. Empty where that failed."""
        fed = []
        self._batch.clear()
        for draft in drafts:
            text = draft.text
            whole = [*draft.sequence.tokens[len(text.held) :], *text.guess]
            missing = whole[max(0, len(text.held) - len(draft.sequence.tokens)) :]
            self._batch.add(missing, len(text.held), text.seq_id, last_logits=True)
            fed.append(missing)
        masked = [draft for draft in drafts if draft.grammar is not None]
        if masked:
            self._masks.begin([draft.grammar for draft in masked if draft.grammar is not None])
        took_ms = self._decode([draft.sequence for draft in drafts])
        masks = self._masks.wait() if masked else None
        if took_ms is None:
            return []
        self._cost.observe_decode(len(drafts), self._used_cells, took_ms)
        logits = self._context.logits(len(drafts))
        for row, (draft, missing) in enumerate(zip(drafts, fed, strict=True)):
            draft.text.held.extend(missing)
            mask = None if masks is None or draft.grammar is None else masks[masked.index(draft)]
            self._choose(draft, logits[row], mask)
        return drafts

    def _choose(self, draft: _DraftInProgress, logits: Logits, mask: Logits | None) -> None:
        """Go on with the likeliest token that the row can be given. The end of a text ends its guess."""
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
            except UmaError:  # it became too complex: the row's own will say so if the text comes to here
                draft.wanted = ahead
                return
        text.guess.append(token)
        text.sureness.append(1.0 / float(np.exp(logits - top).sum()))

    def _grammar_of(self, sequence: Sequence, text: _DraftContext) -> GrammarState | None:
        """A row's grammar behind its guess so far, which is cut where the grammar does not allow it."""
        if sequence.choice.grammar is None:
            return None
        allowed = sequence.choice.grammar.common(text.guess) if text.guess else 0
        del text.guess[allowed:], text.sureness[allowed:]
        self._catch_up(sequence, text)
        fork = sequence.choice.grammar.fork(renews=False)
        with suppress(UmaError):  # it became too complex: from here on it allows no token
            for token in text.guess:
                fork.accept(token)
        return fork

    def _decode(self, sequences: list[Sequence]) -> float | None:
        """Milliseconds that the batch took. None where it failed: then these texts are forgotten, and read again."""
        threads = self._threads()
        if threads != self._threads_in_force:
            self._threads_in_force = threads
            self._context.set_threads(threads)
            self._cost.use(threads)
        self._asked = 0
        began = now_ms()
        code = self._context.decode(self._batch)
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

"""From logits to tokens: greedy rows all at once, the others by their own sampler chain.

What constrains a row's next token (logit bias, a grammar, the end of text that must not come yet) is added to its
logits before the token is chosen. They are llama.cpp's own memory, so a sampler chain sees the change.

A row can be given several tokens at once: those that its grammar leaves no choice about come behind the sampled one, in
the same step. All of them go to the reader; the next batch computes them together, and samples after the last.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from uma.engine.worker.logprobs import Logprober
from uma.engine.worker.sequence import Sequence
from uma.errors import DecodeFailed
from uma.llama.context import Context
from uma.llama.grammar import GrammarMasks
from uma.types import Logprobs

MAX_FORCED = 32
"""Maximum tokens of a row in one step: what a grammar forces beyond is given in the next ones. It keeps the batch that
reads them, and the events of one step, small."""

Logits = npt.NDArray[np.float32]


class Sampled(NamedTuple):
    """One token that a sequence continues with."""

    token: int
    logprobs: Logprobs | None = None
    """How likely it and the likeliest tokens were; None where not asked for."""
    is_end: bool = False
    """Its grammar is complete with it, and nothing can follow."""


Given = tuple[Sampled, ...] | Exception
"""What a step gives a row: its next tokens, one as a rule; or the fault that ends this sequence alone."""


class Sampling:
    """Chooses tokens for a context's rows. Belongs to the decode thread, which calls `prepare` before each batch."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._vocab = context.model.vocab
        self._masks = GrammarMasks(self._vocab.n_tokens)
        self._logprobs = Logprober(self._vocab)
        self._masked: list[Sequence] = []
        """The sequences whose masks are being computed, in order."""

    def close(self) -> None:
        """End the helper thread, if grammars made one."""
        self._masks.close()

    def prepare(self, sequences: Rows[Sequence]) -> None:
        """Start computing what constrains the next tokens of these rows, to be ready when their batch is computed."""
        self._masked = [
            each for each in sequences if each.grammar is not None and not each.forced and not each.grammar.is_over
        ]
        if self._masked:
            self._masks.begin([each.grammar for each in self._masked if each.grammar is not None])

    def sample(self, sequences: Rows[Sequence], batch_indices: Rows[int]) -> list[Given]:
        """Sample the rows of the batch just computed that have logits, which are these, in this order."""
        logits = self._context.logits(len(sequences))
        is_constrained = any(sequence.is_constrained for sequence in sequences)
        asking = [row for row, sequence in enumerate(sequences) if sequence.wants_logprobs]
        ends = self._read(logits, asking, copies=is_constrained or len(asking) < len(sequences)) if asking else None
        if is_constrained:
            self._constrain(logits, sequences)
        likeliest: list[int] = []
        given: list[Given] = []
        chosen: list[tuple[int, int]] = []
        for row, sequence in enumerate(sequences):
            try:
                if sequence.forced:
                    given.append(self._forced(sequence))
                    continue
                if sequence.sampler is not None:
                    if sequence.suppresses_end:
                        logits[row, self._vocab.eog_ids] = -np.inf
                    self._check_any(logits, row, sequence)
                    token = sequence.sampler.sample(self._context, batch_indices[row])
                else:
                    # Greedy rows all at once: one pass of numpy over the matrix instead of a call for each row.
                    likeliest = likeliest or logits.argmax(axis=1).tolist()
                    token = likeliest[row]
                    if token in self._vocab.eog and sequence.suppresses_end:
                        logits[row, self._vocab.eog_ids] = -np.inf
                        token = int(logits[row].argmax())
                    self._check_any(logits, row, sequence)
                sampled = Sampled(token)
                given.append((sampled,) if sequence.grammar is None else self._advance(sequence, sampled))
                if sequence.wants_logprobs:
                    chosen.append((row, token))
            except _CompleteError:
                given.append((Sampled(int(self._vocab.eog_ids[0]), is_end=True),))
            except Exception as error:  # noqa: BLE001  (whatever it is, it is this row's alone)
                given.append(error)
        if chosen:
            if ends is not None:
                logits[:, self._vocab.eog_ids] = ends
            self._tell(chosen, asking, sequences, given)
        return given

    def prompt_logprobs(self, tokens: Rows[int], count: int) -> list[Logprobs]:
        """How likely the batch just computed, whose every row has logits, found each of these as its row's next."""
        self._logprobs.read(self._context.logits(len(tokens)))
        return self._logprobs.told(range(len(tokens)), tokens, [count] * len(tokens))

    def _read(self, logits: Logits, asking: list[int], *, copies: bool) -> Logits | None:
        """Read the log probabilities of these rows. Where no copy is made, returns the logits of the ends of text: they
        are all that choosing a token changes then, and are put back before log probabilities are told.
        """
        if copies:
            self._logprobs.read_some(logits, asking)
            return None
        self._logprobs.read(logits)
        ends: Logits = logits[:, self._vocab.eog_ids]
        return ends

    def _constrain(self, logits: Logits, sequences: Rows[Sequence]) -> None:
        """Add logit biases and grammar masks to the rows that have them."""
        masks = dict(zip(self._masked, self._masks.wait(), strict=True)) if self._masked else {}
        self._masked = []
        for row, sequence in enumerate(sequences):
            if sequence.bias is not None:
                tokens, values = sequence.bias
                logits[row, tokens] += values
            mask = masks.get(sequence)
            if mask is not None:
                logits[row] += mask

    def _check_any(self, logits: Logits, row: int, sequence: Sequence) -> None:
        """Raise `_CompleteError` where the only allowed token was the end, which must not come: nothing can follow."""
        grammar = sequence.grammar
        if grammar is None or not (grammar.is_over or np.isneginf(logits[row].max())):
            return
        grammar.check()
        if not grammar.is_over and not sequence.suppresses_end:
            raise DecodeFailed("the grammar allows no token of this vocabulary here")
        raise _CompleteError

    def _tell(
        self, chosen: list[tuple[int, int]], asking: list[int], sequences: Rows[Sequence], given: list[Given]
    ) -> None:
        """Put log probabilities into what rows are given. `chosen`: the rows that ask for them, and their tokens."""
        counts = [sequences[row].request.sampling.logprobs or 0 for row, _ in chosen]
        places = {row: place for place, row in enumerate(asking)}
        known = self._logprobs.told([places[row] for row, _ in chosen], [token for _, token in chosen], counts)
        for (row, _), logprobs in zip(chosen, known, strict=True):
            each = given[row]
            assert not isinstance(each, Exception)
            given[row] = (each[0]._replace(logprobs=logprobs), *each[1:])

    def _advance(self, sequence: Sequence, sampled: Sampled) -> tuple[Sampled, ...]:
        """The sampled token, and those that the grammar forces behind it."""
        grammar = sequence.grammar
        assert grammar is not None
        if sampled.token in self._vocab.eog:
            return (sampled,)
        grammar.accept(sampled.token)
        if not grammar.is_over and sequence.forces:
            sequence.forced = grammar.force()
        if not sequence.forced:
            return (sampled._replace(is_end=grammar.is_over),)
        return (sampled, *self._forced(sequence))

    def _forced(self, sequence: Sequence) -> tuple[Sampled, ...]:
        """The next of the tokens that are certain."""
        grammar = sequence.grammar
        assert grammar is not None
        now, sequence.forced = sequence.forced[:MAX_FORCED], sequence.forced[MAX_FORCED:]
        if sequence.sampler is not None:
            for token in now:
                sequence.sampler.accept(token)
        is_end = grammar.is_over and not sequence.forced
        return (*map(Sampled, now[:-1]), Sampled(now[-1], is_end=is_end))


class _CompleteError(Exception):
    """The text that a grammar asks for is complete, and may not end by a token."""

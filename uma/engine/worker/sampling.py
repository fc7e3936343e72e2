"""Chooses tokens by logits: for greedy rows all at once, for others by their own sampler chain.

What constrains a row's next token (logit bias, a grammar, an end of text that must not come yet) is added to its logits
before the token is chosen. The logits are llama.cpp's own memory, so a sampler chain sees the change.

A row can be given several tokens in one step. Tokens that its grammar forces come behind the sampled one: all of them
go to the reader, and the next batch computes them together and samples after the last. So do the tokens of the mark
that closes its thinking at its bound, and those of a draft that the row's own sampler confirms, position by position
(`verify`).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from uma.engine.worker.logprobs import Logprober
from uma.engine.worker.row_helpers import CHAIN_LOGITS, MAX_HELPERS, RowHelpers
from uma.engine.worker.sequence import Sequence
from uma.errors import DecodeFailed
from uma.llama.backend import core_count
from uma.llama.context import Context
from uma.llama.grammar import GrammarDelayedError, GrammarMasks
from uma.types import Logprobs

MAX_FORCED = 24
"""Maximum tokens of a row in one step: further forced ones are given in the next steps. It bounds the batch that
computes them, and the events of a step, so that other rows wait for it no longer than for a piece of a short prompt."""

Logits = npt.NDArray[np.float32]


class SampledToken(NamedTuple):
    """One token that a sequence continues with."""

    token: int
    logprobs: Logprobs | None = None
    """Log probability of it, and those of the likeliest tokens; None where not asked for."""
    is_end: bool = False
    """Whether its grammar is complete with it, so that no token can follow."""


RowResult = tuple[SampledToken, ...] | Exception
"""Tokens that a step gives a row, usually one; or the exception that ends only this sequence."""


_Place = tuple[int, Sequence, int]
"""Index of the first row of logits of a sequence, the sequence, and its number of rows."""


class _Step:
    """Results of one step: logits, the rows whose log probabilities are asked for, and the likeliest tokens."""

    __slots__ = ("_likeliest", "asking", "chosen", "logits")

    def __init__(self, logits: Logits, asking: list[int]) -> None:
        self.logits = logits
        self.asking = asking
        self.chosen: dict[int, int] = {}
        """Chosen tokens by row."""
        self._likeliest: list[int] = []

    @property
    def likeliest(self) -> list[int]:
        """Likeliest token of every row: one pass of numpy over the matrix instead of a call for each greedy row."""
        self._likeliest = self._likeliest or self.logits.argmax(axis=1).tolist()
        return self._likeliest


class RowSampler:
    """Chooses tokens for a context's rows. Belongs to the decode thread, which calls `prepare` before a batch."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._vocab = context.model.vocab
        self._masks = GrammarMasks(self._vocab.n_tokens)
        self._logprobs = Logprober(self._vocab)
        self._helpers = RowHelpers(min(MAX_HELPERS, core_count() - 1) if context.returns_early else 0)
        self.is_plain = False
        """Whether all rows of the running batch are plain (`TokenChoice.is_plain`): then the next batch of the same
        rows needs no `prepare`."""
        self._masked: dict[Sequence, int] = {}
        """Sequences whose masks are being computed, each with the index of its first mask."""

    def close(self) -> None:
        """End the helper threads, if some were made."""
        self._masks.close()
        self._helpers.close()

    def prepare(self, sequences: Rows[Sequence], drafts: Rows[list[int]] | None = None) -> None:
        """Start computing what constrains the next tokens of these rows, while their batch is computed.

        `drafts` has a draft for each row, possibly empty: then also what constrains the token behind each drafted one.
        """
        self.is_plain = all(sequence.choice.is_plain for sequence in sequences)
        if self.is_plain:
            return
        self._masked = {}
        rows = zip(sequences, drafts or [[]] * len(sequences), strict=True)
        masked = [
            (sequence, draft)
            for sequence, draft in rows
            if sequence.choice.grammar is not None
            and not sequence.choice.forced
            and not sequence.choice.grammar.is_over
        ]
        count = 0
        for sequence, draft in masked:
            self._masked[sequence] = count
            count += 1 + len(draft)
        if masked:
            states = [sequence.choice.grammar for sequence, _ in masked if sequence.choice.grammar is not None]
            self._masks.begin(states, [draft for _, draft in masked])

    def sample(self, sequences: Rows[Sequence], batch_indices: Rows[int]) -> list[RowResult]:
        """Sample `sequences`: the rows of the batch just computed that have logits, in this order."""
        if self.is_plain:
            return self._sample_plain(sequences, batch_indices)
        places = [(row, sequence, 1) for row, sequence in enumerate(sequences)]
        step = self._step(len(sequences), places)
        given: list[RowResult] = []
        for row, sequence in enumerate(sequences):
            try:
                given.append(self._next(step, row, batch_indices[row], sequence))
            except Exception as error:  # noqa: BLE001  (whatever it is, it is this row's alone)
                given.append(error)
        self._tell(step, places, given)
        return given

    def _sample_plain(self, sequences: Rows[Sequence], batch_indices: Rows[int]) -> list[RowResult]:
        """Sample rows without grammar, bias or log probabilities. Most batches take this shorter way, because a batch
        evicts all code from the CPU's caches.
        """
        logits = self._context.logits(len(sequences))

        def choose(rows: range) -> list[RowResult]:
            step, given = _Step(logits[rows.start : rows.stop], []), list[RowResult]()
            for at, row in enumerate(rows):
                try:
                    given.append((SampledToken(self._draw(step, at, batch_indices[row], sequences[row], 0)),))
                except Exception as error:  # noqa: BLE001  (whatever it is, it is this row's alone)
                    given.append(error)
            return given

        if not self._helpers.count:
            return choose(range(len(sequences)))
        chains = sum(sequence.choice.sampler is not None for sequence in sequences)
        work = (len(sequences) + chains * (CHAIN_LOGITS - 1)) * self._vocab.n_tokens
        return self._helpers.each_part(choose, len(sequences), work)

    def prompt_logprobs(self, tokens: Rows[int], count: int) -> list[Logprobs]:
        """Log probabilities of prompt tokens in the batch just computed, each by the row before it."""
        self._logprobs.read(self._context.logits(len(tokens)), [count] * len(tokens))
        return self._logprobs.of(range(len(tokens)), tokens)

    def verify(self, drafts: Rows[tuple[Sequence, list[int]]]) -> list[RowResult]:
        """Sample rows of the batch just computed in which each sequence's last token is followed by a draft, all with
        logits: at each position in order, as long as the sampled token is the drafted one. So a row is given exactly
        the tokens that it would be given without a draft.
        """
        places: list[_Place] = []
        count = 0
        for sequence, draft in drafts:
            places.append((count, sequence, 1 + len(draft)))
            count += 1 + len(draft)
        step = self._step(count, places)
        given: list[RowResult] = []
        for (first, sequence, _), (_, draft) in zip(places, drafts, strict=True):
            try:
                given.append(self._follow(step, first, sequence, draft))
            except Exception as error:  # noqa: BLE001  (whatever it is, it is this row's alone)
                given.append(error)
        self._tell(step, places, given)
        return given

    def _follow(self, step: _Step, first: int, sequence: Sequence, draft: list[int]) -> tuple[SampledToken, ...]:
        given: tuple[SampledToken, ...] = ()
        while True:
            at = len(given)
            try:
                given += self._next(step, first + at, first + at, sequence, at)
            except GrammarDelayedError:
                if not given:
                    raise
                return given
            agrees = len(given) <= len(draft) and [sampled.token for sampled in given[at:]] == draft[at : len(given)]
            if not agrees or given[-1].is_end:
                return given

    def _step(self, rows: int, places: list[_Place]) -> _Step:
        """The constrained logits of the batch just computed."""
        logits = self._context.logits(rows)
        self._read_labels(logits, places)
        is_constrained = any(sequence.choice.is_constrained for _, sequence, _ in places)
        asking = self._read_logprobs(logits, places, is_constrained=is_constrained)
        if is_constrained:
            self._constrain(logits, places)
        return _Step(logits, asking)

    def _read_labels(self, logits: Logits, places: list[_Place]) -> None:
        """Read the rows of labels, before anything constrains logits."""
        asking = [(row, sequence, read) for row, sequence, _ in places if (read := sequence.choice.labels) is not None]
        if asking:
            own = self._logprobs.copied(logits, [row for row, _, _ in asking])
            values = self._logprobs.values(own, [read.tokens for _, _, read in asking])
            for (_, sequence, read), found in zip(asking, values, strict=True):
                read.logprobs, read.cached_tokens = found, sequence.cached_tokens

    def _read_logprobs(self, logits: Logits, places: list[_Place], *, is_constrained: bool) -> list[int]:
        """Read the rows whose log probabilities are asked for, from a copy if logits change. Returns the rows."""
        asking: list[int] = []
        counts: list[int] = []
        for row, sequence, size in places:
            if sequence.choice.wants_logprobs:
                asking += range(row, row + size)
                counts += [sequence.request.sampling.logprobs or 0] * size
                is_constrained = is_constrained or sequence.suppresses_end()
        if asking:
            is_copied = is_constrained or len(asking) < len(logits)
            self._logprobs.read(self._logprobs.copied(logits, asking) if is_copied else logits, counts)
        return asking

    def _constrain(self, logits: Logits, places: list[_Place]) -> None:
        """Add logit biases and grammar masks to the rows that have them."""
        masks = self._masks.wait() if self._masked else None
        for row, sequence, size in places:
            if sequence.choice.bias is not None:
                tokens, values = sequence.choice.bias
                for at in range(row, row + size):
                    logits[at, tokens] += values
            first = self._masked.get(sequence)
            if masks is not None and first is not None:
                logits[row : row + size] += masks[first : first + size]
        self._masked = {}

    def _next(
        self, step: _Step, row: int, batch_index: int, sequence: Sequence, ahead: int = 0
    ) -> tuple[SampledToken, ...]:
        """The next token of a row, `ahead` tokens behind the last one given, and the tokens that are then forced."""
        if sequence.choice.forced:
            return self._forced(sequence)
        if self._closes_thinking(sequence):
            if sequence.choice.forces:
                self._force(sequence)
                return self._forced(sequence)
            token = sequence.choice.closing.pop(0)
            if sequence.choice.sampler is not None:
                sequence.choice.sampler.accept(token)
        else:
            try:
                token = self._draw(step, row, batch_index, sequence, ahead)
            except _CompleteError:
                return (SampledToken(int(self._vocab.eog_ids[0]), is_end=True),)
        if sequence.choice.wants_logprobs:
            step.chosen[row] = token
        if sequence.choice.thinking is not None:
            sequence.choice.thinking.read(token)
        sampled = SampledToken(token)
        return (sampled,) if sequence.choice.grammar is None else self._advance(sequence, sampled)

    def _closes_thinking(self, sequence: Sequence) -> bool:
        """Whether the next token belongs to the mark that closes a row's thinking."""
        if not sequence.choice.closing and sequence.choice.thinking is not None:
            sequence.choice.closing = sequence.choice.thinking.closing(sequence.choice.grammar)
        return bool(sequence.choice.closing)

    def _force(self, sequence: Sequence) -> None:
        """Force the mark that closes a row's thinking, and what its grammar forces behind that."""
        sequence.choice.forced, sequence.choice.closing = sequence.choice.closing, []
        grammar = sequence.choice.grammar
        if grammar is None:
            return
        for token in sequence.choice.forced:
            grammar.accept(token)
        if not grammar.is_over:
            sequence.choice.forced += grammar.force()

    def _draw(self, step: _Step, row: int, batch_index: int, sequence: Sequence, ahead: int) -> int:
        logits, vocab = step.logits, self._vocab
        if sequence.choice.sampler is not None:
            if sequence.suppresses_end(ahead):
                logits[row, vocab.eog_ids] = -np.inf
            self._check_any(logits, row, sequence, ahead)
            return sequence.choice.sampler.sample(self._context, batch_index)
        token = step.likeliest[row]
        if token in vocab.eog and sequence.suppresses_end(ahead):
            logits[row, vocab.eog_ids] = -np.inf
            token = int(logits[row].argmax())
        self._check_any(logits, row, sequence, ahead)
        return token

    def _check_any(self, logits: Logits, row: int, sequence: Sequence, ahead: int) -> None:
        """Raise `_CompleteError` if the end of text is the only allowed token and must not come: nothing can follow."""
        grammar = sequence.choice.grammar
        if grammar is None or not (grammar.is_over or np.isneginf(logits[row].max())):
            return
        grammar.check()
        if not grammar.is_over and not sequence.suppresses_end(ahead):
            raise DecodeFailed("the grammar allows no token of this vocabulary here")
        raise _CompleteError

    def _tell(self, step: _Step, places: list[_Place], given: list[RowResult]) -> None:
        """Add log probabilities to the tokens of rows that ask for them."""
        if not step.chosen:
            return
        order = {row: place for place, row in enumerate(step.asking)}
        logprobs = self._logprobs.of([order[row] for row in step.chosen], list(step.chosen.values()))
        known = dict(zip(step.chosen, logprobs, strict=True))
        for index, (first, sequence, _) in enumerate(places):
            row = given[index]
            if sequence.choice.wants_logprobs and isinstance(row, tuple):
                given[index] = tuple(sampled._replace(logprobs=known.get(at)) for at, sampled in enumerate(row, first))

    def _advance(self, sequence: Sequence, sampled: SampledToken) -> tuple[SampledToken, ...]:
        """The sampled token, and those that the grammar forces behind it."""
        grammar = sequence.choice.grammar
        assert grammar is not None
        if sampled.token in self._vocab.eog:
            return (sampled,)
        grammar.accept(sampled.token)
        if not grammar.is_over and sequence.choice.forces:
            sequence.choice.forced = grammar.force()
        if not sequence.choice.forced:
            return (sampled._replace(is_end=grammar.is_over),)
        return (sampled, *self._forced(sequence))

    def _forced(self, sequence: Sequence) -> tuple[SampledToken, ...]:
        """The next forced tokens, as many as a step gives."""
        grammar = sequence.choice.grammar
        now, sequence.choice.forced = sequence.choice.forced[:MAX_FORCED], sequence.choice.forced[MAX_FORCED:]
        for token in now:
            if sequence.choice.sampler is not None:
                sequence.choice.sampler.accept(token)
            if sequence.choice.thinking is not None:
                sequence.choice.thinking.read(token)
        is_end = grammar is not None and grammar.is_over and not sequence.choice.forced
        return (*map(SampledToken, now[:-1]), SampledToken(now[-1], is_end=is_end))


class _CompleteError(Exception):
    """The text that a grammar asks for is complete, and the end of text must not be sampled."""

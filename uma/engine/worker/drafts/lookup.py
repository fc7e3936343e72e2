"""Prompt lookup: guesses a text's next tokens by where its last tokens stood before.

Summaries quote, code edits repeat, JSON lists have the same keys again and again. If the last three tokens occurred
before, what followed them there is the guess. The longer the text has agreed with its earlier place, the likelier the
guess. Every token, sampled or verified, shows whether the guess was right, so the calibration of a text is known before
a draft is verified.

Why not after one token or two as well: guesses after so few saved 4 % of the batches in 45,200 tokens of edited files,
for two more indexes of the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Rows
from itertools import islice
from weakref import WeakKeyDictionary

from uma.engine.worker.drafts.drafter import NOTHING, Calibration, Guess
from uma.engine.worker.sequence import Sequence
from uma.llama.vocab import Vocab

NGRAM = 3
"""Tokens that must have come before for a guess."""
MAX_INDEXED = 16_384
"""Maximum tokens of a text, from its end, that are searched: indexing takes half a microsecond each."""
MAX_PLACES = 8
"""Maximum earlier places that are compared: the one with the longest agreement is used."""
MAX_AGREED = 32
"""Maximum length of an agreement that is counted."""
HALF_AGREED = 3.0
"""Length of an agreement with which half of the next tokens agree, before a text has shown its own rate."""
LIKELY = 0.75
"""Minimum probability of the first token with which a guess ends a stride: the policy then decides whether to verify
it."""


class Lookup:
    """One text's guesses. Belongs to one thread at a time."""

    __slots__ = ("_agreed", "_calibration", "_count", "_last", "_next", "_place", "_tokens")

    def __init__(self, tokens: Rows[int], of_all: Calibration | None = None) -> None:
        """`of_all` is the calibration by all texts."""
        self._count = len(tokens)
        """Number of tokens of the whole text that were taken in."""
        self._tokens = array("i", tokens[-MAX_INDEXED:])
        self._last: dict[tuple[int, ...], int] = {}
        """Index behind the last occurrence of each three tokens."""
        self._next = array("i", [0] * min(NGRAM, len(self._tokens) + 1))
        """Index behind the previous occurrence of the same three tokens, by index; 0: there is none."""
        for end, ngram in enumerate(zip(*(islice(self._tokens, at, None) for at in range(NGRAM)), strict=False), NGRAM):
            self._next.append(self._last.get(ngram, 0))
            self._last[ngram] = end
        self._place = 0
        """Index of the token that is expected next; 0: none is."""
        self._agreed = 0
        """Number of tokens before it that agree with the end of the text."""
        self._calibration = Calibration(of_all)
        self._find()

    @property
    def agreed(self) -> int:
        """Tokens for which the place of the guess has agreed; 0: there is no guess."""
        return self._agreed if self._place else 0

    def catch_up(self, tokens: Rows[int]) -> None:
        """Take in what was appended to the text; `tokens` is the whole of it."""
        for token in tokens[self._count :]:
            self.push(token)

    def push(self, token: int) -> None:
        """Take in the text's next token."""
        tokens = self._tokens
        self._count += 1
        if self._place:
            self._learn(is_accepted=tokens[self._place] == token)
        tokens.append(token)
        if len(tokens) >= NGRAM:
            ngram = tuple(tokens[-NGRAM:])
            self._next.append(self._last.get(ngram, 0))
            self._last[ngram] = len(tokens)
        else:
            self._next.append(0)
        if not self._place:
            self._find()

    def guess(self, count: int) -> list[int]:
        """The next tokens, at most `count`; empty where nothing is guessed."""
        if not self._place:
            return []
        found = list(self._tokens[self._place : self._place + count])
        # A text that repeats itself at once goes on so: the guess follows its own beginning.
        period = len(self._tokens) - self._place
        while len(found) < count:
            found.append(found[len(found) - period])
        return found

    def probabilities(self, count: int) -> list[float]:
        """Probability of each token of `guess(count)` that it and all before it are accepted: from 1 to 0, falling."""
        found: list[float] = []
        whole = 1.0
        for ahead in range(count):
            whole *= self._calibration.of(_likelihood(self._agreed + ahead))
            found.append(whole)
        return found

    def _learn(self, *, is_accepted: bool) -> None:
        self._calibration.learn(_likelihood(self._agreed), is_accepted=is_accepted)
        if is_accepted:
            self._place += 1
            self._agreed = min(self._agreed + 1, MAX_AGREED)
        else:
            self._place = 0

    def _find(self) -> None:
        """Find the earlier place that agrees longest with the end of the text; of equals, the last."""
        tokens, size = self._tokens, len(self._tokens)
        self._place, self._agreed = 0, 0
        place = self._next[size] if size < len(self._next) else 0
        for _ in range(MAX_PLACES):
            if not place:
                return
            agreed = NGRAM
            while agreed < MAX_AGREED and agreed < place and tokens[place - agreed - 1] == tokens[size - agreed - 1]:
                agreed += 1
            if agreed > self._agreed:
                self._place, self._agreed = place, agreed
            place = self._next[place]


def _likelihood(agreed: int) -> float:
    """Probability of the next token after `agreed` tokens that agree, before any calibration."""
    agreed = min(agreed, MAX_AGREED)
    return agreed / (agreed + HALF_AGREED)


class LookupDrafter:
    """A `Drafter` whose guesses take no time. A text is indexed when drafts could pay for the first time."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._of_all = Calibration()
        """Calibration by all texts, with which a new text begins."""
        self._lookups: WeakKeyDictionary[Sequence, Lookup] = WeakKeyDictionary()
        self._guesses: WeakKeyDictionary[Sequence, Guess] = WeakKeyDictionary()
        """The last of each row."""

    def expected(self, sequence: Sequence, most: int) -> Rows[float]:
        """The probabilities of the guess itself."""
        lookup = self._lookup(sequence)
        tokens = lookup.guess(most)
        for index, token in enumerate(tokens):
            if token < 0 or token in self._vocab.eog:  # a picture stands there
                tokens = tokens[:index]
                break
        if tokens and sequence.choice.grammar is not None:
            tokens = tokens[: sequence.choice.grammar.common(tokens)]
        found = self._guesses[sequence] = Guess(tokens, lookup.probabilities(len(tokens))) if tokens else NOTHING
        return found.probabilities

    def step_ms(self, rows: int) -> float:
        """Nothing is computed."""
        return 0.0

    def guess(self, rows: Rows[tuple[Sequence, int]], plain_ms: float, within_ms: float) -> list[Guess]:
        """What `expected` found."""
        found = [(self._guesses[sequence], most) for sequence, most in rows]
        return [Guess(guess.tokens[:most], guess.probabilities[:most]) for guess, most in found]

    def on_token(self, sequence: Sequence, token: int) -> bool:
        """Whether the text has, most probably, come to a passage that it repeats."""
        lookup = self._lookups.get(sequence)
        if lookup is None:
            return False
        lookup.push(token)
        return lookup.agreed > 0 and lookup.probabilities(1)[0] >= LIKELY

    def _lookup(self, sequence: Sequence) -> Lookup:
        lookup = self._lookups.get(sequence)
        if lookup is None:
            lookup = self._lookups[sequence] = Lookup(sequence.tokens, self._of_all)
        else:
            lookup.catch_up(sequence.tokens)
        return lookup

"""The interface of drafters, which guess the next tokens of decode rows, and the acceptance rates of their guesses."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

from uma.engine.worker.sequence import Sequence


class Guess(NamedTuple):
    """What is guessed to come behind a row's last token; possibly nothing."""

    tokens: list[int]
    probabilities: Rows[float]
    """Probability of each token that it and all before it are accepted: from 1 to 0, falling."""


NOTHING = Guess([], ())


class Drafter(Protocol):
    """Guesses for the decode rows of one engine. Belongs to the decode thread, but for `abort`.

    A tick asks for the `expected` probabilities, and for a `guess` of the rows for which these pay. A guess changes
    nothing but the time; tokens that a row's grammar does not allow are never accepted.
    """

    def expected(self, sequence: Sequence, most: int) -> Rows[float]:
        """Probabilities of a guess of up to `most` tokens, estimated before it is computed; empty: there is none."""

    def step_ms(self, rows: int) -> float:
        """Time that guessing one more token for each of so many rows takes; 0: none, or it was not measured yet."""

    def guess(self, rows: Rows[tuple[Sequence, int]], plain_ms: float, within_ms: float) -> list[Guess]:
        """A guess for each row, of at most so many tokens. It is empty as long as the drafter has more of the row's
        text to read than `within_ms` allows, or than pays where a row's token takes `plain_ms` without a draft.
        """

    def takes_in(self, sequence: Sequence, token: int) -> bool:
        """Take in a token that a row was given in the middle of a stride: whether a guess of the next is likely to be
        accepted.
        """

    def abort(self) -> None:
        """End what is computed, and compute nothing any more. Any thread."""


PRIOR_TOKENS = 4.0
"""Guesses of its own after which what a text has shown counts for half."""
MEMORY_TOKENS = 64.0
"""Maximum recent guesses whose mean a rate is: texts change."""


class AcceptanceRates:
    """How often guesses are accepted, by kind: numbers from 0, one for each rate of `prior`.

    The prior are figures, or the rates of all texts, which learn too. `most` bounds what they say of a new text.
    """

    __slots__ = ("_accepted", "_most", "_of_all", "_prior", "_seen")

    def __init__(self, prior: Rows[float] | AcceptanceRates, most: Rows[float] | None = None) -> None:
        self._most = most
        self._of_all = prior if isinstance(prior, AcceptanceRates) else None
        self._prior: Rows[float] = prior._prior if isinstance(prior, AcceptanceRates) else prior
        self._seen = [0.0] * len(self._prior)
        self._accepted = [0.0] * len(self._prior)
        """Guesses, and those of them that were accepted, by kind; old ones count less and less."""

    def learn(self, kind: int, *, is_accepted: bool) -> None:
        """Observe a guess."""
        self.fade(kind, 1 / MEMORY_TOKENS)
        self._seen[kind] += 1
        self._accepted[kind] += is_accepted
        if self._of_all is not None:
            self._of_all.learn(kind, is_accepted=is_accepted)

    def fade(self, kind: int, share: float) -> None:
        """Forget such a share of what was observed: the rate goes back towards the prior."""
        self._seen[kind] *= 1 - share
        self._accepted[kind] *= 1 - share

    def of(self, kind: int) -> float:
        """The rate of one kind."""
        prior = self._prior[kind] if self._of_all is None else self._of_all.of(kind)
        if self._most is not None:
            prior = min(prior, self._most[kind])
        return (prior * PRIOR_TOKENS + self._accepted[kind]) / (PRIOR_TOKENS + self._seen[kind])

    def each(self) -> list[float]:
        """The rates of all kinds."""
        return [self.of(kind) for kind in range(len(self._prior))]

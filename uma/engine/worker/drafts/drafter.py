"""The interface of drafters, which guess the next tokens of decode rows, and what corrects their probabilities."""

from __future__ import annotations

import math
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
    """Guesses for the decode rows of one engine. Belongs to the decode thread.

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

    def on_token(self, sequence: Sequence, token: int) -> bool:
        """Take in a token that a row was given in the middle of a stride: whether a guess of the next is likely to be
        accepted.
        """


RATE = 0.3
"""Learning rate of a calibration: a text that begins to repeat is believed after some ten tokens."""
FADE = 1 / 256
"""Part of a calibration that `fade` forgets: after some hundred tokens a text whose guesses failed is tried again."""
EXPONENTS = (0.25, 64.0)
"""Bounds of a calibration's exponent: beyond them, what a text has shown would take too long to forget."""
SUREST = 0.95
"""Maximum probability before correction: a drafter that is sure can be wrong each time, where the row is sampled."""


class Calibration:
    """Corrects the probabilities of one text's guesses by what was accepted: it raises them to a power.

    So sure guesses stay surer than unsure ones, whatever the text. That of a new text is what all texts have shown.
    """

    __slots__ = ("_exponent", "_of_all")

    def __init__(self, of_all: Calibration | None = None) -> None:
        self._of_all = of_all
        self._exponent: float = 1.0 if of_all is None else of_all._exponent

    def of(self, probability: float) -> float:
        """The corrected probability."""
        return float(min(probability, SUREST) ** self._exponent)

    def learn(self, probability: float, *, is_accepted: bool) -> None:
        """Observe a guess of this (uncorrected) probability."""
        exponent = self._exponent * math.exp(RATE * (self.of(probability) - is_accepted))
        self._exponent = min(max(exponent, EXPONENTS[0]), EXPONENTS[1])
        if self._of_all is not None:
            self._of_all.learn(probability, is_accepted=is_accepted)

    def fade(self) -> None:
        """Forget a little of what was observed."""
        self._exponent **= 1 - FADE

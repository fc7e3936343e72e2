"""The interface of drafters, which guess the next tokens of decode rows, and what corrects their probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

from uma.engine.worker.sequence import Sequence


class Guess(NamedTuple):
    """A draft: tokens that are guessed to follow a row's last token. It can be empty."""

    tokens: list[int]
    probabilities: Rows[float]
    """Probability of each token that it and all before it are accepted: from 1 to 0, falling."""


NOTHING = Guess([], ())


class Drafter(Protocol):
    """Guesses drafts for the decode rows of one engine. Belongs to the decode thread.

    A tick asks for `expected` probabilities, and then for a `guess` for the rows where these pay. A draft changes only
    the time; tokens that a row's grammar does not allow are never accepted.
    """

    def expected(self, sequence: Sequence, most: int) -> Rows[float]:
        """Probabilities of a draft of up to `most` tokens, estimated before it is computed; empty: there is none."""

    def step_ms(self, rows: int) -> float:
        """Time (ms) to guess one more token for each of `rows` rows; 0: none, or not measured yet."""

    def guess(self, rows: Rows[tuple[Sequence, int]], plain_ms: float, within_ms: float) -> list[Guess]:
        """Draft for each row, of at most the given number of tokens. It is empty while the drafter has more of the
        row's text to read than `within_ms` allows, or than pays where a token without a draft takes `plain_ms`.
        """

    def on_token(self, sequence: Sequence, token: int) -> bool:
        """Take in a row's token in the middle of a stride. Returns whether a guess of the next one is likely to be
        accepted.
        """


RATE = 0.3
"""Learning rate of a calibration: a text that begins to repeat is believed after some ten tokens."""
FADE = 1 / 256
"""Part of a calibration that `fade` forgets: drafts are tried again some hundred tokens after they failed in a text."""
EXPONENTS = (0.25, 64.0)
"""Bounds of the exponent of a calibration: beyond them, what a text has shown would take too long to forget."""
SUREST = 0.95
"""Maximum probability before correction: a drafter that is sure can be wrong each time, where the row is sampled."""


class Calibration:
    """Corrects the probabilities of one text's drafts by what was accepted: it raises them to a power.

    So surer guesses stay surer, whatever the text. A new text begins with the exponent that all texts have shown.
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

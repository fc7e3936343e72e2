"""The interface of drafters, which guess the next tokens of decode rows: prompt look-up and a draft model have it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

from uma.engine.worker.sequence import Sequence


class Guess(NamedTuple):
    """What is guessed to come behind a row's last token; possibly nothing."""

    tokens: list[int]
    chances: Rows[float]
    """Of each token, the chance that it and all before it hold: from 1 to 0, falling."""


NOTHING = Guess([], ())


class Drafter(Protocol):
    """Guesses for the decode rows of one engine. Belongs to the decode thread, but for `abort`.

    A tick asks for `prospects`, and for a `guess` of the rows for which those pay. Guesses change nothing but the time,
    so a drafter can guess what it likes; tokens that a row's grammar does not allow cannot hold.
    """

    def prospects(self, sequence: Sequence, most: int) -> Rows[float]:
        """Chances to be expected of a guess of up to `most` tokens, before it is computed; empty: none can be had."""

    def step_ms(self, rows: int) -> float:
        """Time that one more token for each of so many rows takes; 0: none, or nothing is known of it yet."""

    def guess(self, rows: Rows[tuple[Sequence, int]], plain_ms: float, within_ms: float) -> list[Guess]:
        """A guess for each row that has prospects, of at most so many tokens; possibly nothing, as long as there is
        more to read than `within_ms` allows, or than is worth it where a row's token takes `plain_ms` otherwise.
        """

    def takes_in(self, sequence: Sequence, token: int) -> bool:
        """In the middle of a stride, a row was given `token`: whether a guess of what comes next would now hold."""

    def abort(self) -> None:
        """End what is computed, and compute nothing any more. Any thread."""

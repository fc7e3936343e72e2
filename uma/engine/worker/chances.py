"""How often guesses hold, by kind: what is usual at first, then what this text has shown.

Pure: outcomes in, chances out.
"""

from __future__ import annotations

from collections.abc import Sequence

PRIOR_TOKENS = 4.0
"""Tokens of its own after which what a text has shown counts for half."""
MEMORY_TOKENS = 64.0
"""Maximum recent tokens whose mean the chances are: texts change."""


class Chances:
    """Of each kind of guess, the chance that it holds. Kinds are numbers from 0, one for each of `usual`.

    What is usual are figures, or the chances of all texts: then those learn too.
    """

    __slots__ = ("_held", "_most", "_of_all", "_seen", "_usual")

    def __init__(self, usual: Sequence[float] | Chances, most: Sequence[float] | None = None) -> None:
        """`most` are the highest chances that are usual, whatever all texts have shown; None: there are no bounds."""
        self._most = most
        self._of_all = usual if isinstance(usual, Chances) else None
        self._usual: Sequence[float] = usual._usual if isinstance(usual, Chances) else usual
        self._seen = [0.0] * len(self._usual)
        self._held = [0.0] * len(self._usual)
        """Guesses, and those of them that held, by kind; old ones count less and less."""

    def learn(self, kind: int, *, is_held: bool) -> None:
        """Take in what became of a guess."""
        self.fade(kind, 1 / MEMORY_TOKENS)
        self._seen[kind] += 1
        self._held[kind] += is_held
        if self._of_all is not None:
            self._of_all.learn(kind, is_held=is_held)

    def fade(self, kind: int, share: float) -> None:
        """Forget such a share of what was seen: the chance goes back towards what is usual."""
        self._seen[kind] *= 1 - share
        self._held[kind] *= 1 - share

    def of(self, kind: int) -> float:
        """The chance of one kind."""
        usual = self._usual[kind] if self._of_all is None else self._of_all.of(kind)
        if self._most is not None:
            usual = min(usual, self._most[kind])
        return (usual * PRIOR_TOKENS + self._held[kind]) / (PRIOR_TOKENS + self._seen[kind])

    def each(self) -> list[float]:
        """The chances of all kinds."""
        return [self.of(kind) for kind in range(len(self._usual))]

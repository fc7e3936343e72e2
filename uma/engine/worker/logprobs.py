"""Log probabilities of sampled tokens and of the likeliest ones, for all rows of a batch that ask for them at once.

They are those of temperature 1, read from the logits before anything changes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from uma.types import MAX_LOGPROBS

LEAST = -9999.0
"""What a probability of zero is told as: JSON has no infinity."""
BLOCK = 64
"""Tokens of which only the highest logit is looked at first: the k likeliest tokens are in k blocks at most."""


class RowLogprobs:
    """The logits of some rows, `[rows, n_vocab]`, read once. Keeps a copy of them."""

    def __init__(self, logits: npt.NDArray[np.float32]) -> None:
        self._logits = logits.copy()
        highest = self._logits.max(axis=1)
        total = np.exp(self._logits - highest[:, None]).sum(axis=1, dtype=np.float64)
        self._log_totals = highest + np.log(total)

    def of(self, row: int, token: int) -> tuple[float, int]:
        """A token's log probability, and its rank: 1 for the likeliest."""
        logits = self._logits[row]
        rank = int(np.count_nonzero(logits > logits[token])) + 1
        return self._told(logits[token], row), rank

    def top(self, row: int, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens with their log probabilities, the likeliest first; of equals, the lower token first."""
        if count == 0:
            return []
        logits = self._logits[row]
        likeliest = self._candidates(logits)
        order = np.lexsort((likeliest, -logits[likeliest]))[:count]
        return [(int(token), self._told(logits[token], row)) for token in likeliest[order]]

    def _candidates(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
        """A few hundred tokens, the `MAX_LOGPROBS` likeliest among them."""
        whole = len(logits) // BLOCK * BLOCK
        if whole <= MAX_LOGPROBS * BLOCK:
            return np.arange(len(logits))
        blocks = logits[:whole].reshape(-1, BLOCK)
        highest = blocks.max(axis=1)
        best = np.flatnonzero(highest >= np.partition(highest, -MAX_LOGPROBS)[-MAX_LOGPROBS])
        tokens = (best[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        return np.concatenate([tokens, np.arange(whole, len(logits))])

    def _told(self, logit: np.float32, row: int) -> float:
        return max(float(logit - self._log_totals[row]), LEAST)


def read_rows(logits: npt.NDArray[np.float32], rows: Sequence[int]) -> RowLogprobs:
    """The log probabilities of these rows, which are numbered as they come here."""
    return RowLogprobs(logits[list(rows)])

"""Log probabilities of sampled tokens and of the likeliest ones, for all rows of a batch that ask for them at once.

They are those of temperature 1, read from the logits before anything changes them. A vocabulary's worth of numbers for
each row is a megabyte soon: the arrays are kept from step to step, because fresh memory costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEAST = -9999.0
"""What a probability of zero is told as: JSON has no infinity."""
BLOCK = 64
"""Tokens of which only the highest logit is looked at first: the k likeliest tokens are in k blocks at most."""

Floats = npt.NDArray[np.float32]


class LogprobReader:
    """Reads the log probabilities of some rows of logits. Belongs to one thread. `read` replaces the rows before."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._whole = n_vocab // BLOCK * BLOCK
        self._space: Floats = np.empty((2, 0, n_vocab), np.float32)
        self._logits: Floats = self._space[0]
        self._highest: Floats | None = None
        """Of each row, the highest logit of each block; None until the likeliest tokens are asked for."""

    def read(self, logits: Floats, rows: Sequence[int]) -> None:
        """Take in these rows, which are numbered as they come here."""
        size = len(rows)
        if size > self._space.shape[1]:
            self._space = np.empty((2, size, self._n_vocab), np.float32)
        self._logits, powers = self._space[0, :size], self._space[1, :size]
        np.take(logits, rows, axis=0, out=self._logits, mode="clip")
        highest = self._logits.max(axis=1)
        np.subtract(self._logits, highest[:, None], out=powers)
        np.exp(powers, out=powers)
        self._log_totals = highest + np.log(powers.sum(axis=1))
        self._highest = None

    def of(self, row: int, token: int) -> tuple[float, int]:
        """A token's log probability, and its rank: 1 for the likeliest."""
        logits = self._logits[row]
        rank = int(np.count_nonzero(logits > logits[token])) + 1
        return self._told(logits[token], row), rank

    def top(self, row: int, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens with their log probabilities, the likeliest first; of equals, the lower token first."""
        if count == 0:
            return []
        tokens = self._candidates(row, count)
        logits = self._logits[row, tokens]
        if len(tokens) > count:
            is_high = logits >= np.partition(logits, -count)[-count]
            tokens, logits = tokens[is_high], logits[is_high]
        order = np.lexsort((tokens, -logits))[:count]
        told = self._told
        return [(int(token), told(logit, row)) for token, logit in zip(tokens[order], logits[order], strict=True)]

    def _candidates(self, row: int, count: int) -> npt.NDArray[np.intp]:
        """A few hundred tokens with the `count` likeliest among them."""
        if self._whole <= count * BLOCK:
            return np.arange(self._n_vocab)
        if self._highest is None:
            self._highest = self._logits[:, : self._whole].reshape(len(self._logits), -1, BLOCK).max(axis=2)
        highest = self._highest[row]
        blocks = np.flatnonzero(highest >= np.partition(highest, -count)[-count])
        tokens = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        return np.concatenate([tokens, np.arange(self._whole, self._n_vocab)])

    def _told(self, logit: np.float32, row: int) -> float:
        return max(float(logit - self._log_totals[row]), LEAST)

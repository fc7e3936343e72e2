"""Log probabilities of tokens and of the likeliest ones, for all rows of a batch that ask for them at once.

They are those of temperature 1, read from the logits before anything changes them. A vocabulary's worth of numbers for
each row is a megabyte soon: the arrays are kept from step to step, because fresh memory costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from uma.llama.vocab import Vocab
from uma.types import Logprobs, TokenLogprob

LEAST = -9999.0
"""What a probability of zero is told as: JSON has no infinity."""
BLOCK = 64
"""Tokens of which only the highest logit is looked at first: the k likeliest tokens are in k blocks at most."""
MAX_PLAIN = 60.0
"""Up to this highest logit, powers of e and their sum stay within 32 bits as they are; beyond it all are shifted."""
ROWS_AT_ONCE = 8
"""Rows whose powers are added up in one pass: more would not stay in a processor's cache."""

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.intp]


class LogprobReader:
    """Reads log probabilities from rows of logits. Belongs to one thread. `read` and `read_some` replace the rows."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._columns = n_vocab // BLOCK
        """Blocks. Block b holds the tokens b, b + columns, b + 2 columns …: its highest is found by whole rows."""
        self._offsets = self._columns * np.arange(BLOCK)[:, None]
        self._rest = np.arange(self._columns * BLOCK, n_vocab)
        """Tokens in no block."""
        self._powers: Floats = np.empty((ROWS_AT_ONCE, n_vocab), np.float32)
        self._is_over = np.empty(n_vocab, np.bool_)
        self._kept: Floats = np.empty((0, n_vocab), np.float32)
        self._logits: Floats = self._kept
        self._highest: Floats = self._kept
        """Of each row, the highest logit of each block."""
        self._log_totals: Floats = np.empty(0, np.float32)
        """Of each row, the logarithm of the sum of all powers of e."""

    def read_some(self, logits: Floats, rows: Sequence[int]) -> None:
        """Take in these rows, numbered as they come here. They are copied: the caller can change them."""
        size = len(rows)
        if size > len(self._kept):
            self._kept = np.empty((size, self._n_vocab), np.float32)
        np.take(logits, rows, axis=0, out=self._kept[:size], mode="clip")
        self.read(self._kept[:size])

    def read(self, logits: Floats) -> None:
        """Take in all rows, which must stay as they are until the last question about them."""
        self._logits = logits
        whole = self._columns * BLOCK
        self._highest = logits[:, :whole].reshape(len(logits), BLOCK, -1).max(axis=1) if whole else logits
        highest = self._highest.max(axis=1)
        if whole < self._n_vocab:
            np.maximum(highest, logits[:, whole:].max(axis=1), out=highest)
        totals, shifts = np.empty(len(logits), np.float32), np.zeros(len(logits), np.float32)
        for start in range(0, len(logits), ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, len(logits)))
            powers = self._powers[: rows.stop - start]
            if np.abs(highest[rows]).max() < MAX_PLAIN:
                np.exp(logits[rows], out=powers)
            else:
                np.subtract(logits[rows], highest[rows, None], out=powers)
                np.exp(powers, out=powers)
                shifts[rows] = highest[rows]
            # Whole blocks are added up column by column, several at a time.
            sums = powers[:, :whole].reshape(len(powers), BLOCK, -1).sum(axis=1).sum(axis=1)
            np.add(sums, powers[:, whole:].sum(axis=1), out=totals[rows])
        self._log_totals = shifts + np.log(totals)

    def of(self, rows: Sequence[int], tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Of a token in each of these rows: its log probability, and its rank, 1 for the likeliest."""
        chosen = self._logits[rows, tokens]
        told: list[float] = np.maximum(chosen - self._log_totals[rows], LEAST).tolist()
        ranks = []
        for row, logit in zip(rows, chosen, strict=True):
            np.greater(self._logits[row], logit, out=self._is_over)
            ranks.append(int(np.count_nonzero(self._is_over)) + 1)  # without an axis it takes a tenth of the time
        return told, ranks

    def top(self, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """Of each row the likeliest tokens, and their log probabilities, the likeliest first; of equals, the lower
        token first.
        """
        count = min(count, self._n_vocab)
        if count == 0:
            return [[] for _ in self._logits], [[] for _ in self._logits]
        tokens, logits, is_tied = self._likeliest(count)
        for row in range(len(tokens)) if is_tied else ():
            every = np.flatnonzero(self._logits[row] >= logits[row].min())
            order = np.lexsort((every, -self._logits[row, every]))[:count]
            tokens[row], logits[row] = every[order], self._logits[row, every[order]]
        order = np.lexsort((tokens, -logits))
        told = np.take_along_axis(logits, order, 1) - self._log_totals[:, None]
        ids: list[list[int]] = np.take_along_axis(tokens, order, 1).tolist()
        values: list[list[float]] = np.maximum(told, LEAST).tolist()
        return ids, values

    def _likeliest(self, count: int) -> tuple[Tokens, Floats, bool]:
        """Of each row `count` tokens with the highest logits, in any order, and whether in some row others are as
        likely.
        """
        size = len(self._logits)
        rows = np.arange(size)[:, None]
        if self._columns <= count:
            tokens = np.broadcast_to(np.arange(self._n_vocab), self._logits.shape)
            logits, is_tied = self._logits, False
        else:
            best = np.argpartition(self._highest, -count, axis=1)[:, -count:]
            lowest = self._highest[rows, best].min(axis=1)
            is_tied = bool(np.count_nonzero(self._highest >= lowest[:, None]) > size * count)
            tokens = np.empty((size, count * BLOCK + len(self._rest)), np.intp)
            np.add(best[:, None, :], self._offsets, out=tokens[:, : count * BLOCK].reshape(size, BLOCK, count))
            tokens[:, count * BLOCK :] = self._rest
            logits = self._logits[rows, tokens]
        picked = np.argpartition(logits, -count, axis=1)[:, -count:]
        found = logits[rows, picked]
        is_tied |= bool(np.count_nonzero(logits >= found.min(axis=1)[:, None]) > size * count)
        return tokens[rows, picked], found, is_tied


class Logprober:
    """What `LogprobReader` reads, as the words of `uma.types`."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._reader = LogprobReader(vocab.n_tokens)
        self.read, self.read_some = self._reader.read, self._reader.read_some

    def told(self, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
        """Of the token in each of these rows: its log probability, and so many of the likeliest there."""
        logprobs, ranks = self._reader.of(rows, tokens)
        likeliest, theirs = self._reader.top(max(counts, default=0))
        shown = self._vocab.shown
        return [
            Logprobs(
                TokenLogprob(token, *shown(token), logprob, rank),
                tuple(
                    TokenLogprob(each, *shown(each), value, place)
                    for place, each, value in zip(range(1, count + 1), likeliest[row], theirs[row], strict=False)
                ),
            )
            for row, token, count, logprob, rank in zip(rows, tokens, counts, logprobs, ranks, strict=True)
        ]

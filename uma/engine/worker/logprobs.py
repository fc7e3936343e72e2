"""Log probabilities of tokens and of the likeliest ones, for all rows of a batch that ask for them at once.

They are those of temperature 1, read from the logits before a bias, a grammar or a sampler changes them. The arrays are
kept from step to step: they are soon megabytes, and allocating them costs more than the arithmetic.

Not simply `argpartition` for each row: it took four times as long for 32 rows of 152,000 logits, 65 ms and not 16. Not
in a thread of its own: that gained under 5 % of a step beside the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from uma.llama.vocab import Vocab
from uma.types import Logprobs, TokenLogprob

LEAST = -9999.0
"""Log probability that stands for a probability of zero: JSON has no infinity."""
BLOCK = 64
"""Tokens of a block, whose highest logit is compared first: the k likeliest tokens are in at most k blocks."""
CACHED_LOGITS = 131_072
"""Maximum logits, or else one row, that are added up in one pass: more do not fit a processor's cache."""

Floats = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.intp]


class LogprobReader:
    """Reads log probabilities from rows of logits. Belongs to one thread. `read` replaces the rows."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._columns = n_vocab // BLOCK
        """Number of blocks. Block b holds the tokens b, b + columns, b + 2 columns …: whole rows are compared."""
        self._offsets = self._columns * np.arange(BLOCK)
        self._rows_at_once = max(1, CACHED_LOGITS // n_vocab)
        self._powers: Floats = np.empty((self._rows_at_once, n_vocab), np.float32)
        self._is_over = np.empty(n_vocab, np.bool_)
        self._kept: Floats = np.empty((0, n_vocab), np.float32)
        self._logits: Floats = self._kept
        self._highest: Floats = self._kept
        """Highest logit of each block, by row."""
        self._log_totals: Floats = np.empty(0, np.float32)
        """Logarithm of the sum of all powers of e, by row."""
        self._top_tokens: TokenIds = np.empty((0, 0), np.intp)
        self._top_logits: Floats = np.empty((0, 0), np.float32)
        """Likeliest tokens of each row, the likeliest first."""

    def copied(self, logits: Floats, rows: Sequence[int]) -> Floats:
        """A copy of these rows, for a caller that changes the logits. The next call overwrites it."""
        size = len(rows)
        if size > len(self._kept):
            self._kept = np.empty((size, self._n_vocab), np.float32)
        np.take(logits, rows, axis=0, out=self._kept[:size], mode="clip")
        return self._kept[:size]

    def read(self, logits: Floats, count: int) -> None:
        """Read all rows, and find the `count` likeliest tokens of each; of equals, the lower token first. The rows must
        not change until the last call of `of` for them.
        """
        self._logits = logits
        size, whole = len(logits), self._columns * BLOCK
        if self._highest.shape != (size, self._columns):
            self._highest = np.empty((size, self._columns), np.float32)
        self._log_totals = np.empty(size, np.float32)
        for start in range(0, size, self._rows_at_once):
            rows = slice(start, min(start + self._rows_at_once, size))
            self._add_up(logits[rows], whole, self._highest[rows], self._log_totals[rows])
        self._find_top(min(count, self._n_vocab))

    def _add_up(self, logits: Floats, whole: int, highest: Floats, log_totals: Floats) -> None:
        """Find, for each of these rows, the highest logits by block, and the logarithm of the sum of all powers."""
        np.max(logits[:, :whole].reshape(len(logits), BLOCK, -1), axis=1, out=highest)
        most = highest.max(axis=1, initial=-np.inf)
        if whole < self._n_vocab:
            np.maximum(most, logits[:, whole:].max(axis=1), out=most)
        powers = self._powers[: len(logits)]
        # Shifted: powers of e of logits from some 88 on are more than 32 bits hold.
        np.subtract(logits, most[:, None], out=powers)
        np.exp(powers, out=powers)
        # Whole blocks are added up column by column, several at a time.
        sums = powers[:, :whole].reshape(len(powers), BLOCK, -1).sum(axis=1).sum(axis=1)
        np.log(sums + powers[:, whole:].sum(axis=1), out=log_totals)
        log_totals += most

    def of(self, rows: Sequence[int], tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Log probability and rank of a token in each of these rows; 1 is the likeliest."""
        found, chosen = self.values(rows, tokens).tolist(), self._logits[rows, tokens]
        likeliest = self._top_logits[rows]
        ranks: list[int] = (np.count_nonzero(likeliest > chosen[:, None], axis=1) + 1).tolist()
        for place, rank in enumerate(ranks):
            if rank > likeliest.shape[1]:  # others can be likelier, too
                ranks[place] = self._over(rows[place], chosen[place]) + 1
        return found, ranks

    def values(self, rows: Sequence[int] | TokenIds, tokens: Sequence[int] | TokenIds) -> Floats:
        """Log probability of a token in each of these rows."""
        found: Floats = np.maximum(self._logits[rows, tokens] - self._log_totals[rows], LEAST)
        return found

    def _over(self, row: int, logit: np.float32) -> int:
        """Tokens of a row that are likelier."""
        np.greater(self._logits[row], logit, out=self._is_over)
        # Without an axis counting takes a tenth of the time.
        return int(np.count_nonzero(self._is_over))

    def top(self) -> tuple[list[list[int]], list[list[float]]]:
        """Likeliest tokens of each row, and their log probabilities."""
        found = np.maximum(self._top_logits - self._log_totals[:, None], LEAST)
        ids: list[list[int]] = self._top_tokens.tolist()
        values: list[list[float]] = found.tolist()
        return ids, values

    def _find_top(self, count: int) -> None:
        """Sort the few tokens that are at least as likely as the top of the `count`-th likeliest block: the `count`
        likeliest blocks have one each, so the `count` likeliest tokens are among them, with all ties.
        """
        size = len(self._logits)
        if count == 0:
            self._top_tokens = np.empty((size, 0), np.intp)
            self._top_logits = np.empty((size, 0), np.float32)
            return
        rows, tokens, logits = self._candidates(count)
        order = np.lexsort((tokens, -logits, rows))
        first = np.searchsorted(rows[order], np.arange(size))
        best = order[first[:, None] + np.arange(count)]
        self._top_tokens, self._top_logits = tokens[best], logits[best]

    def _candidates(self, count: int) -> tuple[TokenIds, TokenIds, Floats]:
        """Rows, tokens and logits: of each row at least the `count` likeliest tokens."""
        whole, logits = self._columns * BLOCK, self._logits
        if self._columns <= count:
            rows, tokens = np.indices(logits.shape).reshape(2, -1)
            return rows, tokens, logits.ravel()
        least = np.partition(self._highest, -count, axis=1)[:, -count]
        # `not less` instead of `at least`: a NaN logit must leave no row with too few.
        rows, columns = np.nonzero(~(self._highest < least[:, None]))
        found = logits[rows[:, None], columns[:, None] + self._offsets]
        pairs, offsets = np.nonzero(~(found < least[rows, None]))
        rest = logits[:, whole:]
        at, places = np.nonzero(~(rest < least[:, None]))
        return (
            np.concatenate((rows[pairs], at)),
            np.concatenate((columns[pairs] + self._offsets[offsets], places + whole)),
            np.concatenate((found[pairs, offsets], rest[at, places])),
        )


class Logprober:
    """What `LogprobReader` reads, in the types of `uma.types`. Belongs to one thread."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._reader = LogprobReader(vocab.n_tokens)
        self.copied = self._reader.copied
        self._likeliest: list[tuple[TokenLogprob, ...]] = []
        """Likeliest tokens of each row that was read."""

    def read(self, logits: Floats, counts: Sequence[int]) -> None:
        """Read these rows, each with so many of its likeliest tokens. They must not change until `of` was called."""
        self._reader.read(logits, max(counts, default=0))
        shown = self._vocab.shown
        self._likeliest = [
            tuple(
                TokenLogprob(token, *shown(token), logprob, place)
                for place, token, logprob in zip(range(1, count + 1), tokens, logprobs, strict=False)
            )
            for count, tokens, logprobs in zip(counts, *self._reader.top(), strict=True)
        ]

    def values(self, logits: Floats, tokens: Sequence[TokenIds]) -> list[list[float]]:
        """Log probabilities of these tokens in each of these rows, which replace those that were read."""
        self._reader.read(logits, 0)
        return [self._reader.values(np.full(len(wanted), row), wanted).tolist() for row, wanted in enumerate(tokens)]

    def of(self, rows: Sequence[int], tokens: Sequence[int]) -> list[Logprobs]:
        """Log probability of the token in each of these rows, and the likeliest tokens there."""
        shown = self._vocab.shown
        return [
            Logprobs(TokenLogprob(token, *shown(token), logprob, rank), self._likeliest[row])
            for row, token, logprob, rank in zip(rows, tokens, *self._reader.of(rows, tokens), strict=True)
        ]

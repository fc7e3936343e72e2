"""Log probabilities of tokens and of the likeliest ones, for all rows of a batch that ask for them at once.

They are those of temperature 1, read from the logits before anything changes them. A vocabulary's worth of numbers for
each row is a megabyte soon: the arrays are kept from step to step, because fresh memory costs more than the arithmetic.
A helper thread reads them while the decode thread chooses the tokens: samplers and numpy compute without the GIL, on
cores that are idle until the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from uma.llama.vocab import Vocab
from uma.types import Logprobs, TokenLogprob

LEAST = -9999.0
"""What a probability of zero is told as: JSON has no infinity."""
BLOCK = 64
"""Tokens whose highest logit stands for all of them at first: the k likeliest tokens are in k blocks at most."""
MAX_PLAIN = 60.0
"""Maximum logit up to which powers of e and their sum stay within 32 bits; beyond it all logits are shifted."""
ROWS_AT_ONCE = 4
"""Maximum rows whose powers are added up in one pass: more would not stay in a processor's cache."""
LEAST_BESIDE = 65_536
"""Minimum logits that the helper thread reads: fewer, about 0.1 ms of work, are not worth the way there and back."""

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.intp]


class LogprobReader:
    """Reads log probabilities from rows of logits. Belongs to one thread at a time. `read` replaces the rows."""

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
        self._top_tokens: Tokens = np.empty((0, 0), np.intp)
        self._top_logits: Floats = np.empty((0, 0), np.float32)
        """Of each row the likeliest tokens, the likeliest first."""

    def copied(self, logits: Floats, rows: Sequence[int]) -> Floats:
        """A copy of these rows: the caller can change its own. The next call overwrites it."""
        size = len(rows)
        if size > len(self._kept):
            self._kept = np.empty((size, self._n_vocab), np.float32)
        np.take(logits, rows, axis=0, out=self._kept[:size], mode="clip")
        return self._kept[:size]

    def read(self, logits: Floats, count: int) -> None:
        """Take in all rows, which must stay as they are until the last question about them, and find the `count`
        likeliest tokens of each; of equals, the lower token first.
        """
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
        self._find_top(min(count, self._n_vocab))

    def of(self, rows: Sequence[int], tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Of a token in each of these rows: its log probability, and its rank, 1 for the likeliest."""
        chosen = self._logits[rows, tokens]
        told: list[float] = np.maximum(chosen - self._log_totals[rows], LEAST).tolist()
        likeliest = self._top_logits[rows]
        ranks: list[int] = (np.count_nonzero(likeliest > chosen[:, None], axis=1) + 1).tolist()
        for place, rank in enumerate(ranks):
            if rank > likeliest.shape[1]:  # others can be likelier, too
                np.greater(self._logits[rows[place]], chosen[place], out=self._is_over)
                # Without an axis counting takes a tenth of the time.
                ranks[place] = int(np.count_nonzero(self._is_over)) + 1
        return told, ranks

    def top(self) -> tuple[list[list[int]], list[list[float]]]:
        """Of each row the likeliest tokens, and their log probabilities."""
        told = np.maximum(self._top_logits - self._log_totals[:, None], LEAST)
        ids: list[list[int]] = self._top_tokens.tolist()
        values: list[list[float]] = told.tolist()
        return ids, values

    def _find_top(self, count: int) -> None:
        if count == 0:
            self._top_tokens = np.empty((len(self._logits), 0), np.intp)
            self._top_logits = np.empty((len(self._logits), 0), np.float32)
            return
        tokens, logits, is_tied = self._likeliest(count)
        for row in range(len(tokens)) if is_tied else ():
            every = np.flatnonzero(self._logits[row] >= logits[row].min())
            order = np.lexsort((every, -self._logits[row, every]))[:count]
            tokens[row], logits[row] = every[order], self._logits[row, every[order]]
        order = np.lexsort((tokens, -logits))
        self._top_tokens = np.take_along_axis(tokens, order, 1)
        self._top_logits = np.take_along_axis(logits, order, 1)

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
    """What `LogprobReader` reads, as the words of `uma.types`. Belongs to one thread, which calls `begin`, chooses
    tokens, and calls `wait` before it asks what is `told`, or computes the next logits.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._reader = LogprobReader(vocab.n_tokens)
        self._likeliest: list[tuple[TokenLogprob, ...]] = []
        """Of each row that was read."""
        self.has_idle_cores = True
        """Whether a helper thread would find a core; else the caller's thread reads the rows."""
        self._helper: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None

    def begin(self, logits: Floats, rows: Sequence[int], counts: Sequence[int], *, copies: bool) -> None:
        """Start reading these rows, numbered as they come here, each with so many of its likeliest tokens. Without
        `copies` they must be all rows, and stay as they are until the last question about them.
        """
        self.wait()  # for a step that a fault has ended
        read = self._reader.copied(logits, rows) if copies else logits
        if read.size < LEAST_BESIDE or not self.has_idle_cores:
            self._read(read, counts)
            return
        if self._helper is None:  # made on first use: where none are asked for, there is no thread
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="uma-logprobs")
        self._job = self._helper.submit(self._read, read, counts)

    def wait(self) -> None:
        """Until what `begin` has started is done. Harmless when nothing was."""
        if self._job is not None:
            job, self._job = self._job, None
            job.result()

    def close(self) -> None:
        """End the helper thread. Harmless when repeated."""
        if self._helper is not None:
            self._helper.shutdown()
            self._helper = None

    def told(self, rows: Sequence[int], tokens: Sequence[int]) -> list[Logprobs]:
        """Of the token in each of these rows: its log probability, and the likeliest there."""
        shown = self._vocab.shown
        return [
            Logprobs(TokenLogprob(token, *shown(token), logprob, rank), self._likeliest[row])
            for row, token, logprob, rank in zip(rows, tokens, *self._reader.of(rows, tokens), strict=True)
        ]

    def _read(self, logits: Floats, counts: Sequence[int]) -> None:
        self._reader.read(logits, max(counts, default=0))
        shown = self._vocab.shown
        self._likeliest = [
            tuple(
                TokenLogprob(token, *shown(token), logprob, place)
                for place, token, logprob in zip(range(1, count + 1), tokens, logprobs, strict=False)
            )
            for count, tokens, logprobs in zip(counts, *self._reader.top(), strict=True)
        ]

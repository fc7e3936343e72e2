"""Log probabilities of tokens and of the likeliest ones, for all rows of a batch that ask for them at once.

They are those of temperature 1, read from the logits before anything changes them. A vocabulary's worth of numbers for
each row is a megabyte soon: the arrays are kept from step to step, because fresh memory costs more than the arithmetic,
and rows are copied only where more than a few of their logits will change. They are read behind the choice of the
tokens; or, where that takes less time, a helper thread reads them beside it: samplers and numpy compute without the
GIL, on cores that are idle until the next batch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from uma.engine.clock import now_ms
from uma.llama.vocab import Vocab
from uma.types import Logprobs, TokenLogprob

LEAST = -9999.0
"""What a probability of zero is told as: JSON has no infinity."""
BLOCK = 64
"""Tokens whose highest logit stands for all of them at first: the k likeliest tokens are in k blocks at most."""
MAX_PLAIN = 60.0
"""Maximum logit up to which powers of e and their sum stay within 32 bits; beyond it all logits are shifted."""
CACHED_LOGITS = 131_072
"""Maximum logits that are added up in one pass, or one row: more, with their powers, would not stay in a processor's
cache."""
LEAST_BESIDE = 65_536
"""Minimum logits that the helper thread reads: fewer, about 0.1 ms of work, are not worth the way there and back."""
REMEMBERED = 5
"""Steps whose median time tells how long a way of reading takes."""
TRY_EVERY = 64
"""Interval, in steps, at which the slower way is measured again: cores are idle at one time, and spin at another."""

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.intp]


class Hidden(NamedTuple):
    """Tokens that were made impossible in some rows, before these are read: they count as they were."""

    rows: Tokens
    tokens: Tokens
    logits: Floats
    """What they were, `[rows, tokens]`."""


def hide(logits: Floats, rows: Sequence[int], tokens: Sequence[int] | npt.NDArray[np.int32]) -> Hidden:
    """Make these tokens impossible in these rows."""
    places = np.array(rows, np.intp), np.array(tokens, np.intp)
    grid = np.ix_(*places)
    hidden = Hidden(*places, logits[grid])
    logits[grid] = -np.inf
    return hidden


class LogprobReader:
    """Reads log probabilities from rows of logits. Belongs to one thread at a time. `read` replaces the rows."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._columns = n_vocab // BLOCK
        """Blocks. Block b holds the tokens b, b + columns, b + 2 columns …: its highest is found by whole rows."""
        self._offsets = self._columns * np.arange(BLOCK)
        self._rows_at_once = max(1, CACHED_LOGITS // n_vocab)
        self._powers: Floats = np.empty((self._rows_at_once, n_vocab), np.float32)
        self._is_over = np.empty(n_vocab, np.bool_)
        self._kept: Floats = np.empty((0, n_vocab), np.float32)
        self._logits: Floats = self._kept
        self._hidden: Hidden | None = None
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

    def read(self, logits: Floats, count: int, hidden: Hidden | None = None) -> None:
        """Take in all rows, which must stay as they are until the last question about them, and find the `count`
        likeliest tokens of each; of equals, the lower token first.
        """
        count = min(count, self._n_vocab)
        if hidden is not None and self._columns <= count:  # so few that all are sorted: they are put back instead
            logits = logits.copy()
            logits[np.ix_(hidden.rows, hidden.tokens)] = hidden.logits
            hidden = None
        self._logits, self._hidden = logits, hidden
        size, whole = len(logits), self._columns * BLOCK
        if self._highest.shape != (size, self._columns):
            self._highest = np.empty((size, self._columns), np.float32)
        self._log_totals = np.empty(size, np.float32)
        for start in range(0, size, self._rows_at_once):
            rows = slice(start, min(start + self._rows_at_once, size))
            self._add_up(logits[rows], whole, self._highest[rows], self._log_totals[rows])
        if hidden is not None:
            least = np.column_stack((self._log_totals[hidden.rows], hidden.logits))
            self._log_totals[hidden.rows] = np.logaddexp.reduce(least, axis=1)
        self._find_top(count)

    def _add_up(self, logits: Floats, whole: int, highest: Floats, log_totals: Floats) -> None:
        """Of each of these rows the highest logits by block, and the logarithm of the sum of all powers."""
        np.max(logits[:, :whole].reshape(len(logits), BLOCK, -1), axis=1, out=highest)
        most = highest.max(axis=1, initial=-np.inf)
        if whole < self._n_vocab:
            np.maximum(most, logits[:, whole:].max(axis=1), out=most)
        powers, is_plain = self._powers[: len(logits)], np.abs(most).max() < MAX_PLAIN
        if is_plain:
            np.exp(logits, out=powers)
        else:
            np.subtract(logits, most[:, None], out=powers)
            np.exp(powers, out=powers)
        # Whole blocks are added up column by column, several at a time.
        sums = powers[:, :whole].reshape(len(powers), BLOCK, -1).sum(axis=1).sum(axis=1)
        np.log(sums + powers[:, whole:].sum(axis=1), out=log_totals)
        if not is_plain:
            log_totals += most

    def of(self, rows: Sequence[int], tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Of a token in each of these rows, none of them hidden: its log probability, and its rank, 1 for the
        likeliest.
        """
        chosen = self._logits[rows, tokens]
        told: list[float] = np.maximum(chosen - self._log_totals[rows], LEAST).tolist()
        likeliest = self._top_logits[rows]
        ranks: list[int] = (np.count_nonzero(likeliest > chosen[:, None], axis=1) + 1).tolist()
        for place, rank in enumerate(ranks):
            if rank > likeliest.shape[1]:  # others can be likelier, too
                ranks[place] = self._over(rows[place], chosen[place]) + 1
        return told, ranks

    def _over(self, row: int, logit: np.float32) -> int:
        """Tokens of a row that are likelier."""
        np.greater(self._logits[row], logit, out=self._is_over)
        # Without an axis counting takes a tenth of the time.
        count = int(np.count_nonzero(self._is_over))
        if self._hidden is not None:
            count += int(np.count_nonzero(self._hidden.logits[self._hidden.rows == row] > logit))
        return count

    def top(self) -> tuple[list[list[int]], list[list[float]]]:
        """Of each row the likeliest tokens, and their log probabilities."""
        told = np.maximum(self._top_logits - self._log_totals[:, None], LEAST)
        ids: list[list[int]] = self._top_tokens.tolist()
        values: list[list[float]] = told.tolist()
        return ids, values

    def _find_top(self, count: int) -> None:
        """Sort the few tokens that are as likely as the least of the `count` likeliest blocks: each of these blocks has
        one, so the `count` likeliest are among them, with all that are as likely.
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

    def _candidates(self, count: int) -> tuple[Tokens, Tokens, Floats]:
        """Rows, tokens and logits, of each row those of the `count` likeliest tokens at least."""
        whole, logits = self._columns * BLOCK, self._logits
        if self._columns <= count:
            rows, tokens = np.indices(logits.shape).reshape(2, -1)
            return rows, tokens, logits.ravel()
        least = np.partition(self._highest, -count, axis=1)[:, -count]
        # Not-less instead of at-least: a logit that is no number must leave no row with too few.
        rows, columns = np.nonzero(~(self._highest < least[:, None]))
        found = logits[rows[:, None], columns[:, None] + self._offsets]
        pairs, offsets = np.nonzero(~(found < least[rows, None]))
        parts = [(rows[pairs], columns[pairs] + self._offsets[offsets], found[pairs, offsets])]
        if whole < self._n_vocab:
            rest = logits[:, whole:]
            at, places = np.nonzero(~(rest < least[:, None]))
            parts.append((at, places + whole, rest[at, places]))
        if self._hidden is not None:
            hidden_rows, hidden_tokens, values = self._hidden
            parts.append(
                (np.repeat(hidden_rows, len(hidden_tokens)), np.tile(hidden_tokens, len(hidden_rows)), values.ravel())
            )
        if len(parts) == 1:
            return parts[0]
        every_row, every_token, every_logit = zip(*parts, strict=True)
        return np.concatenate(every_row), np.concatenate(every_token), np.concatenate(every_logit)


class ReadingTimes:
    """Whether the helper thread reads a step's rows: where choosing the tokens and reading took less time with it.

    A compute thread of llama.cpp that spins, a core of which another hyperthread computes, and the GIL can make it
    slower.
    """

    def __init__(self) -> None:
        self._took_ms: dict[tuple[int, bool], deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        """By the number of rows, and with the helper or without it."""
        self._steps = 0

    def is_better_beside(self, rows: int) -> bool:
        """Whether the helper reads so many rows in the next step."""
        beside, behind = self._took_ms[rows, True], self._took_ms[rows, False]
        if len(beside) < REMEMBERED or len(behind) < REMEMBERED:
            return len(beside) <= len(behind)
        self._steps += 1
        return (sorted(beside)[REMEMBERED // 2] < sorted(behind)[REMEMBERED // 2]) is not (self._steps % TRY_EVERY == 0)

    def learn(self, rows: int, ms: float, *, is_beside: bool) -> None:
        """Take in what a step took."""
        self._took_ms[rows, is_beside].append(ms)


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
        self._work: tuple[Floats, Sequence[int], Hidden | None] | None = None
        """What was begun."""
        self._times = ReadingTimes()
        self._began_ms = 0.0

    def begin(self, logits: Floats, counts: Sequence[int], hidden: Hidden | None = None) -> None:
        """These rows are asked, each with so many of its likeliest tokens: read now by the helper thread, or at `wait`.
        But for what is hidden, they must stay as they are until the last question about them.
        """
        self._drop()
        self._work = logits, counts, hidden
        if not self._can_be_beside(logits):
            return
        self._began_ms = now_ms()
        if not self._times.is_better_beside(len(logits)):
            return
        if self._helper is None:  # made on first use: where none are asked for, there is no thread
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="uma-logprobs")
        self._job = self._helper.submit(self._read, *self._work)

    def _can_be_beside(self, logits: Floats) -> bool:
        return self.has_idle_cores and logits.size >= LEAST_BESIDE

    def read(self, logits: Floats, counts: Sequence[int]) -> None:
        """Take in these rows at once."""
        self._drop()
        self._read(logits, counts, None)

    def copied(self, logits: Floats, rows: Sequence[int]) -> Floats:
        """See `LogprobReader`."""
        self._drop()
        return self._reader.copied(logits, rows)

    def _drop(self) -> None:
        """End what was started for a step that a fault has ended."""
        job, self._job, self._work = self._job, None, None
        if job is not None and not job.cancel():
            job.exception()

    def wait(self) -> None:
        """Until the rows are read: what the helper has not come to is read here, when no token needs to be hidden any
        more. Harmless when nothing was begun.
        """
        job, self._job = self._job, None
        work, self._work = self._work, None
        if work is None:
            return
        logits, counts, hidden = work
        if job is not None and not job.cancel():
            job.result()
        else:
            if hidden is not None:
                logits[np.ix_(hidden.rows, hidden.tokens)] = hidden.logits
            self._read(logits, counts, None)
        if self._can_be_beside(logits):
            self._times.learn(len(logits), now_ms() - self._began_ms, is_beside=job is not None)

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

    def _read(self, logits: Floats, counts: Sequence[int], hidden: Hidden | None) -> None:
        self._reader.read(logits, max(counts, default=0), hidden)
        shown = self._vocab.shown
        self._likeliest = [
            tuple(
                TokenLogprob(token, *shown(token), logprob, place)
                for place, token, logprob in zip(range(1, count + 1), tokens, logprobs, strict=False)
            )
            for count, tokens, logprobs in zip(counts, *self._reader.top(), strict=True)
        ]

"""How long a batch takes on this machine, learnt from the batches that ran.

Cost is not linear in tokens: 64 tokens can be read faster than 48 (kernels have tiles), and attention grows with the
tokens before them. So the model is a few small tables of observed times, by number of decode rows and by size of a
piece of a prompt, and drift factors that follow the whole machine when its speed changes.

There is no separate exploration: a size without recent observations is predicted a little faster than the nearest known
size (`PROMISE`), so that it is chosen where it fits, and is known from then on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import attrs

SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1_024, 1_536, 2_048, 4_096, 8_192)
"""Sizes of pieces, in tokens, that have a bucket each. `best_size` offers these, and the whole rest of a prompt."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of decode rows that have a bucket each."""
TILE_TOKENS = 64
"""Tokens of a sequence that llama.cpp's flash attention computes together on a CPU. With fewer tokens, each costs
several times as much; a last, partial tile costs as much as a whole one."""
LEARN = 0.3
"""Weight of a new observation in a moving average: after a few batches an outdated machine speed is forgotten."""
LEARN_SLOPE = 0.05
"""Learning rate of the cost per token attended to, which changes little and shows only in long prompts."""
SURE_SEEN = 3
"""Minimum observations for `is_sure_of`: the first batches of a size are slow, because they touch memory first."""
SURE_TOKENS = 200
"""Spread (standard deviation) of the observed positions, in tokens, at which half of a measured slope is believed."""
PROMISE = 0.9
"""Time of a larger size without recent observations, as a share of the nearest smaller one's in proportion."""
FORGET_AFTER = 256
"""Observations of other sizes after which a size counts as never seen, so that a slow one is tried again."""
NEARLY = 0.96
"""Share of the best throughput from which a smaller piece is preferred: requests that arrive wait for its end."""
HICCUP = 2.0
"""Maximum time that is learnt from one observation, as a multiple of its prediction. A machine that is really slower
shows it again; a batch that another program interrupted for a second says nothing of the next."""
DRIFT_LIMIT = 4.0
"""Bound of the drift factor (1/4 to 4), and of the share that decode rows add to a mixed batch (-4 to 4)."""

Position = Callable[[int], float]
"""Mean number of tokens before each token of a piece of so many tokens, which it attends to."""


@attrs.define(slots=True)
class _Bucket:
    """Observed times of one batch size: a fast average, and slow averages that give its slope by tokens attended to."""

    x: float
    ms: float
    seen_at: int
    """Value of the table's observation counter when this size was last seen."""
    seen: int = 1
    mean_x: float = attrs.field(init=False)
    mean_ms: float = attrs.field(init=False)
    var: float = 0.0
    cov: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.mean_x, self.mean_ms = self.x, self.ms

    def learn(self, x: float, ms: float, drift: float, at: int) -> None:
        # The second observation replaces the first, which may have touched memory for the first time.
        weight = max(LEARN, 1 / self.seen)
        self.seen, self.seen_at = self.seen + 1, at
        self.x += (x - self.x) * weight
        self.ms += (ms / drift - self.ms) * weight
        # Not `ms / drift`: while a stream grows and the drift falls, that quotient rises, and the slope learnt from it
        # lowered the drift further, until a step was predicted at four times its time.
        weight = max(LEARN_SLOPE, 1 / self.seen)
        dx, dms = x - self.mean_x, ms - self.mean_ms
        self.mean_x += dx * weight
        self.mean_ms += dms * weight
        # Observations at about one position neither teach the slope nor decay it. With decay, after 200 such pieces one
        # at 2,000 tokens was predicted to take as long as one at 1,000, and took twice as long.
        weight *= dx * dx / (dx * dx + SURE_TOKENS * SURE_TOKENS)
        self.var = (1 - weight) * (self.var + weight * dx * dx)
        self.cov = (1 - weight) * (self.cov + weight * dx * dms)


class _Table:
    """A bucket for each size. Sizes whose attention is computed alike share a slope (attention cost per token)."""

    def __init__(self, sizes: tuple[int, ...], *, is_tiled: bool, forgets: bool = False) -> None:
        self._sizes = sizes
        self._is_tiled = is_tiled
        self._forgets = forgets
        self._buckets: list[_Bucket | None] = [None] * len(sizes)
        self._slopes = [0.0, 0.0]
        """Milliseconds per token, and per token that it attends to: of sizes below a tile, and from a tile on."""
        self._observed = 0

    def scaled(self, factor: float) -> _Table:
        """A copy in which everything takes `factor` times as long."""
        copy = _Table(self._sizes, is_tiled=self._is_tiled, forgets=self._forgets)
        copy._observed, copy._slopes = self._observed, [slope * factor for slope in self._slopes]
        for index, bucket in enumerate(self._buckets):
            if bucket is not None:
                copy._buckets[index] = _Bucket(bucket.x, bucket.ms * factor, bucket.seen_at, bucket.seen)
        return copy

    @property
    def is_empty(self) -> bool:
        return not self._observed

    def has_seen(self, size: int) -> bool:
        """Whether the bucket of this size has recent observations."""
        return self._fresh(self._index(size)) is not None

    def times_seen(self, size: int) -> int:
        """Number of observations in the bucket of this size; 0 if none is recent."""
        bucket = self._fresh(self._index(size))
        return 0 if bucket is None else bucket.seen

    def seen_below(self, size: int) -> int:
        """The largest smaller size with recent observations; 0: none."""
        return next((self._sizes[at] for at in range(self._index(size) - 1, -1, -1) if self._fresh(at)), 0)

    def predict(self, size: int, x: float) -> float:
        """Milliseconds for `size`, each attending to `x` tokens; 0 while nothing is known."""
        index = self._index(size)
        if (nearest := self._nearest(index, size)) is None:
            return 0.0
        bucket, own = self._buckets[nearest], self._sizes[nearest]
        assert bucket is not None
        scale = size / own
        if nearest != index:
            # A smaller size is never predicted below a quarter of the time: part of the cost is fixed.
            scale = max(scale, 0.25) if scale < 1 else scale * (PROMISE if self._forgets else 1.0)
        level = max(0.25 * bucket.ms, bucket.ms - self._attention(own, bucket.x))
        return level * scale + self._attention(size, x)

    def learn(self, size: int, x: float, ms: float, drift: float) -> bool:
        """Add one observation, made while the whole machine takes `drift` times as long as usual. Returns whether this
        size's bucket had recent observations before.
        """
        index, was_seen, self._observed = self._index(size), self.has_seen(size), self._observed + 1
        own, bucket = self._sizes[index], self._buckets[index]
        own_ms = ms * own / size
        if bucket is None:
            self._buckets[index] = _Bucket(x, own_ms / drift, self._observed)
            return was_seen
        bucket.learn(x, own_ms, drift, self._observed)
        kind = self._kind(own)
        near = [(s, b) for s, b in zip(self._sizes, self._buckets, strict=True) if b and self._kind(s) == kind]
        cov = sum(b.cov * min(b.seen, 1 / LEARN_SLOPE) / s for s, b in near)
        var = sum(b.var * min(b.seen, 1 / LEARN_SLOPE) for _, b in near)
        self._slopes[kind] = max(0.0, cov / (var + SURE_TOKENS * SURE_TOKENS))
        return was_seen

    def _attention(self, size: int, x: float) -> float:
        kind = self._kind(size)
        slope = self._slopes[kind] if kind else max(self._slopes)
        return slope * (-(-size // TILE_TOKENS) * TILE_TOKENS if kind else size) * x

    def _kind(self, size: int) -> int:
        return int(self._is_tiled and size >= TILE_TOKENS)

    def _index(self, size: int) -> int:
        """Index of the bucket for `size`: the next larger; of pieces, with a partial last tile, the next smaller."""
        index = _index(self._sizes, size)
        return index - 1 if self._is_tiled and index and size < self._sizes[index] else index

    def _fresh(self, index: int) -> _Bucket | None:
        bucket = self._buckets[index]
        is_old = self._forgets and bucket is not None and self._observed - bucket.seen_at > FORGET_AFTER
        return None if is_old else bucket

    def _nearest(self, index: int, size: int) -> int | None:
        """Index of the nearest known bucket, first among those whose attention is computed alike."""
        if self._fresh(index):
            return index
        known = [other for other in range(len(self._sizes)) if self._fresh(other)]
        kind = self._kind(size)
        return min(known, key=lambda other: (self._kind(self._sizes[other]) != kind, abs(other - index)), default=None)


@attrs.define(slots=True)
class _Learnt:
    """What was learnt with one number of compute threads."""

    rows: _Table = attrs.field(factory=lambda: _Table(ROWS, is_tiled=False))
    pieces: _Table = attrs.field(factory=lambda: _Table(SIZES, is_tiled=True, forgets=True))
    added: dict[tuple[int, int], tuple[float, int]] = attrs.field(factory=dict)
    """Time that decode rows add to a mixed batch, by buckets of rows and of all tokens: as a share of the rows' time
    alone, with the value of `considered` at that observation."""
    considered: int = 0
    """Number of mixed batches considered: the clock by which `added` is forgotten."""
    rows_drift: float = 1.0
    """Time that decode rows take now, as a multiple of what the tables say."""
    pieces_drift: float = 1.0
    """Factor for pieces likewise, from the last ones observed; a piece is predicted by `reading_drift`."""

    @property
    def reading_drift(self) -> float:
        """Factor of a piece's time now to what the tables say: the larger of both drifts. Slower decode rows predict
        slower pieces, and are observed some ten times as often. Faster rows predict nothing: after a long stream's end
        steps took half as long, and pieces predicted at half of their time came too late for their readers.
        """
        return max(self.rows_drift, self.pieces_drift)

    def scaled(self, factor: float) -> _Learnt:
        rows, pieces = self.rows.scaled(factor), self.pieces.scaled(factor)
        return _Learnt(rows, pieces, dict(self.added), self.considered, self.rows_drift, self.pieces_drift)


class CostModel:
    """Predicts milliseconds: of decoding from rows and cells in use, of reading from tokens and where they stand."""

    def __init__(self) -> None:
        self._threads = 0
        self._learnt = _Learnt()
        self._others: dict[int, _Learnt] = {}

    def use(self, threads: int) -> None:
        """Predict and learn for this number of compute threads from now on. Each number has tables of its own; those of
        a new number begin as the current ones, scaled as if the work divided evenly.
        """
        before, self._threads = self._threads, threads
        if before in (0, threads):
            return
        self._others[before] = self._learnt
        known = self._others.get(threads)
        self._learnt = self._learnt.scaled(before / threads) if known is None else known

    @property
    def knows_prefill(self) -> bool:
        """Whether any piece has been observed."""
        return not self._learnt.pieces.is_empty

    def has_decoded(self, rows: int) -> bool:
        """Whether a decode batch of about this size has been observed."""
        return self._learnt.rows.has_seen(rows)

    def has_read(self, tokens: int) -> bool:
        """Whether a piece of about this size has been observed recently."""
        return self._learnt.pieces.has_seen(tokens)

    def is_sure_of(self, tokens: int) -> bool:
        """Whether a piece of about this size has been observed often enough to rely on its prediction."""
        return self._learnt.pieces.times_seen(tokens) >= SURE_SEEN

    def decode_ms(self, rows: int, cells: int) -> float:
        """Predicted time of a batch of decode rows, with `cells` KV cells in use; 0 while nothing is known."""
        return self._learnt.rows.predict(rows, cells) * self._learnt.rows_drift if rows else 0.0

    def prefill_ms(self, tokens: int, position: float) -> float:
        """Predicted time of a piece of a prompt, behind its first `position` tokens; 0 while nothing is known."""
        drift = self._learnt.reading_drift
        return self._learnt.pieces.predict(tokens, position + tokens / 2) * drift if tokens else 0.0

    def mixed_ms(self, rows: int, cells: int, tokens: int, position: float) -> float | None:
        """Predicted time of a batch of decode rows and `tokens` prompt tokens; None while no mixed batch is known."""
        learnt, (row_index, size_index) = self._learnt, _indices(rows, rows + tokens)
        fresh = {at: share for at, (share, seen) in learnt.added.items() if learnt.considered - seen <= FORGET_AFTER}
        at = min(fresh, key=lambda indices: (abs(indices[0] - row_index), abs(indices[1] - size_index)), default=None)
        if at is None:
            return None
        return max(0.0, self.prefill_ms(rows + tokens, position) + fresh[at] * self.decode_ms(rows, cells))

    def hoped_decode_ms(self, rows: int, cells: int, *, is_trial: bool = False) -> float:
        """Optimistic time of a decode batch: the prediction, once observed often enough; until then, and in a trial, no
        more than that of the largest smaller known batch.
        """
        if is_trial or self._learnt.rows.times_seen(rows) < SURE_SEEN:
            rows = self._learnt.rows.seen_below(rows) or rows
        return self.decode_ms(rows, cells)

    def best_size(
        self,
        most: int,
        position: Position,
        usual_ms: float,
        *,
        most_ms: float = 0.0,
        tile_ms: float = 0.0,
        worth: float = 0.0,
    ) -> int:
        """Size of the piece with the highest throughput, at most `most` tokens; 0 where none is short enough.

        A piece takes at most `usual_ms`, or up to `most_ms` where its gain in throughput is at least `worth` times its
        relative excess. A whole tile may take `tile_ms`: deep in a prompt a partial tile takes as long. Of sizes that
        are nearly as fast, `most` is preferred, then the smallest.
        """
        took = {size: self.prefill_ms(size, position(size)) for size in (*(s for s in SIZES if s < most), most)}
        whole = min(most, TILE_TOKENS)
        if took[whole] <= max(tile_ms, usual_ms):
            took = {size: ms for size, ms in took.items() if size >= whole}
        rates = {
            size: size / max(ms, 1e-9) / (1 + worth * max(0.0, ms / max(usual_ms, 1e-9) - 1))
            for size, ms in took.items()
            if ms <= max(usual_ms, most_ms) or (size == whole and ms <= tile_ms)
        }
        enough = NEARLY * max(rates.values(), default=0.0)
        if rates.get(most, -1.0) >= enough:
            return most
        return next((size for size, rate in rates.items() if rate >= enough), 0)

    def observe_decode(self, rows: int, cells: int, ms: float) -> None:
        """Learn from a batch of decode rows that ran."""
        learnt, expected = self._learnt, self.decode_ms(rows, cells)
        ms = _without_hiccup(ms, expected)
        # Not for an unknown size: that its extrapolated prediction was wrong says nothing of the machine.
        if learnt.rows.learn(rows, cells, ms, learnt.rows_drift):
            learnt.rows_drift = _followed(learnt.rows_drift, ms, expected)

    def observe_prefill(self, tokens: int, position: float, ms: float) -> None:
        """Learn from a piece of a prompt that ran."""
        learnt, expected = self._learnt, self.prefill_ms(tokens, position)
        ms = _without_hiccup(ms, expected)
        if learnt.pieces.learn(tokens, position + tokens / 2, ms, learnt.reading_drift):
            learnt.pieces_drift = _followed(learnt.reading_drift, ms, expected)

    def observe_mixed(self, rows: int, cells: int, tokens: int, position: float, ms: float) -> None:
        """Learn from a mixed batch that ran."""
        learnt, expected = self._learnt, self.mixed_ms(rows, cells, tokens, position)
        alone_ms, piece_ms = self.decode_ms(rows, cells), self.prefill_ms(rows + tokens, position)
        if alone_ms <= 0 or piece_ms <= 0:
            return
        ms = _without_hiccup(ms, expected or alone_ms + piece_ms)
        at = _indices(rows, rows + tokens)
        if expected is not None and at in learnt.added:
            learnt.pieces_drift = _followed(learnt.reading_drift, ms, expected)
        share = min(max((ms - piece_ms) / alone_ms, -DRIFT_LIMIT), DRIFT_LIMIT)
        before = learnt.added.get(at, (share, 0))[0]
        learnt.added[at] = before + (share - before) * LEARN, learnt.considered

    def considered_mixed(self) -> None:
        """Count a possible mixed batch. By this count observations expire, so that a slow size is retried."""
        self._learnt.considered += 1


def _followed(drift: float, ms: float, expected: float) -> float:
    """The drift after a batch that took `ms`: it corrects the predictions of sizes without recent observations."""
    if expected <= 0:
        return drift
    ratio = max(ms / expected, 1 / DRIFT_LIMIT)
    # It returns to 1 slowly: the tables learn a lasting change.
    followed: float = min(max(drift * ratio**0.2, 1 / DRIFT_LIMIT), DRIFT_LIMIT) ** 0.99
    return followed


def _index(sizes: tuple[int, ...], size: int) -> int:
    return min(bisect_left(sizes, size), len(sizes) - 1)


def _indices(rows: int, tokens: int) -> tuple[int, int]:
    return _index(ROWS, rows), _index(SIZES, tokens)


def _without_hiccup(ms: float, expected_ms: float) -> float:
    return min(ms, HICCUP * expected_ms) if expected_ms > 0 else ms

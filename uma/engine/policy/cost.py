"""How long a batch takes on this machine, learnt from the batches that ran.

Cost is not a line: 64 tokens can be read faster than 48 (kernels have tiles), and attention grows with what lies before
them. So the model is a few small tables of what was really seen, by number of decode rows and by size of a prompt's
piece, and drift factors that follow the whole machine when its speed changes.

It makes no trials. A size that was not seen of late promises to read a little faster than the nearest that was
(`PROMISE`): where it fits, it is chosen, and from then on it is known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import attrs

SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1_024, 1_536, 2_048, 4_096, 8_192)
"""Sizes of pieces that the model tells apart, and the only ones it offers beside all that is left of a prompt."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of decode rows that the model tells apart."""
TILE_TOKENS = 64
"""Tokens of a sequence that llama.cpp's flash attention computes together on a CPU. Of fewer, each costs several times
as much, and a part of a tile costs as much as a whole one."""
LEARN = 0.3
"""Weight of a new observation: a few batches forget an old machine speed."""
LEARN_SLOPE = 0.05
"""Learning rate of how cost grows with the tokens attended to, which changes little and shows only in long prompts."""
SURE_SEEN = 3
"""Observations from which a size is believed where it matters: the first touch memory for the first time."""
SURE_TOKENS = 200
"""Spread of the observations from which such a slope is believed."""
PROMISE = 0.9
"""Time of a larger size that was not seen of late, as a share of what the nearest smaller one says in proportion."""
FORGET_AFTER = 256
"""Observations after which a size that was not among them counts as never seen: what was slow once need not be now."""
NEARLY = 0.96
"""Share of the best rate from which a smaller piece is as good: what comes meanwhile waits for its end."""
HICCUP = 2.0
"""Maximum time that is learnt from one observation, as a multiple of its prediction. A machine that is really slower
shows it again; a batch that another program interrupted for a second says nothing of the next."""
DRIFT_LIMIT = 4.0
"""Bounds of the drift factor, and of what rows add to a piece's batch, as multiples."""

Position = Callable[[int], float]
"""Where a piece of so many tokens stands: what each of them attends to before it, on the average."""


@attrs.define(slots=True)
class _Line:
    """What batches of one size took: of late, and slowly averaged by the tokens attended to."""

    x: float
    ms: float
    seen_at: int
    """The table's observations when it was last seen."""
    seen: int = 1
    mean_x: float = attrs.field(init=False)
    mean_ms: float = attrs.field(init=False)
    var: float = 0.0
    cov: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.mean_x, self.mean_ms = self.x, self.ms

    def learn(self, x: float, ms: float, drift: float, at: int) -> None:
        # The first observation counts only until there is a second: perhaps memory was touched for the first time.
        weight = max(LEARN, 1 / self.seen)
        self.seen, self.seen_at = self.seen + 1, at
        self.x += (x - self.x) * weight
        self.ms += (ms / drift - self.ms) * weight
        # What it really took, not divided by the drift. While a stream grows and the drift falls that quotient grows:
        # the slope learnt of it made the drift fall further, until a step was predicted at four times its time.
        weight = max(LEARN_SLOPE, 1 / self.seen)
        dx, dms = x - self.mean_x, ms - self.mean_ms
        self.mean_x += dx * weight
        self.mean_ms += dms * weight
        # Where all stand at about one place nothing is learnt of the slope, and nothing is forgotten: after 200 such
        # pieces one was expected to take as long at 2,000 tokens as at 1,000, and took twice as long.
        weight *= dx * dx / (dx * dx + SURE_TOKENS * SURE_TOKENS)
        self.var = (1 - weight) * (self.var + weight * dx * dx)
        self.cov = (1 - weight) * (self.cov + weight * dx * dms)


class _Table:
    """A line for each size. Attention costs each token the same at every size that is computed in one way."""

    def __init__(self, sizes: tuple[int, ...], *, is_tiled: bool, forgets: bool = False) -> None:
        self._sizes = sizes
        self._is_tiled = is_tiled
        self._forgets = forgets
        self._lines: list[_Line | None] = [None] * len(sizes)
        self._slopes = [0.0, 0.0]
        """Milliseconds of a token for each that it attends to: below a tile, and from one on."""
        self._observed = 0

    def scaled(self, factor: float) -> _Table:
        """A copy in which everything takes `factor` times as long."""
        copy = _Table(self._sizes, is_tiled=self._is_tiled, forgets=self._forgets)
        copy._observed, copy._slopes = self._observed, [slope * factor for slope in self._slopes]
        for slot, line in enumerate(self._lines):
            if line is not None:
                copy._lines[slot] = _Line(line.x, line.ms * factor, line.seen_at, line.seen)
        return copy

    @property
    def is_empty(self) -> bool:
        return not self._observed

    def has_seen(self, size: int) -> bool:
        """Whether anything is known of about this size."""
        return self._fresh(self._slot(size)) is not None

    def times_seen(self, size: int) -> int:
        """Observations of about this size."""
        line = self._fresh(self._slot(size))
        return 0 if line is None else line.seen

    def seen_below(self, size: int) -> int:
        """The largest smaller size that something is known of; 0: none."""
        return next((self._sizes[at] for at in range(self._slot(size) - 1, -1, -1) if self._fresh(at)), 0)

    def predict(self, size: int, x: float) -> float:
        """Milliseconds for `size`, each attending to `x` tokens; 0 while nothing is known."""
        slot = self._slot(size)
        if (nearest := self._nearest(slot, size)) is None:
            return 0.0
        line, own = self._lines[nearest], self._sizes[nearest]
        assert line is not None
        scale = size / own
        if nearest != slot:
            # A smaller one is never assumed cheaper than in proportion to its fixed part.
            scale = max(scale, 0.25) if scale < 1 else scale * (PROMISE if self._forgets else 1.0)
        level = max(0.25 * line.ms, line.ms - self._attention(own, line.x))
        return level * scale + self._attention(size, x)

    def learn(self, size: int, x: float, ms: float, drift: float) -> bool:
        """Take in one observation, while the whole machine takes `drift` times as long as usual. Returns whether about
        this size was seen before.
        """
        slot, was_seen, self._observed = self._slot(size), self.has_seen(size), self._observed + 1
        own, line = self._sizes[slot], self._lines[slot]
        own_ms = ms * own / size
        if line is None:
            self._lines[slot] = _Line(x, own_ms / drift, self._observed)
            return was_seen
        line.learn(x, own_ms, drift, self._observed)
        kind = self._kind(own)
        near = [(s, line) for s, line in zip(self._sizes, self._lines, strict=True) if line and self._kind(s) == kind]
        cov = sum(line.cov * min(line.seen, 1 / LEARN_SLOPE) / s for s, line in near)
        var = sum(line.var * min(line.seen, 1 / LEARN_SLOPE) for _, line in near)
        self._slopes[kind] = max(0.0, cov / (var + SURE_TOKENS * SURE_TOKENS))
        return was_seen

    def _attention(self, size: int, x: float) -> float:
        kind = self._kind(size)
        slope = self._slopes[kind] if kind else max(self._slopes)
        return slope * (-(-size // TILE_TOKENS) * TILE_TOKENS if kind else size) * x

    def _kind(self, size: int) -> int:
        return int(self._is_tiled and size >= TILE_TOKENS)

    def _slot(self, size: int) -> int:
        """The line that stands for `size`: the next larger, or of a piece the next smaller, whose end fills no tile."""
        slot = _slot(self._sizes, size)
        return slot - 1 if self._is_tiled and slot and size < self._sizes[slot] else slot

    def _fresh(self, slot: int) -> _Line | None:
        line = self._lines[slot]
        is_old = self._forgets and line is not None and self._observed - line.seen_at > FORGET_AFTER
        return None if is_old else line

    def _nearest(self, slot: int, size: int) -> int | None:
        """The nearest line that is known: first of those that attention computes in the same way."""
        if self._fresh(slot):
            return slot
        known = [other for other in range(len(self._sizes)) if self._fresh(other)]
        kind = self._kind(size)
        return min(known, key=lambda other: (self._kind(self._sizes[other]) != kind, abs(other - slot)), default=None)


@attrs.define(slots=True)
class _Learnt:
    """What was learnt with one number of compute threads."""

    rows: _Table = attrs.field(factory=lambda: _Table(ROWS, is_tiled=False))
    pieces: _Table = attrs.field(factory=lambda: _Table(SIZES, is_tiled=True, forgets=True))
    added: dict[tuple[int, int], tuple[float, int]] = attrs.field(factory=dict)
    """Cost that decode rows add, by slots of rows and of all tokens: what they add to the batch of a piece, as a share
    of what they take alone, and how many mixed batches there could have been until then."""
    considered: int = 0
    """How often a mixed batch was considered."""
    rows_drift: float = 1.0
    """Time that decode rows take now, as a multiple of what the tables say."""
    pieces_drift: float = 1.0
    """What the last pieces showed of that; a piece is predicted by `reading_drift`."""

    @property
    def reading_drift(self) -> float:
        """Time that a piece takes now, as a multiple of what the tables say. Where decode rows are slower than these
        say, pieces will be too: there are some ten steps for each. Where rows are faster, this says nothing: after a
        long stream's end steps took half as long, and pieces that were therefore expected in half of their time came
        too late for their readers.
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
        """Predict and learn for so many compute threads from now on. What was learnt with others is kept for when they
        come back; of a number never seen the model assumes that the work divides evenly.
        """
        before, self._threads = self._threads, threads
        if before in (0, threads):
            return
        self._others[before] = self._learnt
        known = self._others.get(threads)
        self._learnt = self._learnt.scaled(before / threads) if known is None else known

    @property
    def knows_prefill(self) -> bool:
        """Whether any piece was seen yet."""
        return not self._learnt.pieces.is_empty

    def has_decoded(self, rows: int) -> bool:
        """Whether a batch of about so many decode rows was seen."""
        return self._learnt.rows.has_seen(rows)

    def has_read(self, tokens: int) -> bool:
        """Whether a piece of about so many tokens was seen of late."""
        return self._learnt.pieces.has_seen(tokens)

    def is_sure_of(self, tokens: int) -> bool:
        """Whether a piece of about so many tokens was seen often enough to be believed."""
        return self._learnt.pieces.times_seen(tokens) >= SURE_SEEN

    def decode_ms(self, rows: int, cells: int) -> float:
        """A batch of decode rows, with so many cells in use; 0 while nothing is known."""
        return self._learnt.rows.predict(rows, cells) * self._learnt.rows_drift if rows else 0.0

    def prefill_ms(self, tokens: int, position: float) -> float:
        """A piece of a prompt, after `position` tokens of it; 0 while nothing is known."""
        drift = self._learnt.reading_drift
        return self._learnt.pieces.predict(tokens, position + tokens / 2) * drift if tokens else 0.0

    def mixed_ms(self, rows: int, cells: int, tokens: int, position: float) -> float | None:
        """A batch of decode rows and of `tokens` tokens of prompts together; None while nothing is known of such."""
        learnt, (row_slot, size_slot) = self._learnt, _slots(rows, rows + tokens)
        fresh = {at: share for at, (share, seen) in learnt.added.items() if learnt.considered - seen <= FORGET_AFTER}
        at = min(fresh, key=lambda slots: (abs(slots[0] - row_slot), abs(slots[1] - size_slot)), default=None)
        if at is None:
            return None
        return max(0.0, self.prefill_ms(rows + tokens, position) + fresh[at] * self.decode_ms(rows, cells))

    def hoped_decode_ms(self, rows: int, cells: int, *, is_trial: bool = False) -> float:
        """The shortest that a batch of so many rows can be hoped to take. That is what was seen, once it was seen often
        enough; until then, and in a trial, no longer than the largest smaller batch that is known.
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
        """The piece, of at most `most` tokens, that reads most tokens a millisecond; 0 where none is short enough.

        It takes `usual_ms` at most, or up to `most_ms` where it reads faster by `worth` of its excess time. A whole
        tile may take `tile_ms`: deep in a prompt a part of one takes as long. Of sizes that read nearly as fast, all
        that there is to read is chosen, or else the smallest.
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
        """Learn from a batch of decode rows that really ran."""
        learnt, expected = self._learnt, self.decode_ms(rows, cells)
        ms = _without_hiccup(ms, expected)
        # What other sizes promise says nothing of the machine.
        if learnt.rows.learn(rows, cells, ms, learnt.rows_drift):
            learnt.rows_drift = _followed(learnt.rows_drift, ms, expected)

    def observe_prefill(self, tokens: int, position: float, ms: float) -> None:
        """Learn from a piece that was really read."""
        learnt, expected = self._learnt, self.prefill_ms(tokens, position)
        ms = _without_hiccup(ms, expected)
        if learnt.pieces.learn(tokens, position + tokens / 2, ms, learnt.reading_drift):
            learnt.pieces_drift = _followed(learnt.reading_drift, ms, expected)

    def observe_mixed(self, rows: int, cells: int, tokens: int, position: float, ms: float) -> None:
        """Learn from a batch of decode rows and a piece of the prompts that really ran."""
        learnt, expected = self._learnt, self.mixed_ms(rows, cells, tokens, position)
        alone_ms, piece_ms = self.decode_ms(rows, cells), self.prefill_ms(rows + tokens, position)
        if alone_ms <= 0 or piece_ms <= 0:
            return
        ms = _without_hiccup(ms, expected or alone_ms + piece_ms)
        at = _slots(rows, rows + tokens)
        if expected is not None and at in learnt.added:
            learnt.pieces_drift = _followed(learnt.reading_drift, ms, expected)
        share = min(max((ms - piece_ms) / alone_ms, -DRIFT_LIMIT), DRIFT_LIMIT)
        before = learnt.added.get(at, (share, 0))[0]
        learnt.added[at] = before + (share - before) * LEARN, learnt.considered

    def considered_mixed(self) -> None:
        """A mixed batch was possible: where it was slower once, it is forgotten some time, and tried again."""
        self._learnt.considered += 1


def _followed(drift: float, ms: float, expected: float) -> float:
    """A drift after a batch that took `ms`. It corrects sizes not seen for long."""
    if expected <= 0:
        return drift
    ratio = max(ms / expected, 1 / DRIFT_LIMIT)
    # It returns to 1 slowly: the tables learn a lasting change.
    followed: float = min(max(drift * ratio**0.2, 1 / DRIFT_LIMIT), DRIFT_LIMIT) ** 0.99
    return followed


def _slot(sizes: tuple[int, ...], size: int) -> int:
    return min(bisect_left(sizes, size), len(sizes) - 1)


def _slots(rows: int, tokens: int) -> tuple[int, int]:
    return _slot(ROWS, rows), _slot(SIZES, tokens)


def _without_hiccup(ms: float, expected_ms: float) -> float:
    return min(ms, HICCUP * expected_ms) if expected_ms > 0 else ms

"""How long a batch takes on this machine, learnt from the ticks that ran.

Cost is not a line: 64 tokens can be read faster than 48 (kernels have tiles), and attention grows with what lies
before them. So the model is two small tables of what was really seen, decode by number of rows and prefill by chunk
size, each entry with its own slope over the tokens attended to, and a drift factor that follows the whole machine when
its speed changes. It starts knowing nothing, and says so.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable

SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1_024, 1_536, 2_048, 4_096, 8_192)
"""Chunk sizes the model tells apart, and the only ones it offers: even tiles, few entries, each seen often."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of decode rows the model tells apart."""
LEARN = 0.3
"""Weight of a new observation: a few ticks forget an old machine speed."""
LEARN_SLOPE = 0.05
"""Minimum weight of a new observation of how cost grows with the tokens attended to: that changes little, and shows
only in long prompts. The first observations weigh the same each, so that one prompt tells most of it."""
SURE_TOKENS = 200
"""Minimum spread of the observations from which a slope is believed; below it what other sizes show counts for more."""
SURE_SEEN = 3
"""Minimum observations for a size to be believed although others promise more."""
MOST_ATTENTION = 0.75
"""Maximum share of a batch's time that is attributed to attention."""
NEARLY = 0.96
"""Minimum rate of a smaller chunk, as a share of the best rate, at which the smaller one is taken."""
DRIFT_LIMIT = 4.0
"""Bounds of the drift factor."""
HICCUP = 2.0
"""Maximum time that is learnt from one observation, as a multiple of its prediction. A machine that is really slower
shows it again with the next batch; a batch that another program interrupted for a second says nothing of the next."""

MOST_SURCHARGE = 4.0
"""Maximum surcharge of rows on a chunk that shares their batch, as a multiple of what they take alone."""

TILE_TOKENS = 64
"""Minimum tokens of a sequence for which llama.cpp's flash attention computes in tiles, on a CPU: attention then costs
a token several times less than below."""

Position = Callable[[int], float]
"""By number of tokens."""


class _Line:
    """Milliseconds of one size by the tokens attended to: the level of late, and a slope that is learnt slowly."""

    __slots__ = ("_far_ms", "_far_x", "_ms", "_x", "cov", "is_own", "seen", "var")

    def __init__(self, x: float, ms: float, *, is_own: bool = True) -> None:
        self.seen = 1
        """Observations."""
        self.is_own = is_own
        """The first was of this size, and not of another that has the same line."""
        self._x = self._far_x = x
        self._ms = self._far_ms = ms
        self.var = self.cov = 0.0
        """Of the tokens attended to, and of these with the milliseconds."""

    def slope(self, usual: float) -> float:
        """Milliseconds an attended token; near `usual` while little is known."""
        sure = SURE_TOKENS * SURE_TOKENS
        slope = (self.cov + usual * sure) / (self.var + sure)
        return min(max(slope, 0.0), MOST_ATTENTION * self._ms / max(self._x, 1.0))

    def scaled(self, factor: float) -> _Line:
        """A copy in which everything takes `factor` times as long."""
        copy = _Line(self._x, self._ms * factor, is_own=self.is_own)
        copy.seen = self.seen
        copy._far_x, copy._far_ms = self._far_x, self._far_ms * factor
        copy.var, copy.cov = self.var, self.cov * factor
        return copy

    def at(self, x: float, usual: float) -> float:
        """The prediction."""
        return max(0.0, self._ms + (x - self._x) * self.slope(usual))

    def learn(self, x: float, ms: float) -> None:
        """Take in one observation."""
        # The first observation counts only until there is a second: perhaps memory was touched for the first time.
        weight = max(LEARN, 1 / self.seen)
        self.seen += 1
        self._x += (x - self._x) * weight
        self._ms += (ms - self._ms) * weight
        weight = max(LEARN_SLOPE, 1 / self.seen)
        dx, dms = x - self._far_x, ms - self._far_ms
        self._far_x += dx * weight
        self._far_ms += dms * weight
        self.var = (1 - weight) * (self.var + weight * dx * dx)
        self.cov = (1 - weight) * (self.cov + weight * dx * dms)


class _Table:
    """A line for each size, and what is usual: the slope of any, by size."""

    __slots__ = ("_is_tiled", "_lines", "_sizes", "_usual")

    def __init__(self, sizes: tuple[int, ...], *, is_tiled: bool) -> None:
        self._sizes = sizes
        self._is_tiled = is_tiled
        self._lines: list[_Line | None] = [None] * len(sizes)
        self._usual = [0.0, 0.0]
        """Of sizes below a tile, and of the others."""

    def scaled(self, factor: float) -> _Table:
        """A copy in which everything takes `factor` times as long."""
        copy = _Table(self._sizes, is_tiled=self._is_tiled)
        copy._lines = [line and line.scaled(factor) for line in self._lines]
        copy._usual = [usual * factor for usual in self._usual]
        return copy

    @property
    def is_empty(self) -> bool:
        return not any(self._lines)

    def has_seen(self, size: int) -> bool:
        """Whether anything is known of this size itself."""
        return self._lines[self._slot(size)] is not None

    def is_sure(self, size: int) -> bool:
        """Whether this size itself was seen often enough to be believed although others promise more."""
        line = self._lines[self._slot(size)]
        return line is not None and line.seen >= SURE_SEEN

    def has_seen_below(self, size: int) -> bool:
        """Whether anything is known of the largest size that is smaller."""
        return self._lines[max(0, self._slot(size) - 1)] is not None

    def predict(self, size: int, x: float) -> float:
        """Milliseconds for `size`, from the nearest size seen; 0 if none was."""
        slot = self._slot(size)
        if self._is_tiled and slot and size < self._sizes[slot]:
            slot -= 1  # the last tile is not full, and no faster than those before it
        own = self._from_nearest(size, slot, x, least_seen=1)
        if not self._is_tiled or (line := self._lines[slot]) is None or line.seen >= SURE_SEEN:
            return own
        # Seen once: perhaps while memory was touched for the first time. What other sizes promise is worth trying.
        return min(own, self._from_nearest(size, slot, x, least_seen=SURE_SEEN, same_kernel_only=True) or own)

    def _from_nearest(
        self, size: int, slot: int, x: float, *, least_seen: int, same_kernel_only: bool = False
    ) -> float:
        # First those that attention computes in the same way.
        for is_other in (False,) if same_kernel_only or not self._is_tiled else (False, True):
            for distance in range(len(self._sizes)):
                for near in (slot - distance, slot + distance):
                    line = self._lines[near] if 0 <= near < len(self._sizes) else None
                    if line is not None and line.seen >= least_seen and self._is_other(size, near) is is_other:
                        return self._from(line, near, size, x, is_own=not distance)
        return 0.0

    def _from(self, line: _Line, slot: int, size: int, x: float, *, is_own: bool) -> float:
        # A larger size is never assumed cheaper a token, nor a smaller one cheaper than in proportion to its fixed
        # part: both errs are on the safe side, and one tick corrects them.
        own = self._sizes[slot]
        ratio = size / own
        scale = ratio if is_own else max(ratio, 0.25)
        if not self._is_other(size, slot):
            return line.at(x, self._usual_slope(own) * own) * scale
        # Another kernel: the level is scaled, but attention costs what it costs there.
        return line.at(0.0, self._usual_slope(own) * own) * scale + x * self._usual_slope(size) * size

    def _usual_slope(self, size: int) -> float:
        """Milliseconds that an attended token costs each of `size`; below a tile at least as much as within tiles."""
        return self._usual[_kind(size)] if _kind(size) else max(self._usual)

    def _is_other(self, size: int, slot: int) -> bool:
        """Whether attention computes `size` tokens in another way than those of this slot."""
        return self._is_tiled and _kind(size) != _kind(self._sizes[slot])

    def learn(self, size: int, x: float, ms: float) -> None:
        slot = self._slot(size)
        if self._is_tiled and self._sizes[0] < size < min(TILE_TOKENS, self._sizes[slot]):
            slot -= 1  # without tiles, tokens cost about the same each: as `predict` has it
        own = self._sizes[slot]
        line = self._lines[slot]
        if line is None or (size == own and not line.is_own):
            # Seen at another size of the same slot: booked as if it had been the slot's own, until that is seen.
            self._lines[slot] = _Line(x, ms * own / size, is_own=size == own)
        elif size == own or not self._is_tiled or own < size < TILE_TOKENS:
            # (From a tile on, a part of one costs as much as the whole: it says nothing of it. Below, tokens cost about
            # the same each.)
            line.learn(x, ms * own / size)
            self._usual[_kind(own)] = self._shared_slope(_kind(own))

    def _shared_slope(self, kind: int) -> float:
        """Milliseconds that an attended token costs each of a piece, from all sizes that attention computes in one way.

        It costs about the same in each of them; one size alone is mostly seen in a few places of a prompt.
        """
        cov = var = 0.0
        for size, line in zip(self._sizes, self._lines, strict=True):
            if line is not None and _kind(size) == kind:
                count = min(line.seen, 1 / LEARN_SLOPE)
                cov += line.cov * count / size
                var += line.var * count
        return max(0.0, cov / (var + SURE_TOKENS * SURE_TOKENS))

    def _slot(self, size: int) -> int:
        return _slot(self._sizes, size)


class _Surcharges:
    """What decode rows add to a chunk of a prompt that is computed in one batch with them, as a share of what they take
    alone. Below 0 where the chunk takes less than predicted: a size between two of the table has a margin.
    """

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], float] = {}
        """By the slots of rows and of all tokens."""

    def copy(self) -> _Surcharges:
        """The same, to learn apart from it."""
        copy = _Surcharges()
        copy._seen = dict(self._seen)
        return copy

    def has_seen(self, rows: int, tokens: int) -> bool:
        """Whether a batch of about so many rows and tokens was seen."""
        return (_slot(ROWS, rows), _slot(SIZES, tokens)) in self._seen

    def near(self, rows: int, tokens: int) -> float | None:
        """The share that was seen with the nearest number of rows, and of these with the nearest size; None of none."""
        at = _slot(ROWS, rows), _slot(SIZES, tokens)
        if at in self._seen:
            return self._seen[at]
        nearest = min(self._seen, key=lambda each: (abs(each[0] - at[0]), abs(each[1] - at[1])), default=None)
        return None if nearest is None else self._seen[nearest]

    def learn(self, rows: int, tokens: int, share: float) -> None:
        """Take in one observation."""
        at = _slot(ROWS, rows), _slot(SIZES, tokens)
        share = min(max(share, -MOST_SURCHARGE), MOST_SURCHARGE)
        before = self._seen.get(at, share)
        self._seen[at] = before + (share - before) * LEARN


def _slot(sizes: tuple[int, ...], size: int) -> int:
    return min(bisect_left(sizes, size), len(sizes) - 1)


def _kind(size: int) -> int:
    return int(size >= TILE_TOKENS)


class CostModel:
    """Predicts milliseconds: of decoding from rows and cells in use, of prefill from tokens and where they stand."""

    __slots__ = ("_chunks", "_drift", "_others", "_rows", "_surcharges", "_used", "_verified", "_verify")

    def __init__(self) -> None:
        self._rows = _Table(ROWS, is_tiled=False)
        self._chunks = _Table(SIZES, is_tiled=True)
        self._verify = _Table(ROWS, is_tiled=False)
        self._surcharges = _Surcharges()
        self._verified: Counter[int] = Counter()
        """By slot of that table, batches seen."""
        self._drift = 1.0
        self._used: tuple[int, Hashable] = (0, None)
        """Compute threads, and what else the times depend on."""
        self._others: dict[tuple[int, Hashable], tuple[_Table, _Table, _Table, _Surcharges, float]] = {}
        """What was learnt with others."""

    def use(self, threads: int, attention: Hashable = None) -> None:
        """Predict and learn for so many compute threads from now on, and for this way through KV memory.

        What was learnt with others is kept for when they come back; of a number of threads never seen the model
        assumes that the work divides evenly, and of a way that it takes as long.
        """
        if (threads, attention) == self._used:
            return
        before, self._used = self._used, (threads, attention)
        if not before[0]:
            return
        self._others[before] = (self._rows, self._chunks, self._verify, self._surcharges, self._drift)
        if self._used in self._others:
            self._rows, self._chunks, self._verify, self._surcharges, self._drift = self._others.pop(self._used)
        else:
            factor = before[0] / threads
            self._rows, self._chunks = self._rows.scaled(factor), self._chunks.scaled(factor)
            self._verify = self._verify.scaled(factor)
            self._surcharges = self._surcharges.copy()

    @property
    def knows_prefill(self) -> bool:
        """Whether any chunk was seen yet."""
        return not self._chunks.is_empty

    def has_decoded(self, rows: int) -> bool:
        """Whether a batch of so many decode rows was seen."""
        return self._rows.has_seen(rows)

    def has_read(self, tokens: int) -> bool:
        """Whether a chunk of about so many tokens was seen."""
        return self._chunks.has_seen(tokens)

    def is_sure_of(self, tokens: int) -> bool:
        """Whether a chunk of about so many tokens was seen often enough to be believed."""
        return self._chunks.is_sure(tokens)

    def has_read_rest(self, tokens: int) -> bool:
        """Whether what fewer tokens than a tile take was seen, of about so many."""
        return self._chunks.has_seen(tokens) if tokens in SIZES else self._chunks.has_seen_below(tokens)

    def decode_ms(self, rows: int, cells: int) -> float:
        """A batch of decode rows, with so many cells in use; 0 while nothing is known."""
        return self._rows.predict(rows, cells) * self._drift if rows else 0.0

    def prefill_ms(self, tokens: int, position: float) -> float:
        """A chunk of a prompt, after `position` tokens of it; 0 while nothing is known."""
        return self._chunks.predict(tokens, position + tokens / 2) * self._drift if tokens else 0.0

    def mixed_ms(self, rows: int, cells: int, tokens: int, position: float) -> float | None:
        """A batch of decode rows and of `tokens` tokens of prompts together; None while nothing is known of such."""
        share = self._surcharges.near(rows, rows + tokens)
        if share is None:
            return None
        return max(0.0, self.prefill_ms(rows + tokens, position) + share * self.decode_ms(rows, cells))

    def times_verified(self, tokens: int) -> int:
        """Batches with drafts, of about so many tokens, that were seen."""
        return self._verified[_slot(ROWS, tokens)]

    def verify_ms(self, tokens: int, cells: int, rows: int) -> float:
        """A batch of `rows` decode rows and drafts behind them, of `tokens` tokens in all, every one with logits.

        Where nothing is known of it, the longest that can be feared: in proportion to `rows` rows alone.
        """
        if self._verify.is_empty:
            return self.decode_ms(rows, cells) * tokens / rows
        return self._verify.predict(tokens, cells) * self._drift

    def least_verify_ms(self, tokens: int, cells: int, rows: int) -> float:
        """The same, the shortest that can be hoped for: no longer than the largest smaller batch that is known."""
        smaller = [size for size in ROWS if rows < size < tokens and self._verify.has_seen(size)]
        plain_ms = self.decode_ms(rows, cells)
        return max(plain_ms, self.verify_ms(smaller[-1], cells, rows)) if smaller else plain_ms

    def best_chunk(
        self, longest_ms: float, position: Position, most: int, *, least: int = SIZES[0], beside_ms: float = 0.0
    ) -> int:
        """The prefill tokens, from `least` to `most`, that read most tokens a millisecond and take `longest_ms` at
        most; 0 if not even the smallest chunk does.

        `position` says where a chunk of so many tokens would stand, on the average, and `beside_ms` what has to be
        computed beside a chunk of any size: it counts as the chunk's time. Of sizes that read nearly as fast, all that
        there is to read is chosen, or else the smallest that was seen: requests that come meanwhile wait for its end.
        Rates are not monotonous in size.
        """
        # A prompt's rest fills no tile: its cost must be known from a smaller size first.
        rest = (most,) if most <= SIZES[0] or self._chunks.has_seen_below(most) else ()
        rates: dict[int, float] = {}
        for size in (*(size for size in SIZES if least <= size <= most), *rest):
            ms = self.prefill_ms(size, position(size))
            if ms <= longest_ms:
                rates[size] = size / (ms + beside_ms) if ms > 0 else math.inf
        enough = NEARLY * max(rates.values(), default=0.0)
        if rates.get(most, -1.0) >= enough:
            return most
        fast = [size for size, rate in rates.items() if rate >= enough]
        return next((size for size in fast if self._chunks.has_seen(size)), max(fast, default=0))

    def has_tried_beyond(self, chunk: int) -> bool:
        """Whether the next size after `chunk` was ever seen."""
        return self._chunks.has_seen(chunk + 1)

    def worth_trying(self, chunk: int, most_ms: float, position: Position, most: int) -> int:
        """A larger size than `chunk`, up to `most`, that can read more tokens a millisecond within `most_ms`.

        What was slow once need not be now; only trying tells. `chunk` itself where no size promises that.
        """
        took = {size: self.prefill_ms(size, position(size)) for size in SIZES if chunk < size <= most}
        fitting = [size for size, ms in took.items() if ms <= most_ms]
        return max(fitting, key=lambda size: size / max(took[size], 1e-9), default=chunk)

    def worth_knowing(self, chunk: int, most_ms: float, position: Position, most: int) -> int:
        """The next size after `chunk`, up to `most`, where it was seen too seldom to be believed and promises to read
        nearly as fast within `most_ms`; or else `chunk`. Beyond a tile sizes differ too little to be worth it.

        What a size promises that was seen once comes from smaller ones, and so is no better than they are: it would
        never be chosen before them.
        """
        size = SIZES[_slot(SIZES, chunk + 1)]
        if chunk > TILE_TOKENS or not chunk < size <= most or self._chunks.is_sure(size):
            return chunk
        ms = self.prefill_ms(size, position(size))
        is_nearly_as_fast = NEARLY * ms * chunk <= self.prefill_ms(chunk, position(chunk)) * size
        return size if ms <= most_ms and is_nearly_as_fast else chunk

    def observe_decode(self, rows: int, cells: int, ms: float) -> None:
        """Learn from a batch of decode rows that really ran."""
        expected, was_seen = self.decode_ms(rows, cells), self._rows.has_seen(rows)
        ms = _without_hiccup(ms, expected)
        self._rows.learn(rows, cells, ms / self._drift)
        # What other numbers of rows promise says nothing of the machine.
        if was_seen:
            self._follow(ms, expected)

    def observe_mixed(self, rows: int, cells: int, tokens: int, position: float, ms: float) -> None:
        """Learn from a batch of decode rows and a piece of the prompts that really ran."""
        size, expected = rows + tokens, self.mixed_ms(rows, cells, tokens, position)
        alone_ms, chunk_ms = self.decode_ms(rows, cells), self.prefill_ms(size, position)
        if alone_ms <= 0 or chunk_ms <= 0:
            return
        ms = _without_hiccup(ms, expected or alone_ms + chunk_ms)
        # The prediction for a size between two of the table has a margin: its error says nothing of the machine.
        if size in SIZES and expected is not None and self._surcharges.has_seen(rows, size):
            self._follow(ms, expected)
        self._surcharges.learn(rows, size, (ms - chunk_ms) / alone_ms)

    def observe_verify(self, tokens: int, cells: int, ms: float) -> None:
        """Learn from a batch with drafts that really ran. The first of a size allocates, and shows nothing else."""
        slot = _slot(ROWS, tokens)
        self._verified[slot] += 1
        if self._verified[slot] > 1:
            self._verify.learn(tokens, cells, _without_hiccup(ms, self._known_verify_ms(tokens, cells)) / self._drift)

    def _known_verify_ms(self, tokens: int, cells: int) -> float:
        return self._verify.predict(tokens, cells) * self._drift if self._verify.has_seen(tokens) else 0.0

    def observe_prefill(self, tokens: int, position: float, ms: float) -> None:
        """Learn from a chunk that was really read."""
        expected, was_seen = self.prefill_ms(tokens, position), self._chunks.has_seen(tokens)
        ms = _without_hiccup(ms, expected)
        self._chunks.learn(tokens, position + tokens / 2, ms / self._drift)
        # How far off a margin is, or what other sizes promise, says nothing of the machine.
        if tokens in SIZES and was_seen:
            self._follow(ms, expected)

    def _follow(self, ms: float, expected: float) -> None:
        if expected > 0:
            ratio = max(ms / expected, 1 / DRIFT_LIMIT)
            # It also corrects sizes not seen for long. It returns to 1 slowly: the tables learn a lasting change.
            self._drift = min(max(self._drift * ratio**0.2, 1 / DRIFT_LIMIT), DRIFT_LIMIT) ** 0.99


def _without_hiccup(ms: float, expected_ms: float) -> float:
    return min(ms, HICCUP * expected_ms) if expected_ms > 0 else ms

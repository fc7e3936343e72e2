"""How long a batch takes on this machine, learnt from the ticks that ran.

Cost is not a line: a chunk of 64 can be cheaper than one of 48 (kernels have tile sizes), and attention grows with the
cells in use. So the model is two small tables of what was really seen, by number of decode rows and by chunk size,
with a correction for the cells in use, and a drift factor that follows the whole machine when its speed changes. It
starts knowing nothing, and says so.
"""

from __future__ import annotations

from bisect import bisect_left

SIZES = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024, 1_536, 2_048, 4_096, 8_192)
"""Chunk sizes the model tells apart, and the only ones it offers: even tiles, few entries, each seen often."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of decode rows the model tells apart."""
LEARN = 0.3
"""Weight of a new observation: a few ticks forget an old machine speed."""
WORTH_SLACK = 1.15
"""Times as many tokens a millisecond that a chunk over the budget must read."""
LEAST_APART_CELLS = 1_024
"""Ticks nearer to each other than this say nothing about the cost of a cell."""
MOST_ATTENTION = 0.5
"""Share of a tick that two ticks' difference may put down to attention."""
DRIFT_LIMIT = 4.0
"""Most one observation may change the drift factor by: a single hiccup must not shrink chunks for long."""


class _Table:
    """Milliseconds by size, each remembered with the cells in use when it was seen."""

    __slots__ = ("cells", "ms", "sizes")

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.ms: list[float | None] = [None] * len(sizes)
        self.cells: list[float] = [0.0] * len(sizes)

    def slot(self, size: int) -> int:
        return min(bisect_left(self.sizes, size), len(self.sizes) - 1)

    def predict(self, size: int, cells: int, per_token_cell_ms: float) -> float | None:
        """Milliseconds for `size`, from the nearest size seen; None if none was."""
        slot = self.slot(size)
        for distance in range(len(self.sizes)):
            for near in (slot - distance, slot + distance):
                if 0 <= near < len(self.sizes) and (ms := self.ms[near]) is not None:
                    # A larger size is never assumed cheaper a token, nor a smaller one cheaper than in proportion to
                    # its fixed part: both errs are on the safe side, and one tick corrects them.
                    scaled = ms * max(size / self.sizes[near], 0.25 if distance else size / self.sizes[near])
                    return max(0.0, scaled + size * (cells - self.cells[near]) * per_token_cell_ms)
        return None

    def learn(self, size: int, cells: int, ms: float) -> None:
        slot = self.slot(size)
        # Seen at another size of the same slot: book it as if it had been the slot's own.
        ms *= self.sizes[slot] / size
        old = self.ms[slot]
        self.ms[slot] = ms if old is None else old + (ms - old) * LEARN
        self.cells[slot] = cells if old is None else self.cells[slot] + (cells - self.cells[slot]) * LEARN


class CostModel:
    """Predicts a tick's milliseconds from decode rows, prefill tokens and cells in use."""

    __slots__ = ("_chunks", "_drift", "_per_token_cell_ms", "_rows")

    def __init__(self) -> None:
        self._rows = _Table(ROWS)
        self._chunks = _Table(SIZES)
        self._drift = 1.0
        self._per_token_cell_ms = 0.0

    @property
    def knows_prefill(self) -> bool:
        """Whether any chunk was seen yet."""
        return any(ms is not None for ms in self._chunks.ms)

    def decode_ms(self, rows: int, cells: int) -> float:
        """A tick of decode rows alone; 0 while nothing is known."""
        if rows == 0:
            return 0.0
        return (self._rows.predict(rows, cells, self._per_token_cell_ms) or 0.0) * self._drift

    def prefill_ms(self, tokens: int, cells: int) -> float:
        """What a chunk adds to a tick; 0 while nothing is known."""
        if tokens == 0:
            return 0.0
        return (self._chunks.predict(tokens, cells, self._per_token_cell_ms) or 0.0) * self._drift

    def predict(self, rows: int, tokens: int, cells: int) -> float:
        """A tick with both."""
        return self.decode_ms(rows, cells) + self.prefill_ms(tokens, cells)

    def best_chunk(self, budget_ms: float, slack_ms: float, cells: int, most: int) -> int:
        """The prefill tokens, up to `most`, to compute in about `budget_ms`; 0 if not even the smallest chunk fits.

        The largest size predicted to fit; or a larger one that takes up to `slack_ms` longer, if it reads clearly more
        tokens a millisecond. Sizes are not monotonous: a larger tile may even be cheaper.
        """
        best, best_rate = 0, 0.0
        for size in (*SIZES, most):
            if size > most:
                continue
            ms = self.prefill_ms(size, cells)
            rate = size / ms if ms > 0 else 0.0
            if ms <= budget_ms:
                best, best_rate = max(best, size), rate
            elif ms <= budget_ms + slack_ms and best and rate >= WORTH_SLACK * best_rate:
                best, best_rate = size, rate
        return best

    def worth_trying(self, chunk: int, most_ms: float, cells: int, most: int) -> int:
        """A larger size than `chunk`, up to `most`, that may read more tokens a millisecond within `most_ms`.

        What was slow once may not be now; only trying tells. `chunk` itself where no size promises that.
        """
        fitting = [size for size in SIZES if chunk < size <= most and self.prefill_ms(size, cells) <= most_ms]
        return max(fitting, key=lambda size: size / max(self.prefill_ms(size, cells), 1e-9), default=chunk)

    def observe(self, rows: int, tokens: int, cells: int, ms: float) -> None:
        """Learn from one tick that really ran."""
        if tokens == 0 and self._observe_usual(rows, cells, ms):
            return
        expected = self.predict(rows, tokens, cells)
        if tokens == 0:
            self._learn_attention(self._rows, rows, cells, ms)
            self._rows.learn(rows, cells, ms / self._drift)
        else:
            share = max(ms - self.decode_ms(rows, cells), ms * tokens / (tokens + rows) * 0.1)
            self._learn_attention(self._chunks, tokens, cells, share)
            self._chunks.learn(tokens, cells, share / self._drift)
        if expected > 0:
            ratio = min(max(ms / expected, 1 / DRIFT_LIMIT), DRIFT_LIMIT)
            # Sizes not seen for long follow by it, too. It goes back to 1 slowly: what lasts ends up in the tables.
            self._drift = min(max(self._drift * ratio**0.2, 1 / DRIFT_LIMIT), DRIFT_LIMIT) ** 0.99

    def _observe_usual(self, rows: int, cells: int, ms: float) -> bool:
        """The everyday tick, decode alone and as long as expected: learnt on the shortest way. False if it was not."""
        table = self._rows
        slot = table.slot(rows)
        old = table.ms[slot]
        if old is None or not -256 < cells - table.cells[slot] < 256:
            return False
        seen = ms * table.sizes[slot] / (rows * self._drift)
        if not 0.8 * old < seen < 1.25 * old:
            return False
        table.ms[slot] = old + (seen - old) * LEARN
        table.cells[slot] = cells
        return True

    def _learn_attention(self, table: _Table, size: int, cells: int, ms: float) -> None:
        slot = table.slot(size)
        old = table.ms[slot]
        apart = cells - table.cells[slot]
        if old is None or abs(apart) < LEAST_APART_CELLS:
            return
        slope = (ms / self._drift - old * size / table.sizes[slot]) / (apart * size)
        # Two ticks differ by more than their cells. No single pair may claim that attention is most of the cost.
        limit = MOST_ATTENTION * old / (table.sizes[slot] * max(cells, table.cells[slot]))
        slope = min(max(slope, -limit), limit)
        self._per_token_cell_ms = max(0.0, self._per_token_cell_ms + (slope - self._per_token_cell_ms) * 0.05)

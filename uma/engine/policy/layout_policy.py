"""Which layout of KV memory serves the sequences at hand, and which attention goes over it.

Changing costs a pause, for memory is made and what is in it carried. So this is the ski rental problem, and it is
answered as usual: change once staying has cost as much as changing does there and back, so that not much more is lost
than twice the least possible time, whatever comes. To make the pool again counts in part only (`RETURN_SHARE`): what is
made anew for a few sequences mostly serves more of them, and the pool is rarely needed soon. What the sequences at hand
will probably lose counts as lost: a crowd that comes together need not lose it first. Where prompts would take longer
with the other attention, the pool reads them first; and where nothing decodes yet, or a reader waits, also where first
tokens come sooner so than behind the change, which then comes while they decode, and rows run ahead of it.
Buffers that had to be given up before they had spared what they cost make the next change dearer, twice each time: a
client that alternates crowds and long prompts brings about few changes.

Beside a small pool the memory of the pool stays as it is, so that the way back costs no more than what is carried.
Behind buffers for each it is not there: those that a small pool holds then get one with flash attention in its place.
After a crowd an engine that has nothing to do is in the pool, where the next crowd is read fastest; a conversation
mostly goes on with few tokens, and what it has in cells need not be carried for them. What counts for a small pool is
what was lost since the engine last had nothing to do; buffers serve from one crowd to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs

from uma.engine.policy.layout import Attended, AttentionCost, Crowd, Held, Layout, PauseCost
from uma.engine.policy.leaving import WAY_BACK, Leaving

LEAST_GAIN_MS = 50.0
"""Minimum gain that is demanded of a change, however short its pause: what readers would not notice is not worth it."""
LEAST_OTHER_ATTENTION_GAIN_MS = 150.0
"""The same of a change to the other attention, which rounds in another way, so that a near tie of two tokens may go
either way.
"""
RETURN_SHARE = 0.25
"""Of the time that making the pool anew takes, what counts against leaving it. Chosen, not measured: with all of it
eight short streams would not leave, though each of their crowds loses four times what their buffers take to be made.
"""
LEAST_MOVING_GAIN = 16.0
"""Minimum expected gain of moving cells together, as a multiple of its cost: how they lie is known to llama.cpp alone,
and they often lie better than is expected.
"""
SPOILED_CELLS = 8
"""Used cells that a prompt's token in a hole between them has expected to lie in its tile. Chosen, not measured."""
PUT_OFF = 2.0
"""Maximum loss in the pool, as a multiple of what a change has to gain, for which readers' prompts put it off."""
MAX_RELUCTANCE = 64
"""Maximum gain, as a multiple of its cost, that is demanded of a change after others did not pay."""


@attrs.define
class _Kind:
    """Layouts for which the pool is left alike, and what it has cost by now not to have left it for any of them."""

    layouts: tuple[Layout, ...]
    lost_ms: float = 0.0


class LayoutPolicy:
    """Chooses among `pool`, which holds whatever is admitted, and `others`."""

    def __init__(
        self,
        pool: Layout,
        others: Sequence[Layout],
        pause: PauseCost,
        *,
        head_ms: float,
        cost: AttentionCost | None = None,
    ) -> None:
        """`head_ms`: milliseconds of a nanosecond of `AttentionCost` in all heads, layers and threads of this model."""
        self.pool = pool
        self.current = pool
        self._pause = pause
        self._small = _Kind(tuple(each for each in others if each.is_unified))
        """What is lost without them counts since the engine last had nothing to do."""
        split = [each for each in others if not each.is_unified]
        flash, plain = [_Kind(tuple(each for each in split if each.is_plain == is_plain)) for is_plain in (False, True)]
        self._kinds = (flash, plain, self._small)
        """What is lost without the first two, a buffer each with either attention, counts since the last change."""
        self._head_ms = head_ms
        self._cost = cost or AttentionCost()
        self._reluctance = 1
        self._before = Attended()
        self._spared_since_ms = 0.0
        """What having left the pool has spared since the last change."""
        self._change_ms = 0.0
        """What the last change costs, there and back."""
        self._had_several = False
        """Several sequences were there since the engine last had nothing to do."""
        self._has_pool = True
        """The pool's memory is there, in use or beside a small pool."""

    @property
    def can_change(self) -> bool:
        """Whether there is anything to choose."""
        return bool(self._others) or self.current != self.pool

    @property
    def _others(self) -> tuple[Layout, ...]:
        return tuple(layout for kind in self._kinds for layout in kind.layouts)

    def choose(self, crowd: Crowd, attended: Attended, held: Held) -> Layout:
        """The layout for the sequences of now. `attended`: what attention went over since the start; `held`: all that
        is in cells.
        """
        since, self._before = attended - self._before, attended
        self._had_several = self._had_several or crowd.sequences > 1
        if self.current == self.pool:
            return self._leaving_pool(crowd, since, held)
        self._spared_since_ms += self._spared_ms(since, self.current)
        if self.current.holds(crowd.sequences, max(crowd.longest, crowd.longest_next), crowd.cells_next):
            return self._having_left(crowd, held)
        return self._outgrowing(crowd, held)

    def resting(self, attended: Attended) -> Layout:
        """The layout for the time in which no sequence is there: after a crowd the pool, if that is at hand."""
        since, self._before = attended - self._before, attended
        if self.current != self.pool:
            self._spared_since_ms += self._spared_ms(since, self.current)
        self._small.lost_ms = 0.0
        had_several, self._had_several = self._had_several, False
        return self.pool if self._has_pool and had_several else self.current

    def changed(self, layout: Layout, held: Held) -> None:
        """The memory has this layout now, and so much was in cells."""
        if not self.current.is_pool:
            has_paid = self._spared_since_ms >= self._change_ms
            self._reluctance = max(1, self._reluctance // 2) if has_paid else min(2 * self._reluctance, MAX_RELUCTANCE)
        self._change_ms = self._there_and_back_ms(layout, held)
        self._has_pool = layout == self.pool or (layout.is_unified and self._has_pool)
        self.current = layout
        self._spared_since_ms = 0.0
        for kind in self._kinds:
            kind.lost_ms = 0.0

    def pause_ms(self, layout: Layout, held: Held) -> float:
        """The pause until memory has this layout."""
        return self._pause.ms(self._cells_made(layout, has_pool=self._has_pool), held.into(layout))

    def most_pause_ms(self, layout: Layout, held: Held) -> float:
        """The pause that readers have to be supplied for: longer than expected, as long as no change was seen."""
        return self._pause.most_ms(self._cells_made(layout, has_pool=self._has_pool), held.into(layout))

    def learn(self, layout: Layout, held: Held, made_ms: float, carried_ms: float) -> None:
        """Take in a change to this layout, before `changed`: what the memory took, and what carrying took."""
        cells = self._cells_made(layout, has_pool=self._has_pool)
        self._pause.learn(cells, made_ms, held.into(layout), carried_ms)

    def leaving(self, reads: float, rows: float) -> Leaving:
        """What decides which cache leaves its cells, while so many tokens of prompts and decode rows are ahead."""
        passing_ns = self._cost.passing_ns(reads, rows, is_plain=self.current.is_plain)
        return Leaving(self._head_ms * passing_ns, self._pause.ms(0, 1))

    def moves(self, reads: Iterable[tuple[int, int]], held: Held, holes: int) -> bool:
        """Whether all that is in the pool's cells is moved together before more of these prompts is read, each of which
        has so many tokens to be read and so many in cells; they would come to lie in the holes between the others'.
        """
        if self.current != self.pool or not held.cells:
            return False
        spoiled = min(1.0, SPOILED_CELLS * holes / held.cells)
        passed = sum(tokens * max(0, held.cells - own) for tokens, own in reads)
        lost_ms = self._head_ms * self._cost.scattered_read_ns * passed * spoiled
        return lost_ms > LEAST_MOVING_GAIN * self.moving_ms(held)

    def moving_ms(self, held: Held) -> float:
        """The pause in which all cells are moved together."""
        return self._pause.ms(0, held.into(self.current))

    def learn_moving(self, held: Held, took_ms: float) -> None:
        """Take in what that took."""
        self._pause.learn(0, 0.0, held.into(self.current), took_ms)

    def learn_copy(self, tokens: int, took_ms: float) -> None:
        """Take in what it took to copy the state of so many tokens out of their cells."""
        self._pause.learn(0, 0.0, tokens, took_ms / (1 - WAY_BACK))

    def give_up_from(self, cells: int) -> None:
        """Choose no layout any more that has so many cells or more; the current one stays."""
        for kind in self._kinds:
            kind.layouts = tuple(each for each in kind.layouts if each.cells < cells)

    def give_up(self) -> Layout:
        """The last choice cannot be had: all that is left is what there was before it, and the pool."""
        for kind in self._kinds:
            kind.layouts = ()
        return self.current

    def _leaving_pool(self, crowd: Crowd, since: Attended, held: Held) -> Layout:
        """The best layout for which it pays to leave the pool now, or the pool."""
        paying: dict[Layout, float] = {}  # with what it has cost by now not to have it
        for kind in self._kinds:
            fitting = self._fitting(crowd, kind.layouts)
            # What it was worth to have the best of them at each time.
            kind.lost_ms += max((self._spared_ms(since, each) for each in fitting), default=0.0)
            kind.lost_ms = max(0.0, kind.lost_ms)
            best = self._best(crowd, held, fitting)
            if best != self.pool and self._pays(best, crowd, held, kind.lost_ms):
                paying[best] = kind.lost_ms
        best = self._best(crowd, held, tuple(paying))
        return best if best == self.pool or not self._reads_first(best, crowd, held, paying[best]) else self.pool

    def _outgrowing(self, crowd: Crowd, held: Held) -> Layout:
        """The layout in place of the current one, which does not hold this crowd."""
        best = self._best(crowd, held, self._others)
        if self._has_pool and self._reads_first(best, crowd, held):
            return self.pool
        return best if self._worth_ms(crowd, held, best) >= self._worth_ms(crowd, held, self.pool) else self.pool

    def _having_left(self, crowd: Crowd, held: Held) -> Layout:
        """The layout for a crowd that the current one holds: the pool for prompts that are read sooner there, and then
        this comes back; else a better one, or the current one.
        """
        current, reads_ms = self.current, -self._spared_ms(crowd.soon.reads, self.current)
        if self._has_pool and not crowd.decodes and reads_ms > self._there_and_back_ms(current, held):
            return self.pool
        staying_ms = max(reads_ms, -self._spared_ms(crowd.soon, current))
        if staying_ms > self._reluctance * self._least_gain_ms(current, held, is_back=True):
            return self.pool
        best = self._best(crowd, held, self._others)
        gain_ms = self._spared_ms(crowd.soon, best) - self._spared_ms(crowd.soon, current)
        return best if gain_ms > self._reluctance * self._least_gain_ms(best, held) else current

    def _pays(self, layout: Layout, crowd: Crowd, held: Held, lost_ms: float) -> bool:
        """Whether it pays to leave the pool for this layout, after so much was lost by not having it."""
        will_spare_ms = self._spared_ms(crowd.soon, layout)
        if will_spare_ms <= (self._there_and_back_ms(layout, held) if layout.is_unified else 0.0):
            return False
        return lost_ms + will_spare_ms >= self._reluctance * self._least_gain_ms(layout, held)

    def _reads_first(self, layout: Layout, crowd: Crowd, held: Held, lost_ms: float = math.inf) -> bool:
        """Whether the pool reads the prompts before this layout pays: they take longer there than changes do. Also
        where all of them are read sooner in the pool than behind the change, by more than carrying them takes, if
        nothing decodes; or if a reader waits, and `lost_ms`, what was lost in the pool by now, is within a bound:
        prompts that follow each other do not keep the pool for ever.
        """
        reads_ms = -self._spared_ms(crowd.soon.reads, layout)
        if reads_ms > self._there_and_back_ms(layout, held):
            return True
        if not crowd.soon.read_tokens:
            return False
        most_lost_ms = PUT_OFF * self._reluctance * self._least_gain_ms(layout, held)
        if crowd.decodes and not (crowd.is_awaited and lost_ms < most_lost_ms):
            return False
        now_ms, later_ms = self.pause_ms(layout, held), self.pause_ms(layout, crowd.held)
        return now_ms + reads_ms > max(0.0, later_ms - now_ms)

    def _best(self, crowd: Crowd, held: Held, layouts: Sequence[Layout]) -> Layout:
        """Of the layouts that hold this crowd for a while, the one that spares most; the pool where none does."""
        fitting = self._fitting(crowd, layouts)
        return max(fitting, key=lambda each: self._worth_ms(crowd, held, each), default=self.pool)

    def _fitting(self, crowd: Crowd, layouts: Sequence[Layout]) -> list[Layout]:
        return [
            each
            for each in layouts
            if (each.is_unified or not crowd.is_one_prefix)
            and each.holds(crowd.sequences, crowd.longest_soon, crowd.cells_soon)
        ]

    def _worth_ms(self, crowd: Crowd, held: Held, layout: Layout) -> float:
        return self._spared_ms(crowd.soon, layout) - self.pause_ms(layout, held)

    def _spared_ms(self, attended: Attended, layout: Layout) -> float:
        return self._head_ms * self._cost.spared_ns(attended, layout)

    def _least_gain_ms(self, layout: Layout, held: Held, *, is_back: bool = False) -> float:
        """What a change to this layout has to gain, or one from it back to the pool."""
        to = self.pool if is_back else layout
        is_other = to.is_plain != self.current.is_plain
        least_ms = LEAST_OTHER_ATTENTION_GAIN_MS if is_other else LEAST_GAIN_MS
        # Where the pool has to be made anew, all of that comes now.
        return max(least_ms, self._there_and_back_ms(layout, held), self.pause_ms(to, held))

    def _there_and_back_ms(self, layout: Layout, held: Held) -> float:
        back = RETURN_SHARE * self._cells_made(self.pool, has_pool=self._has_pool and layout.is_unified)
        return self.pause_ms(layout, held) + self._pause.ms(round(back), held.into(self.pool))

    def _cells_made(self, layout: Layout, *, has_pool: bool) -> int:
        return 0 if layout == self.pool and has_pool else layout.cells

"""Scheduling order: admission and prefill priority, and preemption order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from uma.engine.policy.cost import CostModel
from uma.engine.policy.state import Row

R = TypeVar("R", bound=Row)

STRETCH = 4.0
"""A prompt without a wish of its own is due when it has waited this many times as long as reading it takes.

So a short prompt that comes later overtakes a long one being read, but only until the long one is due: deadlines are
fixed on arrival, and no request that arrives after that can overtake it. That bounds every wait.
"""
LEAST_DUE_MS = 50.0
"""No deadline is nearer than this, so that prompts of a few tokens keep their order of arrival among themselves."""
LANE_DELAY_MS = {1: 0.0, 0: 60_000.0, -1: 120_000.0}
"""Delay added to the deadlines of a lane (ms). Requests of a higher lane that arrive within it are served first, later
ones are not, so it bounds how long a lane can starve."""
GIVE_WAY_AFTER_MS = 500.0
"""Minimum time that a waiting request leaves background rows what they have: on a machine that is not full a slot is
free by then, and what they have computed is not lost. On a simulated GPU with work for nine tenths of its time 200 cost
one of 2,000 background answers a pause of 0.4 s, and this none."""
GIVE_WAY_SHARE = 0.25
"""Maximum of that time, as a share of the target for the first token that the request names."""
RESERVE_PER_ROW = 16
"""Cells left free for each running row before another begins."""


def due_ms(row: Row, cost: CostModel) -> float:
    """When the row's first token is due, on the policy's clock. For `Row.due_ms`, once, on arrival."""
    if row.target_ttft_ms is not None:
        return row.arrived_ms + row.target_ttft_ms
    alone_ms = cost.prefill_ms(row.prompt_tokens, 0) or row.prompt_tokens
    return row.arrived_ms + max(LEAST_DUE_MS, STRETCH * alone_ms)


def admission_key(row: Row) -> tuple[float, int]:
    """Sorts rows in the order in which they begin and are read; the last part is the row's key. It never changes."""
    return (row.due_ms + LANE_DELAY_MS[row.lane], row.key)


def may_begin(cells_needed: int, free_cells: int, unread_tokens: int, running: int) -> bool:
    """Whether another row's prompt fits beside what is promised to those that run.

    `unread_tokens` are the prompt tokens the running rows have still to compute; each also gets a small reserve, so
    that it does not have to give way as soon as it decodes. Alone, a row can always begin.
    """
    return running == 0 or cells_needed <= free_cells - unread_tokens - RESERVE_PER_ROW * running


def gives_way(head: Row, active: Iterable[R], now_ms: float) -> list[R]:
    """Background rows that can lose their place or cells to a waiting `head` of a higher lane, in that order.

    One that has been due for as long as its lane can be starved keeps what it has, or it would never end.
    """
    patience_ms = min(GIVE_WAY_AFTER_MS, GIVE_WAY_SHARE * (head.target_ttft_ms or math.inf))
    if head.lane < 0 or now_ms < head.arrived_ms + patience_ms:
        return []
    # Only rows that would wait behind the head: one that sorts before it would begin again at once, for ever.
    first = admission_key(head)
    return [row for row in preemption_order(active) if row.lane < 0 and max((now_ms, 0), first) < admission_key(row)]


def first_token_first(rows: Iterable[R]) -> list[R]:
    """Prefill order: deadline first, each lane behind the higher ones by a stated time, then by arrival."""
    return sorted(rows, key=admission_key)


def preemption_order(rows: Iterable[R]) -> list[R]:
    """Preemption order: sequences that are paused for their readers, then the youngest of the lowest lane."""
    return sorted(rows, key=lambda row: (not row.is_paused, row.lane, -row.key))

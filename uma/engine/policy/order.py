"""Scheduling order: admission and prefill priority, and preemption order.

Lanes come first; a stated waiting time makes up for one lane. Within a lane clients have equal shares of what is
computed (`state.FairShares`), and the prompts of one client come by their deadlines, so that short ones overtake long
ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from uma.engine.policy.cost import CostModel
from uma.engine.policy.state import FairShare, Row
from uma.engine.policy.tuning import TUNING

R = TypeVar("R", bound=Row)

HIGHEST_LANE = 1


def due_ms(row: Row, cost: CostModel) -> float:
    """Deadline of the row's first token, on the policy's clock. Computed once, on arrival, for `Row.due_ms`."""
    if row.target_ttft_ms is not None:
        return row.arrived_ms + row.target_ttft_ms
    alone_ms = cost.prefill_ms(row.prompt_tokens, 0) or row.prompt_tokens
    return row.arrived_ms + TUNING.due_factor * alone_ms


def rank(row: Row, now_ms: float) -> int:
    """Lanes that the row is behind the highest, less one for each `Tuning.lane_delay_ms` that it has waited."""
    return max(0, HIGHEST_LANE - row.lane - int((now_ms - row.arrived_ms) / TUNING.lane_delay_ms))


def admission_key(row: Row, now_ms: float) -> tuple[int, float, int]:
    """Sort key for the rows of one client: the order of admission and of prefill."""
    return (rank(row, now_ms), row.due_ms, row.key)


def in_order(rows: Iterable[R], now_ms: float) -> list[R]:
    """Rows in prefill order.

    The rows of one client sort by deadline. A row's finish level is its client's `level`, plus the prefill left of the
    row and of that client's rows before it. Within a lane the lowest finish level comes first.
    """
    levels: dict[FairShare, float] = {}
    keyed: list[tuple[tuple[int, float, float, int], R]] = []
    for behind, due, key, row in sorted((*admission_key(row, now_ms), row) for row in rows):
        level = levels[row.fair_share] = levels.get(row.fair_share, row.fair_share.level) + row.prefill_left
        keyed.append(((behind, level, due, key), row))
    return [row for _, row in sorted(keyed)]


def may_begin(cells_needed: int, free_cells: int, unread_tokens: int, running: int) -> bool:
    """Whether the prompt of another row fits beside the cells that running rows still need.

    `unread_tokens` are the prompt tokens that running rows have yet to compute. A small reserve for each keeps it from
    being preempted as soon as it decodes. With nothing running, a prompt can always begin.
    """
    return running == 0 or cells_needed <= free_cells - unread_tokens - TUNING.reserve_tokens * running


def gives_way(head: Row, active: Iterable[R], now_ms: float) -> list[R]:
    """Background rows that can be preempted for a waiting `head` of a higher lane, in preemption order.

    Not a row that has waited until its `rank` is that of `head`, or it would never end.
    """
    patience_ms = min(TUNING.give_way_ms, (head.target_ttft_ms or math.inf) / 4)
    if head.lane < 0 or now_ms < head.arrived_ms + patience_ms:
        return []
    first = rank(head, now_ms)
    return [row for row in preemption_order(active) if row.lane < 0 and rank(row, now_ms) > first]


def preemption_order(rows: Iterable[R]) -> list[R]:
    """Preemption order: sequences that are paused for their readers, then the youngest of the lowest lane."""
    return sorted(rows, key=lambda row: (not row.is_paused, row.lane, -row.key))

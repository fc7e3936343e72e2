"""Whose turn it is: the order in which prompts begin and are read, and in which sequences lose their place.

Lanes come first, each ahead of the next lower one by a stated time. Within a lane clients have equal shares of what is
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
    """When the row's first token is due, on the policy's clock. For `Row.due_ms`, once, on arrival."""
    if row.target_ttft_ms is not None:
        return row.arrived_ms + row.target_ttft_ms
    alone_ms = cost.prefill_ms(row.prompt_tokens, 0) or row.prompt_tokens
    return row.arrived_ms + TUNING.due_factor * alone_ms


def rank(row: Row, now_ms: float) -> int:
    """How many lanes it is behind the highest: one less for each `Tuning.lane_delay_ms` that it has waited."""
    return max(0, HIGHEST_LANE - row.lane - int((now_ms - row.arrived_ms) / TUNING.lane_delay_ms))


def admission_key(row: Row, now_ms: float) -> tuple[int, float, int]:
    """Sorts the rows of one client in the order in which they begin and are read."""
    return (rank(row, now_ms), row.due_ms, row.key)


def in_order(rows: Iterable[R], now_ms: float) -> list[R]:
    """Rows in the order in which their prompts are read.

    Those of one client come by their deadlines. Each is done when its client has had what is missing of it and of those
    before it; of the same lane, the one that is done at the lowest level comes first.
    """
    levels: dict[FairShare, float] = {}
    keyed: list[tuple[tuple[int, float, float, int], R]] = []
    for behind, due, key, row in sorted((*admission_key(row, now_ms), row) for row in rows):
        level = levels[row.fair_share] = levels.get(row.fair_share, row.fair_share.level) + row.prefill_left
        keyed.append(((behind, level, due, key), row))
    return [row for _, row in sorted(keyed)]


def may_begin(cells_needed: int, free_cells: int, unread_tokens: int, running: int) -> bool:
    """Whether another row's prompt fits beside what is promised to those that run.

    `unread_tokens` are the prompt tokens the running rows have still to compute; each also gets a small reserve, so
    that it does not have to give way as soon as it decodes. Alone, a row can always begin.
    """
    return running == 0 or cells_needed <= free_cells - unread_tokens - TUNING.reserve_tokens * running


def gives_way(head: Row, active: Iterable[R], now_ms: float) -> list[R]:
    """Background rows that can lose their place or cells to a waiting `head` of a higher lane, in that order.

    One that has waited for as long as its lane can be starved keeps what it has, or it would never end.
    """
    patience_ms = min(TUNING.give_way_ms, (head.target_ttft_ms or math.inf) / 4)
    if head.lane < 0 or now_ms < head.arrived_ms + patience_ms:
        return []
    first = rank(head, now_ms)
    return [row for row in preemption_order(active) if row.lane < 0 and rank(row, now_ms) > first]


def preemption_order(rows: Iterable[R]) -> list[R]:
    """Preemption order: sequences that are paused for their readers, then the youngest of the lowest lane."""
    return sorted(rows, key=lambda row: (not row.is_paused, row.lane, -row.key))

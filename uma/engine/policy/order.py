"""Who comes first, and who goes first: prefill order, and the order of preemption."""

from __future__ import annotations

from collections.abc import Iterable

from uma.engine.policy.cost import CostModel
from uma.engine.policy.state import Row

STRETCH = 4.0
"""A prompt without a wish of its own is due when it has waited this many times as long as reading it takes.

So a short prompt that comes later overtakes a long one being read, but only until the long one is due: deadlines are
fixed on arrival, and nobody who comes after it can get before it. That bounds every wait.
"""
LEAST_DUE_MS = 50.0
"""No deadline is nearer than this, so that prompts of a few tokens keep their order of arrival among themselves."""
RESERVE_PER_ROW = 16
"""Cells left free for each running row before another begins."""


def due_ms(row: Row, cost: CostModel) -> float:
    """When the row's first token is due, on the policy's clock. For `Row.due_ms`, once, on arrival."""
    if row.target_ttft_ms is not None:
        return row.arrived_ms + row.target_ttft_ms
    alone_ms = cost.prefill_ms(row.prompt_tokens, 0) or row.prompt_tokens
    return row.arrived_ms + max(LEAST_DUE_MS, STRETCH * alone_ms)


def admission_key(row: Row) -> tuple[int, float, int]:
    """Sorts waiting rows in the order in which they begin; the last part is the row's key."""
    return (-row.lane, row.due_ms, row.key)


def may_begin(cells_needed: int, free_cells: int, unread_tokens: int, running: int, max_running: int) -> bool:
    """Whether another row may begin: a place is free, and its prompt fits beside what is promised to those that run.

    `unread_tokens` are the prompt tokens the running rows have still to compute; each also gets a small reserve, so
    that it does not have to give way as soon as it decodes. Alone, a row may always begin.
    """
    if running == 0:
        return True
    return running < max_running and cells_needed <= free_cells - unread_tokens - RESERVE_PER_ROW * running


def first_token_first(rows: Iterable[Row]) -> list[Row]:
    """Prefill order: by lane, deadline first within a lane, then by arrival."""
    return sorted(rows, key=admission_key)


def preemption_order(rows: Iterable[Row]) -> list[Row]:
    """Who gives back its KV cells first: whoever waits for its reader anyway, then the youngest of the lowest lane."""
    return sorted(rows, key=lambda row: (not row.is_paused, row.lane, -row.key))

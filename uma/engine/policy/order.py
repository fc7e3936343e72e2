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


def due_ms(row: Row, cost: CostModel) -> float:
    """When the row's first token is due, on the policy's clock. For `Row.due_ms`, once, on arrival."""
    if row.target_ttft_ms is not None:
        return row.arrived_ms + row.target_ttft_ms
    alone_ms = cost.prefill_ms(row.prompt_tokens, 0) or row.prompt_tokens
    return row.arrived_ms + max(LEAST_DUE_MS, STRETCH * alone_ms)


def first_token_first(rows: Iterable[Row]) -> list[Row]:
    """Prefill order: by lane, deadline first within a lane, then by arrival."""
    return sorted(rows, key=lambda row: (-row.lane, row.due_ms, row.key))


def preemption_order(rows: Iterable[Row]) -> list[Row]:
    """Who gives back its KV cells first: the youngest of the lowest lane."""
    return sorted(rows, key=lambda row: (row.lane, -row.key))

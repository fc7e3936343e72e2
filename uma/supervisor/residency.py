"""Which models are in memory together: what has to leave before another is loaded. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

UnloadReason = Literal["asked", "crashed", "idle", "memory", "replaced", "stopped", "yielded"]
"""Why a model has left memory; docs/observability.md tells them apart."""


@attrs.frozen
class Resident:
    """A model in memory, or one whose process has yet to end."""

    name: str
    size_bytes: int
    used_at: float
    """When its last request ended."""
    stays_until: float
    """Time until which it stays: while it is used at least as long as its load took, so that two models which do not
    fit together are not loaded in turns for a request each."""
    is_running: bool = False
    """Requests of it run."""
    is_leaving: bool = False
    """Whether it takes no more requests; it ends once those that run have ended."""
    is_pinned: bool = False
    """Whether it does not leave for others."""


@attrs.frozen
class ResidencyPlan:
    """What to do for the model that is to be loaded next."""

    loads: bool = False
    """Load it now."""
    leave: tuple[str, ...] = ()
    """Models that take no more requests, and end once nothing of them runs."""
    again_at: float | None = None
    """When to plan again, where nothing else happens before."""
    pinned: tuple[str, ...] = ()
    """Models beside which it does not fit, and which do not leave: it cannot be loaded."""


def plan(name: str, size_bytes: int, budget_bytes: int, residents: Sequence[Resident], now: float) -> ResidencyPlan:
    """The next step for a model of this size, which must not be over the budget.

    Idle models leave first, those used least recently before others; then those that run, which other requests wait
    for: they end what they have begun.
    """
    if any(resident.name == name for resident in residents):
        return ResidencyPlan()  # its last process has yet to end
    pinned = [resident for resident in residents if resident.is_pinned and not resident.is_leaving]
    if size_bytes > budget_bytes - sum(model.size_bytes for model in pinned):
        return ResidencyPlan(pinned=tuple(model.name for model in pinned))
    free = budget_bytes - sum(resident.size_bytes for resident in residents)
    if size_bytes <= free:
        return ResidencyPlan(loads=True)
    free += sum(resident.size_bytes for resident in residents if resident.is_leaving)
    if size_bytes <= free:
        return ResidencyPlan()
    staying = [resident for resident in residents if not resident.is_leaving and not resident.is_pinned]
    leave: list[Resident] = []
    for model in sorted(staying, key=lambda model: (model.is_running, model.used_at)):
        if model.stays_until <= now and free < size_bytes:
            leave.append(model)
            free += model.size_bytes
    if free < size_bytes:
        return ResidencyPlan(again_at=min(model.stays_until for model in staying if model.stays_until > now))
    for model in reversed(list(leave)):  # a large one can have made smaller ones before it needless
        if free - model.size_bytes >= size_bytes:
            leave.remove(model)
            free -= model.size_bytes
    return ResidencyPlan(leave=tuple(model.name for model in leave))


def passes(name: str, size_bytes: int, ahead_bytes: int, budget_bytes: int, residents: Sequence[Resident]) -> bool:
    """Whether a model of this size can be loaded before others which wait for memory, of `ahead_bytes` together: it
    fits beside all that is there, and beside them once what is leaving has ended.
    """
    if any(resident.name == name for resident in residents):
        return False
    staying = sum(resident.size_bytes for resident in residents if not resident.is_leaving)
    fits_now = size_bytes <= budget_bytes - sum(resident.size_bytes for resident in residents)
    return fits_now and size_bytes + ahead_bytes <= budget_bytes - staying

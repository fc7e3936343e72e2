"""What runs and waits just now: read from the decode thread's own objects, without a lock.

Each figure is one attribute that the decode thread writes and that is read as it is at this moment; two figures of one
request can be a tick apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from uma.engine.policy.order import admission_key
from uma.engine.worker.sequence import HAS_SLOT, Sequence, Status
from uma.types import Activity, RunningRequest

MAX_TOLD = 64
"""Maximum waiting requests that are told one by one: more than fit a screen, and few enough for a viewer that asks four
times a second."""


def activity_of(sequences: Iterable[Sequence], now_ms: float, max_active: int) -> Activity:
    """The activity of `sequences`, which have not ended and come in order of arrival. Trio thread."""
    sequences = list(sequences)
    begun = [each for each in sequences if each.started_ms > 0]
    queued = sorted((each for each in sequences if each.started_ms == 0), key=_order)
    lanes = Counter(each.lane for each in queued)
    has_slot = [each for each in sequences if each.status in HAS_SLOT]
    prompts = [each for each in has_slot if each.status is Status.PREFILLING]
    first = min(prompts, key=_order, default=None)
    lack = "slot" if len(has_slot) >= max_active else "cells"
    running, waiting = ([_told(each, first, lack, now_ms) for each in part] for part in (begun, queued[:MAX_TOLD]))
    return Activity(tuple(running), lanes[1], lanes[0], lanes[-1], tuple(waiting))


def _order(sequence: Sequence) -> tuple[float, float, int]:
    """Order of service; a sequence whose deadline the decode thread has not set yet has just come."""
    return (0 if sequence.due_ms else 1, *admission_key(sequence))


def _told(sequence: Sequence, first: Sequence | None, lack: str, now_ms: float) -> RunningRequest:
    reason = _waits_for(sequence, first, lack)
    return RunningRequest(
        id=sequence.request.id,
        priority=sequence.lane,
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        computed_tokens=min(sequence.computed, sequence.prompt_tokens),
        generated_tokens=sequence.generated,
        age_ms=round(now_ms - sequence.arrived_ms, 1),
        is_preempted=sequence.started_ms > 0 and sequence.holding is None and not sequence.is_reproducible,
        waits_for=reason,
        behind=first.request.id if reason == "prompt" and first is not None else "",
        origin=sequence.origin,
        number=sequence.key,
        ttft_ms=round(sequence.first_token_ms - sequence.arrived_ms, 1) if sequence.first_token_ms else None,
        worst_gap_ms=round(sequence.worst_gap_ms, 1),
    )


def _waits_for(sequence: Sequence, first: Sequence | None, lack: str) -> str:
    """Why nothing of it is computed; see `RunningRequest.waits_for`."""
    if sequence.is_reproducible and sequence.started_ms > 0:  # it is computed by itself, without a slot
        return ""
    match sequence.status:
        case Status.WAITING:
            return lack
        case Status.FOLLOWING:
            return "prefix"
        case Status.PAUSED | Status.PARKED:
            return "reader"
        case Status.PREFILLING if first is not None and sequence is not first:
            return "prompt"
        case _:
            return ""

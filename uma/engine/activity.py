"""What runs just now: read from the decode thread's own objects, without a lock.

Each figure is one attribute that the decode thread writes and that is read as it is at this moment; two figures of one
request can be a tick apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from uma.engine.worker.sequence import Sequence
from uma.types import Activity, RunningRequest


def activity_of(sequences: Iterable[Sequence], now_ms: float) -> Activity:
    """The activity of `sequences`, which have not ended and come in order of arrival. Trio thread."""
    running: list[RunningRequest] = []
    waiting: Counter[int] = Counter()
    for sequence in sequences:
        if sequence.started_ms == 0:
            waiting[sequence.lane] += 1
        else:
            running.append(_running(sequence, now_ms))
    return Activity(tuple(running), waiting[1], waiting[0], waiting[-1])


def _running(sequence: Sequence, now_ms: float) -> RunningRequest:
    return RunningRequest(
        id=sequence.request.id,
        priority=sequence.lane,
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        computed_tokens=min(sequence.computed, sequence.prompt_tokens),
        generated_tokens=sequence.generated,
        age_ms=round(now_ms - sequence.arrived_ms, 1),
        is_preempted=sequence.holding is None and not sequence.is_reproducible,
    )

"""What runs and waits now, and where the time of a request went: read from the decode thread's objects without a lock.

Each figure is one attribute that the decode thread writes, read as it is at the moment; two figures of one request can
be a tick apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from uma.engine.policy.order import admission_key, in_order
from uma.engine.worker.account import PAUSED, Account, Figures
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.slots import blocking_resource
from uma.engine.worker.status import HAS_SLOT, Status
from uma.types import Activity, Explained, RecordedText, RunningRequest

MAX_LISTED = 64
"""Maximum waiting requests that are listed: more than fit a screen, and few enough for a viewer that asks four times a
second."""


def activity_of(sequences: Iterable[Sequence], now_ms: float, max_active: int, id: str = "") -> Activity:
    """The activity of `sequences`, which have not ended and are in order of arrival. Trio thread.

    With `id` other sequences are neither sorted nor described: hundreds of streams can each ask often for their own.
    """
    sequences = [sequence for sequence in sequences if id in ("", sequence.request.id)]
    begun = [sequence for sequence in sequences if sequence.started_ms > 0]
    queued = sorted(
        (sequence for sequence in sequences if sequence.started_ms == 0), key=lambda sequence: _order(sequence, now_ms)
    )
    lanes = Counter(sequence.lane for sequence in queued)
    if id:
        describe: Callable[[Sequence], RunningRequest] = partial(_described, first=None, blocked_on="", now_ms=now_ms)
    else:
        describe = _describer(sequences, now_ms, max_active)
    return Activity(
        tuple(map(describe, begun)), lanes[1], lanes[0], lanes[-1], tuple(map(describe, queued[:MAX_LISTED]))
    )


def explained(
    account: Account, sequences: Iterable[Sequence], now_ms: float, max_active: int, piece: Callable[[int], bytes]
) -> Explained:
    """Where the time of a request went, which is in `sequences` or has ended; `piece` gives a token's bytes."""
    sequences = list(sequences)
    own = next((sequence for sequence in sequences if sequence.account is account), None)
    now = None if own is None else _describer(sequences, now_ms, max_active)(own)
    figures, until_ms = account.figures(now_ms), account.ended_ms or now_ms
    started, higher = account.started_before
    return Explained(
        account.id,
        account.lane,
        account.origin,
        round(account.came_at, 3),
        round(until_ms - account.came_ms, 3),
        {cause: shown for cause, ms in account.spent_until(until_ms).items() if (shown := round(ms, 3))},
        account.prompt_tokens,
        figures.cached_tokens,
        figures.generated_tokens,
        account.cache,
        figures.metrics,
        account.reason,
        now,
        started,
        higher,
        account.preemptions,
        account.preempted_by,
        account.pauses,
        round(account.worst_gap_ms, 3),
        account.worst_gap_token,
        account.beside,
        account.answers,
        account.left_out.dropped_messages,
        account.is_decision,
        _recorded(figures, piece),
    )


def _recorded(figures: Figures, piece: Callable[[int], bytes]) -> RecordedText | None:
    texts = (b"".join(map(piece, tokens)).decode("utf-8", "replace") for tokens in figures.texts)
    return RecordedText(*texts) if figures.texts else None


def _describer(sequences: list[Sequence], now_ms: float, max_active: int) -> Callable[[Sequence], RunningRequest]:
    """Function that describes one of `sequences`."""
    has_slot = [sequence for sequence in sequences if sequence.status in HAS_SLOT]
    prompts = [sequence for sequence in has_slot if sequence.status is Status.PREFILLING]
    first = next(iter(in_order(prompts, now_ms)), None)
    sets = {sequence.adapter_set for sequence in has_slot}

    def describe(sequence: Sequence) -> RunningRequest:
        blocked_on = blocking_resource(len(has_slot), max_active, len(sets | {sequence.adapter_set}))
        return _described(sequence, first, blocked_on, now_ms)

    return describe


def _order(sequence: Sequence, now_ms: float) -> tuple[int, int, float, int]:
    """Order of service. A sequence without a deadline has just come: the decode thread has not set it yet."""
    return (0 if sequence.due_ms else 1, *admission_key(sequence, now_ms))


def _described(sequence: Sequence, first: Sequence | None, blocked_on: str, now_ms: float) -> RunningRequest:
    reason = _waits_for(sequence, first, blocked_on)
    return RunningRequest(
        id=sequence.request.id,
        priority=sequence.lane,
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        computed_tokens=min(sequence.computed_so_far, sequence.prompt_tokens),
        generated_tokens=sequence.generated,
        age_ms=round(now_ms - sequence.arrived_ms, 1),
        is_preempted=sequence.started_ms > 0 and sequence.holding is None and not sequence.is_reproducible,
        waits_for=reason,
        behind=first.request.id if reason == "prompt" and first is not None else "",
        origin=sequence.account.origin,
        number=sequence.key,
        ttft_ms=round(sequence.first_token_ms - sequence.arrived_ms, 1) if sequence.first_token_ms else None,
        worst_gap_ms=round(sequence.account.worst_gap_ms, 1),
    )


def _waits_for(sequence: Sequence, first: Sequence | None, blocked_on: str) -> str:
    """Why nothing of it is computed; see `RunningRequest.waits_for`."""
    if sequence.account.totals.blocked_on == PAUSED:
        return PAUSED
    if sequence.is_reproducible and sequence.started_ms > 0:  # it is computed by itself, without a slot
        return ""
    match sequence.status:
        case Status.WAITING:
            return blocked_on
        case Status.FOLLOWING:
            return "prefix"
        case Status.PAUSED | Status.PARKED:
            return sequence.account.paused_for
        case Status.PREFILLING if first is not None and sequence is not first:
            return "prompt"
        case _:
            return ""

"""How far to decode ahead before a piece of a prompt is read.

A stream is smooth if its reader gets tokens evenly, not if they are computed evenly. So while prompts are read, decode
rows run several steps, their tokens are handed out one by one at the pace of `target_tbt_ms`, and meanwhile a piece is
read that is as large as those tokens cover. Large pieces read more tokens a millisecond.

A row's lead is the time for which its reader can go on from tokens that are computed. A cycle of `n` steps of `step_ms`
and a piece of `piece_ms` keeps every reader supplied if `lead + n * pace >= n * step + piece + step`: the tokens last
until the first step after the piece. Andes (arXiv 2404.16283) paces in the client for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from uma.engine.policy.state import Row

PACE_SHARE = 0.9
"""Interval of delivery, as a share of `target_tbt_ms`; the rest is for timers and wakeups."""
MOST_PACE_MS = 250.0
"""Maximum interval of delivery where decoding then takes no more than `LITTLE_DECODE_SHARE` of the time: a longer
target asks for throughput, not for slower reading."""
LITTLE_DECODE_SHARE = 0.01
"""Share of the time for decoding below which a longer interval would hardly leave prompts more."""
SAFETY = 1.1
"""Minimum time that the lead covers, as a multiple of a piece's predicted time."""
COMFORT = 1.5
"""Preferred time that the lead covers, as a multiple of a piece's predicted time, within `max_lead_ms`: on a busy
machine some batches take longer than predicted, and a step that runs early is not an extra one."""
MAX_STEPS = 32
"""Maximum decode steps before a piece: what is computed ahead is lost when the reader cancels, and takes its credit."""
MAX_LEAD_STEPS = 8
"""Maximum tokens that are computed and not yet delivered to a reader: enough to cover the longest pieces, and a bound
on how much later an answer ends for them."""
MORE_LEAD_STEPS, MOST_LEAD_MS = 16, 2_000.0
"""Up to so many where they last no longer than this time. Enough to cover a whole tile of a prompt where a step takes
half of its reader's target: a token in parts of a tile takes a model of 500 M parameters a third to a half longer."""
TTFT_SHARE = 0.125
"""Usual maximum length of a piece, as a share of `slo_ttft_ms` (or of what `piece.LEAST_TTFT_STEPS` makes of it): a new
request waits for the end of the piece that is read."""
NEXT_REQUEST_TTFT_SHARE = 0.075
"""The same while a reader's next request is expected (`returns.NEXT_REQUEST_MS`)."""
BACKGROUND_TTFT_SHARE = 0.15
"""The same while only background prompts wait: large pieces read faster, and probably no other prompt waits."""


def pace_ms(target_ms: float, step_ms: float = 0.0) -> float:
    """Time between two tokens that are handed out to a reader with this target, where a decode step takes `step_ms`."""
    return min(PACE_SHARE * target_ms, max(MOST_PACE_MS, step_ms / LITTLE_DECODE_SHARE))


def max_lead_ms(pace: float) -> float:
    """Maximum time for which a computed token is kept for its reader."""
    return max(MAX_LEAD_STEPS * pace, min(MORE_LEAD_STEPS * pace, MOST_LEAD_MS))


def lead_ms(rows: Iterable[Row], pace: float, now_ms: float) -> float:
    """For how long the readers of these rows can go on: the shortest of their leads, and never negative."""
    return max(0.0, min((row.last_token_ms + pace - now_ms for row in rows), default=math.inf))


def longest_piece_ms(lead: float, pace: float, step_ms: float, max_steps: int) -> float:
    """The longest piece that a lead and `max_steps` more steps cover; negative where not even the steps are."""
    return (min(lead + max_steps * (pace - step_ms), max_lead_ms(pace)) - step_ms) / SAFETY


def can_be_covered(piece_ms: float, pace: float, step_ms: float) -> bool:
    """Whether enough steps make a lead that covers such a piece."""
    return SAFETY * piece_ms + step_ms <= max_lead_ms(pace)


def steps_before_mixed(batch_ms: float, lead: float, pace: float, step_ms: float) -> int:
    """Decode steps before a batch of a piece and the next step, so that every reader is supplied until its end."""
    short_ms = SAFETY * batch_ms - lead
    return math.ceil(short_ms / (pace - step_ms)) if short_ms > 0 else 0


def steps_lacking(needed_ms: float, lead: float, pace: float, step_ms: float) -> int:
    """Decode steps until a lead covers `needed_ms`, where a step really took `step_ms`; 0 where none can make it so."""
    if lead >= needed_ms or needed_ms > max_lead_ms(pace) or step_ms >= pace:
        return 0
    return min(MAX_STEPS, math.ceil((needed_ms - lead) / (pace - step_ms)))


def preferred_lead_ms(piece_ms: float, pace: float, step_ms: float) -> float:
    """The lead to have before a piece, or a pause in which nothing is computed; `MAX_LEAD_STEPS` bounds it."""
    return min(COMFORT * piece_ms + step_ms, max_lead_ms(pace))


def steps_before(piece_ms: float, lead: float, pace: float, step_ms: float) -> int:
    """Decode steps before a piece, so that every reader is supplied until after it; at least one, or at a pace beyond
    `MOST_PACE_MS` none where the lead does it: more steps than the targets ask for would take time from the prompts.

    `pace` must be longer than `step_ms`.
    """
    short_ms = max(SAFETY * piece_ms + step_ms, preferred_lead_ms(piece_ms, pace, step_ms)) - lead
    if short_ms <= 0:
        is_slow_pace = pace > MOST_PACE_MS and lead < math.inf
        return 0 if is_slow_pace else 1
    return max(1, math.ceil(short_ms / (pace - step_ms)))

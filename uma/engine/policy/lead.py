"""How far to decode ahead of readers before a piece of a prompt is read, and at which pace readers are given tokens.

A stream is smooth if its reader gets tokens evenly, not if they are computed evenly. So while prompts are read, decode
rows run several steps, their tokens are handed out one by one at a pace, and meanwhile a piece is read that is as large
as those tokens cover. Andes (arXiv 2404.16283) paces in the client for the same reason.

A row's lead is the time for which tokens that are computed already supply its reader. A cycle of `n` steps of `step_ms`
and a piece of `piece_ms` keeps every reader supplied if `lead + n * pace >= n * step + piece + step`: the tokens last
until the first step after the piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs

from uma.engine.policy.state import Row
from uma.engine.policy.tuning import TUNING

NEIGHBOUR_LOAD = 0.75
"""Load of other programs, in threads, from which a core counts as taken."""
NEARLY_LATE = 0.8
"""Time of a decode step, as a share of the default target, from which the target is relaxed, and gradually so, because
predicted step times drift."""


@attrs.frozen
class Pacing:
    """The rows whose tokens are paced, and how."""

    readers: list[Row]
    """Rows whose readers must not wait while a piece is read."""
    pace_ms: float
    """Time between two tokens of each. Longer than a decode step."""
    is_late: bool
    """Decoding alone takes longer than the targets of all of `readers`."""


def choose_pacing(
    decode: Iterable[Row],
    step_ms: float,
    *,
    budget_ms: float = math.inf,
    neighbour_load: float = 0.0,
    prompts: Sequence[Row] = (),
) -> Pacing:
    """Choose which decode rows are paced, and how fast, beside `prompts` that are read or wait. A step takes `step_ms`.

    A target that a request names is kept if prompts still get `least_prompt_share` of the time. A default target, at
    most `budget_ms`, is relaxed until they get `prompt_share`. Background rows, and rows without a reader, slow no
    prompt.
    """
    streams = [row for row in decode if row.lane >= 0 and row.has_reader]
    named = [row for row in streams if row.has_own_target and is_kept(row.target_tbt_ms, step_ms)]
    usual = [row for row in streams if not row.has_own_target and row.target_tbt_ms >= step_ms]
    pace = math.inf
    if usual or not named:
        aimed_ms = min((budget_ms, *(row.target_tbt_ms for row in usual)))
        used = 0.0 if named or usual else step_ms / aimed_ms
        share = _decode_share(streams, prompts, max(used, step_ms / aimed_ms))
        least_ms = step_ms / share
        # Not for prompts of lower lanes: on few cores the client of a batch counts as such a program itself, and a chat
        # beside the batch was slowed down to a token in 200 ms.
        if neighbour_load >= NEIGHBOUR_LOAD and not _are_lower(prompts, streams):
            neighbour_ms = min(step_ms / (1 - TUNING.neighbour_prompt_share), TUNING.neighbour_pace_ms)
            least_ms = max(least_ms, neighbour_ms)
        pace = max(pace_ms(aimed_ms), least_ms)
    if named:
        kept_ms = min(row.target_tbt_ms for row in named)
        pace = min(pace, max(pace_ms(kept_ms), step_ms / (1 - TUNING.least_prompt_share)))
    return Pacing(named + usual or streams, pace, not (named or usual))


def is_kept(target_ms: float, step_ms: float) -> bool:
    """Whether a target that a request names is kept beside prompts, where a decode step takes `step_ms`."""
    return step_ms <= (1 - TUNING.least_prompt_share) * target_ms


def _decode_share(streams: Sequence[Row], prompts: Sequence[Row], used: float) -> float:
    """Maximum share of the time for decoding at default targets. A decode step takes the share `used` of the target."""
    if streams and _are_lower(prompts, streams):
        return 1 - TUNING.lower_prompt_share
    usual = 1 - TUNING.prompt_share
    lane = min((row.lane for row in streams), default=0)
    beside = sum(row.lane >= lane for row in prompts)
    if not beside:
        return usual
    least = TUNING.late_decode_share
    late = max(least, min(2 * least, len(streams) / (len(streams) + beside)))
    return usual + min(1.0, max(0.0, (used - NEARLY_LATE) / (1 - NEARLY_LATE))) * (late - usual)


def _are_lower(prompts: Sequence[Row], streams: Sequence[Row]) -> bool:
    """Whether there are prompts, and all of lower lanes than every stream."""
    lane = min((row.lane for row in streams), default=0)
    return bool(prompts) and all(row.lane < lane for row in prompts)


def pace_ms(target_ms: float) -> float:
    """Time between two tokens that are handed out to a reader with this target."""
    return min(TUNING.pace_share * target_ms, TUNING.longest_pace_ms)


def max_lead_ms(pace: float) -> float:
    """Maximum time for which a computed token is kept for its reader."""
    return max(TUNING.lead_steps * pace, min(2 * TUNING.lead_steps * pace, TUNING.lead_ms))


def lead_ms(rows: Iterable[Row], pace: float, now_ms: float) -> float:
    """Time for which the readers of these rows can go on: the shortest of their leads, and never negative."""
    return max(0.0, min((row.last_token_ms + pace - now_ms for row in rows), default=math.inf))


def lateness(rows: Iterable[Row], now_ms: float, pace: float) -> float:
    """The latest row's time since its last token, or between its last two, as a multiple of the interval intended for
    its reader: its target, or `pace` where that is longer.
    """
    waits = ((max(now_ms - row.last_token_ms, row.last_gap_ms), max(row.target_tbt_ms, pace)) for row in rows)
    return max((wait / target for wait, target in waits), default=0.0)


def longest_piece_ms(lead: float, pace: float, step_ms: float, max_steps: int) -> float:
    """Maximum time of a piece that a lead and `max_steps` more steps cover; negative if not even the steps."""
    return (min(lead + max_steps * (pace - step_ms), max_lead_ms(pace)) - step_ms) / TUNING.safety


def steps_before(piece_ms: float, lead: float, pace: float, step_ms: float) -> int:
    """Decode steps before a piece, so that every reader is supplied until after it; at least one. `pace` must be longer
    than `step_ms`.
    """
    wanted_ms = max(TUNING.safety * piece_ms, min(TUNING.comfort * piece_ms, max_lead_ms(pace) - step_ms))
    short_ms = max(0.0, wanted_ms + step_ms - lead)
    return max(1, math.ceil(short_ms / (pace - step_ms)))


def steps_before_mixed(batch_ms: float, lead: float, pace: float, step_ms: float) -> int:
    """Decode steps before a batch of a piece and the next step, so that every reader is supplied until its end."""
    return math.ceil(max(0.0, TUNING.safety * batch_ms - lead) / (pace - step_ms))


def steps_lacking(needed_ms: float, lead: float, pace: float, step_ms: float) -> int:
    """Decode steps until a lead covers `needed_ms`, at a measured `step_ms`; 0 if it does, or never will."""
    if lead >= needed_ms or needed_ms > max_lead_ms(pace) or step_ms >= pace:
        return 0
    return min(2 * TUNING.lead_steps, math.ceil((needed_ms - lead) / (pace - step_ms)))

"""The pace at which readers are given tokens while prompts are read, and which targets it keeps.

The pace is nine tenths of the tightest target in play, and all of a default one where decoding takes half of the time.
Default targets are bounded by `tick_budget_ms`; a target that a request names can be longer, up to `lead.MOST_PACE_MS`.
A faster pace leaves the prompts less time, so a machine that is too slow for a target must give up one of them:

- A target that a request names is kept wherever prompts have `LEAST_READ_SHARE` of the time beside it. Where even that
  is too much, the target is ignored: reading more slowly would not keep it either.
- A default target, which no request asked for, gives way earlier: prompts have two fifths of the time, or a fifth where
  all are of lower lanes than the streams; and seven eighths while another program takes a core, as long as tokens then
  come every `NEIGHBOUR_PACE_MS`.
- Where decoding alone takes longer than that target, as with a large model on few cores, streams have as much of the
  time as they are of all that stream or wait: half at most, and a quarter at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs

from uma.engine.policy.lead import pace_ms
from uma.engine.policy.state import Row

LEAST_READ_SHARE = 0.1
"""Minimum share of the time for prompts while a requested target is kept: it bounds their wait."""
EVEN_SHARE = 0.5
"""Share of the time for decoding beyond which default targets are not undercut: a tenth more between tokens leaves
prompts a quarter more of the time there."""
MOST_DECODE_SHARE = 0.6
"""Maximum share of the time for decoding where targets are the default ones: at their full pace, decoding on a machine
that is slow for a while would leave prompts no time."""
LOWER_DECODE_SHARE = 0.8
"""The same where all prompts are of lower lanes than the streams, which come first there."""
LEAST_LATE_SHARE = 0.25
"""Minimum share of the time for decoding where it alone takes longer than the target: it bounds what many prompts do to
a stream."""
MOST_LATE_SHARE = 0.5
"""Maximum share of the time for decoding there, which few streams have beside as few prompts."""
NEIGHBOUR_LOAD = 0.75
"""Minimum load of other programs, in threads, that counts as a core taken."""
NEIGHBOUR_DECODE_SHARE = 0.125
"""Maximum share of the time for decoding at default targets while another program takes a core: prompts then take most
of the time."""
NEIGHBOUR_PACE_MS = 200.0
"""Maximum time (ms) between two tokens to which `NEIGHBOUR_DECODE_SHARE` slows a stream: it bounds what streams give up
for prompts."""
HOPELESS = 1.25
"""Multiple of a decode step's time below which a default target cannot be met by reading prompts more slowly."""


@attrs.frozen
class Pacing:
    """The rows whose tokens are paced, and how."""

    readers: list[Row]
    """Rows whose readers must not wait while a piece is read."""
    pace_ms: float
    """Time between two tokens of each. Longer than a decode step."""
    is_hopeless: bool
    """Decoding alone makes all of `readers` late."""


def choose_pacing(
    decode: Iterable[Row],
    step_ms: float,
    *,
    budget_ms: float = math.inf,
    neighbour_load: float = 0.0,
    prompts: Sequence[Row] = (),
) -> Pacing:
    """The pacing of rows of which a decode step takes `step_ms`: at most `budget_ms` where one of them has no target of
    its own and the machine allows that. `prompts`: those that are read meanwhile or wait for it, if there are any yet.

    The targets of background rows, and of rows without a reader, throttle no prompt.
    """
    interactive = [row for row in decode if row.lane >= 0 and row.has_reader]
    kept = [row for row in interactive if row.has_own_target and is_kept(row.target_tbt_ms, step_ms)]
    usual = [row for row in interactive if not row.has_own_target and row.target_tbt_ms > HOPELESS * step_ms]
    pace = math.inf
    if usual or not kept:
        aimed_ms = min((budget_ms, *(row.target_tbt_ms for row in usual)))
        pace = max(pace_ms(aimed_ms, step_ms), min(step_ms / EVEN_SHARE, aimed_ms))
        share = _decode_share(interactive, prompts, 0.0 if kept or usual else step_ms / aimed_ms)
        pace = max(pace, _least_pace_ms(step_ms, neighbour_load, share))
    if kept:
        kept_ms = min(row.target_tbt_ms for row in kept)
        pace = min(pace, max(pace_ms(kept_ms, step_ms), step_ms / (1 - LEAST_READ_SHARE)))
    return Pacing(kept + usual or interactive, pace, not (kept or usual))


def is_kept(target_ms: float, step_ms: float) -> bool:
    """Whether a target that a request names is kept beside prompts, where a decode step takes `step_ms`."""
    return step_ms <= (1 - LEAST_READ_SHARE) * target_ms


def _decode_share(streams: list[Row], prompts: Sequence[Row], used: float) -> float:
    """Maximum share of the time for decoding at default targets. `used`: what a decode step takes of the default one,
    where no reader's target can be met.

    A step's predicted time drifts, so from where it makes readers late (`HOPELESS`) to where it takes the whole target
    the share changes little by little.
    """
    if not (streams and prompts):
        return MOST_DECODE_SHARE
    lane = min(row.lane for row in streams)
    beside = sum(row.lane >= lane for row in prompts)
    if not beside:
        return LOWER_DECODE_SHARE
    late = max(LEAST_LATE_SHARE, min(MOST_LATE_SHARE, len(streams) / (len(streams) + beside)))
    lateness = min(1.0, max(0.0, (used - 1 / HOPELESS) / (1 - 1 / HOPELESS)))
    return MOST_DECODE_SHARE + lateness * (late - MOST_DECODE_SHARE)


def _least_pace_ms(step_ms: float, neighbour_load: float, decode_share: float) -> float:
    """The shortest time between tokens that leaves prompts their share, where no request named a target."""
    least_ms = step_ms / decode_share
    if neighbour_load < NEIGHBOUR_LOAD:
        return least_ms
    return max(least_ms, min(step_ms / NEIGHBOUR_DECODE_SHARE, NEIGHBOUR_PACE_MS))

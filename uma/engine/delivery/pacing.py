"""When output is sent: how far to decode ahead of delivery, and when each token is due. Pure: no clock, no threads.

Handing tokens over costs a wakeup of the Trio thread and of each reader, on cores that compute. So a token waits in the
outbox for those of the next steps, for as long as its stream's target between tokens allows; and while nothing changes,
decode rows run several steps without re-planning (a stride). When a token is due is said here alone:

- A stream's first token, and any event for a reader that is nearly out of credit, are due at once; so is its last event
  behind tokens that are. (A token that is early is due at its time, see below.)
- Every other token is due `hold_ms` after it was sampled.
- While prompts are read, rows decode ahead (`policy.lead`), and their readers are given each token at its time
  (`reader_ms`): the Trio side keeps those that are early.
- A stride ends before the first token in it is due, and before any sequence in it can change (`uniform_steps`). Where a
  GPU computes, tokens are handed over in the middle of it, while the next are computed, so that it goes on for longer.

The outbox and the mailbox carry that out, and delay no token further. The outbox hands over all it has with the first
event that is due, also before each batch that takes longer than a token can wait (`worker/runner.py`, `worker/loop.py`)
and before the thread rests. A stream keeps its events in order: one that is due takes along those that wait
(`EarlyEventBuffer`). A fault, a cancel and a background stream's end are due at once, any other end with its last token
(`Slots.end`). How far apart tokens are while prompts are read is the policy's (`policy/lead.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from uma.engine.policy.lead import max_lead_ms

CREDITS = 64
"""Credit window: maximum events that a reader can be behind before its sequence pauses. The decode thread spends a
credit for each event; the Trio thread gives credits back as the reader reads."""
LOW_CREDITS = CREDITS // 4
"""Credits at which nothing is buffered any more: the reader gets each event at once, so that it can catch up."""
RETURNED_EVENTS = CREDITS // 2
"""Events read for which credit is given back in one command."""
HOLD_SHARE = 0.4
"""Maximum buffering delay of a token, as a share of its stream's `target_tbt_ms`. More would be felt as a gap."""
AT_ONCE = -math.inf
"""A due time: before anything else is computed."""
STRIDE_STEPS = 16
"""Maximum decode steps that run without re-planning (multi-step decoding): a bound on how stale a plan can be."""


def hold_ms(target_tbt_ms: float, *, is_streamed: bool) -> float:
    """Maximum buffering delay (ms) that still meets the reader's inter-token target."""
    return HOLD_SHARE * target_tbt_ms if is_streamed else math.inf


def due_ms(sampled_ms: float, hold_ms: float, *, is_first: bool, is_early: bool, credits: int) -> float:
    """When a token that was sampled at `sampled_ms` must be handed over. `credits` are the reader's before it.

    A reader can be without credits because tokens are kept for it until their time: one that is kept as well
    (`is_early`) does not help it.
    """
    return AT_ONCE if is_first or (credits <= LOW_CREDITS and not is_early) else sampled_ms + hold_ms


def reader_ms(last_ms: float, sampled_ms: float, pace_ms: float) -> float:
    """When the reader is given a token that was sampled at `sampled_ms`, after one that it is given at `last_ms`.

    Tokens that were computed ahead go out `pace_ms` apart, and never out of order. The first is given at once, and so
    is every one without a pace. Where rows are computed faster than that for long, a token waits no longer than the
    longest lead that is of use.
    """
    if not pace_ms or not last_ms:
        return sampled_ms
    return max(sampled_ms, last_ms, min(last_ms + pace_ms, sampled_ms + max_lead_ms(pace_ms)))


def uniform_steps(
    *, generated: int, max_tokens: int, min_tokens: int, credits: float, is_checked_each_token: bool
) -> float:
    """How many tokens can be sampled before one of them must be looked at, because the next depends on what it means.

    `is_checked_each_token` is true with stop strings, which are found in the text. `credits` is infinite where the
    request is not streamed. The end of text needs no look: the runner sees its token.
    """
    if is_checked_each_token:
        return 1
    steps = max_tokens - generated
    if min_tokens > generated:
        steps = min(steps, min_tokens - generated)
    return min(steps, credits - LOW_CREDITS)


class Stride(NamedTuple):
    """How far decode rows run before anything else is looked at."""

    steps: int
    """Maximum tokens for each row."""
    within_ms: float
    """Maximum time between the first token and the last."""

    def lasts_ms(self, step_ms: float) -> float:
        """Maximum time that it lasts, where a step takes `step_ms`: output due until its end is sent before."""
        return min(self.steps * step_ms, self.within_ms + step_ms)


ONE_STEP = Stride(1, 0.0)


def plan_stride(uniform_steps: Iterable[float], hold_ms: float, step_ms: float, free_cells_per_row: int) -> Stride:
    """The stride for rows of which each allows so many `uniform_steps`; `hold_ms` is that of the least patient."""
    if hold_ms < step_ms:
        return ONE_STEP
    steps = min(STRIDE_STEPS, free_cells_per_row, *uniform_steps)
    return Stride(int(steps), hold_ms) if steps > 1 else ONE_STEP

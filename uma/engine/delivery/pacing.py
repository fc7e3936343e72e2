"""When output is sent: how far to decode ahead of delivery, and when each token is due. Pure: no clock, no threads.

Handing tokens over wakes the Trio thread and each reader, on cores that compute. So a token waits in the outbox for
those of the next steps, as long as its stream's target between tokens allows; and while nothing changes, decode rows
run several steps without re-planning (a stride). Only this file says when a token is due:

- A stream's first token, and any event for a reader that is nearly out of credit, are due at once; so is its last event
  behind tokens that are. (A token that is early is due at its time, see below.)
- Every other token is due `hold_ms` after it was sampled.
- While prompts are read, rows decode ahead (`policy.lead`), and their readers are given each token at its time
  (`reader_ms`): the Trio side keeps those that are early.
- A stride ends before the first token in it is due, and before any sequence in it can change (`uniform_steps`). Where a
  GPU computes, tokens are handed over in the middle of it, while the next are computed, so that it goes on for longer.

Outbox and mailbox carry that out, and delay no token further. The outbox hands over all it has with the first due
event, also before each batch that takes longer than a token can wait (`worker/runner.py`, `worker/loop.py`) and before
the thread is idle. A stream keeps its events in order: a due one takes along those that wait (`EarlyEventBuffer`). A
failure, a cancel and a background stream's end are due at once, any other end with its last token (`Slots.end`). The
interval between tokens while prompts are read is the policy's (`policy/lead.py`).
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
"""Number of events read for which one command returns credit."""
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

    A reader can lack credits because tokens are kept for it until their time: handing over another early one
    (`is_early`) does not help.
    """
    return AT_ONCE if is_first or (credits <= LOW_CREDITS and not is_early) else sampled_ms + hold_ms


def reader_ms(last_ms: float, sampled_ms: float, pace_ms: float) -> float:
    """When the reader gets a token that was sampled at `sampled_ms`, after one that it gets at `last_ms`.

    Tokens computed ahead go out `pace_ms` apart, and never out of order. The first goes out at once, and so does every
    one without a pace. If rows are computed faster than that for long, a token waits no longer than the maximum lead.
    """
    if not pace_ms or not last_ms:
        return sampled_ms
    return max(sampled_ms, last_ms, min(last_ms + pace_ms, sampled_ms + max_lead_ms(pace_ms)))


def uniform_steps(
    *, generated: int, max_tokens: int, min_tokens: int, credits: float, is_checked_each_token: bool
) -> float:
    """Number of tokens that can be sampled before one must be checked, because the next depends on it.

    `is_checked_each_token` is true with stop strings, which are found in the text. `credits` is infinite if the request
    is not streamed. The end of text needs no check: the runner sees its token.
    """
    if is_checked_each_token:
        return 1
    steps = max_tokens - generated
    if min_tokens > generated:
        steps = min(steps, min_tokens - generated)
    return min(steps, credits - LOW_CREDITS)


class Stride(NamedTuple):
    """How far decode rows run before the inbox and the plan are looked at again."""

    steps: int
    """Maximum tokens for each row."""
    within_ms: float
    """Maximum time between the first token and the last."""

    def lasts_ms(self, step_ms: float) -> float:
        """Maximum duration, if a step takes `step_ms`: output that is due before its end is sent before it begins."""
        return min(self.steps * step_ms, self.within_ms + step_ms)


ONE_STEP = Stride(1, 0.0)


def plan_stride(uniform_steps: Iterable[float], hold_ms: float, step_ms: float, free_cells_per_row: int) -> Stride:
    """The stride for rows that allow `uniform_steps` each; `hold_ms` is the shortest of theirs."""
    if hold_ms < step_ms:
        return ONE_STEP
    steps = min(STRIDE_STEPS, free_cells_per_row, *uniform_steps)
    return Stride(int(steps), hold_ms) if steps > 1 else ONE_STEP

"""When output is sent: how far to decode ahead of delivery, and when each token is due. Pure: no clock, no threads.

Handing tokens over costs a wakeup of the Trio thread and of each reader, on cores that compute. So a token waits in the
outbox for those of the next steps, for as long as its stream's target between tokens allows; and while nothing changes,
decode rows run several steps without re-planning (a stride). When a token is due is said here alone:

- A stream's first token, and any event for a reader that is nearly out of credit, are due at once; so is its last event
  behind tokens that are. (A token that is early is due at its time, see below.)
- Every other token is due `hold_ms` after it was sampled.
- While prompts are read, rows decode ahead (`policy.lead`), and their readers are given each token at its time
  (`reader_ms`), all readers together (`Beat`): the Trio side keeps those that are early.
- A stride ends before the first token in it is due, and before any sequence in it can change (`uniform_steps`). Where a
  GPU computes, tokens are handed over in the middle of it, while the next are computed, so that it goes on for longer.

The outbox and the mailbox carry that out, and delay no token further. The outbox hands over all it has with the first
event that is due, also before each batch that takes longer than a token can wait (`worker/runner.py`, `worker/loop.py`)
and before the thread rests. A stream keeps its events in order: one that is due takes along those that wait (`Ahead`).
A fault, a cancel and a background stream's end are due at once, any other end with its last token (`Residency.end`).
How far apart tokens are while prompts are read is the policy's (`policy/lead.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import attrs

from uma.engine.policy.lead import max_lead_ms

CREDITS = 64
"""Credit window: maximum events that a reader can be behind before its sequence pauses. The decode thread spends a
credit for each event; the Trio thread gives credits back as the reader reads."""
LOW_CREDITS = CREDITS // 4
"""With this many credits or fewer nothing is buffered: the reader gets each event at once, so that it can catch up."""
RETURNED_EVENTS = CREDITS // 2
"""Events read for which credit is given back in one command."""
HOLD_SHARE = 0.4
"""Maximum buffering delay of a token, as a share of its stream's `target_tbt_ms`. More would be felt as a gap."""
BEAT_SHARE = 0.125
"""Maximum time by which a token comes before its pace for the sake of the common beat, as a share of the pace: two
streams meet within eight tokens, and no reader sees it."""
ROUNDING_MS = 0.01
"""Maximum difference (ms) between two beats that are the same: a sum of floats is not always exact."""
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


def reader_ms(last_ms: float, sampled_ms: float, pace_ms: float, beat: Beat | None = None) -> float:
    """When the reader is given a token that was sampled at `sampled_ms`, after one that it is given at `last_ms`.

    Tokens that were computed ahead go out `pace_ms` apart, or a little closer where they come to a `beat` so, and never
    out of order. The first is given at once, and so is every one without a pace. Where rows are computed faster than
    that for long, each waits no longer than the longest lead that is of use.
    """
    if not pace_ms or not last_ms:
        return sampled_ms
    due_ms = last_ms + pace_ms
    if beat is not None and due_ms > sampled_ms:
        due_ms = beat.near(due_ms, pace_ms)
    return max(sampled_ms, last_ms, min(due_ms, sampled_ms + max_lead_ms(pace_ms)))


class Beat:
    """Brings streams together that have one pace, so that one wakeup gives all of them their tokens.

    A wakeup of the Trio thread costs as much as ten tokens. Streams keep the distance with which they began; so each of
    them has its tokens a little early until they come with those of the others.
    """

    __slots__ = ("_at_ms",)

    def __init__(self) -> None:
        self._at_ms = 0.0
        """One beat; the others are a pace apart."""

    def near(self, due_ms: float, pace_ms: float) -> float:
        """The last beat before a token is due, or where that is too early, as near to it as can be."""
        if due_ms - self._at_ms > 2 * max_lead_ms(pace_ms):
            self._at_ms = due_ms  # no stream is on it any more
        # Rounded, so that sums of different terms make the same moment; and what is due then is not before it.
        beats = math.floor((due_ms - self._at_ms + ROUNDING_MS) / pace_ms)
        self._at_ms = round(self._at_ms + beats * pace_ms, 3)
        return max(self._at_ms, due_ms - BEAT_SHARE * pace_ms)


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


@attrs.define(slots=True)
class Experience:
    """Quality of experience of one stream, as Andes (arXiv 2404.16283, section 3) defines it.

    The reader wants the first token at some time and the others at some pace, and reads no faster than that. Over the
    time until the last token is read, the tokens that it wanted to have read by then make one area, those that it could
    read make another: the quality is the second as a share of the first, 1 where it never waited. All times are
    milliseconds on the same clock.
    """

    _expected_ms: float
    """When the reader wants the next token."""
    _pace_ms: float
    _read_ms: float = 0.0
    """When the reader has the last one."""
    _tokens: int = 0
    _expected_sum_ms: float = 0.0
    _read_sum_ms: float = 0.0

    def had_token(self, given_ms: float) -> None:
        """The reader is given its next token."""
        ready_ms = self._read_ms + self._pace_ms if self._tokens else self._expected_ms
        self._read_ms = max(given_ms, ready_ms)
        self._read_sum_ms += self._read_ms
        self._expected_sum_ms += self._expected_ms
        self._expected_ms += self._pace_ms
        self._tokens += 1

    @property
    def qoe(self) -> float:
        """From 0 to 1; 1 before there is anything to compare."""
        whole = self._tokens * self._read_ms - self._expected_sum_ms
        had = self._tokens * self._read_ms - self._read_sum_ms
        return round(min(1.0, max(0.0, had / whole)), 4) if whole > 0 else 1.0

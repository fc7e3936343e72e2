"""Streams that would end before a long prompt is read, or soon beside a background prompt, end first.

Beside streams a prompt is read in small pieces, each covered by tokens that were computed ahead. Where all streams end
before it is read in any case, the prompt gains nothing by that: their steps are computed before its last token either
way. Computed at once, they delay it by nothing; the streams end earlier, and then it is read in pieces as large as are
computed at once.

How far a stream goes on is known from its `max_tokens` at most. Others can follow as soon as these end, and wait for
less than the prompt, so all that a prompt waits in this way is bounded by what it takes to be read.

A background prompt waits for streams of higher lanes that end soon, whatever it takes to be read: beside it they would
be paced, and the next request of a reader that was just served would wait for the end of a piece. That is bounded, too.
"""

from __future__ import annotations

from uma.engine.policy.pace import Pacing
from uma.engine.policy.piece import Prompts
from uma.engine.policy.state import Row, Targets

MOST_WAITED = 1.0
"""Maximum time from a prompt's arrival for which it is put off, as a multiple of what reading it takes."""
BACKGROUND_WAITS_MS = 2_000.0
"""The same of a background prompt that takes less than that to be read."""


def steps_to_end(pacing: Pacing, step_ms: float, prompts: Prompts, targets: Targets, now_ms: float) -> int:
    """Decode steps until all streams have ended, if they end first; 0: the prompts are read beside them.

    `step_ms` is a decode step's predicted time.
    """
    head, readers = prompts.rows[0], pacing.readers
    if not readers or step_ms <= 0 or min(row.lane for row in readers) < head.lane:
        return 0
    steps = max(row.left_tokens for row in readers)
    if head.lane >= 0 and steps * pacing.pace_ms > _read_ms(head, prompts, targets):
        return 0
    return steps if now_ms + steps * step_ms <= waits_until_ms(prompts, targets) else 0


def waits_until_ms(prompts: Prompts, targets: Targets) -> float:
    """Until when the first of the prompts is put off for readers at most."""
    head = prompts.rows[0]
    least_ms = BACKGROUND_WAITS_MS if head.lane < 0 else 0.0
    return head.arrived_ms + max(least_ms, MOST_WAITED * _read_ms(head, prompts, targets))


def _read_ms(row: Row, prompts: Prompts, targets: Targets) -> float:
    """What it takes to read the rest of a prompt, in pieces as large as are computed at once."""
    alone = prompts.replaced([row])
    tokens = min(row.remaining, targets.solo_tokens)
    further = 0.0 if alone.attended_cells is not None else (row.remaining - tokens) / 2
    return alone.cost.prefill_ms(tokens, alone.position(tokens) + further) * row.remaining / tokens

"""Prompts that came together: whether all of them are read before any decodes.

Where that is one batch, the question is the mean first token (`whole_crowd`). Where it is several, those of the first
batch have their first token and can decode beside the others, which is right as long as some schedule gives them their
tokens in time. Where none does, they wait until the others are read (`reads_on`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from uma.engine.policy.lead import pace_ms
from uma.engine.policy.piece import Prompts, Streams
from uma.engine.policy.state import Row, Targets

EVEN_MEAN = 0.8
"""Share of the decoding share at which the mean first token comes as soon either way, from which on all prompts of a
crowd are read at once: beside streams the mean would come a twentieth sooner, and the last 1.6 times as late."""
READ_ON_SHARE = 0.6
"""Share of the time for decoding with which waiting is compared. It is more than late streams have (`pace`), since
steps of few of them take nearly as long as those of all do later."""
MOST_READ_ON = 4.0
"""Maximum time from their first token for which streams wait for the prompts that came with them, as a multiple of
`slo_ttft_ms`."""


def whole_crowd(prompts: Prompts, streams: Streams, targets: Targets, most: int) -> int:
    """Tokens of all prompts of a lane that came together, where they are read at once; 0 where one batch after the
    other gives first tokens sooner.

    Those that the first batch ends decode, and the others are read beside them, in what that leaves of the time.
    So the mean first token comes sooner if all are read at once where decoding takes a larger share of the time
    than the first batch ends of the prompts.
    """
    lane = prompts.rows[0].lane
    crowd = [row for row in prompts.rows if row.lane == lane]
    wanted, first = sum(row.remaining for row in crowd), ends_within(crowd, targets.solo_tokens)
    if lane < 0 or prompts.expects_next_request or targets.attends_all or wanted > most or first == len(crowd):
        return 0
    step_ms = prompts.cost.decode_ms(first, streams.used_cells + targets.solo_tokens)
    budget_ms = targets.tick_budget_ms
    aimed_ms = min(row.target_tbt_ms if row.has_own_target else min(row.target_tbt_ms, budget_ms) for row in crowd)
    is_slow = step_ms / pace_ms(aimed_ms) > EVEN_MEAN * first / len(crowd)
    is_soon = prompts.replaced(crowd).ms(wanted) < targets.slo_ttft_ms
    return wanted if is_slow and is_soon else 0


def reads_on(prompts: Prompts, streams: Streams, targets: Targets) -> bool:
    """Whether streams that have had their first token alone wait for the prompts that came with them, because no
    schedule gives them their tokens in time.

    Beside steps that take a share of the time (`READ_ON_SHARE`), the others' first tokens take `1 / (1 - share)` as
    long, and so does all that follows; the streams themselves would wait as long as reading takes. So enough others
    have to wait.
    """
    lane, rows = prompts.rows[0].lane, streams.rows
    if lane < 0 or not rows or not streams.pacing.is_hopeless:
        return False
    if any(row.generated > 1 or row.lane > lane for row in rows):
        return False
    others = [row for row in prompts.rows if row.lane == lane]
    # Those of the first batch, at each later one as well: what was begun is not broken off.
    first = _count_within((row.prompt_tokens for row in rows), targets.solo_tokens)
    if READ_ON_SHARE * (len(rows) + len(others) - first) <= (1 - READ_ON_SHARE) * first:
        return False
    wanted = sum(row.remaining for row in others)
    batch = min(wanted, targets.solo_tokens)
    read_ms = prompts.replaced(others).ms(batch) * wanted / batch
    began_ms = min(row.last_token_ms for row in rows)
    return streams.now_ms + read_ms <= began_ms + MOST_READ_ON * targets.slo_ttft_ms


def ends_within(rows: list[Row], tokens: int) -> int:
    """How many prompts end within the first `tokens` tokens of these."""
    return _count_within((row.remaining for row in rows), tokens)


def _count_within(sizes: Iterable[int], tokens: int) -> int:
    return sum(end <= tokens for end in accumulate(sizes))

"""Refuses requests whose first token would come too late, and computes when to retry."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import attrs

from uma.engine.policy.cost import CostModel
from uma.engine.policy.tuning import TUNING

BEYOND_REPAIR = 1.5
"""Predicted wait, as a multiple of the target, above which a request is refused. Predictions err, so a shorter wait is
accepted."""
TYPICAL_CHUNK_TOKENS = 256
"""Tokens of the piece by which the speed of prefill is predicted."""
MIN_RETRY_MS = 50
"""Minimum hint of when to try again."""
MAX_RETRY_MS = 60_000
"""Maximum hint of when to try again: OpenAI's clients take no hint that is much longer (60 s, later 120 s)."""
UNKNOWN_SERVICE_MS = 1_000
"""Assumed service time of a request (ms), until one has ended."""


@attrs.frozen
class Load:
    """Load ahead of a new request of some lane."""

    ahead_tokens: int
    """Prompt tokens still to be computed for requests of its lane or a higher one."""
    ahead_waiting: int
    """Number of these requests that have not begun."""
    running: int
    decoding: int
    max_running: int
    service_ms: float
    """Usual service time of a request, from its begin to its end; 0 if unknown."""
    used_cells: int
    tick_budget_ms: float


def wait_ms(load: Load, prompt_tokens: int, cost: CostModel) -> float:
    """Predicted milliseconds until the first token of a request with `prompt_tokens` that comes now.

    It is the time to read all prompts ahead and its own, at the share of each tick that decoding leaves; or, if all
    slots are taken and that is longer, the time until enough requests have ended (Little's law).
    """
    tokens = load.ahead_tokens + prompt_tokens
    per_token_ms = cost.prefill_ms(TYPICAL_CHUNK_TOKENS, prompt_tokens / 2) / TYPICAL_CHUNK_TOKENS
    decode_ms = cost.decode_ms(load.decoding, load.used_cells)
    share = max(TUNING.least_prompt_share, 1 - decode_ms / load.tick_budget_ms) if load.decoding else 1.0
    reading_ms = tokens * per_token_ms / share
    short = load.running + load.ahead_waiting + 1 - load.max_running
    place_ms = short * load.service_ms / load.max_running if short > 0 else 0.0
    return max(reading_ms, place_ms + prompt_tokens * per_token_ms / share)


def is_full(lane: int, waiting: int, ahead: int, limit: int, *, is_first: bool) -> bool:
    """Whether a request finds the queue full; `ahead` of the waiting ones are of its lane or a higher one. The queue is
    twice as long for background requests, and longer by its limit for the first request of a client, so that no client
    fills it for others.
    """
    spare = limit if is_first else 0
    return (lane >= 0 and ahead >= limit + spare) or waiting >= 2 * limit + spare


def full_queue_retry_ms(
    waiting: int, limit: int, service_ms: float, max_running: int, ages_ms: Sequence[float] = ()
) -> int:
    """When a request that found the queue full should retry: once half of the queue has been served.

    A hint of the next free place would bring all refused requests back at once, to a queue that is full again. If
    running requests take longer than earlier ones, twice their median age counts: on average, a request seen at a
    random moment is half done.
    """
    ahead = max(1, waiting - limit // 2)
    service_ms = max(service_ms or UNKNOWN_SERVICE_MS, 2 * median(ages_ms) if ages_ms else 0.0)
    return min(MAX_RETRY_MS, max(MIN_RETRY_MS, round(ahead * service_ms / max_running)))


def retry_after_ms(wait: float, target_ms: float) -> int:
    """When a retry can succeed: once the excess load has been served."""
    return max(MIN_RETRY_MS, round(wait - target_ms))

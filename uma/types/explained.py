"""Where one request's time went, and why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from uma.types.events import RequestMetrics
from uma.types.server import RunningRequest

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "loading": "loading its model",
        "prepare": "turning its text into tokens",
        "summary": "summarizing messages that did not fit",
        "grammar": "preparing the format of its output",
        "disk": "looking for its beginning on disk",
        "batch": "waiting for a computation that ran when it came",
        "paused": "waiting because the server was paused (`uma pause`)",
        "slot": "waiting for a free slot",
        "cells": "waiting for space in the KV cache",
        "adapters": "waiting for the turn of its LoRA adapters",
        "prefix": "waiting for another request to read the same beginning",
        "read": "reading its prompt",
        "prompt": "waiting while the prompts of others were read",
        "streams": "waiting for its first token while the answers of others were written",
        "apart": "waiting for reproducible requests, which run one at a time",
        "write": "writing its answer",
        "sample": "choosing tokens",
        "reader": "waiting for its program, which was slow to read the answer",
        "preempted": "waiting for its slot, which a more urgent request had",
        "cpu": "waiting for a CPU, which other programs used",
        "rest": "everything else",
    }
)
"""What a request's time can go to, in the order of its life, in words. Those of `RunningRequest.waits_for` are among
them."""

WHY_NOT_CACHED: Mapping[str, str] = MappingProxyType(
    {
        "": "all that it begins with was there",
        "asked": "it asked for none (cache_prompt, or log probabilities of its prompt)",
        "reproducible": "a reproducible request is computed without cache",
        "none": "nothing in the cache begins as it does for long enough",
        "end": "what is cached ends there",
        "differs": "what is cached goes on with another token",
        "earlier": "what is cached can only be taken up earlier, at a checkpoint or window, or is hardly longer",
    }
)
"""Why no more of a prompt came from the cache, in words."""


@attrs.frozen
class CacheUse:
    """What a prompt had of the cache when it was begun. All counts are tokens."""

    tier: str = ""
    """Where what it used was: `cells`, `memory` or `disk`; empty: it used nothing."""
    known_tokens: int = 0
    """Prompt tokens that the nearest cached or running conversation has in common with it."""
    why: str = ""
    """Why not more: a word of `WHY_NOT_CACHED`."""
    token_id: int | None = None
    """The prompt's own token behind `known_tokens`, the first that is not cached: with `end` and `differs`."""


@attrs.frozen
class Beside:
    """Another request whose prompt was read while the explained one had a slot."""

    id: str
    prompt_tokens: int
    read_ms: float
    """Time of the batches with it, since both had a slot."""


@attrs.frozen
class RecordedText:
    """Text of a request, where the server records it (`--record-text`)."""

    prompt_end: str
    """Text of the prompt's last tokens."""
    answer_begin: str
    """Text of the answer's first tokens."""
    before_parting: str = ""
    """The prompt up to `CacheUse.known_tokens`, the last tokens of it."""
    behind_parting: str = ""


@attrs.frozen
class Explained:
    """Where the time of a request went that runs or has ended. Times are milliseconds, counts are tokens."""

    id: str
    priority: int
    origin: str
    """See `RunningRequest.origin`."""
    came_at: float
    """Seconds since 1970."""
    age_ms: float
    """Time from arrival to its last token, or until now; `spent_ms` adds up to it."""
    spent_ms: dict[str, float]
    """Time spent by cause (`CAUSES`), in the order of its life; causes that took nothing are left out."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    cache: CacheUse
    metrics: RequestMetrics
    """Metrics of its last event, or until now."""
    reason: str = ""
    """Why it ended: a finish reason, or an error's code; empty: it runs."""
    now: RunningRequest | None = None
    """Where it runs: how far it is, and what it waits for."""
    started_before: int = 0
    """Requests that were given a slot while it waited for its first."""
    started_before_higher: int = 0
    """Requests of a higher lane among them."""
    preemptions: int = 0
    preempted_by: str = ""
    """The id of the request that had its slot last."""
    pauses: int = 0
    """How often its reader fell behind by a credit window."""
    worst_gap_ms: float = 0.0
    """Longest time between two of its tokens, as they were given."""
    worst_gap_token: int = 0
    """How many tokens came before it."""
    beside: tuple[Beside, ...] = ()
    """Other prompts that were read while it had a slot, the longest first; a few of them."""
    answers: int = 1
    """Answers that it asked for; the other fields are the first one's."""
    dropped_messages: int = 0
    """See `Finished`."""
    is_decision: bool = False
    """A `DecisionRequest`, which writes nothing: its `answers` are the prompts of its questions."""
    text: RecordedText | None = None

"""Sentences that explain where a request's time went, for `uma explain` and the page."""

from __future__ import annotations

from collections.abc import Iterator

from uma.types import CAUSES, WHY_NOT_CACHED, Explained

WAITS_FOR = {
    "loading": "its model is loaded first",
    "paused": "the server is paused, and `uma resume` continues",
    "slot": "no slot is free",
    "cells": "no cells are free for its prompt",
    "adapters": "two other sets of LoRA adapters take turns",
    "prefix": "another request reads what its prompt begins with",
    "prompt": "another prompt is read first",
    "grammar": "its grammar is compiled again",
    "reader": "its reader has not taken what is written",
}
"""Text for each value of `RunningRequest.waits_for`."""

CURES = {
    "loading": "`uma pin NAME` keeps it loaded",
    "paused": "`uma resume`",
    "slot": "if memory allows, a larger `--max-sequences`",
    "cells": "a larger `--n-ctx`, or less memory for each token",
    "read": "shorter prompts; the same beginning each time, since a prefix is cached",
    "prompt": "`priority` 1 for this program, or -1 for the others",
    "streams": "`priority` 1 for this program, or -1 for the others",
    "write": "a smaller quantization or model, a GPU, `--speculate auto` for text that repeats itself",
    "reader": "a reader that takes what is written at once",
    "preempted": "a larger `--n-ctx`, or `priority` 1 for this program",
    "cpu": "end what else computes there (the system's `top` shows it), or let it run at another time; models that "
    "share CPUs are faster one after the other",
}
"""What reduces each cause (`CAUSES`), where a setting or habit does. `docs/slow.md` has the same words."""

_BEFORE_THE_CACHE = ("loading", "paused", "slot", "cells", "adapters", "prefix")
"""Values of `waits_for` at which it is not yet known how much of the prompt is cached."""


def sentences(shown: Explained) -> Iterator[str]:
    """Sentences on a request, beside its figures: one fact each."""
    yield from _account_of(shown)
    if (now := shown.now) is not None:
        if now.waits_for:
            behind = f" ({now.behind})" if now.behind else ""
            yield f"Now it waits: {WAITS_FOR.get(now.waits_for, now.waits_for)}{behind}."
        elif now.computed_tokens < now.prompt_tokens:
            yield f"Now its prompt is read: {now.computed_tokens:,} of {now.prompt_tokens:,} tokens are there."
    if shown.started_before:
        higher = f", {shown.started_before_higher:,} of a higher lane" if shown.started_before_higher else ""
        yield f"Queue: {_counted(shown.started_before, 'request')} got a slot before it{higher}."
    if shown.now is None or shown.now.is_preempted or shown.now.waits_for not in _BEFORE_THE_CACHE:
        yield _cache_sentence(shown)
    if shown.beside:
        prompts = ", ".join(
            f"{other.id} ({other.prompt_tokens:,} tokens, {seconds(other.read_ms)})" for other in shown.beside
        )
        yield f"Prompts read meanwhile: {prompts}."
    if shown.preemptions:
        by = f", the last time to {shown.preempted_by}" if shown.preempted_by else ""
        yield f"Preempted: it lost its slot {_times(shown.preemptions)}{by}."
    if shown.pauses:
        yield f"Reader: it fell behind {_times(shown.pauses)}, and the request stood still until it had caught up."
    if shown.worst_gap_ms:
        yield f"Longest gap between two tokens: {seconds(shown.worst_gap_ms)}, after token {shown.worst_gap_token:,}."
    if shown.metrics.batch_size > 1:
        yield f"Company: up to {_counted(shown.metrics.batch_size - 1, 'other request')} in one batch with it."
    if shown.text is not None:
        yield f"The prompt ends: {shown.text.prompt_end}"
        yield f"The answer begins: {shown.text.answer_begin}"
    largest = max(shown.spent_ms, key=lambda cause: shown.spent_ms[cause], default="")
    if largest in CURES:
        yield f"The most time: {CAUSES[largest]}. What helps: {CURES[largest]}."


def _account_of(shown: Explained) -> Iterator[str]:
    """Note on what the account covers, where that is not the whole request."""
    if shown.is_decision:
        yield "It is a decision: its prompts are read, and no token is written; this is the account of one of them."
    elif shown.answers > 1:
        yield f"It asked for {shown.answers:,} answers; this is the first one's account."


def _cache_sentence(shown: Explained) -> str:
    cache = shown.cache
    where = f" (from {cache.tier})" if cache.tier else ""
    said = f"Cache: {shown.cached_tokens:,} of {shown.prompt_tokens:,} prompt tokens{where}"
    said += f"; {WHY_NOT_CACHED.get(cache.why, cache.why)}"
    if cache.known_tokens and cache.why:
        said += f", after {_counted(cache.known_tokens, 'token')} in common"
    if shown.text is not None and cache.token_id is not None:
        said += f"; the prompt goes on behind ▸: {shown.text.before_parting} ▸ {shown.text.behind_parting}"
    return said + "."


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def seconds(ms: float) -> str:
    """A duration with its unit."""
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.1f} ms"

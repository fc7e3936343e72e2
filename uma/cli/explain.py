"""`uma explain`: where the time of a request went that runs on a server, or has ended lately, and why."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import datetime

from uma.cli import say
from uma.cli.options import load_settings
from uma.cli.sanitize import json_text
from uma.cli.source import connected
from uma.cli.table import print_table, print_wrapped
from uma.cli.trio_run import Interrupts, run
from uma.protocol.converter import unstructure
from uma.types import CAUSES, WHY_NOT_CACHED, Explained

BAR_CELLS = 24
"""Length of the bar of a cause that took all of the time."""
LEAST_SHARE = 0.005
"""Part of the time below which a cause has no row: it would be 0 %."""
_LANES = {1: "interactive", 0: "normal", -1: "background"}
_OF_HTTP = re.compile(r"^(?:chatcmpl-|cmpl-|resp_|msg_)(?=[0-9a-f]{24})")
"""What the ids of answers over HTTP have before the request's own."""
_WAITS_FOR = {
    "slot": "no slot is free",
    "cells": "no cells are free for its prompt",
    "prefix": "another request reads what its prompt begins with",
    "prompt": "another prompt is read first",
    "reader": "its reader has not taken what is written",
}

_BEFORE_THE_CACHE = ("slot", "cells", "prefix")
"""What a request waits for as long as it is not known what of its prompt is cached."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    config = load_settings(options).config

    async def show(_: Interrupts) -> int:
        async with AsyncExitStack() as stack:
            client = await connected(stack, config.socket, say.note, loads=False)
            explained = await client.explain(_OF_HTTP.sub("", options.id))
        if options.json:
            print(json_text(unstructure(explained), indent=2))
        else:
            show_explained(explained)
        return 0

    return run(show)


def show_explained(explained: Explained) -> None:
    """Write it for people to standard output."""
    for line in _head(explained):
        print_wrapped(line)
    print()
    print_table(("time", "share", "", "what it went to"), list(_rows(explained)))
    print()
    for sentence in _sentences(explained):
        print_wrapped(sentence)


def _head(shown: Explained) -> Iterator[str]:
    yield " · ".join(filter(None, [f"request {shown.id}", _LANES.get(shown.priority, ""), shown.origin]))
    came = datetime.fromtimestamp(shown.came_at).astimezone().isoformat(sep=" ", timespec="seconds")
    ended = f"ended: {shown.reason}" if shown.reason else "it runs"
    yield f"came {came}, {'took' if shown.reason else 'so far'} {_sec(shown.age_ms)}, {ended}"
    figures = [f"{shown.prompt_tokens:,} prompt tokens ({shown.cached_tokens:,} from cache)"]
    figures += [f"{shown.generated_tokens:,} tokens written"]
    if shown.metrics.ttft_ms:
        figures += [f"the first {_sec(shown.metrics.ttft_ms)} after it was queued"]
    if shown.metrics.tokens_per_second:
        figures += [f"{shown.metrics.tokens_per_second:,.1f} tokens/s"]
    yield ", ".join(figures)


def _rows(shown: Explained) -> Iterator[tuple[str, ...]]:
    whole = max(shown.age_ms, 0.001)
    for cause, ms in shown.spent_ms.items():
        share = ms / whole
        if share < LEAST_SHARE:
            continue
        yield _sec(ms), f"{share:.0%}", "█" * round(share * BAR_CELLS) or "▏", CAUSES.get(cause, cause)


def _sentences(shown: Explained) -> Iterator[str]:
    if (now := shown.now) is not None:
        if now.waits_for:
            behind = f" ({now.behind})" if now.behind else ""
            yield f"Now it waits: {_WAITS_FOR.get(now.waits_for, now.waits_for)}{behind}."
        elif now.computed_tokens < now.prompt_tokens:
            yield f"Now its prompt is read: {now.computed_tokens:,} of {now.prompt_tokens:,} tokens are there."
    if shown.started_before:
        higher = f", {shown.started_before_higher:,} of a higher lane" if shown.started_before_higher else ""
        yield f"Queue: {shown.started_before:,} requests were given a slot before it{higher}."
    if shown.now is None or shown.now.is_preempted or shown.now.waits_for not in _BEFORE_THE_CACHE:
        yield _cache_sentence(shown)
    if shown.beside:
        prompts = ", ".join(
            f"{other.id} ({other.prompt_tokens:,} tokens, {_sec(other.read_ms)})" for other in shown.beside
        )
        yield f"Prompts read meanwhile: {prompts}."
    if shown.preemptions:
        by = f", the last time to {shown.preempted_by}" if shown.preempted_by else ""
        yield f"Preempted: it lost its slot {shown.preemptions:,} times{by}."
    if shown.pauses:
        yield f"Reader: it fell behind {shown.pauses:,} times, and the request stood still until it had caught up."
    if shown.worst_gap_ms:
        yield f"Longest gap between two tokens: {_sec(shown.worst_gap_ms)}, after token {shown.worst_gap_token:,}."
    if shown.metrics.batch_size > 1:
        yield f"Company: up to {shown.metrics.batch_size - 1:,} other requests in one batch with it."
    if shown.answers > 1:
        yield f"It asked for {shown.answers:,} answers; this is the first one's account."
    if shown.text is not None:
        yield f"The prompt ends: {shown.text.prompt_end}"
        yield f"The answer begins: {shown.text.answer_begin}"


def _cache_sentence(shown: Explained) -> str:
    cache = shown.cache
    where = f" (from {cache.tier})" if cache.tier else ""
    said = f"Cache: {shown.cached_tokens:,} of {shown.prompt_tokens:,} prompt tokens{where}"
    said += f"; {WHY_NOT_CACHED.get(cache.why, cache.why)}"
    if cache.known_tokens and cache.why:
        said += f", after {cache.known_tokens:,} tokens in common"
    if cache.token_id is not None:
        said += f"; the prompt goes on with token {cache.token_id}"
    if shown.text is not None and cache.token_id is not None:
        said += f": {shown.text.before_parting} ▸ {shown.text.behind_parting}"
    return said + "."


def _sec(ms: float) -> str:
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.1f} ms"

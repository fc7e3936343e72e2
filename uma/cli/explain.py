"""`uma explain`: where the time of a request went that runs on a server, or has ended lately, and why."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from datetime import datetime

from uma.cli import words
from uma.cli.options import load_settings
from uma.cli.sanitize import json_text
from uma.cli.source import asking
from uma.cli.table import print_table, print_wrapped
from uma.cli.trio_run import Interrupts, run
from uma.contracts.explaining import seconds, sentences
from uma.protocol.converter import unstructure
from uma.types import CAUSES, Explained

BAR_CELLS = 24
"""Length of the bar of a cause that took all of the time."""
_OF_HTTP = re.compile(r"^(?:chatcmpl-|cmpl-|resp_|msg_)(?=[0-9a-f]{24})")
"""What the ids of answers over HTTP have before the request's own."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    config = load_settings(options).config

    async def show(_: Interrupts) -> int:
        async with asking(config.socket) as client:
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
    print_table(("time", "share", "", "what it went to"), list(_rows(explained)), spare={"": 70})
    print()
    for sentence in sentences(explained):
        print_wrapped(sentence)


def _head(shown: Explained) -> Iterator[str]:
    yield " · ".join(filter(None, [f"request {shown.id}", words.LANES.get(shown.priority, ""), shown.origin]))
    came = datetime.fromtimestamp(shown.came_at).astimezone().isoformat(sep=" ", timespec="seconds")
    is_decided = shown.is_decision and shown.reason == "stop"
    ended = f"ended: {'decided' if is_decided else shown.reason}" if shown.reason else "it runs"
    yield f"came {came}, {'took' if shown.reason else 'so far'} {seconds(shown.age_ms)}, {ended}"
    figures = [f"{shown.prompt_tokens:,} prompt tokens ({shown.cached_tokens:,} from cache)"]
    figures += [] if shown.is_decision else [f"{shown.generated_tokens:,} tokens written"]
    if shown.metrics.ttft_ms:
        figures += [f"the first {seconds(shown.metrics.ttft_ms)} after it was queued"]
    if shown.metrics.tokens_per_second:
        figures += [f"{shown.metrics.tokens_per_second:,.1f} tokens/s"]
    yield ", ".join(figures)


def _rows(shown: Explained) -> Iterator[tuple[str, ...]]:
    until_ms, whole = 0.0, max(shown.age_ms, 0.001)
    for cause, ms in shown.spent_ms.items():
        # Rounded where each ends, not each by itself: together they are 100 %.
        percent = round(100 * (until_ms + ms) / whole) - round(100 * until_ms / whole)
        until_ms += ms
        if percent:
            yield seconds(ms), f"{percent}%", "█" * round(ms / whole * BAR_CELLS) or "▏", CAUSES.get(cause, cause)

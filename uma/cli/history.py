"""`uma history`: the requests that a server with `--history` has kept, whole; how two of them differ; all as rows."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from itertools import starmap
from typing import Any

import trio

from uma import json_text
from uma.cli import say
from uma.cli.sanitize import sanitize
from uma.cli.streams import naming
from uma.cli.table import laid_out, print_wrapped, width_of
from uma.cli.trio_run import Interrupts, run
from uma.errors import ConfigError
from uma.history import Head, History, HistoryEntry, default_path, parting
from uma.kept import KeptFault

POLL_SEC = 0.5
"""Time between two looks with `--follow`."""
MAX_FOLLOWED = 1_000
"""Maximum requests that are shown of one look."""
COLUMNS = ("nr", "came", "model", "prompt", "cached", "written", "took", "ended")
SPARE = {"written": 100, "took": 70, "came": 70}
"""Columns that a terminal goes without which is narrower than this."""
SNIPPET_CHARS = 60
"""Text shown on each side of where two prompts part."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    path = default_path()
    if not path.exists():
        raise KeptFault(f"no history at {path}; a server keeps one with `uma run --history`")
    with History(path, only_reads=True) as history:
        if options.diff:
            return _show_difference(*map(history.entry, options.diff))
        if options.export:
            return _export(history.entries(options.search), options.export)
        if options.number is not None:
            return _show(history.entry(options.number))
        rows = list(starmap(_row, history.heads(options.last, search=options.search)))
        print(*_table(rows), sep="\n", flush=True)
        if options.follow:
            return run(partial(_follow, history, rows, options.search))
        if not rows:
            say.note(f"not found in the history: {options.search!r}" if options.search else "nothing is kept yet")
        return 0


def _row(number: int, head: Head) -> list[str]:
    came = datetime.fromtimestamp(head.came_at).strftime("%m-%d %H:%M:%S")
    share = f"{100 * head.cached_tokens / head.prompt_tokens:.0f} %" if head.prompt_tokens else ""
    counts = f"{head.prompt_tokens:,}", share, f"{head.completion_tokens:,}"
    return [str(number), came, head.model, *counts, f"{head.took_ms / 1000:.1f} s", head.reason]


def _table(rows: list[list[str]]) -> list[str]:
    return laid_out(COLUMNS, rows, width_of(sys.stdout), spare=SPARE)


async def _follow(history: History, rows: list[list[str]], search: str, _: Interrupts) -> int:
    """Show requests as they come, under the table of the `rows` before them."""
    while True:
        last = int(rows[-1][0]) if rows else 0
        if more := list(starmap(_row, history.heads(MAX_FOLLOWED, last, search=search))):
            shown, rows = len(_table(rows)), [*rows, *more]
            print(*_table(rows)[shown:], sep="\n", flush=True)
            rows = rows[-MAX_FOLLOWED:]
        await trio.sleep(POLL_SEC)


def _show(entry: HistoryEntry) -> int:
    head = entry.head
    print_wrapped(f"request {entry.number} · {head.id} · {head.model} · {head.origin}")
    print_wrapped(
        f"{head.prompt_tokens:,} tokens in ({head.cached_tokens:,} from cache), {head.completion_tokens:,} written, "
        f"the first after {head.ttft_ms / 1000:.2f} s, {head.tokens_per_second:.1f} tokens/s, ended: {head.reason}"
    )
    sent = json_text.dumps(entry.request, indent=2)
    for title, text in (("sent", sent), ("prompt", entry.prompt), ("answer", entry.answer)):
        print(f"\n── {title} ──\n{sanitize(text)}")
    return 0


def _show_difference(one: HistoryEntry, other: HistoryEntry) -> int:
    found = parting(one, other)
    if found is None:
        print_wrapped(f"{one.number} and {other.number} have the same prompt: {other.head.prompt_tokens:,} tokens.")
        return 0
    print_wrapped(
        f"{one.number} and {other.number} begin alike for {found.common:,} tokens; {other.number} had "
        f"{other.head.cached_tokens:,} of {other.head.prompt_tokens:,} tokens from the cache."
    )
    texts = one.prompt + one.answer, other.prompt
    for entry, text, token, place in zip((one, other), texts, found.tokens, found.places, strict=True):
        told = f"token {found.common:,} is {token!r}, in {place}" if token else "ends there"
        print_wrapped(f"{entry.number}: {told}")
        before, behind = text[: found.offset], text[found.offset :]
        print(f"  …{before[-SNIPPET_CHARS:]!r} ▶ {behind[:SNIPPET_CHARS]!r}")
    return 0


def _export(entries: Iterable[HistoryEntry], name: str) -> int:
    try:
        out = sys.stdout if name == "-" else os.fdopen(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w")
    except FileExistsError:
        raise ConfigError(f"--export: {name} exists already; name a new file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"--export: {name}: {error.strerror}") from None
    rows = 0
    with naming(name), nullcontext(out) if name == "-" else out:
        for entry in entries:
            out.write(json_text.dumps(batch_row(entry)) + "\n")
            rows += 1
    say.note(f"{rows:,} rows for `uma batch`")
    return 0


def batch_row(entry: HistoryEntry) -> dict[str, Any]:
    """A request as a line that `uma batch` and OpenAI's batches take. It names no model: the batch says which."""
    asked, sampling = entry.request, entry.request.get("sampling", {})
    body = {name: sampling[name] for name in _SAMPLING if name in sampling}
    if messages := asked.get("messages"):
        url, body["messages"] = "/v1/chat/completions", list(map(_message, messages))
        if tools := asked.get("tools"):
            body["tools"] = [{"type": "function", "function": tool} for tool in tools]
            if asked.get("tool_choice") in ("none", "required"):
                body["tool_choice"] = asked["tool_choice"]
    else:
        url, body["prompt"] = "/v1/completions", asked.get("prompt") or asked.get("token_ids")
    return {"custom_id": str(entry.number), "method": "POST", "url": url, "body": body}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as OpenAI's chats have it."""
    told = {name: message[name] for name in ("role", "content", "name", "tool_call_id") if name in message}
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in message.get("tool_calls", ())
    ]
    return told | ({"tool_calls": calls} if calls else {})


_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "repetition_penalty")

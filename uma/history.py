"""History: a server's last requests with their texts, and comparison of the prompts of two requests."""

from __future__ import annotations

import os
import re
import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import orjson

from uma import json_bytes
from uma.errors import BadRequest, ConfigError
from uma.kept import MAX_BYTES, Kept, KeptRow
from uma.prefix import common_size

MAX_AGE_SEC = 7 * 24 * 3_600
MAX_SEARCHED = 5_000
"""Maximum entries that one search reads, the newest first."""
REDACTED = "[redacted]"


@attrs.frozen(kw_only=True)
class Head:
    """Summary of a request for lists. Times are milliseconds, counts are tokens."""

    id: str
    model: str
    origin: str
    came_at: float
    """Arrival in seconds since 1970."""
    took_ms: float
    reason: str
    """Finish reason, or an error's code."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_ms: float = 0.0
    tokens_per_second: float = 0.0


@attrs.frozen(kw_only=True)
class HistoryEntry:
    """A request as it was sent, its rendered prompt, and its answer."""

    head: Head
    request: Mapping[str, Any]
    """`messages`, `prompt` or `token_ids`, with tools and sampling, by the names of the wire."""
    prompt: str = ""
    """Prompt tokens as text, special tokens by their spelling."""
    ends: Sequence[int] = ()
    """End of each token, as an index in `prompt` followed by `answer`."""
    answer: str = ""
    number: int = 0
    """Number of the entry in the file, from 1."""
    owner: str = ""
    """See `KeptRow`."""

    def redacted(self, pattern: re.Pattern[str]) -> HistoryEntry:
        """A copy in which matches of the pattern are replaced by `REDACTED`, in every text."""

        def clean(part: Any) -> Any:
            if isinstance(part, str):
                return pattern.sub(REDACTED, part)
            if isinstance(part, Mapping):
                return {name: clean(value) for name, value in part.items()}
            return list(map(clean, part)) if isinstance(part, list | tuple) else part

        # Replaced ranges: where each starts, and the index behind it in the old text and in the new.
        begins, behind = [-1], [(0, 0)]

        def cover(found: re.Match[str]) -> str:
            before, now = behind[-1]
            begins.append(found.start())
            behind.append((found.end(), now + found.start() - before + len(REDACTED)))
            return REDACTED

        def moved(place: int) -> int:
            """Index in the new text; an index inside of a replaced range becomes the one behind it."""
            before, now = behind[bisect_left(begins, place) - 1]
            return now + max(0, place - before)

        text = pattern.sub(cover, self.prompt + self.answer)
        begin, ends = moved(len(self.prompt)), list(map(moved, self.ends))
        return attrs.evolve(self, request=clean(self.request), prompt=text[:begin], ends=ends, answer=text[begin:])


def default_path() -> Path:
    """`$XDG_STATE_HOME/uma/history.db`, by default in `~/.local/state`. Raises `ConfigError` without a home."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        raise ConfigError("the history has no place: this user has no home folder; set XDG_STATE_HOME") from None
    return Path(state) / "uma" / "history.db"


class History(Kept):
    """An open history; see `Kept`."""

    def __init__(self, path: Path, *, only_reads: bool = False) -> None:
        super().__init__(path, only_reads=only_reads)
        self._db.create_function("has", 3, _has)

    def keep(self, entries: Iterable[HistoryEntry], *, max_bytes: int = MAX_BYTES) -> None:
        """Add these entries, and delete what exceeds the bounds."""
        self.add(map(_row, entries), max_age_sec=MAX_AGE_SEC, max_bytes=max_bytes)

    def heads(
        self, last: int, after: int = 0, before: int | None = None, owner: str | None = None, search: str = ""
    ) -> list[tuple[int, Head]]:
        """The last entries with numbers between `after` and `before`, the newest last: of one owner, and with `search`
        in the request or the answer, ignoring case. A search reads the last `MAX_SEARCHED` entries.
        """
        last = min(last, sys.maxsize)  # SQLite's maximum
        rows = self.rows(
            "SELECT number, head FROM kept WHERE number IN (SELECT number FROM kept WHERE number > ?1 AND "
            "(?2 IS NULL OR number < ?2) AND (?3 IS NULL OR owner = ?3) ORDER BY number DESC LIMIT ?4) AND "
            "(?5 = '' OR has(?5, head, body)) ORDER BY number DESC LIMIT ?6",
            *(after, before, owner, MAX_SEARCHED if search else last, _spelled(search), last),
        )
        return [(number, Head(**orjson.loads(head))) for number, head in rows][::-1]

    def entry(self, number: int, owner: str | None = None) -> HistoryEntry:
        """Entry by its number. Raises `BadRequest` where there is none, or it is not this owner's."""
        # As a text, which SQLite compares as a number: an integer over 64 bits raises.
        if found := self._first("number = ?1 AND (?2 IS NULL OR owner = ?2)", str(number), owner):
            return found
        raise BadRequest(f"request {number} is not found in the history; it was never there, or has made way")

    def entries(self, search: str = "") -> Iterator[HistoryEntry]:
        """All current entries that contain `search`, the oldest first. No read transaction stays open between two of
        them, because the write-ahead log of a running server would grow for as long as a pager waits.
        """
        ((last,),) = self.rows("SELECT max(number) FROM kept")
        wanted, found = "number > ?1 AND number <= ?2 AND (?3 = '' OR has(?3, head, body))", None
        while found := self._first(wanted, found.number if found else 0, last, _spelled(search)):
            yield found

    def _first(self, which: str, *values: str | float | None) -> HistoryEntry | None:
        columns = "number, head, unpacked(body), unpacked(more)"
        query = f"SELECT {columns} FROM kept WHERE {which} ORDER BY number LIMIT 1"
        for number, head, body, ends in list(self.rows(query, *values)):
            texts = json_bytes.loads(body)
            return HistoryEntry(number=number, head=Head(**orjson.loads(head)), ends=array("I", ends), **texts)
        return None


def _row(entry: HistoryEntry) -> KeptRow:
    return KeptRow(
        owner=entry.owner,
        came_at=entry.head.came_at,
        head=orjson.dumps(attrs.asdict(entry.head)).decode(),
        body=json_bytes.dumps({"request": entry.request, "prompt": entry.prompt, "answer": entry.answer}),
        more=array("I", entry.ends).tobytes(),
    )


def _spelled(search: str) -> str:
    return orjson.dumps(search)[1:-1].decode().casefold()


def _has(wanted: str, head: str, body: bytes) -> bool:
    """Whether one of a row's texts contains `wanted`, which is encoded by `_spelled` as these are."""
    return wanted in head.casefold() or wanted in zlib.decompress(body).decode().casefold()


@attrs.frozen
class Parting:
    """Place where a prompt begins to differ from an earlier request's prompt and answer, which are in the cache."""

    common: int
    """Number of tokens at the beginning that are equal."""
    offset: int
    """End of these tokens in the texts."""
    tokens: tuple[str, str]
    """First token that differs, in each text; empty: that text ends there."""
    places: tuple[str, str]
    """Message that this token is in, in each request."""


def parting(one: HistoryEntry, other: HistoryEntry) -> Parting | None:
    """Place where the prompt of `other` begins to differ from `one`; None where both have the same prompt."""
    if one.prompt == other.prompt:
        return None
    mine, theirs = (
        [text[begin:end] for begin, end in pairwise((0, *entry.ends)) if end <= len(text)]
        for entry, text in ((one, one.prompt + one.answer), (other, other.prompt))
    )
    # Compared by token: equal text can be tokenized differently, and the cache ends there.
    common = common_size(mine, theirs)
    offset = sum(map(len, mine[:common]))
    first, second = (
        next(filter(None, parts[common:]), "") for parts in (mine, theirs)
    )  # parts of a character are empty
    return Parting(common, offset, (first, second), (place(one, offset), place(other, offset)))


def place(entry: HistoryEntry, offset: int) -> str:
    """Part of the request at this index of its prompt, in words."""
    if offset >= len(entry.prompt):
        return "the answer"
    messages = entry.request.get("messages") or ()
    begins, names = [0], ["what comes before the first message"]
    for at, message in enumerate(messages):
        text = str(message.get("content") or "").strip()
        found = entry.prompt.find(text, begins[-1]) if text else -1
        if found >= 0:
            name = f"messages[{at}] ({message.get('role')})"
            begins += [found, found + len(text)]
            names += [name, f"what follows {name}"]
    return names[bisect_right(begins, offset) - 1] if messages else "the prompt"

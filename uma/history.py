"""History: a server's last requests, whole, and where the prompts of two part."""

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
"""Maximum entries that one search looks through, the newest first."""
REDACTED = "[redacted]"


@attrs.frozen(kw_only=True)
class Head:
    """What a list shows of a request. Times are milliseconds, counts are tokens."""

    id: str
    model: str
    origin: str
    came_at: float
    """Seconds since 1970."""
    took_ms: float
    reason: str
    """Why it ended: a finish reason, or an error's code."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_ms: float = 0.0
    tokens_per_second: float = 0.0


@attrs.frozen(kw_only=True)
class HistoryEntry:
    """A request as it was sent, what its model was given, and what it answered."""

    head: Head
    request: Mapping[str, Any]
    """`messages`, `prompt` or `token_ids`, with tools and sampling, by the names of the wire."""
    prompt: str = ""
    """The prompt's tokens as text, special ones by their spelling."""
    ends: Sequence[int] = ()
    """Where each of the tokens ends in `prompt` and the `answer` behind it."""
    answer: str = ""
    number: int = 0
    """The entry's place in the file, from 1."""
    owner: str = ""
    """See `KeptRow`."""

    def redacted(self, pattern: re.Pattern[str]) -> HistoryEntry:
        """A copy in which what the pattern finds is `REDACTED`, in every text."""

        def clean(part: Any) -> Any:
            if isinstance(part, str):
                return pattern.sub(REDACTED, part)
            if isinstance(part, Mapping):
                return {name: clean(value) for name, value in part.items()}
            return list(map(clean, part)) if isinstance(part, list | tuple) else part

        begins, behind = [-1], [(0, 0)]  # of what is covered; a place behind it as it was, and as it is now

        def cover(found: re.Match[str]) -> str:
            before, now = behind[-1]
            begins.append(found.start())
            behind.append((found.end(), now + found.start() - before + len(REDACTED)))
            return REDACTED

        def moved(place: int) -> int:
            """Where a place of the text is now; one that is covered is behind what covers it."""
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
        """Write these, and let go of what is over the bounds."""
        self.add(map(_row, entries), max_age_sec=MAX_AGE_SEC, max_bytes=max_bytes)

    def heads(
        self, last: int, after: int = 0, before: int | None = None, owner: str | None = None, search: str = ""
    ) -> list[tuple[int, Head]]:
        """The last so many of those with numbers between these, the newest last: of one owner, and with some text in
        what was sent or answered, of whatever case; this looks at the last `MAX_SEARCHED`.
        """
        last = min(last, sys.maxsize)  # SQLite takes no more
        rows = self.rows(
            "SELECT number, head FROM kept WHERE number IN (SELECT number FROM kept WHERE number > ?1 AND "
            "(?2 IS NULL OR number < ?2) AND (?3 IS NULL OR owner = ?3) ORDER BY number DESC LIMIT ?4) AND "
            "(?5 = '' OR has(?5, head, body)) ORDER BY number DESC LIMIT ?6",
            *(after, before, owner, MAX_SEARCHED if search else last, _spelled(search), last),
        )
        return [(number, Head(**orjson.loads(head))) for number, head in rows][::-1]

    def entry(self, number: int, owner: str | None = None) -> HistoryEntry:
        """One by its number. Raises `BadRequest` where there is none, or it is not this owner's."""
        # As a text: SQLite takes none over 64 bits, and compares it as a number.
        if found := self._first("number = ?1 AND (?2 IS NULL OR owner = ?2)", str(number), owner):
            return found
        raise BadRequest(f"request {number} is not found in the history; it was never there, or has made way")

    def entries(self, search: str = "") -> Iterator[HistoryEntry]:
        """All that are there now and have this text, the oldest first. Between two of them no read is open, which would
        have the journal of a server that writes grow for as long as a pager waits.
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
    """Whether one of a row's texts has this, which is `_spelled` as these are."""
    return wanted in head.casefold() or wanted in zlib.decompress(body).decode().casefold()


@attrs.frozen
class Parting:
    """Where a prompt begins to differ from an earlier one and its answer, of which the cache has both."""

    common: int
    """How many tokens both begin with."""
    offset: int
    """Where these end in the texts."""
    tokens: tuple[str, str]
    """The first that differs, of each text; empty: that one ends there."""
    places: tuple[str, str]
    """The message of each that it stands in."""


def parting(one: HistoryEntry, other: HistoryEntry) -> Parting | None:
    """Where the prompt of `other` parts from `one`; None where both have the same prompt."""
    if one.prompt == other.prompt:
        return None
    mine, theirs = (
        [text[begin:end] for begin, end in pairwise((0, *entry.ends)) if end <= len(text)]
        for entry, text in ((one, one.prompt + one.answer), (other, other.prompt))
    )
    # A text that is the same can be cut in other tokens: the cache ends at the first of these.
    common = common_size(mine, theirs)
    offset = sum(map(len, mine[:common]))
    first, second = (next(filter(None, parts[common:]), "") for parts in (mine, theirs))  # a part of a letter is empty
    return Parting(common, offset, (first, second), (place(one, offset), place(other, offset)))


def place(entry: HistoryEntry, offset: int) -> str:
    """Which part of the request stands at this place of its prompt, in words."""
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

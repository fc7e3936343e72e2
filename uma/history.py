"""History: a server's last requests, whole, in one file of SQLite for its user alone.

    with History(path) as history:          # a server's, in one thread
        history.add([entry, …])
    with History(path, reads=True) as history:
        entry = history.entry(17)

Several processes, such as those of several models, can write one file at once. What is over the bounds goes: the oldest
of the owner that has most, so that no client pushes out all that others sent.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
import orjson

from uma import json_bytes
from uma.errors import BadRequest, ConfigError, UmaError, told
from uma.prefix import common_size

MAX_BYTES = 2**30
"""Maximum size of all entries."""
MAX_AGE_SEC = 7 * 24 * 3_600
BUSY_SEC = 5.0
"""Longest wait for another process that writes."""
MAX_ENTRY_BYTES = 64 * 2**20
"""Maximum length of an entry's texts: the rest of a longer one is not kept."""
MAX_SEARCHED = 5_000
"""Maximum entries that one search looks through, the newest first."""
_TABLE = """
CREATE TABLE IF NOT EXISTS requests (number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT, came_at REAL,
                                     size INTEGER, head TEXT, request BLOB, prompt BLOB, ends BLOB, answer BLOB);
CREATE INDEX IF NOT EXISTS requests_by_time ON requests (came_at);
CREATE INDEX IF NOT EXISTS requests_by_owner ON requests (owner, number, size);
"""
REDACTED = "[redacted]"


class HistoryFault(UmaError):
    """The file of the history cannot be read or written."""

    code = "E_HISTORY"


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
    prompt: bytes = b""
    """The prompt's tokens as text, special ones by their spelling."""
    ends: Sequence[int] = ()
    """Where each of the tokens ends in `prompt`, in bytes; nothing where texts were redacted."""
    answer: bytes = b""
    number: int = 0
    """The entry's place in the file, from 1."""
    owner: str = ""
    """Whose it is: the key or user that it came with; empty: the server's own user, and whoever needs no key."""

    def redacted(self, pattern: re.Pattern[str]) -> HistoryEntry:
        """A copy in which what the pattern finds is `REDACTED`, in every text."""

        def clean(part: Any) -> Any:
            if isinstance(part, str):
                return pattern.sub(REDACTED, part)
            if isinstance(part, Mapping):
                return {name: clean(value) for name, value in part.items()}
            return list(map(clean, part)) if isinstance(part, list | tuple) else part

        prompt, answer = (clean(text.decode("utf-8", "replace")).encode() for text in (self.prompt, self.answer))
        is_same = (prompt, answer) == (self.prompt, self.answer)
        ends = self.ends if is_same else ()
        return attrs.evolve(self, request=clean(dict(self.request)), prompt=prompt, ends=ends, answer=answer)


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_STATE_HOME/uma/history.db`, by default in `~/.local/state`. Raises `ConfigError` without a home."""
    if state := environ.get("XDG_STATE_HOME"):
        return Path(state) / "uma" / "history.db"
    try:
        return Path.home() / ".local" / "state" / "uma" / "history.db"
    except RuntimeError:
        raise ConfigError("the history has no place: this user has no home folder; set XDG_STATE_HOME") from None


class History:
    """An open history. Each call waits for the disk; every fault of it is a `HistoryFault`."""

    def __init__(self, path: Path, *, reads: bool = False) -> None:
        self._path, self._reads = path, reads
        self._db: sqlite3.Connection | None = None

    def __enter__(self) -> History:
        with _faults(self._path):
            if self._reads:
                if not self._path.exists():
                    raise HistoryFault(f"no history at {self._path}; a server keeps one with `uma run --history`")
                self._db = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SEC)
                return self
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(self._path, timeout=BUSY_SEC)
            self._db.executescript(f"PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL; {_TABLE}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._db is not None:
            self._db.close()

    def add(self, entries: Sequence[HistoryEntry], *, max_bytes: int = MAX_BYTES) -> None:
        """Write these, and let go of what is over the bounds."""
        assert self._db is not None
        with _faults(self._path), self._db as db:
            db.executemany("INSERT INTO requests VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", map(_row, entries))
            db.execute("DELETE FROM requests WHERE came_at < ?", (time.time() - MAX_AGE_SEC,))
            sizes = Counter(dict(db.execute("SELECT owner, sum(size) FROM requests GROUP BY owner")))
            while sizes.total() > max_bytes:
                ((owner, _),) = sizes.most_common(1)
                oldest = "SELECT number, size FROM requests WHERE owner = ? ORDER BY number LIMIT 1"
                number, size = db.execute(oldest, (owner,)).fetchone()
                db.execute("DELETE FROM requests WHERE number = ?", (number,))
                sizes[owner] -= size
        with _faults(self._path):
            self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def heads(
        self, last: int, after: int = 0, before: int | None = None, owner: str | None = None, search: str = ""
    ) -> list[tuple[int, Head]]:
        """The last so many of those with numbers between these, the newest last: of one owner, and with some text in
        what was sent or answered, of whatever case; this looks at `MAX_SEARCHED` at most.
        """
        texts = ", request, prompt, answer" if search else ""
        rows = self._rows(
            f"SELECT number, head{texts} FROM requests WHERE number > ?1 AND (?2 IS NULL OR number < ?2) "
            "AND (?3 IS NULL OR owner = ?3) ORDER BY number DESC LIMIT ?4",
            *(after, before, owner, MAX_SEARCHED if search else last),
        )
        wanted = search.casefold()
        found = (row for row in rows if not search or _has(wanted, *row[1:]))
        return [(number, Head(**orjson.loads(head))) for number, head, *_ in reversed(list(islice(found, last)))]

    def entry(self, number: int, owner: str | None = None) -> HistoryEntry:
        """One by its number. Raises `BadRequest` where there is none, or it is not this owner's."""
        for row in self._rows(
            "SELECT head, request, prompt, ends, answer FROM requests WHERE number = ?1 AND (?2 IS NULL OR owner = ?2)",
            *(number, owner),
        ):
            return _entry(number, *row)
        raise BadRequest(f"request {number} is not found in the history; it was never there, or has made way")

    def entries(self) -> Iterator[HistoryEntry]:
        """All, the oldest first, one at a time."""
        for number, *row in self._rows(
            "SELECT number, head, request, prompt, ends, answer FROM requests ORDER BY number"
        ):
            yield _entry(number, *row)

    def _rows(self, query: str, *values: int | str | None) -> Iterator[Any]:
        assert self._db is not None
        with _faults(self._path):
            # A file that a server has just made has no table for a moment.
            if self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'requests'").fetchone():
                yield from self._db.execute(query, values)


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    """A block whose faults of disk, database and contents are `HistoryFault`."""
    try:
        yield
    except (OSError, sqlite3.Error, ValueError, TypeError, zlib.error) as error:
        raise HistoryFault(f"the history {path}: {told(error)}") from error


def _row(entry: HistoryEntry) -> tuple[Any, ...]:
    head = orjson.dumps(attrs.asdict(entry.head)).decode()
    ends = array("I", entry.ends).tobytes()
    texts = (json_bytes.dumps(entry.request), entry.prompt[:MAX_ENTRY_BYTES], ends, entry.answer[:MAX_ENTRY_BYTES])
    packed = [zlib.compress(text, 1) for text in texts]
    return (entry.owner, entry.head.came_at, len(head) + sum(map(len, packed)), head, *packed)


def _has(wanted: str, head: str, *packed: bytes) -> bool:
    """Whether one of a row's texts has this, which is casefolded."""
    texts = (zlib.decompress(text).decode("utf-8", "replace") for text in packed)
    return any(wanted in text.casefold() for text in (head, *texts))


def _entry(number: int, head: str, *packed: bytes) -> HistoryEntry:
    request, prompt, ends, answer = map(zlib.decompress, packed)
    return HistoryEntry(
        number=number,
        head=Head(**orjson.loads(head)),
        request=json_bytes.loads(request),
        prompt=prompt,
        ends=array("I", ends),
        answer=answer,
    )


@attrs.frozen
class Parting:
    """Where two prompts begin to differ."""

    common_bytes: int
    common_tokens: int | None
    """None where tokens are not known."""
    tokens: tuple[str, str]
    """The first differing token of each, or where these are not known, some text; empty: that prompt ends there."""
    places: tuple[str, str]
    """The message of each that it stands in."""


def parting(one: HistoryEntry, other: HistoryEntry) -> Parting | None:
    """The first difference of two prompts; None where they are the same."""
    if one.prompt == other.prompt:
        return None
    common = common_size(one.prompt, other.prompt)
    if not (one.ends and other.ends):
        shown = tuple(entry.prompt[common : common + 20].decode("utf-8", "replace") for entry in (one, other))
        return Parting(common, None, (shown[0], shown[1]), (place(one, common), place(other, common)))
    # A text that is the same can be cut in other tokens: the cache ends at the first of these.
    pairs = enumerate(zip(one.ends, other.ends, strict=False))
    parted = (at for at, (mine, theirs) in pairs if mine != theirs or mine > common)
    count = next(parted, min(len(one.ends), len(other.ends)))
    begin = one.ends[count - 1] if count else 0
    found = [entry.prompt[begin : entry.ends[count]] if count < len(entry.ends) else b"" for entry in (one, other)]
    first, second = (text.decode("utf-8", "replace") for text in found)
    return Parting(begin, count, (first, second), (place(one, begin), place(other, begin)))


def place(entry: HistoryEntry, offset: int) -> str:
    """Which part of the request stands at this byte of its prompt, in words."""
    messages = entry.request.get("messages") or ()
    begin, last = 0, "what comes before the first message"
    for at, message in enumerate(messages):
        text = str(message.get("content") or "").strip().encode()
        found = entry.prompt.find(text, begin) if text else -1
        if found < 0:
            continue
        if offset < found:
            return last
        name = f"messages[{at}] ({message.get('role')})"
        begin = found + len(text)
        if offset < begin:
            return name
        last = f"what follows {name}"
    return last if messages else "the prompt"

"""Rows that a server keeps of what it was asked, in one file of SQLite for its user alone: the history's, and stored
responses.

A row can go on from another, which stays as long as that does. What is over the bounds goes: the oldest of the owner
that has most, so that no client pushes out all that others sent. Several processes can write one file at once.
"""

from __future__ import annotations

import os
import sqlite3
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from uma.closing import Closing
from uma.errors import UmaError, told

MAX_BYTES = 2**30
"""Maximum size of all rows."""
BUSY_SEC = 5.0
"""Longest wait for another process that writes."""
_TABLE = """
CREATE TABLE IF NOT EXISTS kept (number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT, body BLOB, head TEXT, more BLOB,
                                 id TEXT, before TEXT, came_at REAL,
                                 size INTEGER AS (length(body) + length(head) + length(more)) STORED);
CREATE INDEX IF NOT EXISTS kept_by_id ON kept (id);
CREATE INDEX IF NOT EXISTS kept_by_before ON kept (before);
CREATE INDEX IF NOT EXISTS kept_by_time ON kept (came_at);
CREATE INDEX IF NOT EXISTS kept_by_owner ON kept (owner, number, size);
"""
_IS_LAST = "NOT EXISTS (SELECT 1 FROM kept AS next WHERE next.before = kept.id)"
"""Whether no row goes on from this one."""
_HAS_ID = "id = ? AND owner = ? AND came_at > 0"
"""Whether a row is the owner's one with that id, and not forgotten."""


class KeptFault(UmaError):
    """The file cannot be read or written."""

    code = "E_KEPT"


@attrs.frozen(kw_only=True)
class KeptRow:
    """A row to be kept. What lists show is its `head`."""

    owner: str
    """Whose it is: the key or user that it came with; empty: the server's own user, and whoever needs no key."""
    body: bytes
    head: str = ""
    more: bytes = b""
    id: str | None = None
    before: str | None = None
    """The id of the row that it goes on from."""
    came_at: float = attrs.field(factory=time.time)


class Kept(Closing):
    """An open file, for one thread at a time, or one that is there and only read. Each call waits for the disk; every
    fault of it is a `KeptFault`.
    """

    def __init__(self, path: Path, *, only_reads: bool = False) -> None:
        self._path = path
        with self._faults():
            if only_reads:
                # Beside a file in a folder that can only be read SQLite cannot make what a file with a journal needs.
                is_still = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
                uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' * is_still}"
                self._db = sqlite3.connect(uri, timeout=BUSY_SEC, check_same_thread=False, uri=True)
            else:
                self._db = self._written(path)
            self._db.create_function("packed", 1, partial(zlib.compress, level=1))
            self._db.create_function("unpacked", 1, zlib.decompress)

    @staticmethod
    def _written(path: Path) -> sqlite3.Connection:
        """A file to write, which is made where there is none."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        db = sqlite3.connect(path, timeout=BUSY_SEC, check_same_thread=False)
        # Chosen before there are tables; later that has no effect, and waits for what another process writes.
        vacuum = "" if path.stat().st_size else "PRAGMA auto_vacuum = INCREMENTAL;"
        try:
            db.executescript(f"{vacuum} PRAGMA journal_mode = WAL; {_TABLE}")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def add(self, rows: Iterable[KeptRow], *, max_age_sec: float, max_bytes: int = MAX_BYTES) -> None:
        """Write these, and let go of what is over the bounds."""
        columns = "owner, body, head, more, id, before, came_at"
        insert = f"INSERT INTO kept ({columns}) VALUES (?, packed(?), ?, packed(?), ?, ?, ?)"
        oldest = f"SELECT number FROM kept WHERE owner = ? AND {_IS_LAST} ORDER BY number LIMIT 1"
        with self._faults():
            with self._db as db:
                db.executemany(insert, map(attrs.astuple, rows))
                self._let_go(time.time() - max_age_sec)
                sizes = Counter(dict(db.execute("SELECT owner, sum(size) FROM kept GROUP BY owner")))
                while sizes.total() > max_bytes:
                    ((owner, _),) = sizes.most_common(1)
                    ((size,),) = db.execute(f"DELETE FROM kept WHERE number = ({oldest}) RETURNING size", (owner,))
                    sizes[owner] -= size
            self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def _let_go(self, before: float) -> None:
        """Remove what came before this time, unless something goes on from it."""
        remove = f"DELETE FROM kept WHERE came_at < ? AND {_IS_LAST}"
        gone = self._db.execute(f"{remove} RETURNING before", (before,)).fetchall()
        while gone:
            # Of the rest only what these went on from can go: to look at all again took 25 s for a chain of 8,000.
            gone += self._db.execute(f"{remove} AND id = ? RETURNING before", (before, *gone.pop())).fetchall()

    def chain(self, id: str, owner: str) -> list[bytes]:
        """Bodies of the owner's row of that id and of all that it goes on from, the oldest first; none without it."""
        query = (
            f"WITH RECURSIVE chain (number, before) AS (SELECT number, before FROM kept WHERE {_HAS_ID} "
            "UNION ALL SELECT kept.number, kept.before FROM kept JOIN chain ON kept.id = chain.before) "
            "SELECT unpacked(body) FROM kept JOIN chain USING (number) ORDER BY number"
        )
        return [body for (body,) in self.rows(query, id, owner)]

    def more(self, id: str, owner: str) -> bytes | None:
        """`KeptRow.more` of the owner's row of that id; None where there is no such row."""
        found = self.rows(f"SELECT unpacked(more) FROM kept WHERE {_HAS_ID}", id, owner)
        return next((more for (more,) in found), None)

    def forget(self, id: str, owner: str) -> bool:
        """Find the owner's row of that id no more, and remove it unless others go on from it; whether there was one."""
        with self._faults(), self._db as db:
            found = db.execute(f"UPDATE kept SET came_at = 0 WHERE {_HAS_ID}", (id, owner)).rowcount
            self._let_go(1.0)
        return bool(found)

    def rows(self, query: str, *values: str | float | None) -> Iterator[Any]:
        """What a query finds; `unpacked(body)` in it is a row's body."""
        with self._faults():
            yield from self._db.execute(query, values)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """A block whose faults of disk, database and contents are `KeptFault`."""
        try:
            yield
        except (OSError, sqlite3.Error, ValueError, TypeError, zlib.error) as error:
            raise KeptFault(f"{self._path}: {told(error)}") from error

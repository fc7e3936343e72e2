"""Rows of a server's requests in an SQLite file that only its user can read: the history's, and stored responses.

A row can continue another one, which is kept as long as it is. Over the bounds, the oldest row of the owner with the
most bytes is deleted, so that no client displaces the rows of all others. Several processes can write one file at once.
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
"""Maximum wait for another process that is writing."""
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
"""SQL: whether no row continues this one."""
_HAS_ID = "id = ? AND owner = ? AND came_at > 0"
"""SQL: whether a row is the owner's row with this id, and not forgotten."""


class KeptFault(UmaError):
    """The file cannot be read or written."""

    code = "E_KEPT"


@attrs.frozen(kw_only=True)
class KeptRow:
    """A row to be added. `head` is what lists show."""

    owner: str
    """Key or user that the request came with; empty: the server's own user, and clients without a key."""
    body: bytes
    head: str = ""
    more: bytes = b""
    id: str | None = None
    before: str | None = None
    """Id of the row that this one continues."""
    came_at: float = attrs.field(factory=time.time)


class Kept(Closing):
    """An open file, for one thread at a time, or read-only. Each call blocks on the disk; all its errors are
    `KeptFault`.
    """

    def __init__(self, path: Path, *, only_reads: bool = False) -> None:
        self._path = path
        with self._faults():
            if only_reads:
                # In a read-only folder SQLite cannot make the files that a write-ahead log needs, so open as immutable.
                is_still = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
                uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' * is_still}"
                self._db = sqlite3.connect(uri, timeout=BUSY_SEC, check_same_thread=False, uri=True)
            else:
                self._db = self._written(path)
            self._db.create_function("packed", 1, partial(zlib.compress, level=1))
            self._db.create_function("unpacked", 1, zlib.decompress)

    @staticmethod
    def _written(path: Path) -> sqlite3.Connection:
        """Open a file for writing, and create it if needed."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        db = sqlite3.connect(path, timeout=BUSY_SEC, check_same_thread=False)
        # Only works before there are tables; later it has no effect, and waits for other writers.
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
        """Add these rows, and delete what exceeds the bounds."""
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
        """Delete rows from before this time, unless a row continues them."""
        remove = f"DELETE FROM kept WHERE came_at < ? AND {_IS_LAST}"
        gone = self._db.execute(f"{remove} RETURNING before", (before,)).fetchall()
        while gone:
            # Next, only rows that the deleted ones continued: searching all again took 25 s for a chain of 8,000.
            gone += self._db.execute(f"{remove} AND id = ? RETURNING before", (before, *gone.pop())).fetchall()

    def chain(self, id: str, owner: str) -> Iterator[bytes]:
        """Bodies of the owner's row of this id and of all rows that it continues, the oldest first; empty without such
        a row. Each is unpacked as it is asked for: 8 MB can be kept in 8 KB.
        """
        query = (
            f"WITH RECURSIVE chain (number, before) AS (SELECT number, before FROM kept WHERE {_HAS_ID} "
            "UNION ALL SELECT kept.number, kept.before FROM kept JOIN chain ON kept.id = chain.before) "
            "SELECT number FROM chain ORDER BY number"
        )
        for (number,) in list(self.rows(query, id, owner)):
            for (body,) in self.rows("SELECT unpacked(body) FROM kept WHERE number = ?", number):
                yield body

    def more(self, id: str, owner: str) -> bytes | None:
        """`KeptRow.more` of the owner's row of that id; None where there is no such row."""
        found = self.rows(f"SELECT unpacked(more) FROM kept WHERE {_HAS_ID}", id, owner)
        return next((more for (more,) in found), None)

    def forget(self, id: str, owner: str) -> bool:
        """Make the owner's row of this id unfindable, and delete it unless others continue it. Returns whether there
        was one.
        """
        with self._faults(), self._db as db:
            found = db.execute(f"UPDATE kept SET came_at = 0 WHERE {_HAS_ID}", (id, owner)).rowcount
            self._let_go(1.0)
        return bool(found)

    def rows(self, query: str, *values: str | float | None) -> Iterator[Any]:
        """Rows of a query; in it, `unpacked(body)` is a row's body."""
        with self._faults():
            yield from self._db.execute(query, values)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """A block whose errors of disk, database and contents become `KeptFault`."""
        try:
            yield
        except (OSError, sqlite3.Error, ValueError, TypeError, zlib.error) as error:
            raise KeptFault(f"{self._path}: {told(error)}") from error

"""Files and batches that a server keeps for its clients: an index in SQLite, contents as files, for one user alone."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import attrs
import orjson

MAX_FILE_BYTES = 209_715_200
"""Maximum length of a file that is sent: as OpenAI has it."""
MAX_STORE_BYTES = 4_294_967_296
"""Maximum bytes of all files, from which on none more is taken."""
MAX_FILES, MAX_BATCHES, MAX_UNFINISHED = 10_000, 1_000, 100
"""Maximum files; batches that are remembered, of which the oldest one that has ended makes way; and batches of a model
that have not ended."""
_TABLES = """
CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, owner TEXT, created_at INTEGER, data TEXT);
CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, owner TEXT, model TEXT, is_over INTEGER, data TEXT);
"""

Status = Literal["in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"]
OVER = ("completed", "failed", "cancelled")


@attrs.frozen(kw_only=True)
class StoredFile:
    """A file, but for its contents."""

    id: str = attrs.field(factory=lambda: f"file-{secrets.token_hex(12)}")
    owner: str
    """Name of the key that it came with; empty without keys."""
    name: str
    purpose: str
    size_bytes: int
    created_at: int = attrs.field(factory=lambda: int(time.time()))


@attrs.frozen(kw_only=True)
class Batch:
    """A batch, as OpenAI tells of one. Times are Unix time."""

    id: str = attrs.field(factory=lambda: f"batch_{secrets.token_hex(12)}")
    owner: str
    model: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None
    status: Status = "in_progress"
    created_at: int = attrs.field(factory=lambda: int(time.time()))
    times: dict[str, int] = attrs.field(factory=dict)
    """By status, when it was reached."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    error: str | None = None
    """Why it has failed as a whole."""

    def now(self, status: Status, **more: Any) -> Batch:
        """The same in another state."""
        return attrs.evolve(self, status=status, times={**self.times, status: int(time.time())}, **more)


class Store:
    """What a folder holds. Belongs to one thread; several processes can share the folder."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError` and `sqlite3.Error` where it cannot be used."""
        for each in (folder, folder / "files", folder / "batches"):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        self.arriving = 0
        """Files that are on their way, and not counted yet."""
        self._db = sqlite3.connect(folder / "index.sqlite3", isolation_level=None)
        self._db.executescript("PRAGMA journal_mode = WAL;" + _TABLES)

    def _do(self, statement: str, values: tuple[object, ...] = ()) -> list[Any]:
        """The rows that a statement to the index gives. Raises `OSError` where the disk is full, or another process has
        the index for long.
        """
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise OSError(f"{self.folder / 'index.sqlite3'}: {error}") from error

    def close(self) -> None:
        """Close the index."""
        self._db.close()

    def path(self, file_id: str) -> Path:
        """Where a file's contents are; `file_id` is one that was given."""
        return self.folder / "files" / file_id

    def results(self, batch_id: str) -> Path:
        """Where a batch's results are until it ends."""
        return self.folder / "batches" / f"{batch_id}.jsonl"

    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(each.size_bytes for each in self.files(None))

    def add_file(self, file: StoredFile) -> None:
        """Remember a file whose contents are there."""
        self._do("INSERT INTO files VALUES (?, ?, ?, ?)", (file.id, file.owner, file.created_at, _text(file)))

    def file(self, file_id: str, owner: str) -> StoredFile | None:
        """The owner's file of that id."""
        found = self._do("SELECT data FROM files WHERE id = ? AND owner = ?", (file_id, owner))
        return StoredFile(**orjson.loads(found[0][0])) if found else None

    def files(self, owner: str | None) -> list[StoredFile]:
        """The owner's files, the newest first; None: all."""
        query = "SELECT data FROM files WHERE ?1 IS NULL OR owner = ?1 ORDER BY rowid DESC"
        return [StoredFile(**orjson.loads(data)) for (data,) in self._do(query, (owner,))]

    def remove_file(self, file_id: str) -> None:
        """Forget a file, and its contents."""
        self._do("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)

    def keep(self, batch: Batch) -> None:
        """Remember a batch as it is now."""
        self._do(
            "INSERT INTO batches VALUES (?1, ?2, ?3, ?4, ?5) "
            "ON CONFLICT (id) DO UPDATE SET is_over = excluded.is_over, data = excluded.data",
            (batch.id, batch.owner, batch.model, batch.status in OVER, _text(batch)),
        )
        self._do("DELETE FROM batches WHERE is_over AND rowid <= (SELECT max(rowid) FROM batches) - ?", (MAX_BATCHES,))

    def batch(self, batch_id: str, owner: str | None) -> Batch | None:
        """The owner's batch of that id; None for the owner: anyone's."""
        query = "SELECT data FROM batches WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)"
        found = self._do(query, (batch_id, owner))
        return Batch(**orjson.loads(found[0][0])) if found else None

    def batches(self, owner: str) -> list[Batch]:
        """The owner's batches, the newest first."""
        query = "SELECT data FROM batches WHERE owner = ? ORDER BY rowid DESC"
        return [Batch(**orjson.loads(data)) for (data,) in self._do(query, (owner,))]

    def unfinished(self, models: Collection[str]) -> list[Batch]:
        """All batches for one of these models that have not ended, the oldest first."""
        rows = self._do("SELECT data, model FROM batches WHERE NOT is_over ORDER BY rowid")
        return [Batch(**orjson.loads(data)) for data, model in rows if model in models]


def _text(entry: StoredFile | Batch) -> str:
    return orjson.dumps(attrs.asdict(entry)).decode()

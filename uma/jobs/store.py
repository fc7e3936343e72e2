"""Files and batches that a server keeps for its clients: an index in SQLite, contents as files, for one user alone.

The folder has one owner among processes, the first that locks it: others can read. Rows of the index are read as they
are asked for, and a row that another version wrote costs nothing but itself.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import attrs
import orjson
import trio

from uma import json_bytes, posix
from uma.errors import BadRequest, UmaError, told
from uma.jobs.journal import journal_of, kept_of, remove_earlier
from uma.kept import Kept
from uma.net.logfmt import log
from uma.protocol.converter import structure

logger = logging.getLogger("uma.jobs")
T = TypeVar("T")

MAX_FILE_BYTES = 209_715_200
"""Maximum length of a file that is sent: as OpenAI has it."""
MAX_STORE_BYTES = 4_294_967_296
"""Maximum bytes of an owner's files and of its entries in the index, from which on no more is taken."""
MAX_FILES, MAX_BATCHES, MAX_UNFINISHED = 10_000, 1_000, 100
"""Maximum files of an owner; batches that are remembered, of which the oldest one that has ended makes way; and batches
that have not ended."""
_FILE_NAME = re.compile(r"file-[0-9a-f]+(\.part)?")
"""Names of files' contents, and of parts of those that are being sent."""
_BATCH_NAME = re.compile(r"batch_[0-9a-f]+\..*")
"""Names of batches' results and journals."""
MAX_TOLD = 1_000
"""Maximum unreadable rows of the index that the log names."""
_TABLES = """
CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, owner TEXT, created_at INTEGER, data TEXT);
CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, owner TEXT, model TEXT, is_over INTEGER, data TEXT);
"""

JobStatus = Literal["in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"]
OVER = ("completed", "failed", "cancelled")


@attrs.frozen(kw_only=True)
class StoredFile:
    """Card of a file that a client has sent or a batch has made: whose it is, its name, size and purpose."""

    id: str = attrs.field(factory=lambda: f"file-{secrets.token_hex(12)}")
    owner: str
    """Name of the key that it came with; empty without keys."""
    name: str
    purpose: str
    size_bytes: int
    created_at: int = attrs.field(factory=lambda: int(time.time()))


@attrs.frozen
class RowFault:
    """What is wrong with a batch's file."""

    code: str
    message: str
    line: int | None = None


@attrs.frozen(kw_only=True)
class StoredBatch:
    """A batch, as OpenAI tells of one. Times are Unix time."""

    id: str = attrs.field(factory=lambda: f"batch_{secrets.token_hex(12)}")
    owner: str
    model: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None
    status: JobStatus = "in_progress"
    created_at: int = attrs.field(factory=lambda: int(time.time()))
    times: dict[str, int] = attrs.field(factory=dict)
    """Time at which each status was reached."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    error: str | None = None
    """Why it has failed as a whole."""
    faults: list[RowFault] = attrs.field(factory=list)
    """Why it has failed before a row ran."""

    def now(self, status: JobStatus, **more: Any) -> StoredBatch:
        """A copy in another state."""
        return attrs.evolve(self, status=status, times={**self.times, status: int(time.time())}, **more)


class StoreFault(UmaError):
    """The folder cannot be used now: the disk is full, or another program has the index for long."""

    code = "E_JOB_STORE"


class StoreTaken(UmaError):
    """Another process owns the folder, and alone changes what is in it."""

    code = "E_JOB_STORE_TAKEN"


class JobFolder:
    """The store of a folder, for a Trio thread. One worker thread at a time does all its work, in the order in which it
    was asked for; no disk is waited for anywhere else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arriving: dict[object, int] = {}
        """Uploads on their way, by client."""
        self._store: Store | None = None
        self._turn = trio.CapacityLimiter(1)
        self._working = threading.Lock()
        self._is_closed = False

    async def do(self, work: Callable[[Store], T]) -> T:
        """What `work` makes of the store, made at its first use. A caller that is cancelled does not wait for the end
        of what has begun. Raises `StoreFault` in place of `OSError` and SQLite's errors, and whatever `work` raises.
        """
        return await trio.to_thread.run_sync(self._done, work, limiter=self._turn, abandon_on_cancel=True)

    async def is_there(self) -> bool:
        """Whether the folder has been made."""
        return await trio.to_thread.run_sync(self.path.is_dir, limiter=self._turn, abandon_on_cancel=True)

    def close(self) -> None:
        """Let another process have the folder: at once, or at the end of work whose caller has gone. Any thread."""
        self._is_closed = True
        if self._working.acquire(blocking=False):  # else its thread closes: it looks once it has let go
            store, self._store = self._store, None
            if store is not None:
                store.close()
            self._working.release()

    def _done(self, work: Callable[[Store], T]) -> T:
        try:
            with self._working:
                return self._worked(work)
        finally:
            if self._is_closed:
                self.close()

    def _worked(self, work: Callable[[Store], T]) -> T:
        try:
            if self._store is None:
                self._store = Store(self.path)
            return work(self._store)
        except (OSError, sqlite3.Error) as error:
            is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in str(error)
            why = "the disk is full: DELETE files, or free some space" if is_full else "cannot be used now"
            raise StoreFault(f"{self.path} (http_jobs): {why} ({told(error)})") from error


class Store:
    """Files and batches of one folder: their index and their contents. One thread at a time uses it. Its
    methods raise `OSError` and `sqlite3.Error`.
    """

    def __init__(self, folder: Path) -> None:
        for needed in (folder, folder / "files", folder / "batches"):
            needed.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        self._told = set[str]()
        self._is_own = False
        with ExitStack() as opened:
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            opened.callback(os.close, self._lock)
            database = sqlite3.connect(folder / "index.sqlite3", isolation_level=None, check_same_thread=False)
            self._db = opened.enter_context(closing(database))
            self._db.executescript("PRAGMA journal_mode = WAL;" + _TABLES)
            with suppress(StoreTaken):
                self.check_own()
            self._closing = opened.pop_all()

    @cached_property
    def responses(self) -> Kept:
        """Stored responses, opened at their first use. A file that cannot be is a `KeptFault` of these alone."""
        return self._closing.enter_context(Kept(self.folder / "responses.db"))

    def check_own(self) -> None:
        """Raise `StoreTaken` unless this process is, or becomes now, the one that changes what the folder has."""
        if self._is_own:
            return
        try:
            posix.lock(self._lock)
        except BlockingIOError:
            other = posix.pread(self._lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise StoreTaken(
                f"{self.folder} (http_jobs): another server (process id {other}) runs its batches and changes its "
                "files; ask that one, or give this server a folder of its own"
            ) from None
        self._sweep()
        os.ftruncate(self._lock, 0)
        posix.pwrite(self._lock, b"%d\n" % os.getpid(), 0)
        self._is_own = True

    def _sweep(self) -> None:
        """Remove what a crash has left: parts of uploads, and contents that the index does not know. What has no name
        of ours stays: a user can have named a folder with files of their own.
        """
        files = {id for (id,) in self._do("SELECT id FROM files")}
        batches = {id for (id,) in self._do("SELECT id FROM batches WHERE NOT is_over")}
        for path in (self.folder / "files").iterdir():
            if _FILE_NAME.fullmatch(path.name) and path.name not in files:
                path.unlink()
        for path in (self.folder / "batches").iterdir():
            if _BATCH_NAME.fullmatch(path.name) and path.name.partition(".")[0] not in batches:
                path.unlink()

    def _do(self, statement: str, values: tuple[object, ...] = ()) -> list[Any]:
        return self._db.execute(statement, values).fetchall()

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """A block whose changes to the index are there all or not at all."""
        self._do("BEGIN IMMEDIATE")
        try:
            yield
            self._do("COMMIT")
        except BaseException:
            self._db.rollback()
            raise

    def close(self) -> None:
        """Close the index, and leave the folder to another process."""
        self._closing.close()

    def path(self, file_id: str) -> Path:
        """Where a file's contents are; `file_id` is one that was given."""
        return self.folder / "files" / file_id

    def results(self, batch_id: str) -> Path:
        """Where a batch's results are until it ends."""
        return self.folder / "batches" / f"{batch_id}.jsonl"

    def used(self, owner: str) -> tuple[int, int]:
        """The owner's files, and bytes of them and of all its entries in the index."""
        size = "CASE WHEN json_valid(data) THEN coalesce(json_extract(data, '$.size_bytes'), 0) ELSE 0 END"
        ((files, file_bytes),) = self._do(
            f"SELECT count(*), coalesce(sum(length(data) + {size}), 0) FROM files WHERE owner = ?", (owner,)
        )
        ((batch_bytes,),) = self._do("SELECT coalesce(sum(length(data)), 0) FROM batches WHERE owner = ?", (owner,))
        return files, file_bytes + batch_bytes

    def add_file(self, file: StoredFile, part: Path) -> None:
        """Keep a file whose contents are `part`, which is none any more."""
        part.rename(self.path(file.id))
        self._insert(file)

    def _insert(self, file: StoredFile) -> None:
        self._do("INSERT INTO files VALUES (?, ?, ?, ?)", (file.id, file.owner, file.created_at, _text(file)))

    def file(self, file_id: str, owner: str) -> StoredFile | None:
        """The owner's file of that id."""
        query = "SELECT id, data FROM files WHERE id = ? AND owner = ?"
        return next(self._read(StoredFile, self._do(query, (file_id, owner))), None)

    def files(
        self, owner: str, limit: int, after: str | None = None, purpose: str | None = None, *, is_rising: bool = False
    ) -> tuple[list[StoredFile], bool]:
        """So many of the owner's files behind the one whose id is `after`, the newest first, or with `is_rising` the
        oldest; and whether there are more. Raises `BadRequest` where there is no such file.
        """
        return self._page(StoredFile, "files", owner, limit, after, purpose, is_rising=is_rising)

    def remove_file(self, file: StoredFile) -> None:
        """Forget a file, and its contents. Raises `BadRequest` for the input of a batch that has not ended."""
        for batch in self.unfinished(owner=file.owner):
            if batch.input_file_id == file.id:
                raise BadRequest.at("id", f"batch {batch.id} reads this file; cancel it first")
        self._do("DELETE FROM files WHERE id = ?", (file.id,))
        self.path(file.id).unlink(missing_ok=True)

    def keep(self, batch: StoredBatch) -> None:
        """Remember a batch as it is now."""
        self._do(
            "INSERT INTO batches VALUES (?1, ?2, ?3, ?4, ?5) "
            "ON CONFLICT (id) DO UPDATE SET is_over = excluded.is_over, data = excluded.data",
            (batch.id, batch.owner, batch.model, batch.status in OVER, _text(batch)),
        )
        self._do(
            "DELETE FROM batches WHERE is_over AND owner = ?1 AND rowid <= "
            "(SELECT rowid FROM batches WHERE owner = ?1 ORDER BY rowid DESC LIMIT 1 OFFSET ?2)",
            (batch.owner, MAX_BATCHES),
        )

    def batch(self, batch_id: str, owner: str | None) -> StoredBatch | None:
        """The owner's batch of that id; None for the owner: anyone's."""
        query = "SELECT id, data FROM batches WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)"
        return next(self._read(StoredBatch, self._do(query, (batch_id, owner))), None)

    def batches(self, owner: str, limit: int, after: str | None = None) -> tuple[list[StoredBatch], bool]:
        """Page of the owner's batches; see `files`."""
        return self._page(StoredBatch, "batches", owner, limit, after)

    def unfinished(self, models: Collection[str] | None = None, owner: str | None = None) -> list[StoredBatch]:
        """Batches that have not ended, the oldest first: for one of these models, or this owner's."""
        query = "SELECT id, data, model FROM batches WHERE NOT is_over AND (?1 IS NULL OR owner = ?1) ORDER BY rowid"
        rows = self._do(query, (owner,))
        return list(self._read(StoredBatch, [row[:2] for row in rows if models is None or row[2] in models]))

    def finish(self, batch: StoredBatch, why: str | None = None) -> StoredBatch:
        """End a batch that nothing runs: its results become its files. `why`: the reason for which it failed."""
        results = self.results(batch.id)
        output, error = (
            StoredFile(owner=batch.owner, name=f"{batch.id}_{kind}.jsonl", purpose="batch_output", size_bytes=0)
            for kind in ("output", "error")
        )
        paths = self.path(output.id), self.path(error.id)
        try:
            good, bad = _split(results, *paths)
            with self._at_once():
                for file, path, rows in ((output, paths[0], good), (error, paths[1], bad)):
                    if rows:
                        self._insert(attrs.evolve(file, size_bytes=path.stat().st_size))
                status: JobStatus = "failed" if why else "cancelled" if batch.status == "cancelling" else "completed"
                ids = {"output_file_id": output.id if good else None, "error_file_id": error.id if bad else None}
                batch = batch.now(status, **ids, completed=good, failed=bad, error=why)
                self.keep(batch)
        except BaseException:
            for path in paths:
                path.unlink(missing_ok=True)
            raise
        for path in (*(path for path, rows in zip(paths, (good, bad), strict=True) if not rows), results):
            path.unlink(missing_ok=True)
        journal_of(results).unlink(missing_ok=True)
        remove_earlier(results)
        return batch

    def _page(
        self,
        kind: type[T],
        table: Literal["files", "batches"],
        owner: str,
        limit: int,
        after: str | None,
        purpose: str | None = None,
        *,
        is_rising: bool = False,
    ) -> tuple[list[T], bool]:
        beyond, order = (">", "ASC") if is_rising else ("<", "DESC")
        start = None
        if after is not None:
            found = self._do(f"SELECT rowid FROM {table} WHERE id = ? AND owner = ?", (after, owner))
            if not found:
                raise BadRequest.at("after", f"{after[:100]!r} was not found: it was deleted, or is another key's")
            start = found[0][0]
        rows = self._do(
            f"SELECT id, data FROM {table} WHERE owner = ?1 AND (?2 IS NULL OR rowid {beyond} ?2) AND (?3 IS NULL OR "
            "CASE WHEN json_valid(data) THEN json_extract(data, '$.purpose') = ?3 END) "
            f"ORDER BY rowid {order} LIMIT ?4",
            (owner, start, purpose, limit + 1),
        )
        return list(self._read(kind, rows[:limit])), len(rows) > limit

    def _read(self, kind: type[T], rows: list[Any]) -> Iterator[T]:
        """The entries of these rows, without members that are unknown here, and without rows that are unreadable."""
        for id, data in rows:
            try:
                fields = orjson.loads(data)
                entry = structure(fields if isinstance(fields, dict) else {}, kind)
            except (ValueError, TypeError, UmaError) as error:
                if id not in self._told and len(self._told) < MAX_TOLD:
                    self._told.add(id)
                    log(logger, logging.WARNING, "jobs.row_skipped", id=id, reason=str(error))
            else:
                yield entry


def _split(results: Path, output: Path, error: Path) -> tuple[int, int]:
    """Good results to one file, the others to another, those that waited for their turn too; how many there are. The
    last line can be torn by a crash.
    """
    is_good_by_id: dict[str, bool] = {}
    with _private(output) as good, _private(error) as bad, ExitStack() as stack:
        found = [path for path in (results, kept_of(results)) if path.exists()]
        for line in chain.from_iterable([stack.enter_context(path.open("rb")) for path in found]):
            try:
                row = json_bytes.loads(line)
                id, response = row["id"], row["response"]
                is_good = response is not None and response["status_code"] < 400
            except (ValueError, TypeError, LookupError):
                continue
            if id not in is_good_by_id:
                is_good_by_id[id] = is_good
                (good if is_good else bad).write(line)
    good_rows = sum(is_good_by_id.values())
    return good_rows, len(is_good_by_id) - good_rows


def _private(path: Path) -> IO[bytes]:
    file = path.open("wb")
    path.chmod(0o600)
    return file


def _text(entry: StoredFile | StoredBatch) -> str:
    return orjson.dumps(attrs.asdict(entry)).decode()

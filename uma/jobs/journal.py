"""Result lines on disk, and the journal beside them that tells which row each of them is.

The lines of OUT and the entries of `OUT.journal` come in the same order, an entry right behind its line, so that
recovery is one walk over both: what a kill or a power cut has torn at their ends is cut off, and its rows are run
again. Marks in the journal tell up to where OUT was on the disk itself: what is wrong before the last mark was no
crash but an editor, and is an error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import attrs
import orjson
import xxhash

from uma import posix
from uma.errors import ConfigError, UmaError

WINDOW = 1024
"""Maximum rows that one which has not ended is behind the furthest that has: results come about in order of the rows,
so that finding one again, and waiting for its turn, takes bounded memory."""
_MARK = b"="
FOLDER = "results need a folder that exists, can be written to and has space"
BY_OPTIONS = "start over with --restart, which overwrites it"
"""What can be done about an OUT that a job cannot go on with."""


class CannotWrite(UmaError):
    """A result could not be written, as where the disk is full. Results from before are kept."""

    code = "E_JOB_WRITE"


class JobChanged(ConfigError):
    """What is on the disk is of another job than this one: other rows, settings, model, or no job's at all."""

    code = "E_JOB_CHANGED"


@attrs.frozen
class Entry:
    """What the journal has of one finished row."""

    number: int
    digest: int
    """Digest of the row."""
    size_bytes: int
    """Size of its line in OUT, the newline included."""
    is_failed: bool
    check: int
    """Checksum of that line."""
    start_bytes: int = 0
    """Where the line begins; not written, since it follows from the lines before."""

    def line(self) -> bytes:
        """Line of the journal."""
        word = b"failed" if self.is_failed else b"ok"
        return b"%d %016x %d %s %016x\n" % (self.number, self.digest, self.size_bytes, word, self.check)

    @classmethod
    def parse(cls, line: bytes, start_bytes: int) -> Entry | None:
        """What a line of the journal says; None where it is none that was written whole."""
        parts = line.split(b" ")
        if len(parts) != 5 or not line.endswith(b"\n") or parts[3] not in (b"ok", b"failed"):
            return None
        try:
            number, size = int(parts[0]), int(parts[2])
            return cls(number, int(parts[1], 16), size, parts[3] == b"failed", int(parts[4], 16), start_bytes)
        except ValueError:
            return None


@attrs.frozen
class EndedRow:
    """A row's result, on its way to the disk."""

    number: int
    digest: int
    line: bytes
    is_failed: bool


class FinishedRows:
    """Which rows have ended, asked in the order of the rows. Reads OUT's journal in step, in bounded memory."""

    def __init__(self, journal: IO[bytes], out: IO[bytes], end_bytes: int) -> None:
        """`journal` stands behind its header; it is read up to `end_bytes`."""
        self._journal, self._out, self._end_bytes = journal, out, end_bytes
        self._at_bytes = 0
        self._known: dict[int, Entry] = {}
        self._furthest = -1

    def find(self, number: int) -> Entry | None:
        """The entry of row `number`, which is larger than that of the call before; None where it has not ended."""
        while number not in self._known and self._furthest < number + WINDOW and (entry := self._next()):
            self._known[entry.number] = entry
            self._furthest = max(self._furthest, entry.number)
        return self._known.pop(number, None)

    def left(self) -> bool:
        """Whether there are entries of rows behind the last that was asked for."""
        return bool(self._known) or self._next() is not None

    def line(self, entry: Entry) -> bytes:
        """The result line of an entry."""
        return posix.pread(self._out.fileno(), entry.size_bytes, entry.start_bytes)

    def close(self) -> None:
        """Close the files."""
        self._journal.close()
        self._out.close()

    def _next(self) -> Entry | None:
        while self._journal.tell() < self._end_bytes:
            line = self._journal.readline()
            if line.startswith(_MARK):
                continue
            entry = Entry.parse(line, self._at_bytes)
            assert entry is not None  # the walk has seen it
            self._at_bytes += entry.size_bytes
            return entry
        return None


@attrs.frozen
class _JournalWalk:
    """What a journal and OUT agree on."""

    header: dict[str, Any] | None
    """None: the journal has none that was written whole."""
    out_bytes: int = 0
    journal_bytes: int = 0
    rows: int = 0
    failed: int = 0


@attrs.define(eq=False)
class Results:
    """OUT and its journal, open for appending. Its methods wait for the disk; one thread at a time calls them."""

    path: Path
    _out: int
    _journal: int
    _out_bytes: int
    _journal_bytes: int
    rows: int
    """Rows that had ended when it was opened."""
    failed: int
    """Rows of these that failed."""
    is_new: bool
    """Nothing of the job was on the disk."""
    finished: FinishedRows
    """The entries of these rows."""
    reusable: Sequence[FinishedRows]
    """What an earlier job left, and what this one has kept until its turn: good results are taken over."""
    header: Mapping[str, Any]
    """What its results depend on, by word."""
    _marked_bytes: int = 0
    _in_use: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _is_closing: bool = attrs.field(default=False, init=False)

    @classmethod
    def open(
        cls,
        path: Path,
        header: Mapping[str, Any],
        *,
        restart: bool = False,
        only_failed: bool = False,
        anew: str = BY_OPTIONS,
    ) -> Results:
        """OUT at `path`, for the job that `header` tells of, as plain data by word; new, or as far as it had come.

        `restart` begins anew; `only_failed` too, but takes over results that are good. `anew` is what errors tell to
        do. Raises `JobChanged` where the job on the disk is another one, and `CannotWrite`.
        """
        try:
            return cls._opened(path, header, restart, only_failed, anew)
        except OSError as error:
            raise CannotWrite(f"{error.filename or path}: {error.strerror}; {FOLDER}") from None

    @classmethod
    def _opened(cls, path: Path, header: Mapping[str, Any], restart: bool, only_failed: bool, anew: str) -> Results:
        path = Path(os.path.realpath(path))  # one file has one journal, whatever links lead to it
        header, journal_path = orjson.loads(orjson.dumps(header)), journal_of(path)
        _check_place(path, anew, restart=restart)
        journal = os.open(journal_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(journal, path)
            if restart:
                path.unlink(missing_ok=True)
                remove_earlier(path)
                os.ftruncate(journal, 0)
            _finish_renaming(path)
            if only_failed and not _before(path).exists() and _walk(path, anew).rows:
                journal = _set_aside(path, journal)
            walk = _walk(path, anew)
            is_new = walk.header is None
            if is_new:
                _check_new(path, anew)
            kept = _walk(kept_of(path), anew)
            if kept.header and not only_failed:
                _check_same(path, kept.header, header, anew)
            if walk.rows and not _is_useless(walk, header):
                _check_same(path, walk.header or {}, header, anew)
            else:
                written = orjson.dumps(header) + b"\n"
                os.ftruncate(journal, 0)
                _write(journal, written, 0)
                walk = _JournalWalk(dict(header), 0, len(written))
            earlier = [other for other in (_before(path), kept_of(path)) if other.exists()]
            reusable = [_finished(other, _walk(other, anew)) for other in earlier]
            out = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _lock(out, path)  # a hard link has another name, another journal, and this very file
                os.ftruncate(out, walk.out_bytes)
                os.ftruncate(journal, walk.journal_bytes)
                _sync_folder(path)
                sizes = walk.out_bytes, walk.journal_bytes, walk.rows, walk.failed
                return cls(path, out, journal, *sizes, is_new, _finished(path, walk), reusable, header)
            except BaseException:
                os.close(out)
                raise
        except BaseException:
            os.close(journal)
            raise

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self._in_use:
                yield
        finally:
            if self._is_closing:
                self.close()

    def append(self, ended: Sequence[EndedRow]) -> None:
        """Write results, each whole: where the disk is full, as many as there is space for. Raises `CannotWrite`."""
        with self._writing():
            self._append(ended)

    def _append(self, ended: Sequence[EndedRow]) -> None:
        lines = b"".join(row.line for row in ended)
        entries = b"".join(
            Entry(row.number, row.digest, len(row.line), row.is_failed, xxhash.xxh3_64_intdigest(row.line)).line()
            for row in ended
        )
        try:
            _write(self._out, lines, self._out_bytes)
            _write(self._journal, entries, self._journal_bytes)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._out, self._out_bytes)
                os.ftruncate(self._journal, self._journal_bytes)
            if len(ended) > 1:
                for row in ended:
                    self._append([row])
                return
            raise self._cannot_write(error) from None
        self._out_bytes += len(lines)
        self._journal_bytes += len(entries)

    def sync(self) -> None:
        """Return once what was appended before is on the disk. Raises `CannotWrite`."""
        with self._writing():
            if self._out_bytes == self._marked_bytes:
                return
            try:
                os.fsync(self._out)
                mark = b"%s %d\n" % (_MARK, self._out_bytes)
                with suppress(OSError):  # a disk that is full: the next result says so
                    _write(self._journal, mark, self._journal_bytes)
                    self._journal_bytes += len(mark)
                    self._marked_bytes = self._out_bytes
                os.fsync(self._journal)
            except OSError as error:
                raise self._cannot_write(error) from None

    def _cannot_write(self, error: BaseException | None) -> CannotWrite:
        why = error.strerror if isinstance(error, OSError) else "cannot be written"
        return CannotWrite(f"{self.path}: {why}; what is in it is kept, and the same command goes on from there")

    def keep(self, ended: Sequence[EndedRow]) -> None:
        """Keep results whose turn has not come, for the run that goes on. Raises `CannotWrite`."""
        try:
            with suppress(JobChanged), closing(Results.open(kept_of(self.path), self.header)) as kept:
                kept.append(ended)
                kept.sync()
        except CannotWrite as error:
            raise self._cannot_write(error.__context__) from None

    def finish(self) -> None:
        """All rows have ended: drop what was kept of an earlier job, or until its turn."""
        remove_earlier(self.path)

    def close(self) -> None:
        """Close the files; the job can then be opened again.

        While a thread that was given up still waits for the disk, that is left to it: its file descriptors must not
        become other files'.
        """
        self._is_closing = True
        if not self._in_use.acquire(blocking=False):
            return
        if self._out >= 0:
            self.finished.close()
            for earlier in self.reusable:
                earlier.close()
            os.close(self._out)
            os.close(self._journal)
            self._out = self._journal = -1
        self._in_use.release()


def judge(path: Path, header: Mapping[str, Any]) -> None:
    """Raise what `Results.open` would for the job on the disk, as far as can be told without the model."""
    path = Path(os.path.realpath(path))
    header = orjson.loads(orjson.dumps(header))
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written; {FOLDER}")
    _check_place(path, BY_OPTIONS)
    walk = _walk(path, BY_OPTIONS)
    was = walk.header or {}
    header = {**header, "model": was.get("model")}
    if walk.rows and not _is_useless(walk, header):
        _check_same(path, was, header, BY_OPTIONS)


def _is_useless(walk: _JournalWalk, header: Mapping[str, Any]) -> bool:
    """Whether nothing is lost where a job that is asked otherwise now begins anew: all its rows failed."""
    was = walk.header or {}
    return walk.rows == walk.failed and was != header and was.get("model") == header.get("model")


def _check_place(path: Path, anew: str, *, restart: bool = False) -> None:
    if path.exists() and not path.is_file():
        raise JobChanged(f"{path}: is no file, and results are kept in one; name one")
    if not restart and not journal_of(path).exists():
        _check_new(path, anew)


def journal_of(path: Path) -> Path:
    """Where the journal of OUT at `path` is."""
    return path.with_name(path.name + ".journal")


def _before(path: Path) -> Path:
    return path.with_name(path.name + ".before")


def kept_of(path: Path) -> Path:
    """Where results of OUT at `path` wait for their turn."""
    return path.with_name(path.name + ".kept")


def remove_earlier(path: Path) -> None:
    """Remove what OUT at `path` has of earlier jobs, and what waits for its turn."""
    for old in (_before(path), kept_of(path)):
        journal_of(old).unlink(missing_ok=True)
        old.unlink(missing_ok=True)


def _lock(file: int, path: Path) -> None:
    try:
        posix.lock(file)
    except OSError:
        raise JobChanged(f"{path}: another process writes results there; wait for it, or end it") from None


def _set_aside(path: Path, journal: int) -> int:
    """Keep OUT and its journal as an earlier job's; a new journal, locked."""
    journal_of(path).rename(journal_of(_before(path)))
    path.rename(_before(path))
    fresh = os.open(journal_of(path), os.O_RDWR | os.O_CREAT, 0o666)
    _lock(fresh, path)
    os.close(journal)
    return fresh


def _finish_renaming(path: Path) -> None:
    """A kill between the two renamings of `_set_aside` leaves the second to be done."""
    before = _before(path)
    if journal_of(before).exists() and not before.exists() and path.exists():
        path.rename(before)


def _check_new(path: Path, anew: str) -> None:
    if path.exists() and path.stat().st_size:
        raise JobChanged(
            f"{path}: exists, and has no journal ({journal_of(path).name}), so it is no job to continue; name "
            f"another file, or {anew}"
        )


def _check_same(path: Path, was: Mapping[str, Any], now: Mapping[str, Any], anew: str) -> None:
    if changes := list(_changes(was, now)):
        shown = "; ".join(f"{name} was {_shown(before)} and is {_shown(after)} now" for name, before, after in changes)
        keep = ", keep the good results there are with --only-failed" if anew == BY_OPTIONS else ""
        raise JobChanged(
            f"{path}: the job was started with other settings: {shown}. "
            f"Repeat the command as it was to continue, name another file{keep}, or {anew}"
        )


def _changes(was: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any, Any]]:
    """What differs: of what is an object in both, such as the model, its fields that do."""
    for name in {**was, **now}:
        before, after = was.get(name), now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _changes(before, after, "--" if name == "sampling" else f"{within}{name}.")
        elif before != after:
            yield within + (name.replace("_", "-") if within == "--" else name), before, after


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    text = orjson.dumps(value).decode()
    return text if len(text) <= 100 else text[:100] + "…"


def _finished(path: Path, walk: _JournalWalk) -> FinishedRows:
    journal = journal_of(path).open("rb")
    journal.readline()
    return FinishedRows(journal, path.open("rb"), walk.journal_bytes)


def _walk(path: Path, anew: str) -> _JournalWalk:
    """Compare OUT with its journal, entry by entry. Raises `JobChanged` where OUT was changed by something else.

    An OUT that was removed has no results.
    """
    try:
        with journal_of(path).open("rb") as journal:
            first = journal.readline()
            header = _header(first)
            if header is None or not path.exists():
                return _JournalWalk(header, 0, len(first))
            with path.open("rb") as out:
                return _compare(path, _JournalWalk(header, 0, len(first)), journal, out, anew)
    except FileNotFoundError:
        return _JournalWalk(None)


def _compare(path: Path, walk: _JournalWalk, lines: Iterable[bytes], out: IO[bytes], anew: str) -> _JournalWalk:
    at_bytes, is_whole, marked_bytes = walk.journal_bytes, True, 0
    for line in lines:
        at_bytes += len(line)
        if line.startswith(_MARK):
            marked_bytes = int(line[1:]) if line.endswith(b"\n") and line[1:].strip().isdigit() else marked_bytes
            continue
        entry = Entry.parse(line, walk.out_bytes) if is_whole else None
        written = out.read(entry.size_bytes) if entry is not None else b""
        is_whole = entry is not None and xxhash.xxh3_64_intdigest(written) == entry.check
        if entry is not None and is_whole:
            rows, failed = walk.rows + 1, walk.failed + entry.is_failed
            walk = _JournalWalk(walk.header, walk.out_bytes + len(written), at_bytes, rows, failed)
    if walk.out_bytes < marked_bytes:
        raise JobChanged(
            f"{path}: was changed after byte {walk.out_bytes:,} ({walk.rows:,} results), so it is not known which rows "
            f"it has; name another file, or {anew}"
        )
    return walk


def _header(line: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(line) if line.endswith(b"\n") else None
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _write(fd: int, data: bytes, at: int) -> None:
    unsent = memoryview(data)
    while unsent:
        written = posix.pwrite(fd, unsent, at)
        unsent, at = unsent[written:], at + written


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

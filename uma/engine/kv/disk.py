"""The third tier: snapshots as files, so that a restarted server need not compute them again.

The decode thread's snapshots wait in a queue to be written. If the disk is slower than they come, the oldest are
dropped, and counted: newer ones belong to conversations that are more likely to go on. A file is tied to the model, the
context's parameters and the llama.cpp that made it, and has a checksum; a file that differs in any of them is ignored
with a log line. Files are written and read in threads, never by the decode thread.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import time
import weakref
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
import trio
import xxhash

from uma.engine.kv.adapter_keys import keyed, place_of, plain, set_of
from uma.engine.kv.events import Tier
from uma.engine.kv.prefix_index import PrefixIndex
from uma.engine.kv.snapshots import MIN_GAIN_TOKENS, Snapshot, usable
from uma.errors import ConfigError
from uma.net.place import directory_objection
from uma.net.wakeup import Wakeup

_log = logging.getLogger("uma.engine.kv.disk")

MAGIC = b"UMAKV005"
FOLDER = "uma-prefixes"
"""Subfolder of the folder that the user names. Nothing outside it is read, counted or removed."""
SUFFIX = ".umakv"
"""Suffix of a snapshot's file."""
PART_SUFFIX = ".umakv-part"
"""Suffix of a file that is still being written."""
PART_AGE_SEC = 3600.0
"""Minimum time (s) without a change after which a partial file counts as abandoned; a younger one can be in use by
another server."""
HEADER_BYTES = 4096
"""Maximum size of a file beyond its snapshot."""
MAX_QUEUED_BYTES = 256 * 2**20
"""Maximum size of the snapshots that wait to be written; a single one can wait whatever its size. This memory comes on
top of the memory tier: where that is smaller, its size is the bound."""


@attrs.define(eq=False)
class _File:
    """A file in this folder: a snapshot, possibly of another model or made by another llama.cpp."""

    path: Path
    size_bytes: int
    used_at: float = 0.0


@attrs.define(eq=False, kw_only=True)
class _UsableFile(_File):
    """A snapshot that can be used."""

    tokens: array[int]
    ends: tuple[int, ...] | None
    """See `Snapshot.ends`."""
    snapshot: weakref.ref[Snapshot] | None = None
    """Snapshot in memory, for as long as the decode thread keeps it."""
    reading: trio.Lock = attrs.field(factory=trio.Lock)
    """Held by the task that reads the file: requests that need it at the same time wait for that one read."""

    def usable(self, common: int) -> int:
        """See `Snapshot.usable`."""
        return usable(len(self.tokens), common, self.ends)

    @property
    def is_loaded(self) -> bool:
        return self.snapshot is not None and self.snapshot() is not None


class DiskTier:
    """Snapshots in `FOLDER` within a folder, up to `capacity_bytes`; the file used longest ago is evicted first.

    All files there count, also those of other models and llama.cpp versions, and are evicted alike. Several servers can
    share the folder: each lists it again after every file that it writes, so the bound is on all files, exceeded at
    most by those being written. `identity` is everything a snapshot depends on. A file larger than `most_read_bytes`
    does not fit into memory and is never read. Belongs to the Trio thread. Raises `ConfigError` if the folder cannot be
    used.
    """

    def __init__(
        self,
        folder: Path,
        identity: dict[str, str | int],
        capacity_bytes: int,
        most_read_bytes: int,
        adapter_keys: Sequence[str] = ("",),
    ) -> None:
        """`adapter_keys` names each set of LoRA adapters in files, by its number; other sets have no files."""
        self._adapter_keys = adapter_keys
        self._folder = made_folder(folder)
        self._identity = identity
        self._capacity_bytes = capacity_bytes
        self._most_read_bytes = most_read_bytes
        self._entries: PrefixIndex[_UsableFile] = PrefixIndex()
        self._files: dict[Path, _File] = {}
        """All files."""
        self.size_bytes = 0
        """Size of all files."""
        self.max_queued_bytes = min(MAX_QUEUED_BYTES, most_read_bytes)
        self.queued_bytes = 0
        self.dropped = 0
        """Snapshots that were never written."""
        self._queue: deque[Snapshot] = deque()
        self._has_work = Wakeup()
        self._is_closed = False

    async def open(self) -> None:
        """Read the headers of the files in the folder."""
        await self._look()

    def enqueue(self, snapshot: Snapshot) -> None:
        """Queue a snapshot to be written; the oldest are dropped until the queue is within its bound."""
        is_named = set_of(snapshot.tokens) < len(self._adapter_keys)
        if not is_named or snapshot.size_bytes + HEADER_BYTES > self._capacity_bytes:
            self._drop(snapshot)
            return
        self._queue.append(snapshot)
        self.queued_bytes += snapshot.size_bytes
        while self.queued_bytes > self.max_queued_bytes and len(self._queue) > 1:
            self._drop(self._take())
        self._has_work.ring()

    def _take(self) -> Snapshot:
        snapshot = self._queue.popleft()
        self.queued_bytes -= snapshot.size_bytes
        return snapshot

    def _drop(self, snapshot: Snapshot) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: the log of a slow disk stays short
            tokens = len(snapshot.tokens)
            _log.warning("cache_dir: a prefix of %d tokens was not written; %d so far", tokens, self.dropped)

    async def run(self) -> None:
        """Write what is queued; ends after `close`, once everything is written."""
        while True:
            while self._queue:
                await self.write(self._take())
            if self._is_closed:
                return
            await self._has_work.wait()

    def close(self) -> None:
        """Once the decode thread has ended: `run` ends as soon as all that was queued is written."""
        self._is_closed = True
        self._has_work.ring()

    def offers(self, tokens: array[int]) -> bool:
        """Whether a file that is not in memory anyway could be worth reading for `tokens`."""
        return self._find(tokens, 0) is not None

    async def fetch(self, tokens: array[int], known_tokens: int) -> Snapshot | None:
        """The snapshot on disk that saves most of `tokens`; None if none saves clearly more than `known_tokens`."""
        entry = self._find(tokens, known_tokens)
        if entry is None:
            return None
        async with entry.reading:
            if entry.is_loaded:
                return None
            snapshot = await trio.to_thread.run_sync(self._read, entry, abandon_on_cancel=True)
            if snapshot is None:
                self._remove(entry)
            else:
                entry.snapshot = weakref.ref(snapshot)
            return snapshot

    def _find(self, tokens: array[int], known_tokens: int) -> _UsableFile | None:
        found = self._entries.most_useful(tokens, _UsableFile.usable)
        if found is None or found[1] < known_tokens + MIN_GAIN_TOKENS:
            return None
        entry = found[0]
        entry.used_at = time.time()  # also if memory holds it: after a restart it will be needed
        return None if entry.is_loaded or entry.size_bytes > self._most_read_bytes else entry

    async def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot. A full disk or a lost folder is a log line, not an error: it is a cache."""
        if self._entries.get(snapshot.tokens) is not None:
            return
        try:
            written = await trio.to_thread.run_sync(self._write, snapshot, abandon_on_cancel=True)
            await self._look(written)
        except OSError as error:
            _log.warning("cache_dir: a snapshot could not be written: %s", error)
            return
        # A longer snapshot serves wherever a shorter one does, except for a few tokens.
        for entry, size in list(self._entries.beginnings(snapshot.tokens)):
            if size < len(snapshot.tokens) and snapshot.serves_for(size):
                self._remove(entry)

    async def _look(self, *written: _UsableFile) -> None:
        """Take in what was `written` here, and what other servers have written, used and removed; then evict the files
        used longest ago until all fit.
        """
        known = {**self._files, **{file.path: file for file in written}}
        found = await trio.to_thread.run_sync(self._listed, known.keys(), abandon_on_cancel=True)
        for path in known.keys() - found.keys():
            self._forget(known[path])
        for path, file in found.items():
            mine = known.get(path, file)
            mine.used_at = max(mine.used_at, file.used_at)
            if path not in known or mine in written:
                self._keep(mine)
        for mine in sorted(self._files.values(), key=lambda kept: kept.used_at):
            if self.size_bytes > self._capacity_bytes:
                self._remove(mine)

    def _keep(self, file: _File) -> None:
        if (old := self._files.pop(file.path, None)) is not None:
            self.size_bytes -= old.size_bytes
        # Another server can have written the same tokens as a second file (other threads: other last bits). The index
        # has one file for each run of tokens, so the second could never be found.
        if isinstance(file, _UsableFile) and (same := self._entries.get(file.tokens)) not in (None, old):
            self._remove(same)
        self._files[file.path] = file
        self.size_bytes += file.size_bytes
        if isinstance(file, _UsableFile):
            self._entries.put(file.tokens, file)

    def _forget(self, file: _File) -> None:
        if self._files.pop(file.path, None) is None:
            return
        self.size_bytes -= file.size_bytes
        if isinstance(file, _UsableFile):
            self._entries.discard(file.tokens)

    def _remove(self, file: _File) -> None:
        self._forget(file)
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("cache_dir: %s could not be removed: %s", file.path, error)

    def _listed(self, known: Collection[Path]) -> dict[Path, _File]:
        """Files in the folder; headers of known ones are not read. Anything but a plain snapshot file is left alone."""
        found: dict[Path, _File] = {}
        for path in self._folder.iterdir():
            try:
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    continue
                if path.suffix == SUFFIX:
                    usable = None if path in known else self._read_header(path, status)
                    found[path] = usable or _File(path, status.st_size, status.st_mtime)
                elif path.suffix == PART_SUFFIX and time.time() - status.st_mtime > PART_AGE_SEC:
                    path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue  # another server has removed it
            except OSError as error:
                _log.warning("cache_dir: %s is ignored: %s", path, error)
        return found

    def _read_header(self, path: Path, status: os.stat_result) -> _UsableFile | None:
        try:
            with path.open("rb") as file:
                header = self._parse_header(file.read(16), file.read)
                differs = [name for name, value in self._identity.items() if header.get(name) != value]
                adapted_from = int(header.get("adapted_from", 0))
                if (adapters := header.get("adapters", "")) not in self._adapter_keys:
                    differs.append("LoRA adapter")
                tokens: array[int] = array("i")
                tokens.frombytes(file.read(_token_bytes(header["n_tokens"], status.st_size)))
                ends = _checked_ends(header["ends"], header["end_bytes"], len(tokens))
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("cache_dir: %s is ignored: it is no snapshot (%s)", path, error)
            return None
        if differs:
            level = logging.DEBUG if "model" in differs else logging.INFO  # models share one folder
            _log.log(level, "cache_dir: %s is ignored: another %s", path, ", ".join(differs))
            return None
        tokens = keyed(tokens, self._adapter_keys.index(adapters), adapted_from)
        return _UsableFile(path, status.st_size, status.st_mtime, tokens=tokens, ends=ends)

    @staticmethod
    def _parse_header(start: bytes, read: object) -> dict[str, Any]:
        if start[:8] != MAGIC or len(start) != 16:
            raise ValueError("wrong magic bytes")
        size = int.from_bytes(start[8:], "little")
        if size > 2**20:
            raise ValueError("header too long")
        header = orjson.loads(read(size))  # type: ignore[operator]
        if not isinstance(header, dict):
            raise ValueError("header is no object")  # noqa: TRY004  (a wrong file, not a wrong call)
        return header

    def _read(self, entry: _UsableFile) -> Snapshot | None:
        try:
            with entry.path.open("rb") as file:
                header = self._parse_header(file.read(16), file.read)
                file.seek(4 * len(entry.tokens), os.SEEK_CUR)
                parts = tuple(file.read(size) for size in _checked_sizes(header["part_bytes"], entry.size_bytes))
                sizes = _checked_sizes(header["end_bytes"], entry.size_bytes)
                checkpoints = tuple(file.read(size) for size in sizes)
            os.utime(entry.path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("cache_dir: %s is ignored: %s", entry.path, error)
            return None
        if _checksum(header, plain(entry.tokens), (*parts, *checkpoints)) != header.get("checksum"):
            _log.warning("cache_dir: %s is ignored: its checksum is wrong", entry.path)
            return None
        ends = None if entry.ends is None else dict(zip(entry.ends, checkpoints, strict=True))
        return Snapshot(entry.tokens, parts, is_on_disk=True, tier=Tier.DISK, ends=ends)

    def _write(self, snapshot: Snapshot) -> _UsableFile:
        ends = None if snapshot.ends is None else tuple(snapshot.ends)
        checkpoints = tuple((snapshot.ends or {}).values())
        header: dict[str, Any] = {
            **self._identity,
            "n_tokens": len(snapshot.tokens),
            "part_bytes": list(map(len, snapshot.parts)),
            "ends": ends,
            "end_bytes": list(map(len, checkpoints)),
        }
        number, at = place_of(snapshot.tokens)
        if number:
            header |= {"adapters": self._adapter_keys[number], "adapted_from": at}
        tokens = plain(snapshot.tokens)
        header["checksum"] = _checksum(header, tokens, (*snapshot.parts, *checkpoints))
        encoded = orjson.dumps(header)
        path = self._folder / f"{header['checksum']}{SUFFIX}"
        # Written aside and renamed, so that a partial file is never found. After a power failure data can be missing
        # behind the new name; then the checksum differs. Waiting for the disk (fsync) would gain a cache nothing.
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=PART_SUFFIX, delete=False) as file:
            try:
                for piece in (MAGIC, len(encoded).to_bytes(8, "little"), encoded, tokens):
                    file.write(piece)
                file.writelines((*snapshot.parts, *checkpoints))
                file.flush()
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
        snapshot.is_on_disk = True
        status = path.stat()
        size, used_at, memory = status.st_size, status.st_mtime, weakref.ref(snapshot)
        return _UsableFile(path, size, used_at, tokens=snapshot.tokens, ends=ends, snapshot=memory)


def made_folder(folder: Path) -> Path:
    """Make the folder of snapshots within the one that the user names, private to the user. Raises `ConfigError` if it
    cannot be used.
    """
    folder = folder / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (problem := directory_objection(folder)) is not None:
            raise ConfigError.at("cache_dir", f"{problem}; remove it, or name another folder with --cache-dir")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError.at("cache_dir", f"{folder} cannot be written: {error.strerror}") from error
    return folder


def _token_bytes(count: object, most: int) -> int:
    if not isinstance(count, int) or not 0 < 4 * count < most:
        raise ValueError(f"{count} tokens cannot be in it")
    return 4 * count


def _checked_ends(ends: list[int] | None, sizes: list[int], n_tokens: int) -> tuple[int, ...] | None:
    if ends is None:
        return None
    if len(ends) != len(sizes) or not all(0 < end < n_tokens for end in ends):
        raise ValueError("wrong ends")
    return tuple(ends)


def _checked_sizes(sizes: list[int], most: int) -> list[int]:
    # A damaged header must not ask for more memory than there is.
    if not all(0 <= size <= most for size in sizes):
        raise ValueError("wrong sizes of its parts")
    return sizes


def _checksum(header: dict[str, Any], tokens: array[int], parts: Iterable[bytes]) -> str:
    """Checksum of everything in a file that is interpreted: the header's other fields, tokens and states.

    Against damage, not forgery: only this user can write the folder. A returning conversation waits for it, and a
    cryptographic hash would take as long as all the other reading.
    """
    fields = {name: value for name, value in header.items() if name != "checksum"}
    digest = xxhash.xxh3_128(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS))
    digest.update(tokens.tobytes())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()

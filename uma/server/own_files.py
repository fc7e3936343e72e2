"""Pictures and sounds that a client of the socket names by their path: its own files, read for it."""

from __future__ import annotations

import base64
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import trio

from uma import posix
from uma.errors import BadRequest
from uma.media.files import MAX_FILE_BYTES, MAX_REQUEST_BYTES, check_count, over_limit
from uma.types import Media, Request

MAX_READING = 2
"""Maximum requests of a server whose files are read and that are not admitted yet: so much of them is held beside what
the engine counts."""
MAX_THREADS = 8
"""Maximum threads that read: one stays where a file system does not answer (FUSE, NFS), after its request has gone."""
DEADLINE_SEC = 20.0
"""Maximum time for all files of one request."""


class OwnFiles:
    """Reads files for all sessions of a server. Belongs to its Trio thread."""

    def __init__(self) -> None:
        self._turns = trio.CapacityLimiter(MAX_READING)
        self._threads = trio.CapacityLimiter(MAX_THREADS)

    @asynccontextmanager
    async def read(self, request: Request, user: int | None) -> AsyncIterator[Request]:
        """A block with the request that has files instead of paths; it lasts until the request is admitted.

        Raises `BadRequest` for what is no regular file of this user, or does not come in time.
        """
        if not any(media_file.path is not None for _, media_file in request.placed_media()):
            yield request
            return
        async with self._turns:
            with trio.move_on_after(DEADLINE_SEC) as patience:
                reading = partial(with_own_files, request, user)
                request = await trio.to_thread.run_sync(reading, limiter=self._threads, abandon_on_cancel=True)
            if patience.cancelled_caught:
                raise BadRequest.at(
                    "media", f"timeout: files were not read by their paths within {DEADLINE_SEC:g} s; send data instead"
                )
            yield request


def with_own_files(request: Request, user: int | None) -> Request:
    """The request with files instead of paths. Blocks. Raises `BadRequest` for what is no regular file of this user,
    and for too many.
    """
    check_count(request)
    media, left = list[Media](), MAX_REQUEST_BYTES
    for field, media_file in request.placed_media():
        if media_file.path is not None:
            data = _read(media_file.path, user, f"{field}.path", left)
            left -= len(data)
            media_file = attrs.evolve(media_file, path=None, data=base64.b64encode(data).decode())  # noqa: PLW2901
        media.append(media_file)
    return request.with_media(media)


def _read(path: str, user: int | None, field: str, left: int) -> bytes:
    """The file, of `left` bytes at most. Raises `BadRequest`."""
    if not Path(path).is_absolute():
        raise BadRequest.at(field, "expected an absolute path")
    try:
        handle = _opened(path, user)
    except (OSError, ValueError):
        raise _refused(field) from None
    max_bytes = min(left, MAX_FILE_BYTES)
    try:
        with os.fdopen(handle, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError:
        raise _refused(field) from None
    if not data:
        raise BadRequest.at(field, "is empty")
    if len(data) > max_bytes:
        raise over_limit(field, left)
    return data


def _opened(path: str, user: int | None) -> int:
    """A regular file of this user. Raises `OSError` or `ValueError`.

    On Linux nothing else is opened: opening does something to a device, and a pipe would be waited for.
    """
    if sys.platform == "win32":
        raise posix.unsupported("files by their path")
    if sys.platform != "linux":
        _check_own(Path(path).stat(), user)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_own(os.fstat(handle), user)
        except BaseException:
            os.close(handle)
            raise
        return handle
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _check_own(os.fstat(place), user)
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)


def _check_own(state: os.stat_result, user: int | None) -> None:
    if not stat.S_ISREG(state.st_mode) or user is None or state.st_uid != user:
        raise ValueError("no regular file of this user")


def _refused(field: str) -> BadRequest:
    """One answer for all, so that nobody learns whether another user's file exists."""
    return BadRequest.at(field, "is no file of this client's user that this server can read; send data instead")

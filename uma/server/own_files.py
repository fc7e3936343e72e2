"""Pictures and sounds that a client of the socket names by their path: its own files, read for it."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import attrs

from uma.errors import BadRequest
from uma.media.files import MAX_FILE_BYTES, MAX_REQUEST_BYTES, check_count
from uma.types import Media, Request


def names_files(request: Request) -> bool:
    """Whether a request names any."""
    return any(each.path is not None for _, each in request.placed_media())


def with_own_files(request: Request, user: int | None) -> Request:
    """The request with files instead of paths. Blocks. Raises `BadRequest` for what is no regular file of this user,
    and for too many.
    """
    check_count(request)
    media, left = list[Media](), MAX_REQUEST_BYTES
    for field, each in request.placed_media():
        if each.path is not None:
            data = _read(each.path, user, f"{field}.path", min(left, MAX_FILE_BYTES))
            left -= len(data)
            each = attrs.evolve(each, path=None, data=base64.b64encode(data).decode())  # noqa: PLW2901
        media.append(each)
    return request.with_media(media)


def _read(path: str, user: int | None, field: str, max_bytes: int) -> bytes:
    if not Path(path).is_absolute():
        raise BadRequest(f"{field}: expected an absolute path")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would be waited for
    except (OSError, ValueError):
        raise _refused(field) from None
    try:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode) or user is None or state.st_uid != user:
            raise _refused(field)
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    except OSError:
        raise _refused(field) from None
    finally:
        os.close(handle)
    if not data:
        raise BadRequest(f"{field}: is empty")
    if len(data) > max_bytes:
        raise BadRequest(f"{field}: is over the limit of {max_bytes:,} bytes")
    return data


def _refused(field: str) -> BadRequest:
    """One answer for all: whether another's file is there is not told."""
    return BadRequest(f"{field}: is no file of this client's user that this server can read; send data instead")

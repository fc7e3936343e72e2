"""Checks the owner of the default socket's directory.

Every user can guess the default's name and, in a shared temporary folder, create it first, listen there in the server's
place, and read the clients' prompts. So client and server check the owner before they use it. A directory that the user
names explicitly is not checked.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from uma import posix
from uma.config import default_socket

REMEDY = "remove it, or name another path with --socket or UMA_SOCKET"


def objection(path: Path) -> str | None:
    """Why a socket at `path` must not be trusted, and what to do; None where it can be, or does not exist yet."""
    directory = path.parent
    if directory != Path(default_socket()).parent:
        return None
    if (problem := directory_objection(directory)) is not None:
        return f"{problem}; {REMEDY}"
    inside = _lstat(path)
    if inside is not None and inside.st_uid != posix.user_id():
        return f"{path} belongs to another user (uid {inside.st_uid}); {REMEDY}"
    return None


def directory_objection(directory: Path) -> str | None:
    """Why another user can have made what is in `directory`; None where none can, or it does not exist yet."""
    if (status := _lstat(directory)) is None:
        return None
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is no directory of its own"
    if status.st_uid != posix.user_id():
        return f"{directory} belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o022:
        return f"{directory} can be written by other users, who may have made what is in it"
    return None


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:  # missing or inaccessible: using it then fails with the reason
        return None

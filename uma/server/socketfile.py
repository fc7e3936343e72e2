"""The socket's file: its permissions, its owner, and what happens to a file that is already there.

A server takes a path over only from a dead server, whose socket refuses connections. A live server's socket, and a file
that is no socket, stay as they are: the start fails with a `ConfigError` that names the path.
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from uma import posix
from uma.config import default_socket
from uma.errors import ConfigError
from uma.net.place import objection

MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""The size of `sockaddr_un.sun_path`, less its terminating NUL."""
BACKLOG = 1024
"""Connections the kernel holds for us while we are busy; it cuts this to its own limit."""


class SocketTaken(ConfigError):
    """A server listens on the socket's path already."""


@attrs.frozen
class SocketFile:
    """A listening Unix socket and the identity of its file."""

    path: Path
    sock: socket.socket
    identity: tuple[int, int]
    """Device and inode, so that only our own file is ever removed."""

    def remove(self) -> None:
        """Remove the file, where it is still ours: another server can have taken the path since."""
        try:
            if _identity(self.path) == self.identity:
                self.path.unlink()
        except OSError:
            pass  # gone already, or its directory is: either way no client can find us there

    def close(self) -> None:
        """Stop listening. The file is `remove`'s business."""
        self.sock.close()


def check(path: Path) -> None:
    """Raise `ConfigError` where `listen` would for what is at `path` now. Changes nothing."""
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ConfigError.at(
            "socket", f"{path}: is {size} bytes long, and the system allows {MAX_PATH_BYTES}; choose a shorter path"
        )
    _check_trusted(path)
    try:
        _is_stale(path)
    except OSError as error:
        raise ConfigError.at("socket", f"{path}: cannot be made: {error.strerror or error}") from error


def listen(path: Path, mode: int) -> SocketFile:
    """Listen on `path`, with `mode` in force before the first client can connect.

    Missing directories are made, the last one 0700; the default's is made so if it is not. Raises `ConfigError` naming
    the path and what is wrong with it.
    """
    check(path)
    try:
        _make_directory(path)
        with _alone_in(path.parent):
            if _is_stale(path):
                path.unlink()
            return _bind(path, mode)
    except OSError as error:
        raise ConfigError.at("socket", f"{path}: cannot be made: {error.strerror or error}") from error


def _check_trusted(path: Path) -> None:
    if (problem := objection(path)) is not None:
        raise ConfigError.at("socket", problem)


def _make_directory(path: Path) -> None:
    directory = path.parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_trusted(path)
    if directory == Path(default_socket()).parent:
        directory.chmod(0o700)  # it can have been made by hand


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Keep two servers that start together from both reclaiming one stale socket.

    Another user's directory (`/tmp`) is not locked: any user could hold that lock for ever.
    """
    if sys.platform == "win32":
        raise posix.unsupported("Unix sockets")
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if os.fstat(handle).st_uid == posix.user_id():
            posix.lock(handle, waits=True)
        yield
    finally:
        os.close(handle)


def _is_stale(path: Path) -> bool:
    """Whether a dead server's socket is in the way; False where nothing is. Anything else raises `ConfigError`."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(kind):
        raise ConfigError.at("socket", f"{path}: is a directory; name a file in it")
    if not stat.S_ISSOCK(kind):
        raise ConfigError.at(
            "socket", f"{path}: is there already and is no socket; remove it or choose another --socket"
        )
    if _is_alive(path):
        raise SocketTaken(
            f"socket: {path}: a server listens there already, which every program can use (uma chat); `uma stop "
            f"--socket {shlex.quote(str(path))}` ends it, or choose another --socket"
        )
    return True


def _is_alive(path: Path) -> bool:
    with posix.unix_socket() as probe:
        probe.setblocking(False)
        result = probe.connect_ex(str(path))
    if result in (errno.EACCES, errno.EPERM, errno.EPROTOTYPE):
        raise ConfigError.at("socket", f"{path}: is another user's socket; choose another --socket")
    # EAGAIN is a server whose backlog is full; only a refusal says that no process listens.
    return result != errno.ECONNREFUSED


def _bind(path: Path, mode: int) -> SocketFile:
    sock = posix.unix_socket()
    try:
        sock.setblocking(False)
        sock.bind(str(path))
        # Until `listen` every connection is refused, so no client connects before the mode is set.
        path.chmod(mode)
        sock.listen(BACKLOG)
        return SocketFile(path, sock, _identity(path))
    except OSError:
        sock.close()
        raise


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino

"""Sockets on which this user's servers listen, wherever they lie: as Linux tells of its processes.

No socket is connected to for that, so no other program's is disturbed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from uma import posix

PROC = Path("/proc")
LISTENING = "00010000"
"""A listener's flags in `/proc/net/unix`."""
SERVING = frozenset({"run", "engine-zmq"})
"""The commands that listen on a socket."""


def listening_sockets() -> Iterator[Path]:
    """The sockets of this user's `uma run`s, in this network namespace. None where the system has no `/proc`."""
    try:
        lines = (PROC / "net/unix").read_text(encoding="utf-8", errors="surrogateescape").splitlines()[1:]
    except OSError:
        return
    fields = (line.split(maxsplit=7) for line in lines)
    paths = {field[6]: field[7] for field in fields if len(field) == 8 and field[3] == LISTENING and field[7][0] == "/"}
    for process in _own_servers():
        with suppress(OSError):  # it has ended meanwhile
            inodes = (re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink())) for fd in (process / "fd").iterdir())
            yield from (Path(paths[inode[1]]) for inode in inodes if inode is not None and inode[1] in paths)


def _own_servers() -> Iterator[Path]:
    for process in PROC.glob("[0-9]*"):
        with suppress(OSError):
            if is_server(process.name) and process.stat().st_uid == posix.user_id():
                yield process


def is_server(pid: int | str) -> bool:
    """Whether a process was started as a server of UMA; True where the system does not tell."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return not (PROC / "self").exists()
    return any(Path(word).name == "uma" for word in words[:4]) and bool(SERVING & set(words))

"""Process and user at the other end of a Unix socket. The kernel tells them, so a peer cannot forge them."""

from __future__ import annotations

import re
import socket
import struct
import sys
from pathlib import Path

SOL_LOCAL, LOCAL_PEERCRED, LOCAL_PEERPID = 0, 1, 2
"""Constants of macOS's `<sys/un.h>`, which Python does not define."""
CREDENTIALS = "3i"
"""Linux's `struct ucred`: process, user, group."""
INTERPRETER = re.compile(r"(python|node|ruby|perl|php|bun)[\d.]*")
XUCRED, XUCRED_BYTES = "II", 76
"""The beginning of macOS's `struct xucred`: version, user."""


def pid_of_peer(sock: socket.socket) -> int | None:
    """Process id of a connected socket's peer; for a server's socket, of the process that listens.

    None where the system does not tell, or where the process is in another container and has no id in this one.
    """
    pid = 0
    try:
        if sys.platform == "linux":
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(CREDENTIALS))
            pid, _, _ = struct.unpack(CREDENTIALS, credentials)
        elif sys.platform == "darwin":
            (pid,) = struct.unpack("i", sock.getsockopt(SOL_LOCAL, LOCAL_PEERPID, struct.calcsize("i")))
    except OSError:
        return None
    return int(pid) or None


def program_of(pid: int | None) -> str:
    """Name of a process's program, as the system lists it; empty where the system does not tell."""
    try:
        return "" if pid is None else Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def script_of(pid: int) -> str:
    """Name of the script or module that a process runs; empty where it is not an interpreter, or unknown."""
    try:
        interpreter, *words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return ""
    if not INTERPRETER.fullmatch(Path(interpreter).name) or not words:
        return ""
    script = words[1] if words[0] == "-m" and len(words) > 1 else words[0]
    return "" if script.startswith("-") else Path(script).name


def uid_of_peer(sock: socket.socket) -> int | None:
    """The user id that a connected socket's peer had when it connected; None where the system does not tell."""
    uid: int | None = None
    try:
        if sys.platform == "linux":
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(CREDENTIALS))
            _, uid, _ = struct.unpack(CREDENTIALS, credentials)
        elif sys.platform == "darwin":
            _, uid = struct.unpack_from(XUCRED, sock.getsockopt(SOL_LOCAL, LOCAL_PEERCRED, XUCRED_BYTES))
    except OSError:
        return None
    return uid

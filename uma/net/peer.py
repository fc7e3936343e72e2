"""Which process is at the other end of a Unix socket, as the kernel knows it: not what the peer says of itself."""

from __future__ import annotations

import socket
import struct
import sys

SOL_LOCAL, LOCAL_PEERPID = 0, 2
"""macOS's `<sys/un.h>`; Python has no names for them."""


def pid_of_peer(sock: socket.socket) -> int | None:
    """The process id of a connected socket's peer: of a server, the process that listens.

    None where the system does not tell, and where that process is in another container and has no id in this one.
    """
    try:
        if sys.platform == "linux":
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, _, _ = struct.unpack("3i", credentials)
        elif sys.platform == "darwin":
            (pid,) = struct.unpack("i", sock.getsockopt(SOL_LOCAL, LOCAL_PEERPID, struct.calcsize("i")))
        else:
            return None
    except OSError:
        return None
    return int(pid) or None

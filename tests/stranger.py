"""What another user of this machine is told by a server: only root can ask for that."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import run_to_end

_STRANGER = """
import os, socket, struct, sys
os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as peer:
    peer.connect(sys.argv[1])
    asked = sys.argv[2].encode()
    peer.sendall(struct.pack("<I", len(asked)) + asked)
    stream = peer.makefile("rb")
    print(stream.read(*struct.unpack("<I", stream.read(4))).decode())
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def told_to_a_stranger(socket: Path, message: dict[str, Any]) -> dict[str, Any]:
    """The first answer to a message of a user that the server does not run as."""
    answer: dict[str, Any] = json.loads(
        run_to_end(sys.executable, "-c", _STRANGER, str(socket), json.dumps(message)).stdout
    )
    return answer

"""A trace of a server's engine (`engine.recorder`), and a file for one that a signal has asked for."""

from __future__ import annotations

import os
import tempfile

from uma.engine import Engine
from uma.engine.recorder import Recorder
from uma.errors import BadRequest
from uma.server.connection import Served


async def traced(served: Served, seconds: float) -> Recorder:
    """What the threads of its engine do within so many seconds. Raises `BadRequest` where a trace is on, and where
    several models are served.
    """
    if not isinstance(served, Engine):
        raise BadRequest(
            "type: this server has several models, each in a process of its own; there is no trace of them"
        )
    return await served.record(seconds)


def written(recorder: Recorder) -> str:
    """The name of a new file in the temporary folder, for this user alone, that has the trace. Raises `OSError`."""
    fd, path = tempfile.mkstemp(".json", "uma-trace-")
    with os.fdopen(fd, "wb") as file:
        file.writelines(recorder.written())
    return path

"""A trace of a server's engine (`engine.recorder`), and a file for one that a signal has asked for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable

from uma.engine import Engine
from uma.errors import BadRequest
from uma.server.connection import ServedEngine
from uma.types import Models


async def traced(served: ServedEngine, seconds: float) -> Iterable[bytes]:
    """What the threads of its engine do within so many seconds, or those of all its models: JSON, in pieces that are
    written as they are taken, in any thread. Raises `BadRequest` where a trace is on.
    """
    if isinstance(served, Models):
        return [(await served.trace(seconds)).encode()]
    if not isinstance(served, Engine):
        raise BadRequest.at("type", "there is no trace of this server")
    return (await served.record(seconds)).written()


def written(trace: Iterable[bytes]) -> str:
    """The name of a new file in the temporary folder, for this user alone, that has the trace. Raises `OSError`."""
    fd, path = tempfile.mkstemp(".json", "uma-trace-")
    with os.fdopen(fd, "wb") as file:
        file.writelines(trace)
    return path

"""A trace of a server's engine (`engine.recorder`)."""

from __future__ import annotations

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

"""What answers a row: one request's body in, one answer's status and body out."""

from __future__ import annotations

from typing import Protocol

import attrs


@attrs.frozen
class Answer:
    """A whole answer over HTTP."""

    status: int
    body: bytes
    """JSON."""
    request_id: str = ""
    retry_after_ms: int | None = None
    """Where the same works later: after about how long."""


class Ask(Protocol):
    """Answers requests; any number at once."""

    async def __call__(self, path: str, body: bytes, id: str) -> Answer:
        """The answer to a POST of `body` to `path`. `id` is that of no other request that runs."""

"""What answers a row: one request's body in, one answer's status and body out, and meanwhile how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs


@attrs.frozen
class RowAnswer:
    """A whole answer over HTTP."""

    status: int
    body: bytes
    """JSON."""
    request_id: str = ""
    retry_after_ms: int | None = None
    """Where the same works later: after about how long."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that had no effect."""
    model: str = ""
    """The model that answered, where another one was asked for."""


@attrs.frozen
class Progress:
    """How far a request is that runs, or waits to."""

    prompt_tokens: int = 0
    """Tokens of its prompt that have been read."""
    completion_tokens: int = 0
    waits: bool = False
    """Nothing of it is computed now, as others' requests are ahead."""


class RowAsk(Protocol):
    """Answers requests; any number at once."""

    async def __call__(self, path: str, body: bytes, id: str) -> RowAnswer:
        """The answer to a POST of `body` to `path`. `id` is that of no other request that runs."""

    async def progress(self) -> Mapping[str, Progress]:
        """How far requests are that run just now, by their ids; those of others can be among them. Of several prompts
        of one body each is by itself, with a number behind the id. Empty where it is not told.
        """

    def loading(self) -> str:
        """Which of several models is being loaded, and how far: `40 % of beta`; empty: none, as far as it is told."""

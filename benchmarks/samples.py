"""What one request was and what became of it, in the client's own clock: the raw material of every latency figure."""

from __future__ import annotations

import time
from typing import Any

import attrs
import trio

QUESTION = "What is this?"
"""What is asked about a picture."""


@attrs.frozen
class Ask:
    """One request, as every target understands it: greedy, never ended by the model, prompt as token ids."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    """-1 background, 0 normal, 1 interactive; targets without lanes ignore it."""
    target_ttft_ms: float | None = None
    target_tbt_ms: float | None = None
    picture: bytes | None = None
    """A picture's file; only UMA and llama-server are asked about one, in a chat, and without a prompt."""
    json_schema: dict[str, Any] | None = None
    """What the answer must fit; only UMA and llama-server are asked for it."""


@attrs.define(eq=False)
class Sample:
    """The course of one request. Times are `time.perf_counter()` seconds when the client had the token in hand."""

    sent_s: float = attrs.field(factory=time.perf_counter)
    token_s: list[float] = attrs.field(factory=list)
    token_ids: list[int] = attrs.field(factory=list)
    cached_tokens: int = 0
    """Prompt tokens the server did not have to compute, as it tells it."""
    error: str | None = None
    """The error's code, where the request was refused or failed."""
    retry_after_ms: int | None = None
    ended_s: float | None = None
    _watchers: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def add(self, token_id: int) -> None:
        """A token arrived now."""
        self.token_s.append(time.perf_counter())
        self.token_ids.append(token_id)
        if self._watchers:
            self._watchers.unpark_all()

    def fail(self, code: str, retry_after_ms: int | None = None) -> None:
        """The request was refused or broke off."""
        self.error, self.retry_after_ms = code, retry_after_ms

    def end(self) -> None:
        """Nothing more will come."""
        self.ended_s = time.perf_counter()
        self._watchers.unpark_all()

    async def reached(self, tokens: int) -> None:
        """Wait until this many tokens arrived, or the request ended."""
        while len(self.token_s) < tokens and self.ended_s is None:
            await self._watchers.park()

    @property
    def ttft_ms(self) -> float:
        """From sending to the first token."""
        return (self.token_s[0] - self.sent_s) * 1000

    @property
    def total_ms(self) -> float:
        """From sending to the last token."""
        return (self.token_s[-1] - self.sent_s) * 1000

    @property
    def gaps_ms(self) -> list[float]:
        """Times between tokens that follow each other."""
        return [(later - earlier) * 1000 for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]

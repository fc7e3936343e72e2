"""What llama-server tells in a stream of how far and how fast it is, where a body asks: the progress of the prompt
(`return_progress`), and timings in each chunk (`timings_per_token`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from uma.types import RunningRequest

POLL_SEC = 0.1
"""Between two looks at how far a prompt has been read."""
AGAIN_SEC = 0.4
"""Time after which the same progress is told again, with the next look: that is within half a second. The count moves
with the layers of a batch that are done (`RunningRequest.computed_tokens`): it is the same while the prompt waits."""


@attrs.frozen(kw_only=True, slots=False)  # beside another base with slots
class TelemetryFields:
    """The fields that ask for it. They change nothing of an answer that is no stream."""

    return_progress: bool | None = None
    timings_per_token: bool | None = None


@attrs.frozen
class PromptState:
    """How far a prompt is. All counts are tokens."""

    total: int
    cached: int
    """Prompt tokens that did not have to be computed."""
    processed: int
    """Prompt tokens that are computed, cached ones included (`RunningRequest.computed_tokens`)."""

    @classmethod
    def of(cls, request: RunningRequest) -> PromptState:
        """The prompt of a request that runs."""
        return cls(request.prompt_tokens, request.cached_tokens, request.computed_tokens)


@attrs.define
class Telemetry:
    """Counts the tokens of a stream's requests. Each is known by its place among the job's. Made in any thread: a
    long body is read in one of its own.
    """

    tells_progress: bool
    times_tokens: bool
    _now: Callable[[], float] = time.monotonic
    """Seconds since an arbitrary moment."""
    _began_at: float = attrs.field(default=attrs.Factory(lambda self: self._now(), takes_self=True), init=False)
    _prompts: dict[int, PromptState] = attrs.field(factory=dict, init=False)
    _sent_at: dict[int, float] = attrs.field(factory=dict, init=False)
    _read_at: dict[int, float] = attrs.field(factory=dict, init=False)
    """When the first token came."""
    _tokens: dict[int, int] = attrs.field(factory=dict, init=False)

    @classmethod
    def of(cls, fields: TelemetryFields, *, stream: bool) -> Telemetry | None:
        """What `fields` ask for; None where that is nothing, or the answer is no stream."""
        progress, timings = bool(fields.return_progress), bool(fields.timings_per_token)
        return cls(progress, timings) if stream and (progress or timings) else None

    def looked(self, index: int, now: PromptState) -> Iterator[dict[str, Any]]:
        """Members of the chunks that tell of `now`: none where that was told less than `AGAIN_SEC` ago, and the first
        begins with what is cached.
        """
        before = self._prompts.get(index)
        if before is None:
            before = self._prompts[index] = attrs.evolve(now, processed=now.cached)
            yield from self._progress(index, before, 0.0)
        if now.processed > before.processed:
            self._prompts[index] = now
        elif self._now() - self._sent_at[index] < AGAIN_SEC:
            return
        yield from self._progress(index, self._prompts[index], 1000 * (self._now() - self._began_at))

    def _progress(self, index: int, state: PromptState, ms: float) -> Iterator[dict[str, Any]]:
        self._sent_at[index] = self._now()
        if self.tells_progress:
            progress = {"total": state.total, "cache": state.cached, "processed": state.processed, "time_ms": ms}
            yield {"prompt_progress": progress, **self._timed(index, ms)}

    def token(self, index: int) -> dict[str, Any]:
        """Members of the chunk with the next token."""
        self._read_at.setdefault(index, self._now())
        self._tokens[index] = self._tokens.get(index, 0) + 1
        return self._timed(index, 1000 * (self._read_at[index] - self._began_at))

    def _timed(self, index: int, prompt_ms: float) -> dict[str, Any]:
        if not self.times_tokens:
            return {}
        state, n = self._prompts.get(index, PromptState(0, 0, 0)), self._tokens.get(index, 0)
        computed = state.processed - state.cached
        predicted_ms = 1000 * (self._now() - self._read_at[index]) if n else 0.0
        return {
            "timings": {
                "cache_n": state.cached,
                "prompt_n": computed,
                "prompt_ms": prompt_ms,
                "prompt_per_token_ms": _over(prompt_ms, computed),
                "prompt_per_second": _over(1000.0 * computed, prompt_ms),
                "predicted_n": n,
                "predicted_ms": predicted_ms,
                "predicted_per_token_ms": _over(predicted_ms, n - 1),
                "predicted_per_second": _over(1000.0 * (n - 1), predicted_ms),
            }
        }


def _over(amount: float, by: float) -> float:
    """0 where there is nothing to divide yet."""
    return amount / by if by > 0 and amount > 0 else 0.0

"""One request on the decode thread: its tokens, how far they are computed, and what its reader has been given."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import attrs

from uma.engine.delivery.detokenize import TextStream
from uma.engine.kv.pool import Holding
from uma.engine.kv.snapshots import Snapshot
from uma.engine.policy.state import Row
from uma.types import FinishReason, Request, RequestMetrics, Usage

if TYPE_CHECKING:
    from uma.llama.sampler import Sampler

PENALTY_WINDOW = 64
"""Prompt tokens the penalties look back over: llama.cpp's default `penalty_last_n`."""


@attrs.define(slots=True, eq=False)
class Sequence:
    """A request from submission to its last event. Made on the Trio thread, then the decode thread's alone."""

    request: Request
    stream: Any
    """Where events go: opaque here, the Trio side's."""
    tokens: array[int]
    """Prompt, then what was generated."""
    prompt_tokens: int
    max_tokens: int
    seed: int
    row: Row
    credits: int
    """Events the reader still has room for; at 0 the sequence pauses."""
    is_probe: bool = False
    warnings: tuple[str, ...] = ()

    text: TextStream = attrs.field(init=False)
    holding: Holding | None = None
    sampler: Sampler | None = None
    kept: Snapshot | None = None
    """While it is preempted: what it had computed, pinned in the store."""
    paused_ms: float = 0.0
    """When its reader fell behind."""
    computed: int = 0
    """Tokens whose KV is held."""
    cached_tokens: int = 0
    generated: int = 0
    """Tokens the reader was or will be given."""
    started_ms: float = 0.0
    first_token_ms: float = 0.0
    largest_batch: int = 0
    iterations: int = 0
    pieces: list[str] = attrs.field(factory=list)
    """Output text, collected where the request is not streamed."""

    def __attrs_post_init__(self) -> None:
        self.text = TextStream(self.request.sampling.stop)

    @property
    def missing(self) -> int:
        """Tokens known but not yet computed. A decoding sequence has exactly one: the last it sampled."""
        return len(self.tokens) - self.computed

    @property
    def suppresses_end(self) -> bool:
        """Whether the end of text must not be sampled now."""
        sampling = self.request.sampling
        return sampling.ignore_eos or self.generated < sampling.min_tokens

    def update_row(self) -> None:
        """Bring what the policy sees up to date after the counts changed."""
        self.row.remaining = 0 if self.generated and self.missing == 1 else self.missing
        self.row.prompt_tokens = len(self.tokens)

    def was_in_batch(self, sequences: int) -> None:
        """Count a batch of so many sequences that it was in."""
        self.iterations += 1
        self.largest_batch = max(self.largest_batch, sequences)

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(self.prompt_tokens, self.cached_tokens, self.generated)

    def metrics(self, reason: FinishReason, now_ms: float) -> RequestMetrics:
        """How it was served, at its end."""
        arrived, started, first = self.row.arrived_ms, self.started_ms or now_ms, self.first_token_ms
        decode_ms = self.row.last_token_ms - first if first else 0.0
        return RequestMetrics(
            queue_ms=round(started - arrived, 3),
            prefill_ms=round((first or now_ms) - started, 3),
            decode_ms=round(decode_ms, 3),
            ttft_ms=round(first - arrived, 3) if first else 0.0,
            batch_size=self.largest_batch,
            tokens_per_second=round((self.generated - 1) * 1000 / decode_ms, 2) if decode_ms > 0 else 0.0,
            decode_iterations=self.iterations,
        )

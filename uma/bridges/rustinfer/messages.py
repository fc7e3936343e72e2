"""RustInfer's messages, with fields in the order of its Rust structs, which MessagePack's compact form relies on.

The forms are serde's: an enum's variant with data is `{"Variant": data}`, one without is the string `"Variant"`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import attrs

from uma.constraints import Length, Range, Text, hints_of
from uma.contracts.load import CacheStats, EngineStats

METRICS_QUERY = "MetricsQuery"

Size = Annotated[int, Range(0, 2**64 - 1)]
Token = Annotated[int, Range(-(2**31), 2**31 - 1)]


@attrs.frozen
class InferenceRequest:
    """A generation request. `prompt` has its chat template applied."""

    request_id: Annotated[str, Length(1, 128)]
    prompt: Annotated[str, Text()]
    max_tokens: Annotated[int, Range(1)]
    temperature: Annotated[float, Range(0, 2)]
    """0 is greedy."""
    top_p: Annotated[float, Range(0, 1)]
    top_k: Annotated[int, Range(-1, 2**31 - 1)]
    """0 or -1: all tokens."""
    stop_sequences: Annotated[tuple[Annotated[str, Length(1)], ...], Length(0, 16, "strings")]
    stream: bool
    priority: Annotated[int, Range(-(2**31), 2**31 - 1)]
    """Priority: 0 normal, over 0 high, under 0 low."""


@attrs.frozen
class InferenceMetrics:
    """Timings of one request."""

    prefill_ms: Size
    decode_ms: Size
    queue_ms: Size
    batch_size: Size
    tokens_per_second: float
    decode_iterations: Size


NO_METRICS = InferenceMetrics(0, 0, 0, 0, 0.0, 0)


@attrs.frozen
class InferenceResponse:
    """Answer to a request with `stream` false, and to a message that cannot be parsed."""

    request_id: str
    status: Literal["Success", "Error"]
    text: str | None
    tokens: tuple[Token, ...] | None
    num_tokens: Size
    error: str | None
    metrics: InferenceMetrics


@attrs.frozen
class StreamChunk:
    """Part of a streamed answer: a token, the end, or an error, whose text is in `finish_reason`."""

    request_id: str
    chunk_type: Literal["Token", "Done", "Error"]
    token: str | None
    token_id: Token | None
    finish_reason: str | None
    metrics: InferenceMetrics | None


@attrs.frozen
class RustInferMetrics:
    """Answer to a metrics query."""

    engine: EngineStats
    cache: CacheStats


Answer = InferenceResponse | StreamChunk | RustInferMetrics

ANSWER_VARIANTS: dict[type, str] = {InferenceResponse: "Inference", RustInferMetrics: "Metrics"}
"""Variants of `EngineResponse`. A `StreamChunk` is sent without one."""


def by_name(values: list[Any], cls: type) -> dict[str, Any]:
    """Fields of a struct that came as a list. Values after the known fields are a newer peer's, and ignored."""
    return dict(zip(hints_of(cls), values, strict=False))

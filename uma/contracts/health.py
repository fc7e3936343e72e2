"""Health checks that every engine understands, and the rule for what counts as healthy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import attrs

from uma.constraints import Length, Range
from uma.contracts.parse import parse
from uma.contracts.request import Tokens
from uma.types import Health, Request, SamplingParams

DEFAULT_TIMEOUT_MS = 5000


@attrs.frozen
class HealthCheckPayload:
    """A request that only a working engine can answer. Without `token_ids` the engine chooses them."""

    type: Literal["generation", "embedding"]
    timeout_ms: Annotated[int, Range(100)] = DEFAULT_TIMEOUT_MS
    token_ids: Annotated[Tokens, Length(1, None, "tokens")] | None = None
    max_tokens: Annotated[int, Range(1)] = 1
    temperature: Annotated[float, Range(0, 2)] = 0.0


@attrs.frozen
class HealthCheckResult:
    """Outcome of a health check."""

    success: bool
    latency_ms: Annotated[float, Range(0)]
    tokens_generated: Annotated[int, Range(0)]
    error: str | None = None


def parse_health_check(value: Any) -> HealthCheckPayload:
    """Parse a peer's health check. Raises `BadRequest` with a line for each wrong field."""
    return parse(value, HealthCheckPayload)


def is_healthy(result: HealthCheckResult, timeout_ms: int = DEFAULT_TIMEOUT_MS) -> bool:
    """Whether a check succeeded, generated a token, and took less than the timeout."""
    return result.success and result.tokens_generated >= 1 and result.latency_ms < timeout_ms


def result_of(health: Health) -> HealthCheckResult:
    """The contract's form of an engine's own health probe."""
    is_ok = health.status == "ok" and health.tokens_generated > 0
    why = "nothing was generated: no model is loaded" if health.status == "ok" else f"the engine is {health.status}"
    error = None if is_ok else why
    return HealthCheckResult(is_ok, health.latency_ms, health.tokens_generated, error)


def request_of(payload: HealthCheckPayload, id: str) -> Request:
    """Request for a generation check: in the highest lane, and from any token where the check names none."""
    return Request(
        id=id,
        token_ids=payload.token_ids or (0,),
        sampling=SamplingParams(max_tokens=payload.max_tokens, temperature=payload.temperature, ignore_eos=True),
        priority=1,
    )

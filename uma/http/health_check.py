"""The contracts' health check: `POST /health/check` has the engine compute, and says whether it did so in time."""

from __future__ import annotations

import attrs
import trio

from uma.contracts.health import (
    HealthCheckPayload,
    HealthCheckResult,
    is_healthy,
    parse_health_check,
    request_of,
    result_of,
)
from uma.errors import BadRequest, PromptTooLarge, UmaError
from uma.http import abilities
from uma.http.exchange import Exchange
from uma.http.fields import allowed_tokens
from uma.http.gateway import Gateway
from uma.http.problem import Forbidden, RateLimited
from uma.types import EmbedRequest


async def check_health(gateway: Gateway, http: Exchange) -> None:
    """`POST /health/check`: status 200 where the engine is healthy, 503 where it is not.

    Without a body the check is the one that the model can answer.
    """
    is_empty = http.header(b"content-length") in (None, "0") and http.header(b"transfer-encoding") is None
    able = gateway.info.capabilities
    default = HealthCheckPayload("generation" if able.generate else "embedding")
    payload = default if is_empty else await http.built(parse_health_check)
    began, result = trio.current_time(), None
    with trio.move_on_after(payload.timeout_ms / 1000):
        result = await _result(gateway, http, payload)
    latency_ms = round(1000 * (trio.current_time() - began), 3)
    if result is None:  # how many tokens there were by then is not known
        error = f"timeout: no answer within {payload.timeout_ms:,} ms"
        await http.answer_json({"success": False, "latency_ms": latency_ms, "error": error}, status=503)
        return
    result = attrs.evolve(result, latency_ms=latency_ms)
    await http.answer_json(attrs.asdict(result), status=200 if is_healthy(result, payload.timeout_ms) else 503)


async def _result(gateway: Gateway, http: Exchange, payload: HealthCheckPayload) -> HealthCheckResult:
    """How it went, but for the time it took. Raises what concerns the payload or the key."""
    able = gateway.info.capabilities
    if payload.type == "generation":
        abilities.generation(able)
        allowed_tokens(gateway, payload.max_tokens, "max_tokens")
    else:
        abilities.embeddings(able)
    try:
        if payload == HealthCheckPayload("generation", payload.timeout_ms):
            # The engine's own probe, which goes before all requests, and is one for all that ask at once.
            return result_of(await gateway.source.health())
        if payload.type == "generation":
            finished = await gateway.finish(http, request_of(payload, http.id))
            return HealthCheckResult(True, 0, finished.usage.completion_tokens)
        request = EmbedRequest(http.id, token_ids=(payload.token_ids or (0,),), priority=1)
        await gateway.compute(http, request, gateway.source.embed)
        # An embedding counts for the token that success asks for.
        return HealthCheckResult(True, 0, 1)
    except (BadRequest, PromptTooLarge, Forbidden, RateLimited):
        raise  # of the payload or of the key: it says nothing of the engine
    except UmaError as error:
        return HealthCheckResult(False, 0, 0, f"{error.code}: {error.message}")

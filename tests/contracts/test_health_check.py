"""The health check: one payload for every engine, and what counts as healthy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine_world import answer, config_for
from http_server import HttpServer

from uma.contracts.health import (
    HealthCheckPayload,
    HealthCheckResult,
    is_healthy,
    parse_health_check,
    request_of,
    result_of,
)
from uma.contracts.parse import parse
from uma.contracts.schema import contract_schemas
from uma.engine import open_engine
from uma.errors import BadRequest
from uma.types import Health

SCHEMA = jsonschema.Draft202012Validator(contract_schemas()["HealthCheckPayload"])


def test_the_least_payload_has_the_text_s_defaults() -> None:
    assert SCHEMA.is_valid({"type": "generation"})
    assert parse_health_check({"type": "generation"}) == HealthCheckPayload("generation", 5000, None, 1, 0.0)


def test_every_wrong_field_is_named() -> None:
    wrong = {"type": "prayer", "timeout_ms": 99, "token_ids": [], "max_tokens": 0, "temperature": 3, "hurry": True}
    with pytest.raises(BadRequest) as refused:
        parse_health_check(wrong)
    assert {line.partition(":")[0] for line in refused.value.message.splitlines()} == wrong.keys()
    assert not SCHEMA.is_valid(wrong)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (HealthCheckResult(True, 10, 1), True),
        (HealthCheckResult(True, 5000, 1), False),
        (HealthCheckResult(True, 10, 0), False),
        (HealthCheckResult(False, 10, 1, "no"), False),
    ],
)
def test_healthy_is_success_with_a_token_within_the_time(result: HealthCheckResult, expected: bool) -> None:
    assert is_healthy(result) is expected


def test_an_engine_that_is_stalled_or_draining_is_not_healthy() -> None:
    assert is_healthy(result_of(Health("ok", 3.0, 1)))
    assert not is_healthy(result_of(Health("stalled", 3.0, 0)))
    assert result_of(Health("ok", 0.0, 0)).error == "nothing was generated: no model is loaded"
    assert result_of(Health("draining", 0.0, 0)).error == "the engine is draining"


async def test_the_built_in_engine_passes_both_forms_of_the_check() -> None:
    async with open_engine(config_for(Path("builtin"))) as engine:
        assert is_healthy(result_of(await engine.health()))
        done = await answer(engine, request_of(HealthCheckPayload("generation", max_tokens=2), "h"))
    assert done.finished.usage.completion_tokens == 2


# Over HTTP


@pytest.mark.parametrize(
    "payload",
    [
        {"type": "generation"},
        {"type": "generation", "token_ids": [1, 300], "max_tokens": 3, "temperature": 1.0},
        {"type": "embedding"},
        {"type": "embedding", "token_ids": [1, 300]},
    ],
)
def test_a_working_server_passes_each_kind_of_check(http_server: HttpServer, payload: dict[str, Any]) -> None:
    got = http_server.ask("POST", "/health/check", {"timeout_ms": 60_000, **payload})
    result = parse(got.json, HealthCheckResult)
    assert (got.status, result.error) == (200, None)
    assert is_healthy(result, 60_000)
    assert result.tokens_generated == payload.get("max_tokens", 1)


def test_a_check_that_takes_longer_than_its_timeout_fails(http_server: HttpServer) -> None:
    got = http_server.ask("POST", "/health/check", {"type": "generation", "timeout_ms": 100, "max_tokens": 2_000})
    assert (got.status, got.json["success"], got.json["error"]) == (503, False, "timeout: no answer within 100 ms")


def test_a_check_that_is_wrong_itself_is_the_client_s_mistake(http_server: HttpServer) -> None:
    with http_server.connect() as raw:
        got = raw.ask("POST", "/health/check", {"type": "prayer", "hurry": True})
        beyond = raw.ask("POST", "/health/check", {"type": "generation", "token_ids": [10**6]})
    assert (got.status, beyond.status) == (400, 400)
    assert {"type", "hurry"} == {line.partition(":")[0] for line in got.json["error"]["message"].splitlines()}

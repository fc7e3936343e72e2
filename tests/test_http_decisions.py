"""Decisions over HTTP are the engine's own, in OpenAI's form and in TypeSafe's; wrong fields are named by path."""

from __future__ import annotations

from typing import Any

import pytest
from http_server import HttpServer

from uma.client.probe import SocketProbe
from uma.contracts.proofs import Question

STATE = "My card was charged twice for one order."
TEAMS = ["billing", "shipping", "true"]
OPENAI: dict[str, Any] = {
    "input": STATE,
    "orders": "one",
    "questions": [
        {"type": "predicate", "instructions": "Does the customer ask for a refund?"},
        {
            "type": "choice",
            "name": "team",
            "instructions": "Which team?",
            "choices": [{"value": "billing"}, {"value": "shipping"}, {"value": True}],
        },
        {"type": "score", "instructions": "How upset?", "levels": [{"label": "calm"}, {"label": "furious"}]},
    ],
}
TYPESAFE: dict[str, Any] = {
    "state": STATE,
    "orders": "one",
    "questions": {
        "refund": {"type": "noul", "instructions": "Does the customer ask for a refund?"},
        "team": {"type": "choice", "instructions": "Which team?", "criteria": dict.fromkeys(TEAMS)},
        "upset": {"type": "score", "instructions": "How upset?", "criteria": ["calm", "furious"]},
    },
}


def test_both_dialects_and_the_socket_tell_the_same(http_server: HttpServer) -> None:
    questions = [
        {"kind": "predicate", "instructions": "Does the customer ask for a refund?"},
        {"kind": "choice", "instructions": "Which team?", "options": [{"label": team} for team in TEAMS]},
        {"kind": "score", "instructions": "How upset?", "options": [{"label": "calm"}, {"label": "furious"}]},
    ]
    fields: dict[str, Any] = {"type": "decide", "messages": [{"role": "user", "content": STATE}], "orders": "one"}
    told = SocketProbe(http_server.process.socket).ask(Question(fields | {"questions": questions})).last["answers"]
    first = http_server.ask("POST", "/v1/decisions", OPENAI).json
    second = http_server.ask("POST", "/v1/systemone", TYPESAFE).json["answers"]
    refund, team, upset = first["answers"]
    assert refund["probability"] == pytest.approx(told[0]["probabilities"][0], abs=1e-3)
    assert (refund["name"], team["name"]) == (None, "team")
    assert second["refund"]["noul"] == pytest.approx(refund["probability"], abs=1e-3)
    shares = [each["probability"] for each in team["probabilities"]]
    assert shares == pytest.approx(told[1]["probabilities"], abs=1e-3)
    assert list(second["team"]["probabilities"].values()) == pytest.approx(shares, abs=1e-3)
    assert [each["value"] for each in team["probabilities"]] == ["billing", "shipping", True]
    assert 0 <= upset["score"] <= 1
    assert second["upset"]["legend"] == {"0": "calm", "1": "furious"}
    assert second["upset"]["score"] == pytest.approx(upset["score"], abs=1e-3)
    assert all(0 <= each["confidence"] <= 1 for each in (team, upset))
    usage = first["usage"]
    assert usage["output_tokens"] == 0
    assert usage["total_tokens"] == usage["input_tokens"] > usage["input_tokens_details"]["cached_tokens"]


def with_question(**fields: Any) -> dict[str, Any]:
    question = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]} | fields
    return OPENAI | {"questions": [OPENAI["questions"][0], question]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/decisions", {"questions": OPENAI["questions"]}, "input"),
        ("/v1/decisions", OPENAI | {"questions": []}, "questions"),
        ("/v1/decisions", with_question(type="guess"), "questions[1].type"),
        ("/v1/decisions", with_question(name=None), "questions[1].name"),
        ("/v1/decisions", with_question(choices=[{"value": "a"}, {"value": 1}]), "questions[1].choices[1].value"),
        ("/v1/decisions", with_question(choices=[{"value": "a"}, {"value": "a"}]), "questions[1].choices[1]"),
        ("/v1/decisions", with_question(choices=[{"value": "true"}, {"value": True}]), "questions[1].choices[1]"),
        (
            "/v1/decisions",
            with_question(type="score", levels=[{"label": "a"}, {"label": "a"}]),
            "questions[1].levels[1]",
        ),
        ("/v1/decisions", with_question(choices=[{"value": "a"}]), "questions[1].choices"),
        (
            "/v1/decisions",
            with_question(choices=[{"value": "a"}, {"value": "b", "description": "x" * 16_385}]),
            "questions[1].choices[1].description",
        ),
        (
            "/v1/decisions",
            with_question(type="score", levels=[{"label": ""}, {"label": "b"}]),
            "questions[1].levels[0].label",
        ),
        ("/v1/decisions", OPENAI | {"temperature": 0}, "temperature"),
        (
            "/v1/decisions",
            OPENAI | {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input[0].call_id",
        ),
        ("/v1/systemone", TYPESAFE | {"questions": {}}, "questions"),
        ("/v1/systemone", TYPESAFE | {"questions": {"a": {"type": "noul"}}}, "questions.a.criteria"),
        ("/v1/systemone", TYPESAFE | {"questions": {"a": {"type": "noul", "criteria": "x"}}}, "questions.a.criteria"),
        ("/v1/systemone", TYPESAFE | {"questions": {"a": {"type": []}}}, "questions.a.type"),
        ("/v1/systemone", TYPESAFE | {"questions": {"a": {"type": "choice", "criteria": []}}}, "questions.a.criteria"),
        (
            "/v1/systemone",
            TYPESAFE | {"questions": {"a": {"type": "score", "criteria": ["x"]}}},
            "questions.a.criteria",
        ),
        (
            "/v1/systemone",
            TYPESAFE | {"questions": {"a": {"type": "score", "criteria": ["x", "y", "x"]}}},
            "questions.a.criteria[2]",
        ),
        (
            "/v1/systemone",
            TYPESAFE | {"questions": {"a": {"type": "choice", "criteria": {"x": None, "": None}}}},
            "questions.a.criteria.",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(
    http_server: HttpServer, path: str, body: dict[str, Any], field: str
) -> None:
    answer = http_server.ask("POST", path, body)
    assert answer.status == 400, answer.body
    assert answer.json["error"]["param"] == field
    assert field in answer.json["error"]["message"]


def test_what_no_language_model_does_is_501(http_server: HttpServer) -> None:
    answer = http_server.ask(
        "POST", "/v1/systemone", TYPESAFE | {"questions": {"a": {"type": "box", "instructions": "dog"}}}
    )
    assert (answer.status, answer.json["error"]["param"]) == (501, "questions.a.type")


def test_conversations_with_calls_and_json_are_states_and_fields_without_effect_are_told(
    http_server: HttpServer,
) -> None:
    items = [
        {"role": "system", "content": "You are a desk."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Order?"}, {"type": "input_json", "data": {"n": 1}}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "Which one?"}]},
        {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": '{"order": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "It was lost."},
        {"type": "custom_tool_call", "call_id": "d", "name": "say", "input": "Sorry."},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "Said."}]},
    ]
    answer = http_server.ask("POST", "/v1/decisions", OPENAI | {"input": items, "safety_identifier": "x"})
    assert answer.status == 200, answer.body
    assert "safety_identifier" in answer.headers["x-uma-ignored"]
    assert answer.json["model"]
    fewer = http_server.ask("POST", "/v1/decisions", OPENAI | {"input": items[:3]}).json
    assert answer.json["usage"]["input_tokens"] > fewer["usage"]["input_tokens"]

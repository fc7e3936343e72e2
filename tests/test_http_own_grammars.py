"""llama-server's `grammar` and `json_schema` and vLLM's fields beside a prompt: in every dialect obeyed, and refused
where they are invalid.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_server import HttpServer

MESSAGES = {"messages": [{"role": "user", "content": "Yes or no?"}]}
PROMPT = {"prompt": "Yes or no?"}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": PROMPT,
    "/v1/responses": {"input": "Yes or no?"},
    "/v1/messages": {**MESSAGES, "max_tokens": 100},
    "/api/chat": {**MESSAGES, "stream": False},
    "/api/generate": {**PROMPT, "stream": False},
    "/completion": PROMPT,
}
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "additionalProperties": False}}
DEMANDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    "/v1/responses": {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"},
    "/v1/messages": {
        "tools": [{"name": "look", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "any"},
    },
}
"""What makes each dialect demand a call."""


def text_of(body: Any) -> str:
    """The answer's text, in any dialect."""
    if "choices" in body:
        (choice,) = body["choices"]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    if "output" in body:
        return str(body["output"][-1]["content"][0]["text"])
    content = body.get("content", body.get("response", body.get("message")))
    if isinstance(content, dict):
        content = content["content"]
    return str(content[-1]["text"] if isinstance(content, list) else content)


@pytest.mark.parametrize("path", PATHS)
def test_a_grammar_beside_the_prompt_is_obeyed(http_server: HttpServer, path: str) -> None:
    said = http_server.ask("POST", path, {**PATHS[path], "grammar": 'root ::= "\\n\\nyes" | "\\nno"'})
    assert said.status == 200, said.body
    assert text_of(json.loads(said.body)) in ("\n\nyes", "\nno")
    assert "grammar" not in said.headers.get("x-uma-ignored", "")


@pytest.mark.parametrize("path", PATHS)
def test_a_schema_beside_the_prompt_is_obeyed(http_server: HttpServer, path: str) -> None:
    said = http_server.ask("POST", path, {**PATHS[path], "json_schema": {"enum": [{"a": 1}, {"a": 2}]}})
    assert said.status == 200, said.body
    assert json.loads(text_of(json.loads(said.body)))["a"] in (1, 2)
    assert "json_schema" not in said.headers.get("x-uma-ignored", "")


@pytest.mark.parametrize("fields", [{"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}])
@pytest.mark.parametrize("path", PATHS)
def test_vllm_s_fields_are_obeyed(http_server: HttpServer, path: str, fields: dict[str, Any]) -> None:
    said = http_server.ask("POST", path, {**PATHS[path], **fields})
    assert said.status == 200, said.body
    assert text_of(json.loads(said.body)) in ("yes", "no")
    assert "x-uma-ignored" not in said.headers


@pytest.mark.parametrize("path", DEMANDED)
def test_an_answer_that_must_be_a_call_has_no_grammar_and_says_so(http_server: HttpServer, path: str) -> None:
    said = http_server.ask("POST", path, {**PATHS[path], **DEMANDED[path], "grammar": 'root ::= "a"'})
    assert said.status == 200, said.body
    assert b"look" in said.body
    assert said.headers["x-uma-ignored"] == "grammar"


@pytest.mark.parametrize(
    ("fields", "naming"),
    [
        ({"grammar": "root ::= nothing"}, "grammar: Rule 'nothing' not found"),
        ({"grammar": 5}, "grammar: expected a grammar as a string"),
        ({"json_schema": {"not": {}}}, "json_schema: not available: not"),
        ({"json_schema": "x"}, "json_schema: expected a JSON Schema"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "json_schema: is given beside grammar"),
        ({"guided_json": {}, "grammar": 'root ::= "a"'}, "guided_json: is given beside grammar"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: "),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", PATHS)
def test_an_invalid_one_is_refused_by_its_name(
    http_server: HttpServer, path: str, fields: dict[str, Any], naming: str
) -> None:
    said = http_server.ask("POST", path, {**PATHS[path], **fields})
    assert said.status == 400, said.body
    assert naming in said.body.decode()


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}),
        ("/v1/completions", {"response_format": {"type": "json_object"}}),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        ("/api/chat", {"format": "json"}),
        ("/api/generate", {"format": "json"}),
    ],
)
def test_one_beside_the_dialect_s_own_field_is_refused(http_server: HttpServer, path: str, own: dict[str, Any]) -> None:
    said = http_server.ask("POST", path, {**PATHS[path], **own, "grammar": 'root ::= "a"'})
    assert said.status == 400, said.body
    assert "grammar: is given beside" in said.body.decode()

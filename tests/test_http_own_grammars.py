"""llama-server's `grammar` and `json_schema` beside a prompt: obeyed, and refused where they are invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_server import HttpServer

MESSAGES = {"messages": [{"role": "user", "content": "Yes or no?"}]}
PATHS: dict[str, dict[str, Any]] = {"/v1/chat/completions": MESSAGES, "/v1/completions": {"prompt": "Yes or no?"}}


def text_of(body: Any) -> str:
    (choice,) = body["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


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


@pytest.mark.parametrize(
    ("fields", "naming"),
    [
        ({"grammar": "root ::= nothing"}, "grammar: Rule 'nothing' not found"),
        ({"grammar": 5}, "grammar: expected a grammar as a string"),
        ({"json_schema": {"not": {}}}, "json_schema: not available: not"),
        ({"json_schema": "x"}, "json_schema: expected a JSON Schema"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "json_schema: is given beside grammar"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "grammar: is given beside"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", PATHS)
def test_an_invalid_one_is_refused_by_its_name(
    http_server: HttpServer, path: str, fields: dict[str, Any], naming: str
) -> None:
    said = http_server.ask("POST", path, {**PATHS[path], **fields})
    assert said.status == 400, said.body
    assert naming in json.loads(said.body)["error"]["message"]

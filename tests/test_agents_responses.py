"""What Codex sends to OpenAI's Responses API: namespaces, custom tools, hosted tools, and what these left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from http_clients import openai_of
from http_server import HttpServer, running_http
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from script_model import write_script_model
from test_engine_tools import QWEN

from harness import short_directory

ASKED = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is the weather?"}]}
CITIES = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bern"]}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": {**CITIES, "additionalProperties": False}}
TOWN = {"type": "namespace", "name": "town", "description": "All about towns.", "tools": [WEATHER]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"},
}
HOSTED = [{"type": kind} for kind in ("web_search", "local_shell", "image_generation", "tool_search")]
TOOLS = [TOWN, PATCH, *HOSTED]
IN_TOWN = {"type": "function", "name": "weather", "namespace": "town"}
INPUT = '*** Begin Patch\n+a "fox"\n*** End Patch'
SAID = [
    '<tool_call>\n{"name": "',
    "apply_patch",
    '", "arguments": {"input": "',
    json.dumps(INPUT)[1:-1],
    '"}}\n</tool_call>',
]
"""In pieces that end where the grammar leaves a choice: what it forces is tokenized by itself."""


@pytest.fixture(scope="module")
def patcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A model that calls `apply_patch`, whatever it is asked."""
    model = write_script_model(tmp_path_factory.mktemp("tools") / "script.gguf", SAID, template=QWEN)
    with short_directory() as directory, running_http(directory, "--model", str(model)) as server:
        yield server


def ignored(answer: Any) -> list[str]:
    return [each for each in answer.headers.get("x-uma-ignored", "").split(", ") if each]


def both(server: HttpServer, **asked: Any) -> list[Response]:
    """The answer whole and streamed, each event of which is one that OpenAI's client knows."""
    with openai_of(server) as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            for event in stream:
                TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump())
            return [whole, stream.get_final_response()]


def test_a_call_of_a_function_in_a_namespace_names_both(http_server: HttpServer) -> None:
    asked: dict[str, Any] = {"model": "builtin", "tools": TOOLS, "max_output_tokens": 60, "temperature": 0}
    for said in both(http_server, input=[ASKED], tool_choice=IN_TOWN, **asked):
        (call,) = said.output
        assert call.type == "function_call"
        assert (call.namespace, call.name, call.status) == ("town", "weather", "completed")
        assert json.loads(call.arguments)["city"] in ("Oslo", "Bern")
        later: list[Any] = [ASKED, call.model_dump(exclude_none=True)]
        later.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rain."})
        with openai_of(http_server) as client:
            assert client.responses.create(input=later, **asked).status in ("completed", "incomplete")


def test_the_model_reads_a_past_call_by_the_name_that_it_is_offered(http_server: HttpServer) -> None:
    """Otherwise a conversation would show it functions that it is not offered."""
    asked = {"tools": TOOLS, "max_output_tokens": 1}
    call = {"type": "function_call", "call_id": "call_1", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "Rain."}
    used = []
    for name in ({"name": "weather", "namespace": "town"}, {"name": "town__weather"}):
        said = http_server.ask("POST", "/v1/responses", {**asked, "input": [ASKED, {**call, **name}, result]})
        assert said.status == 200, said.body
        used.append(said.json["usage"]["input_tokens"])
    assert used[0] == used[1]


def test_tools_that_run_at_openai_s_are_named_and_the_rest_is_offered(http_server: HttpServer) -> None:
    body = {"input": [ASKED], "tools": TOOLS, "max_output_tokens": 1}
    said = http_server.ask("POST", "/v1/responses", body)
    assert said.status == 200, said.body
    assert ignored(said) == ["tools[2]", "tools[3]", "tools[4]", "tools[5]"]
    assert said.json["tools"][0] == TOWN
    alone = http_server.ask("POST", "/v1/responses", {**body, "tools": TOOLS[:2]})
    assert said.json["usage"]["input_tokens"] == alone.json["usage"]["input_tokens"]


def test_a_custom_tool_is_called_with_its_input_as_text(patcher: HttpServer) -> None:
    asked: dict[str, Any] = {"model": "Script", "tools": TOOLS, "max_output_tokens": 200}
    for said in both(patcher, input=[ASKED], **asked):
        (call,) = said.output
        assert call.type == "custom_tool_call"
        assert (call.name, call.input) == ("apply_patch", INPUT)
        later: list[Any] = [ASKED, call.model_dump(exclude_none=True)]
        later.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."})
        with openai_of(patcher) as client:
            assert client.responses.create(input=later, **asked).output


def test_the_input_of_a_custom_tool_is_told_before_its_item_ends(patcher: HttpServer) -> None:
    body = {"input": [ASKED], "tools": TOOLS, "max_output_tokens": 200, "stream": True}
    events = patcher.ask("POST", "/v1/responses", body).events
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert [events[3]["delta"], events[4]["input"], events[5]["item"]["input"]] == [INPUT] * 3


def test_a_grammar_of_a_custom_tool_is_told_to_the_model(patcher: HttpServer) -> None:
    used = []
    for definition in ("start: /.+/", "start: /.+/ " * 20):
        tool = {**PATCH, "format": {**PATCH["format"], "definition": definition}}  # type: ignore[dict-item]
        body = {"input": [ASKED], "tools": [tool], "max_output_tokens": 1}
        used.append(patcher.ask("POST", "/v1/responses", body).json["usage"]["input_tokens"])
    assert used[1] > used[0] + 100


@pytest.mark.parametrize(
    ("syntax", "definition", "texts"),
    [
        ("lark", 'start: ("+" | "-") "\\"fox\\"" LF\n%import common.LF', r'[+-]"fox"\n'),
        ("regex", r'(owl|"bear")\n\d{2}', r'(owl|"bear")\n\d{2}'),
    ],
)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_the_input_of_a_custom_tool_is_what_its_grammar_allows(
    patcher: HttpServer, http_server: HttpServer, syntax: str, definition: str, texts: str, choice: str
) -> None:
    """Also where the model would write another, and in the form of a model of whose calls nothing is known."""
    tool = {**PATCH, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    for server in [patcher, *([http_server] if choice == "required" else [])]:
        body = {"input": [ASKED], "tools": [tool], "tool_choice": choice, "max_output_tokens": 200}
        body["parallel_tool_calls"] = False  # how many a random model would make is chance
        said = server.ask("POST", "/v1/responses", body)
        assert said.status == 200, said.body
        (call,) = said.json["output"]
        assert call["type"] == "custom_tool_call"
        assert re.fullmatch(texts, call["input"]), call
        assert not ignored(said)


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("lark", 'start: "(" start? ")"'), ("regex", "(?=a)a"), ("peg", "a"), ("lark", 5)],
)
def test_a_grammar_that_cannot_be_held_to_is_named(http_server: HttpServer, syntax: str, definition: Any) -> None:
    tool = {**PATCH, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    said = http_server.ask("POST", "/v1/responses", {"input": [ASKED], "tools": [tool], "max_output_tokens": 1})
    assert said.status == 200, said.body
    assert ignored(said) == ["tools[0].format"]


def test_what_is_said_of_a_namespace_is_told_to_the_model(http_server: HttpServer) -> None:
    used = []
    for about in ("All about towns.", "All about towns. " * 8):
        body = {"input": [ASKED], "tools": [{**TOWN, "description": about}], "max_output_tokens": 1}
        said = http_server.ask("POST", "/v1/responses", body)
        assert not ignored(said)
        used.append(said.json["usage"]["input_tokens"])
    assert used[1] > used[0] + 20


def test_items_about_tools_of_openai_s_are_named_and_the_rest_is_read(http_server: HttpServer) -> None:
    shell = {"type": "exec", "command": ["ls"], "env": {}}
    left: list[Any] = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "AA=="},
        {"type": "local_shell_call", "call_id": "call_1", "status": "completed", "action": shell},
        {"type": "local_shell_call_output", "call_id": "call_1", "output": "a.txt"},
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "a", "tools": []},
    ]
    said = http_server.ask("POST", "/v1/responses", {"input": [ASKED, *left, ASKED], "max_output_tokens": 1})
    assert said.status == 200, said.body
    assert {"input[1]", "input[5]"} <= set(ignored(said))
    assert not {"input[3]", "input[4]"} & set(ignored(said))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"name": 1}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a" * 127, "tools": [WEATHER]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [WEATHER] * 513}]}, "tools[0].tools"),
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tools": [{"type": 1}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "b"}]}, "input[0].input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ],
)
def test_what_is_no_tool_and_no_item_is_refused_with_its_place(
    http_server: HttpServer, fields: dict[str, Any], named: str
) -> None:
    refused = http_server.ask("POST", "/v1/responses", {"input": "a", "max_output_tokens": 1, **fields})
    assert refused.status == 400
    assert refused.json["error"]["message"].startswith(named + ":"), refused.json

"""Tools and thinking over HTTP, through the clients that people use, on the real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from http_server import HttpServer, running_http
from script_model import write_script_model
from test_engine_tools import ARGUMENTS, QWEN, SAID

from harness import short_directory

CITIES = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bern"]}}, "required": ["city"]}
PARAMETERS = {**CITIES, "additionalProperties": False}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS},
}
ANY_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
"""What the scripted model's call has."""
FREE: Any = {"type": "function", "function": {"name": "weather", "parameters": ANY_CITY}}
ASKED = "What is the weather in Oslo?"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A model that thinks, says a word and calls a tool, whatever it is asked."""
    model = write_script_model(tmp_path_factory.mktemp("tools") / "script.gguf", SAID, template=QWEN)
    with short_directory() as directory, running_http(directory, "--model", str(model)) as server:
        yield server


def openai_client(server: HttpServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_openai_s_client_goes_through_a_loop_of_tools(http_server: HttpServer, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    asked: Any = {"model": "builtin", "messages": messages, "tools": [WEATHER], "max_tokens": 60, "temperature": 0}
    with openai_client(http_server) as client:
        first = client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", None)
        (call,) = first.message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Bern")
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "Rain, 4 degrees."}]
        last = client.chat.completions.create(**asked).choices[0]
    assert last.finish_reason in ("stop", "length")
    assert last.message.content


def test_openai_s_stream_adds_up_to_the_call_and_the_thinking(thinker: HttpServer) -> None:
    asked: Any = {
        "model": "script",
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [FREE],
        "max_tokens": 200,
    }
    with openai_client(thinker) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            thoughts = "".join(
                event.chunk.choices[0].delta.model_extra.get("reasoning_content", "")
                for event in stream
                if event.type == "chunk" and event.chunk.choices and event.chunk.choices[0].delta.model_extra
            )
            final = stream.get_final_completion().choices[0]
    for said in (whole, final):
        (call,) = said.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        assert (said.finish_reason, said.message.content) == ("tool_calls", "Moment.")
    assert thoughts == (whole.message.model_extra or {})["reasoning_content"] == "Which city?"


@pytest.mark.parametrize(
    ("fields", "naming"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"functions": [WEATHER["function"]]}, "functions"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "grammar"),
    ],
)
def test_what_cannot_be_done_with_tools_is_refused_by_name(
    http_server: HttpServer, fields: dict[str, Any], naming: str
) -> None:
    body = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 2, **fields}
    refused = http_server.ask("POST", "/v1/chat/completions", body)
    assert refused.status == 400
    assert naming in refused.json["error"]["message"]

"""Tools whose schemas no grammar can keep to: where the model chooses, they are offered all the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from chat_templates import TEMPLATES
from engine_world import config_for
from http_server import HttpServer, running_http
from reference import schema_suite
from script_model import write_script_model
from test_engine_tools import QWEN

from harness import short_directory
from models import write_model
from uma import Request, SamplingParams, open_engine
from uma.engine import Engine
from uma.errors import BadRequest
from uma.types import Finished, Message, Tool

UNSERVED: dict[str, tuple[dict[str, Any], str]] = {
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, ".propertyNames"),
    "uniqueItems": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ".uniqueItems"),
    "not": ({"type": "string", "not": {"const": "x"}}, ".not"),
    "if": ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, ".if"),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, ".contains"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, ".unevaluatedProperties"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ".oneOf"),
    "format": ({"type": "string", "format": "idn-email"}, ".format"),
    "look-around": ({"type": "string", "pattern": "^(?!-)[a-z]+$"}, ".pattern"),
    "dangling $ref": ({"$ref": "#/$defs/none"}, '["$ref"]'),
    "minProperties": ({"type": "object", "minProperties": 3}, ".minProperties"),
    "large bound": ({"type": "integer", "maximum": 2**53 + 1}, ".maximum"),
    "slow multiple": ({"type": "integer", "multipleOf": 9_999_991}, ".multipleOf"),
    "deep": ({"type": "array", "items": {"anyOf": [{"type": "null"}, {"not": {}}]}}, ".items.anyOf[1].not"),
}
GOOD = {"type": "string", "enum": ["yes", "no"]}


def tool_of(inner: Any, name: str = "tool", *, strict: bool = False) -> Tool:
    schema = {"type": "object", "properties": {"good": GOOD, "x": inner}, "required": ["good"]}
    return Tool(name, "", {**schema, "additionalProperties": False}, strict)


async def finished(engine: Engine, *tools: Tool, **fields: Any) -> tuple[Finished, tuple[str, ...]]:
    plain: dict[str, Any] = {"sampling": SamplingParams(max_tokens=2), "tools": tools}
    request = Request("a", messages=(Message("user", "Go."),), **(plain | fields))
    async with engine.generate(request) as stream:
        last = [event async for event in stream][-1]
        assert isinstance(last, Finished)
        return last, stream.ignored


@pytest.mark.parametrize("form", ["qwen", "gemma-4", "qwen3-coder"])
async def test_each_keyword_that_no_grammar_keeps_to_is_left_out_of_it_and_named(tmp_path: Path, form: str) -> None:
    template = QWEN if form == "qwen" else TEMPLATES[form]
    model = write_model(tmp_path / "tiny.gguf", chat_template=template, context_length=4_096)
    async with open_engine(config_for(model, n_ctx=4_096)) as engine:
        for keyword, (inner, place) in UNSERVED.items():
            for _ in range(2):  # found out, and known
                last, ignored = await finished(engine, Tool("fine"), tool_of(inner))
                named = f"tools[1].parameters.properties.x{place}"
                assert ignored, keyword
                assert any(named.startswith(each) or each.startswith(named) for each in ignored), (keyword, ignored)
                assert all(each in last.warnings[-1] for each in ignored[:10])


async def test_the_rest_of_the_schema_is_kept_to_and_the_prompt_shows_all_of_it(tmp_path: Path) -> None:
    said = '<tool_call>\n{"name": "tool", "arguments": {"good": "maybe", "x": 5}}\n</tool_call>'
    model = write_script_model(tmp_path / "script.gguf", said, template=QWEN)
    tool = tool_of({"enum": ["a", "b"], "not": {"const": "unlikely"}})
    async with open_engine(config_for(model)) as engine:
        last, ignored = await finished(engine, tool, sampling=SamplingParams(max_tokens=200, temperature=0))
        request = Request("a", messages=(Message("user", "Go."),), tools=(tool,))
        prompt = (await engine.tokenize(request)).text or ""
    assert ignored == ("tools[0].parameters.properties.x.not",)
    (call,) = last.tool_calls
    jsonschema.validate(json.loads(call.arguments), tool.parameters)
    assert "unlikely" in prompt


@pytest.mark.parametrize("keyword", UNSERVED)
async def test_a_strict_tool_is_refused_by_the_keyword_and_no_other_is_also_where_its_call_is_demanded(
    tmp_path: Path, keyword: str
) -> None:
    model = write_model(tmp_path / "tiny.gguf", chat_template=QWEN, context_length=2_048)
    inner, _ = UNSERVED[keyword]
    async with open_engine(config_for(model)) as engine:
        for choice in ("auto", "required", "tool"):
            with pytest.raises(BadRequest, match=r"^tools\[0\]\.parameters\.properties\.x"):
                await finished(engine, tool_of(inner, strict=True), tool_choice=choice)
            _, ignored = await finished(engine, tool_of(inner), tool_choice=choice)
            assert ignored[0].startswith("tools[0].parameters.properties.x")


def suite() -> list[dict[str, Any]]:
    """Every schema of the official tests, as that of an argument, and of all arguments where it can be; without numbers
    that no request can hold.
    """
    files = sorted(schema_suite().rglob("*.json"))
    schemas = [case["schema"] for file in files for case in json.loads(file.read_text())]
    whole = [each for each in schemas if isinstance(each, dict) and each.get("type", "object") == "object"]
    every = [{"type": "object", "properties": {"x": each}} for each in schemas] + whole
    return [each for each in every if not re.search(r"\d{19}", json.dumps(each))]


@pytest.mark.parametrize("form", ["qwen", "gemma-4", "qwen3-coder"])
async def test_no_schema_of_json_schema_s_own_tests_is_refused_where_the_model_chooses(
    tmp_path: Path, form: str
) -> None:
    # What the model is shown of the tools takes longer than their grammars: here it is shown their names.
    shows = r"(?s)\{% (if tools %\}\{% )?for tool in tools.*?\{% endfor %\}"
    template = re.sub(
        shows,
        r"{% \1for tool in tools or [] %}{{ tool.function.name }} {% endfor %}",
        QWEN if form == "qwen" else TEMPLATES[form],
    )
    model = write_model(tmp_path / "tiny.gguf", chat_template=template, context_length=2_048)
    tools = [Tool(f"tool_{at}", "", schema) for at, schema in enumerate(suite())]
    assert len(tools) > 600
    async with open_engine(config_for(model)) as engine:
        for at in range(0, len(tools), 32):
            await finished(engine, *tools[at : at + 32], sampling=SamplingParams(max_tokens=1))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    said = '<tool_call>\n{"name": "tool", "arguments": {"good": "yes"}}\n</tool_call>'
    model = write_script_model(tmp_path_factory.mktemp("loose") / "script.gguf", said, template=QWEN)
    with short_directory() as directory, running_http(directory, "--model", str(model)) as server:
        yield server


SCHEMA = {"type": "object", "properties": {"good": GOOD, "x": {"not": {"const": 1}}}, "required": ["good"]}
FUNCTION = {"name": "tool", "parameters": SCHEMA}
USER = [{"role": "user", "content": "Go."}]
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
        "tools[0].function.parameters.properties.x.not",
    ),
    "/v1/responses": (
        {"input": "Go.", "tools": [{"type": "function", **FUNCTION}]},
        "tools[0].parameters.properties.x.not",
    ),
    "/v1/messages": (
        {"messages": USER, "max_tokens": 90, "tools": [{"name": "tool", "input_schema": SCHEMA}]},
        "tools[0].input_schema.properties.x.not",
    ),
    "/api/chat": (
        {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
        "tools[0].function.parameters.properties.x.not",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_dialect_names_what_was_left_out_in_its_own_words(server: HttpServer, path: str, stream: bool) -> None:
    body, place = BODIES[path]
    answer = server.ask("POST", path, {**body, "stream": stream})
    assert answer.status == 200, answer.body
    assert place in answer.headers["x-uma-ignored"].split(", ")
    assert b"tool" in answer.body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_strict_true_refuses_what_no_grammar_keeps_to(server: HttpServer, path: str) -> None:
    body, place = BODIES[path]
    (tool,) = body["tools"]
    strict = (
        {**tool, "function": {**tool["function"], "strict": True}} if "function" in tool else {**tool, "strict": True}
    )
    answer = server.ask("POST", path, {**body, "tools": [strict]})
    assert answer.status == 400
    assert place.removesuffix(".not") in answer.body.decode()

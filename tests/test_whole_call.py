"""An answer that is wholly the JSON of one valid call is that call; whatever else quotes JSON is text."""

from __future__ import annotations

import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import attrs
import pytest
from chat_templates import TEMPLATES, family_of
from http_clients import openai_of
from http_server import running_http
from script_model import write_script_model
from test_engine_tools import QWEN, WEATHER, events_of

from harness import short_directory
from uma.chat.families import Family, thinking_of
from uma.chat.parser import Parser
from uma.chat.parts import AnswerText, CallArguments, CallBegun, CallEnded, Part, Reasoning, joined
from uma.chat.schema import follows
from uma.chat.whole_call import NOTE, WholeCallParser
from uma.types import Finished, Token, ToolCallDelta

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 2}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = {"weather": CITY, "add": {"type": "object", "properties": {"a": {"type": "integer"}}}}
ARGUMENTS = '{"city": "Bern"}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
WRITTEN = [
    CALL,
    f"\n  {CALL}\n",
    f"```json\n{CALL}\n```",
    f"```\n{CALL}```\n",
    json.dumps(json.loads(CALL), indent=2),
    CALL.replace("arguments", "parameters"),
]
QUOTES = [
    CALL,
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "weather", "arguments": {"city": "Bern", "unit": "celsius"}}',
    json.dumps(json.loads(CALL), indent=4),
    '{"name": "weather", "parameters": {"city": "Oslo"}}',
    '{"arguments": {"city": "Bern"}, "name": "weather"}',
    '{"name": "add", "arguments": {}}',
]
AROUND = [
    "Call it so: {}",
    "{} is how it is called.",
    "```json\n{}\n```\nThat is the call.",
    "Here:\n```json\n{}\n```",
    "```json\n{}",
    "{}\n{}",
    "```json\n{}\n```\n```json\n{}\n```",
    "[{}]",
    "> {}",
    "`{}`",
    '{{"call": {}}}',
    "{}}}",
]
OTHERS = [
    '{"name": "weather", "arguments": {"city": 3}}',
    '{"name": "weather", "arguments": {"city": "B"}}',
    '{"name": "weather", "arguments": {"unit": "celsius"}}',
    '{"name": "weather", "arguments": {"city": "Bern", "unit": "kelvin"}}',
    '{"name": "weather", "arguments": {"city": "Bern", "country": "CH"}}',
    '{"name": "weather", "arguments": "Bern"}',
    '{"name": "weather", "arguments": ["Bern"]}',
    '{"name": "weather"}',
    '{"name": "forecast", "arguments": {"city": "Bern"}}',
    '{"name": "add", "arguments": {"a": true}}',
    '{"name": "add", "arguments": {"a": 1.5}}',
    '{"name": "Anna", "age": 31}',
    '{"city": "Bern"}',
    "{'name': 'weather', 'arguments': {'city': 'Bern'}}",
    "{}",
    '```python\nprint("weather")\n```',
]
TEXTS = [around.format(*[quote] * 2) for around, quote in product(AROUND, QUOTES)] + OTHERS


def parts_of(text: str, cuts: list[int], template: str = TEMPLATES["hermes"]) -> list[Part]:
    family = family_of(template)
    assert isinstance(family, Family)
    reading = WholeCallParser(Parser(family, TOOLS, thinking_of(template)), TOOLS)
    given = [part for start, stop in pairwise([0, *cuts, len(text)]) for part in reading.push(text[start:stop])]
    return joined([*given, *reading.finish()])


@pytest.mark.parametrize("text", WRITTEN)
def test_an_answer_that_is_wholly_one_valid_call_is_that_call(text: str) -> None:
    for cuts in ([], list(range(1, len(text))), *([cut] for cut in range(1, len(text)))):
        begun, arguments, ended = parts_of(text, cuts)
        assert begun == CallBegun("weather")
        assert isinstance(arguments, CallArguments)
        assert ended == CallEnded("weather", arguments.text, NOTE)
        assert json.loads(arguments.text) == json.loads(ARGUMENTS)


def test_a_hundred_answers_that_quote_json_are_text_to_the_last_character() -> None:
    assert len(set(TEXTS)) == 100
    for text in TEXTS:
        assert parts_of(text, []) == [AnswerText(text)], text
        assert parts_of(text, list(range(1, len(text)))) == [AnswerText(text)], text


def test_thinking_goes_before_such_a_call_and_is_told_at_once() -> None:
    parts = parts_of(f"<think>Bern.</think>\n{CALL}", [], QWEN)
    assert parts == [
        Reasoning("Bern."),
        CallBegun("weather"),
        CallArguments(ARGUMENTS),
        CallEnded("weather", ARGUMENTS, NOTE),
    ]


def test_text_that_cannot_be_a_call_is_not_held_back() -> None:
    family = family_of(TEMPLATES["hermes"])
    assert isinstance(family, Family)
    for begins in ("Well", '{"city"', "```python\np", '{"name": "Anna"', "[1"):
        reading = WholeCallParser(Parser(family, TOOLS, None), TOOLS)
        assert reading.push(begins + ", ") == [AnswerText(begins + ",")]


@pytest.mark.parametrize(
    ("value", "schema", "is_valid"),
    [
        ({"a": [1, 2]}, {"properties": {"a": {"items": {"type": "integer"}, "maxItems": 2}}}, True),
        ({"a": [1, "2"]}, {"properties": {"a": {"items": {"type": "integer"}}}}, False),
        ({"a": 1}, {"$defs": {"x": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/x"}}}, False),
        ({"a": 1}, {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}}}, True),
        ({"a": 1}, {"properties": {"a": {"oneOf": [{"minimum": 0}, {"type": "integer"}]}}}, False),
        ({"a": 1}, {"properties": {"a": {"allOf": [{"minimum": 0}, {"exclusiveMaximum": 1}]}}}, False),
        ({"a": 1}, {"properties": {"a": {"enum": [True]}}}, False),
        ({"b": 1}, {"additionalProperties": {"type": "string"}}, False),
        ({"a": "x"}, {"properties": {"a": {"pattern": "x"}}}, False),
        ({"a": "x"}, {"$ref": "#"}, False),
    ],
)
def test_arguments_follow_a_schema_only_where_that_is_certain(value: Any, schema: Any, is_valid: bool) -> None:
    assert follows(value, schema) is is_valid


@pytest.mark.parametrize("is_strict", [False, True])
async def test_the_engine_takes_such_an_answer_for_a_call_unless_the_tool_is_strict(
    tmp_path: Path, is_strict: bool
) -> None:
    model = write_script_model(tmp_path / "script.gguf", CALL, template=QWEN)
    events = await events_of(model, tools=(attrs.evolve(WEATHER, parameters=CITY, strict=is_strict),))
    last = events[-1]
    assert isinstance(last, Finished)
    calls, text = ([], CALL) if is_strict else ([ARGUMENTS], "")
    assert [call.arguments for call in last.tool_calls] == calls
    assert "".join(each.arguments for each in events if isinstance(each, ToolCallDelta)) == "".join(calls)
    assert "".join(each.text for each in events if isinstance(each, Token)) == text
    assert [line.partition(": ")[2] for line in last.warnings] == [NOTE] * len(calls)


def test_a_header_says_that_the_call_was_no_more_than_json(tmp_path: Path) -> None:
    model = write_script_model(tmp_path / "script.gguf", f"```json\n{CALL}\n```", template=QWEN)
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    asked: Any = {"model": "x", "messages": [{"role": "user", "content": "Go."}], "tools": [tool], "max_tokens": 200}
    with (
        short_directory() as directory,
        running_http(directory, "--model", str(model), "--alias", "x") as server,
        openai_of(server) as client,
    ):
        answer = client.chat.completions.with_raw_response.create(**asked)
    choice = answer.parse().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert json.loads(choice.message.tool_calls[0].function.arguments) == json.loads(ARGUMENTS)
    assert answer.headers["x-uma-note"] == f"tool call 0 (weather): {NOTE}"

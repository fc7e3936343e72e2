"""Tools and thinking through the real engine: a model that writes a known text, asked in process and over the wire."""

from __future__ import annotations

import json
import time
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import attrs
import jsonschema
import pytest
from chat_templates import HERMES_CALLS, TEMPLATES
from engine_world import config_for
from hypothesis import given
from hypothesis import strategies as st
from script_model import pieces_of, write_script_model

from models import CHATML, write_model
from uma import Request, SamplingParams, json_text, open_engine
from uma.engine.delivery.parsed import tokens_within
from uma.errors import BadRequest
from uma.types import Event, Finished, Grammar, Message, ReasoningDelta, Token, Tool, ToolCall, ToolCallDelta

pytestmark = pytest.mark.usefixtures("renders_here")

ARGUMENTS = '{"city": "Zürich"}'
SAID = f'<think>Which city?</think>Moment.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT_TOKENS = sum(begin < SAID.index("Moment.") for begin in accumulate(map(len, pieces_of(SAID, set())), initial=0))
"""Tokens of the scripted model that begin before its answer does."""
QWEN = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}{# <think></think> #}"
    "{% if enable_thinking is defined %}no thinking{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}" + HERMES_CALLS + "\n{% endfor %}assistant{{ '\\n' }}"
)
WEATHER = Tool("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})


async def events_of(model: Path, **fields: Any) -> list[Event]:
    plain: dict[str, Any] = {"messages": (Message("user", "Go."),), "sampling": SamplingParams(max_tokens=200)}
    request = Request("a", **(plain | fields))
    async with open_engine(config_for(model)) as engine, engine.generate(request) as stream:
        return [event async for event in stream]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script_model(tmp_path_factory.mktemp("tools") / "script.gguf", SAID, template=QWEN)


async def test_calls_and_thinking_are_streamed_apart_from_the_text(model: Path) -> None:
    events = await events_of(model, tools=(WEATHER,), reasoning="auto")
    assert "".join(each.text for each in events if isinstance(each, Token)) == "Moment."
    assert "".join(each.text for each in events if isinstance(each, ReasoningDelta)) == "Which city?"
    assert "".join(each.arguments for each in events if isinstance(each, ToolCallDelta)) == ARGUMENTS
    last = events[-1]
    assert isinstance(last, Finished)
    assert [(call.name, call.arguments) for call in last.tool_calls] == [("weather", ARGUMENTS)]
    assert (last.reason, last.usage.reasoning_tokens) == ("stop", THOUGHT_TOKENS)


async def test_an_answer_that_is_not_streamed_has_them_in_its_end(model: Path) -> None:
    (last,) = await events_of(model, tools=(WEATHER,), reasoning="auto", stream=False)
    assert isinstance(last, Finished)
    assert (last.text, last.reasoning) == ("Moment.", "Which city?")
    assert [call.arguments for call in last.tool_calls] == [ARGUMENTS]
    assert last.usage.reasoning_tokens == THOUGHT_TOKENS


async def test_earlier_calls_are_read_beside_trio_s_thread(model: Path) -> None:
    arguments = f"[{'0,' * 1_000_000}0]"  # no object: no prompt is made of it
    began_sec = time.thread_time()
    json_text.loads(arguments)
    own_sec = time.thread_time() - began_sec
    messages = (Message("user", "Go."), Message("assistant", "", tool_calls=(ToolCall("1", "weather", arguments),)))
    async with open_engine(config_for(model, max_prompt_bytes=2**24)) as engine:
        began_sec = time.thread_time()
        with pytest.raises(BadRequest, match="expected a JSON object"):
            await engine.tokenize(Request("a", messages=messages))
        assert time.thread_time() - began_sec < own_sec / 2


@pytest.mark.parametrize("fields", [{}, {"tools": (WEATHER,), "tool_choice": "none"}])
async def test_without_tools_or_reasoning_the_text_stays_as_it_is(model: Path, fields: dict[str, Any]) -> None:
    events = await events_of(model, **fields)
    assert "".join(each.text for each in events if isinstance(each, Token)) == SAID
    assert all(isinstance(each, Token | Finished) for each in events)
    assert isinstance(last := events[-1], Finished)
    assert last.usage.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("fields", "naming"),
    [
        ({"tool_choice": "nothing"}, "tool_choice"),
        ({"tools": (), "tool_choice": "required"}, "tool_choice"),
        ({"sampling": SamplingParams(grammar=Grammar(regex="a"))}, "grammar: beside tools"),
        ({"sampling": SamplingParams(grammar=Grammar(json_object=True)), "tool_choice": "required"}, "grammar: with"),
        (
            {"sampling": SamplingParams(grammar=Grammar(json_schema={"properties": {"x": {"not": {"const": 1}}}}))},
            r"grammar\.json_schema\.properties\.x",
        ),
        (
            {"sampling": SamplingParams(grammar=Grammar(json_schema={"minProperties": 2}))},
            r"^grammar\.json_schema\.minProperties: ",
        ),
        ({"tools": (Tool("a", "", {"type": "string"}),)}, r"tools\[0\]\.parameters\.type"),
        (
            {"tools": (WEATHER, Tool("a", "", {"properties": {"x": {"not": {"const": 1}}}}, strict=True))},
            r"tools\[1\]\.parameters\.properties\.x: ",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(model: Path, fields: dict[str, Any], naming: str) -> None:
    with pytest.raises(BadRequest, match=naming):
        await events_of(model, **{"tools": (WEATHER,), **fields})


@pytest.mark.parametrize("choice", ["required", "add"])
async def test_a_call_that_is_demanded_comes_from_a_model_that_would_never_make_one(
    tmp_path: Path, choice: str
) -> None:
    tiny = write_model(tmp_path / "tiny.gguf", chat_template=QWEN, context_length=2048)
    add = Tool(
        "add", "Adds.", {"properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}
    )
    request = Request(
        "a",
        messages=(Message("user", "Go."),),
        tools=(WEATHER, attrs.evolve(add, parameters={**(add.parameters or {}), "additionalProperties": False})),
        tool_choice=choice,
        parallel_tool_calls=False,
        sampling=SamplingParams(max_tokens=400, temperature=1.5, seed=3, n=3),
        reasoning="off",
    )
    async with open_engine(config_for(tiny)) as engine, engine.generate(request) as stream:
        events = [event async for event in stream]
    last = events[-1]
    assert isinstance(last, Finished)
    for answer in last.answers:
        deltas = [each for each in events if isinstance(each, ToolCallDelta) and each.index == answer.index]
        assert "".join(each.arguments for each in deltas).startswith("{")
        if answer.reason == "length":  # a string of random letters can be long
            continue
        (call,) = answer.tool_calls
        assert "".join(each.arguments for each in deltas) == call.arguments
        assert {"add": {"a"}, "weather": {"city"}}[call.name] >= json.loads(call.arguments).keys()
        assert choice in ("required", call.name)
    assert any(answer.tool_calls for answer in last.answers)


FORECAST = {
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["deepseek-v3", "mistral-args", "qwen3-coder", "glm-4", "gemma-4", "harmony"])
async def test_every_form_of_a_call_can_be_demanded(tmp_path: Path, name: str) -> None:
    tiny = write_model(tmp_path / "tiny.gguf", chat_template=TEMPLATES[name], context_length=2048)
    forecast = Tool("forecast", "", FORECAST)
    sampling = SamplingParams(max_tokens=400, temperature=1.5, seed=3)
    fields: dict[str, Any] = {"tools": (forecast,), "tool_choice": "required", "parallel_tool_calls": False}
    events = await events_of(tiny, sampling=sampling, reasoning="off", **fields)
    last = events[-1]
    assert isinstance(last, Finished)
    (call,) = last.tool_calls
    assert "".join(each.arguments for each in events if isinstance(each, ToolCallDelta)) == call.arguments
    assert "".join(each.text for each in events if isinstance(each, Token)) == ""
    assert (last.reason, call.name) == ("stop", "forecast")
    jsonschema.validate(json.loads(call.arguments), FORECAST)


async def test_a_schema_that_a_form_of_calls_cannot_keep_to_is_refused_with_its_place(tmp_path: Path) -> None:
    tiny = write_model(tmp_path / "tiny.gguf", chat_template=TEMPLATES["qwen3-coder"])
    bad = Tool("bad", "", {"properties": {"x": {"type": "string", "format": "idn-email"}}}, strict=True)
    with pytest.raises(BadRequest, match=r"tools\[1\]\.parameters\.properties\.x\.format"):
        await events_of(tiny, tools=(WEATHER, bad))


async def test_tools_that_a_template_does_not_show_are_told_in_its_model_s_form(tmp_path: Path) -> None:
    tiny = write_model(tmp_path / "tiny.gguf", chat_template=TEMPLATES["deepseek-v3"])
    call = ToolCall("123456789", "weather", ARGUMENTS)
    messages = (Message("user", "Go."), Message("assistant", "", (call,)), Message("tool", "Rain.", (), call.id))
    async with open_engine(config_for(tiny)) as engine:
        text = (await engine.tokenize(Request("a", messages=messages, tools=(WEATHER,)))).text or ""
    assert "Tells the weather." in text
    assert "<name>\n```json\n{...}\n```<\uff5ctool\u2581call\u2581end\uff5c>" in text
    assert f"weather\n```json\n{ARGUMENTS}\n```" in text


async def test_arguments_that_the_model_gets_wrong_are_put_right_by_the_grammar(tmp_path: Path) -> None:
    said = '<tool_call>\n{"name": "weather", "arguments": {"town": "Bern"}}\n</tool_call> And that is that.'
    model = write_script_model(tmp_path / "script.gguf", said, template=QWEN)
    schema = {"properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"], "additionalProperties": False}
    last = (await events_of(model, tools=(Tool("weather", "", schema),), parallel_tool_calls=False))[-1]
    assert isinstance(last, Finished)
    assert [json.loads(call.arguments) for call in last.tool_calls] == [{"city": "Oslo"}]


ANSWER = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}


@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        ('{"rain":true}', '{"rain":true}', 0),
        ('<think>Wet.</think>\n{"rain":false}', '{"rain":false}', 0),
        (f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>', "", 1),
    ],
    ids=["JSON", "JSON behind thinking", "a call"],
)
async def test_an_answer_beside_tools_is_a_call_or_json_of_the_schema(
    tmp_path: Path, said: str, text: str, calls: int
) -> None:
    model = write_script_model(tmp_path / "script.gguf", said, template=QWEN)
    sampling = SamplingParams(max_tokens=200, grammar=Grammar(json_schema={**ANSWER, "additionalProperties": False}))
    (last,) = await events_of(model, tools=(WEATHER,), sampling=sampling, reasoning="auto", stream=False)
    assert isinstance(last, Finished)
    assert ((last.text or "").strip(), len(last.tool_calls), last.reason) == (text, calls, "stop")


@pytest.mark.parametrize("name", ["qwen", "harmony", "mistral-args", "glm-4"])
async def test_whatever_a_model_draws_beside_tools_and_a_schema_is_one_or_the_other(tmp_path: Path, name: str) -> None:
    tiny = write_model(tmp_path / "tiny.gguf", chat_template=TEMPLATES.get(name, QWEN), context_length=2048)
    grammar = Grammar(json_schema={**ANSWER, "additionalProperties": False})
    sampling = SamplingParams(max_tokens=300, temperature=1.5, seed=5, n=6, grammar=grammar)
    forecast = Tool("forecast", "", FORECAST)
    fields: dict[str, Any] = {"tools": (forecast,), "parallel_tool_calls": False, "reasoning": "off", "stream": False}
    last = (await events_of(tiny, sampling=sampling, **fields))[-1]
    assert isinstance(last, Finished)
    ended = [answer for answer in last.answers if answer.reason == "stop"]
    assert ended
    for answer in ended:
        if answer.tool_calls:
            jsonschema.validate(json.loads(answer.tool_calls[0].arguments), FORECAST)
        else:
            jsonschema.validate(json.loads(answer.text or ""), ANSWER)


OPENS = QWEN.replace("assistant{{ '\\n' }}", "assistant\n<think>{{ '\\n' }}")
"""A template whose prompts end inside thinking."""


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    ("said", "template", "controls"),
    [
        ('Wet?</think>\n\n{"rain":true}', OPENS, ()),
        ('Wet?</think>\n\n{"rain":true}', OPENS, ("</think>",)),
        ('<think>Wet?</think>{"rain":true}', QWEN, ()),
    ],
    ids=["opened by the template", "and closed by a control token", "opened by the model"],
)
async def test_a_grammar_begins_where_the_thinking_ends(
    tmp_path: Path, said: str, template: str, controls: tuple[str, ...], is_streamed: bool
) -> None:
    model = write_script_model(tmp_path / "script.gguf", said, template=template, controls=controls)
    sampling = SamplingParams(max_tokens=200, grammar=Grammar(json_schema={**ANSWER, "additionalProperties": False}))
    events = await events_of(model, sampling=sampling, reasoning="auto", stream=is_streamed)
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason == "stop"
    if is_streamed:
        assert "".join(each.text for each in events if isinstance(each, ReasoningDelta)) == "Wet?"
        assert "".join(each.text for each in events if isinstance(each, Token)) == '{"rain":true}'
    else:
        assert (last.reasoning, last.text) == ("Wet?", '{"rain":true}')


@pytest.mark.parametrize("reasoning", [None, "off"])
async def test_a_grammar_begins_at_once_where_no_thinking_is_asked_for(
    tmp_path: Path, reasoning: Literal["off"] | None
) -> None:
    model = write_script_model(tmp_path / "script.gguf", "Wet?</think>", template=OPENS)
    sampling = SamplingParams(max_tokens=200, grammar=Grammar(json_schema={"const": {"rain": True}}))
    (last,) = await events_of(model, sampling=sampling, reasoning=reasoning, stream=False)
    assert isinstance(last, Finished)
    assert (last.reason, last.text, last.reasoning) == ("stop", '{"rain":true}', None)


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
async def test_the_template_gets_tools_calls_and_the_switch(tmp_path: Path, switch: str) -> None:
    template = QWEN.replace("enable_thinking is defined", f"{switch} is defined and not {switch}")
    model = write_script_model(tmp_path / "script.gguf", SAID, template=template)
    call = ToolCall("123456789", "weather", ARGUMENTS)
    messages = (Message("assistant", "", (call,)), Message("tool", "Rain.", (), call.id, "weather"))
    request = Request("a", messages=messages, tools=(WEATHER,), reasoning="off")
    async with open_engine(config_for(model)) as engine:
        text = (await engine.tokenize(request)).text
        thinking = (await engine.tokenize(attrs.evolve(request, reasoning="auto"))).text
        assert engine.info.capabilities.reasoning
        assert engine.info.capabilities.reasoning_switch
    assert text is not None
    assert thinking is not None
    assert "no thinking" not in thinking
    assert '"description": "Tells the weather."' in text
    assert "no thinking" in text
    assert f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>' in text


async def test_a_template_without_tools_tells_them_in_the_system_message(tmp_path: Path) -> None:
    said = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
    model = write_script_model(tmp_path / "script.gguf", said, template=CHATML)
    (last,) = await events_of(model, tools=(WEATHER,), stream=False)
    assert isinstance(last, Finished)
    assert [each.arguments for each in last.tool_calls] == [ARGUMENTS]
    async with open_engine(config_for(model)) as engine:
        request = Request("a", messages=(Message("user", "Go."),), tools=(WEATHER,))
        assert "Tells the weather." in ((await engine.tokenize(request)).text or "")


async def test_the_output_ends_with_its_first_call_where_no_other_is_wanted(tmp_path: Path) -> None:
    call = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    model = write_script_model(tmp_path / "script.gguf", call + "and much more of it", template=QWEN)
    events = await events_of(model, tools=(WEATHER,), parallel_tool_calls=False)
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.reason, len(last.tool_calls)) == ("stop", 1)
    assert "".join(each.text for each in events if isinstance(each, Token)) == ""


MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    ("stop", "thoughts", "thought_tokens", "text", "calls"),
    [
        ((), "Which city?", 4, "Moment.", 1),
        (("Mom", "zzz"), "Which city?", 4, "", 0),
        (("city?x",), "Which city?", 4, "Moment.", 1),  # the thinking ends with the beginning of it
        (("city?</think>Mo",), "Which ", 3, "", 0),
    ],
)
async def test_marks_that_are_control_tokens_go_together_with_stop_strings(
    tmp_path: Path,
    is_streamed: bool,
    stop: tuple[str, ...],
    thoughts: str,
    thought_tokens: int,
    text: str,
    calls: int,
) -> None:
    model = write_script_model(tmp_path / "controls.gguf", SAID, template=QWEN, controls=MARKS)
    sampling = SamplingParams(max_tokens=200, stop=stop)
    events = await events_of(model, tools=(WEATHER,), reasoning="auto", sampling=sampling, stream=is_streamed)
    last = events[-1]
    assert isinstance(last, Finished)
    assert (len(last.tool_calls), last.usage.reasoning_tokens) == (calls, thought_tokens)
    assert (last.stop_string is None) == bool(calls)
    if is_streamed:
        assert "".join(each.text for each in events if isinstance(each, ReasoningDelta)) == thoughts
        assert "".join(each.text for each in events if isinstance(each, Token)) == text
    else:
        assert (last.reasoning, last.text) == (thoughts, text)


async def test_marks_that_are_control_tokens_have_no_text_where_nothing_is_parsed(tmp_path: Path) -> None:
    model = write_script_model(tmp_path / "controls.gguf", "<think>Hm</think>Yes!", template=QWEN, controls=MARKS)
    events = await events_of(model)
    assert "".join(each.text for each in events if isinstance(each, Token)) == "HmYes!"


@given(st.lists(st.integers(0, 3), max_size=30), st.sets(st.integers(0, 40), max_size=6))
def test_the_tokens_of_thinking_are_those_with_a_part_in_it(sizes: list[int], borders: set[int]) -> None:
    ordered = sorted(borders)
    spans = list(zip(ordered[::2], ordered[1::2], strict=False))
    thinking = {char for start, stop in spans for char in range(start, stop)}
    ends = list(accumulate(sizes))
    tokens = [range(start, max(stop, start + 1)) for start, stop in pairwise([0, *ends])]
    assert tokens_within(spans, ends) == sum(not thinking.isdisjoint(token) for token in tokens)

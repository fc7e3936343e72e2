"""What each family's models write becomes text, thinking and calls, however the text is cut."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chat_templates import ONE, PARIS, SUM, TEMPLATES, TOOLS, TWO, WRITTEN, family_of
from hypothesis import given
from hypothesis import strategies as st

from uma.chat.families import GENERIC, Family, thinking_of
from uma.chat.harmony import HarmonyParser
from uma.chat.parser import Parser
from uma.chat.partial_json import whole_members
from uma.chat.parts import AnswerText, CallArguments, CallBegun, CallBroken, CallCut, CallEnded, Part, Reasoning, joined
from uma.llama.template import ChatTemplate
from uma.types import Message, ToolCall

CALLS = [CallEnded("weather", PARIS), CallEnded("add", SUM)]


def family(name: str) -> Family:
    found = family_of(TEMPLATES[name])
    assert isinstance(found, Family)
    return found


def parser(name: str, tools: Mapping[str, Any] = TOOLS, **options: bool) -> Parser | HarmonyParser:
    if family(name).has_channels:
        return HarmonyParser(tools, splits_thinking=options.get("splits_thinking", True))
    return Parser(family(name), tools, thinking_of(TEMPLATES[name]), **options)


def read(
    text: str, name: str, cuts: list[int], tools: Mapping[str, Any] = TOOLS, **options: bool
) -> tuple[list[Part], list[str]]:
    """The parts, and the pieces of the text that are thinking."""
    reading = parser(name, tools, **options)
    given = [part for start, stop in pairwise([0, *cuts, len(text)]) for part in reading.push(text[start:stop])]
    parts = joined([*given, *reading.finish()])
    return parts, [text[start:stop] for start, stop in reading.thoughts]


def parts_of(text: str, name: str, cuts: list[int], tools: Mapping[str, Any] = TOOLS, **options: bool) -> list[Part]:
    return read(text, name, cuts, tools, **options)[0]


def parts_of_bytes(text: str, name: str, **options: bool) -> list[Part]:
    """The same, cut at every byte, as a model with a token for each byte writes it."""
    reading, decoder = parser(name, TOOLS, **options), codecs.getincrementaldecoder("utf-8")()
    given = [part for byte in text.encode() for part in reading.push(decoder.decode(bytes([byte])))]
    return joined([*given, *reading.finish()])


def text_in(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, AnswerText))


BY_HAND = {"generic", "gemma", "gemma-4", "granite", "harmony", "llama3"}
"""Templates that do not show, or not in a few calls, how they are written."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_how_calls_are_written(name: str) -> None:
    is_by_hand = family(name).name in ("generic", "gemma", "granite", "harmony", "llama3")
    assert is_by_hand == (name in BY_HAND - {"granite"})


def test_the_page_has_every_family_that_is_known_by_hand() -> None:
    page = (Path(__file__).parent.parent / "docs" / "templates.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(.*?)`", page, re.MULTILINE)) == BY_HAND - {"gemma-4"} | (
        {"functionary", "kimi-k3", "lfm2", "minimax-m3", "muse", "phi"}
    )


def test_a_template_that_shows_tools_and_no_calls_is_refused_in_one_sentence() -> None:
    assert family_of("{{ tools }}") == "its chat template does not show how they are written"


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"generic"}))
def test_a_template_shows_earlier_calls_as_the_model_writes_them(name: str) -> None:
    calls = (ToolCall("a", "weather", PARIS), ToolCall("b", "add", SUM))
    template = ChatTemplate(TEMPLATES[name], "", "")
    try:
        assert WRITTEN[name] in template.render([Message("user", "Go."), Message("assistant", "", calls)])
    finally:
        template.close()


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_the_same_plain_and_cut_at_every_character(name: str) -> None:
    text = WRITTEN[name]
    whole = parts_of(text, name, [])
    assert [part for part in whole if isinstance(part, CallEnded)] == CALLS
    assert text_in(whole) == ""
    assert parts_of(text, name, list(range(1, len(text)))) == whole
    for cut in range(1, len(text)):
        assert parts_of(text, name, [cut]) == whole


@pytest.mark.parametrize("name", WRITTEN)
def test_streamed_arguments_are_those_of_the_whole_call(name: str) -> None:
    text = WRITTEN[name]
    grown: list[str] = []
    for part in parts_of(text, name, list(range(1, len(text)))):
        if isinstance(part, CallBegun):
            grown.append("")
        elif isinstance(part, CallArguments):
            grown[-1] += part.text
    assert grown == [PARIS, SUM]


@pytest.mark.parametrize(
    ("text", "begins_thinking", "thoughts", "answer"),
    [
        ('<think>Hm.</think>\n\n{"a": "<think>b</think>"}', False, "Hm.", '{"a": "<think>b</think>"}'),
        ('Hm.</think>["</think> "]', True, "Hm.", '["</think> "]'),
        ('\n{"a": "<think>"}', False, "", '\n{"a": "<think>"}'),
        ("<thin", False, "", "<thin"),
        ("Hm.", True, "Hm.", ""),
    ],
)
def test_where_thinking_comes_first_all_that_follows_is_the_answer(
    text: str, begins_thinking: bool, thoughts: str, answer: str
) -> None:
    for cuts in ([], list(range(1, len(text)))):
        parts = parts_of(text, "hermes", cuts, begins_thinking=begins_thinking, thinks_first=True)
        assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == thoughts
        assert text_in(parts) == answer


def test_arguments_come_before_the_call_is_whole() -> None:
    parts = parser("hermes").push('<tool_call>{"name": "add", "arguments": {"a": 1')
    assert parts == [CallBegun("add"), CallArguments('{"a": 1')]
    assert text_in(Parser(GENERIC, TOOLS, None).push('{"answer": [1')) == '{"answer": [1', "nor is what is no call held"


def test_arguments_before_the_name_and_as_a_string_are_understood() -> None:
    inner = json.dumps(SUM)
    for call in (f'{{"arguments": {SUM}, "name": "add"}}', f'{{"name": "add", "arguments": {inner}}}'):
        parts = parts_of(f"<tool_call>{call}</tool_call>", "hermes", [])
        assert parts == [CallBegun("add"), CallArguments(SUM), CallEnded("add", SUM)]


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"generic", "llama3", "harmony"}))
def test_text_before_and_behind_calls_is_text(name: str) -> None:
    assert parts_of(f"Let me see.\n{WRITTEN[name]}", name, [])[0] == AnswerText("Let me see.")
    parts = parts_of(f"<tool_call>{TWO}</tool_call>\n\nDone.", "hermes", [])
    assert parts[-2:] == [CALLS[1], AnswerText("Done.")]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "launch", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "ad',
        '<tool_call>{"name": "add", "arguments": {"a": nope}}</tool_call> so',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "name": "weather"}',
        "<tool_call> is the mark, <tool_ca",
        '{"answer": [1, 2]} \n',
    ],
)
def test_what_is_no_whole_call_is_text_as_the_model_wrote_it(text: str) -> None:
    parts = parts_of(text, "hermes", [])
    assert text_in(parts) == text
    assert not any(isinstance(part, CallEnded) for part in parts)
    begun = sum(isinstance(part, CallBegun) for part in parts)
    assert sum(isinstance(part, CallBroken) for part in parts) == begun
    assert parts_of(text, "hermes", list(range(1, len(text)))) == parts


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_the_output_ends_inside_of_is_told_with_what_there_is_of_it(name: str) -> None:
    before = "" if name in ("generic", "llama3", "harmony") else "Let me see.\n"
    text = before + WRITTEN[name]
    whole = next(end for end in range(len(text)) if CALLS[0] in parts_of(text[:end], name, []))
    kinds = set()
    for end in range(whole):
        parts = parts_of(text[:end], name, [])
        cut = [part for part in parts if isinstance(part, CallCut)]
        assert len(cut) == sum(isinstance(part, CallBegun) for part in parts)
        assert text_in(parts) + "".join(part.text for part in cut) == text[:end]
        assert PARIS.startswith("".join(part.text for part in parts if isinstance(part, CallArguments)))
        kinds |= {type(part) for part in parts}
        assert parts_of(text[:end], name, list(range(1, end))) == parts
    assert {AnswerText, CallBegun, CallArguments, CallCut} <= kinds | ({AnswerText} if name == "harmony" else set())


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4), st.integers(0, 200), st.booleans())
def test_of_a_cut_object_the_members_that_are_whole_are_found(value: dict[str, Any], end: int, is_spaced: bool) -> None:
    text = json.dumps(value, separators=None if is_spaced else (",", ":"))
    found = json.loads(whole_members(text[:end]))
    assert found == value or end < len(text)
    assert list(found.items()) == list(value.items())[: len(found)]
    first = json.dumps(dict(list(value.items())[:-1]), separators=None if is_spaced else (",", ":"))[:-1]
    assert len(found) >= len(value) - 1 or end <= len(first)


THOUGHT = f"<think>\nUse <tool_call>?\n</think>\n\n<tool_call>{TWO}</tool_call>"


def test_thinking_is_kept_out_of_the_text_and_holds_no_calls() -> None:
    for cuts in ([], list(range(1, len(THOUGHT)))):
        parts, thoughts = read(THOUGHT, "hermes", cuts)
        assert thoughts == ["<think>\nUse <tool_call>?\n</think>"]
        assert parts[0] == Reasoning("\nUse <tool_call>?\n")
        assert parts[-1] == CALLS[1]
        assert text_in(parts) == ""


def test_thinking_that_the_prompt_began_is_thinking() -> None:
    ended = read("hm</think>yes", "hermes", [], begins_thinking=True)
    assert ended == ([Reasoning("hm"), AnswerText("yes")], ["hm</think>"])
    assert read("hm", "hermes", [], begins_thinking=True) == ([Reasoning("hm")], ["hm"])


def test_thinking_that_is_not_asked_for_stays_in_the_text() -> None:
    parts = parts_of(THOUGHT, "hermes", [], splits_thinking=False)
    assert text_in(parts) == "<think>\nUse <tool_call>?\n</think>"
    assert parts[-1] == CALLS[1]


HARMONY = (
    f"<|channel|>analysis<|message|>Which <|channel|> is it?<|end|><|start|>assistant<|channel|>commentary<|message|>"
    f"Moment.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{SUM}"
)


def test_channels_become_thinking_text_and_calls() -> None:
    thought, call = Reasoning("Which <|channel|> is it?"), [CallBegun("add"), CallArguments(SUM), CALLS[1]]
    for cuts in ([], list(range(1, len(HARMONY)))):
        parts, thoughts = read(HARMONY, "harmony", cuts)
        assert parts == [thought, AnswerText("Moment."), *call]
        assert thoughts == ["<|channel|>analysis<|message|>Which <|channel|> is it?<|end|>"]
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert parts_of(answer, "harmony", []) == [Reasoning("Hm."), AnswerText("Yes.")]
    assert text_in(parts_of(answer, "harmony", [], splits_thinking=False)).endswith("Hm.<|end|>Yes.")
    text = "<|channel>thought\nHm.<channel|>Yes."
    for cuts in ([], list(range(1, len(text)))):
        assert parts_of(text, "gemma-4", cuts) == [Reasoning("Hm."), AnswerText("Yes.")], "a label is no thought"


@pytest.mark.parametrize(
    "text",
    [
        "Yes, <|message|> is a mark.",
        "<|channel|>strange header, and no end of it",
        "<|channel|>commentary to=functions.launch<|message|>{}",
        '<|channel|>commentary to=functions.add<|message|>{"a": nope}',
    ],
)
def test_messages_that_are_none_are_text_as_the_model_wrote_them(text: str) -> None:
    for cuts in ([], list(range(1, len(text)))):
        parts = parts_of(text, "harmony", cuts)
        assert text_in(parts) == text
        assert not any(isinstance(part, CallEnded) for part in parts)


def test_arguments_nested_beyond_any_bound_are_text() -> None:
    text = "<start_function_call>call:add{a:" + "[" * 5_000
    parts = parts_of(text, "gemma", [])
    assert text_in(parts) == text
    assert not any(isinstance(part, CallEnded) for part in parts)


VALUES: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
        "number": {"type": "number"},
    }
}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "7", "7"),
        ("text", ' "a"\\\n<b>\n', ' "a"\\\n<b>\n'),
        ("text", "", ""),
        ("maybe", "7", 7),
        ("maybe", "null", None),
        ("maybe", "7.5", "7.5"),
        ("maybe", "seven", "seven"),
        ("number", " 1e3 ", 1000.0),
    ],
)
def test_a_value_without_quotes_is_what_its_schema_makes_of_it(key: str, written: str, value: object) -> None:
    forms = {
        "qwen3-coder": (
            f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
        ),
        "glm-4": f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
    }
    for name, text in forms.items():
        for cuts in ([], list(range(1, len(text)))):
            last = parts_of(text, name, cuts, tools={"f": VALUES})[-1]
            assert isinstance(last, CallEnded)
            assert json.loads(last.arguments) == {key: value}


def test_a_call_s_own_identifier_is_skipped() -> None:
    found = family_of(TEMPLATES["mistral-args"].replace("[ARGS]", "[CALL_ID]{{ c.id }}[ARGS]"))
    assert isinstance(found, Family)
    parts = Parser(found, TOOLS, None).push(f"[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{SUM}")
    assert parts[-1] == CALLS[1]


SOUP_WORDS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>", "<|/tool_call|>"),
    *("<think>", "</think>", ONE, TWO, "[", "]", "{", "}", ",", ";", " ", "\n", '"', "\\", ":", "é", "<", "x"),
    *('{"name": ', '"add"', '"arguments": ', '{"answer": 1}'),
    *("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>", "```", "[ARGS]", "add"),
    *("<start_function_call>", "call:add{", "<escape>", "<end_function_call>", "a:1", "<function=add>", "</function>"),
    *("<parameter=a>", "</parameter>", "add<arg_key>a</arg_key><arg_value>", "</arg_value>", "<|channel|>analysis"),
    *("<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>commentary to=functions.add", *WRITTEN.values()),
]
SOUP = st.lists(st.sampled_from(SOUP_WORDS), max_size=12).map("".join)


@pytest.mark.parametrize("kind", ["object", ["object", "string"]])
def test_a_mark_inside_a_json_string_does_not_end_the_value(kind: str | list[str]) -> None:
    value = {"</parameter>": ["\\", '"</parameter>\n</function>']}
    tools = {"f": {"properties": {"a": {"type": kind}}}}
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{json.dumps(value)}\n</parameter>\n</function>\n</tool_call>"
    (call,) = [part for part in parts_of(text, "qwen3-coder", [], tools) if isinstance(part, CallEnded)]
    assert json.loads(call.arguments) == {"a": value}


@given(SOUP, st.sampled_from(sorted(TEMPLATES)), st.booleans(), st.data())
def test_parts_do_not_depend_on_where_the_text_is_cut(text: str, name: str, splits: bool, data: st.DataObject) -> None:
    whole = read(text, name, [], splits_thinking=splits)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    assert read(text, name, cuts, splits_thinking=splits) == whole
    assert read(text, name, list(range(1, len(text))), splits_thinking=splits) == whole
    assert parts_of_bytes(text, name, splits_thinking=splits) == whole[0]


@given(SOUP, st.sampled_from(sorted(set(TEMPLATES) - {"harmony"})), st.booleans())
def test_no_text_is_lost_where_no_call_can_be_whole(text: str, name: str, is_cut: bool) -> None:
    cuts = list(range(1, len(text))) if is_cut else []
    assert text_in(parts_of(text, name, cuts, tools={}, splits_thinking=False)) == text

"""What each family's models write becomes text, thinking and calls, however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma.chat.families import GENERIC, Family, family_of, thinking_of
from uma.chat.parser import Parser, joined
from uma.chat.parts import CallArguments, CallBegun, CallBroken, CallEnded, Part, Reasoning, Text

TOOLS = ("weather", "add")
TEMPLATES = {
    "hermes": "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call> … </tool_call> <think></think>",
    "mistral": "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS] [TOOL_CALLS] …",
    "llama3": "{{ tools }} {% if role == 'ipython' %}<|python_tag|>{% endif %}",
    "granite": "{{ tools | tojson }} write <|tool_call|> and then a list",
    "phi": "<|tool|>{{ tools }}<|/tool|> <|tool_call|> … <|/tool_call|>",
    "generic": "{% for message in messages %}{{ message.content }}{% endfor %}",
}
PARIS, SUM = '{"city": "Paris", "note": "a \\"b\\" }"}', '{"a": 1, "b": [2, {"c": null}]}'
ONE = '{"name": "weather", "arguments": ' + PARIS + "}"
TWO = '{"name": "add", "arguments": ' + SUM + " }"
CALLS = [CallEnded("weather", PARIS), CallEnded("add", SUM)]


def family(name: str) -> Family:
    found = family_of(TEMPLATES[name])
    assert isinstance(found, Family)
    return found


def parts_of(text: str, name: str, cuts: list[int], names: tuple[str, ...] = TOOLS, **options: bool) -> list[Part]:
    parser = Parser(family(name), names, thinking_of(TEMPLATES[name]), **options)
    given = [part for start, stop in pairwise([0, *cuts, len(text)]) for part in parser.push(text[start:stop])]
    return joined([*given, *parser.finish()])


def text_in(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


WRITTEN = {
    "hermes": f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>",
    "mistral": f"[TOOL_CALLS][{ONE}, {TWO}]",
    "llama3": f"{ONE.replace('arguments', 'parameters')}; {TWO}",
    "granite": f"<|tool_call|>[{ONE},{TWO}]",
    "phi": f"<|tool_call|>[{ONE}, {TWO}]<|/tool_call|>",
    "generic": f"{ONE}\n{TWO}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_recognised(name: str) -> None:
    assert family(name).name == name


@pytest.mark.parametrize(
    "form", ["<|channel|>", "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<tool_call><function=x>", "{{ tools }}"]
)
def test_a_form_that_cannot_be_parsed_is_named(form: str) -> None:
    assert isinstance(family_of(form), str)


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_the_same_plain_and_cut_at_every_character(name: str) -> None:
    text = WRITTEN[name]
    whole = parts_of(text, name, [])
    assert [part for part in whole if isinstance(part, CallEnded)] == CALLS
    assert text_in(whole) == ("Let me see." if name == "hermes" else "")
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


def test_arguments_come_before_the_call_is_whole() -> None:
    parser = Parser(family("hermes"), TOOLS, None)
    parts = parser.push('<tool_call>{"name": "add", "arguments": {"a": 1')
    assert parts == [CallBegun("add"), CallArguments('{"a": 1')]


def test_arguments_before_the_name_and_as_a_string_are_understood() -> None:
    inner = json.dumps(SUM)
    for call in (f'{{"arguments": {SUM}, "name": "add"}}', f'{{"name": "add", "arguments": {inner}}}'):
        parts = parts_of(f"<tool_call>{call}</tool_call>", "hermes", [])
        assert parts == [CallBegun("add"), CallArguments(SUM), CallEnded("add", SUM)]


def test_text_behind_calls_is_text() -> None:
    parts = parts_of(f"<tool_call>{TWO}</tool_call>\n\nDone.", "hermes", [])
    assert parts[-2:] == [CALLS[1], Text("Done.")]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "launch", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1',
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


def test_json_that_is_no_call_is_not_held_back_to_its_end() -> None:
    assert text_in(Parser(GENERIC, TOOLS, None).push('{"answer": [1')) == '{"answer": [1'


THOUGHT = f"<think>\nUse <tool_call>?\n</think>\n\n<tool_call>{TWO}</tool_call>"


def test_thinking_is_kept_out_of_the_text_and_holds_no_calls() -> None:
    for cuts in ([], list(range(1, len(THOUGHT)))):
        parts = parts_of(THOUGHT, "hermes", cuts)
        assert parts[0] == Reasoning("\nUse <tool_call>?\n")
        assert parts[-1] == CALLS[1]
        assert text_in(parts) == ""


def test_thinking_that_the_prompt_began_is_thinking() -> None:
    assert parts_of("hm</think>yes", "hermes", [], begins_thinking=True) == [Reasoning("hm"), Text("yes")]
    assert parts_of("hm", "hermes", [], begins_thinking=True) == [Reasoning("hm")]


def test_thinking_that_is_not_asked_for_stays_in_the_text() -> None:
    parts = parts_of(THOUGHT, "hermes", [], splits_thinking=False)
    assert text_in(parts) == "<think>\nUse <tool_call>?\n</think>"
    assert parts[-1] == CALLS[1]


SOUP_WORDS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>", "<|/tool_call|>"),
    *("<think>", "</think>", ONE, TWO, "[", "]", "{", "}", ",", ";", " ", "\n", '"', "\\", ":", "é", "<", "x"),
    *('{"name": ', '"add"', '"arguments": ', '{"answer": 1}'),
]
SOUP = st.lists(st.sampled_from(SOUP_WORDS), max_size=12).map("".join)


@given(SOUP, st.sampled_from(sorted(TEMPLATES)), st.booleans(), st.data())
def test_parts_do_not_depend_on_where_the_text_is_cut(text: str, name: str, splits: bool, data: st.DataObject) -> None:
    whole = parts_of(text, name, [], splits_thinking=splits)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    assert parts_of(text, name, cuts, splits_thinking=splits) == whole
    assert parts_of(text, name, list(range(1, len(text))), splits_thinking=splits) == whole


@given(SOUP, st.sampled_from(sorted(TEMPLATES)), st.booleans())
def test_no_text_is_lost_where_no_call_can_be_whole(text: str, name: str, is_cut: bool) -> None:
    cuts = list(range(1, len(text))) if is_cut else []
    assert text_in(parts_of(text, name, cuts, names=(), splits_thinking=False)) == text

"""Whatever a model draws under the grammar of its tools, each call that is parsed has arguments that validate."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, cast

import attrs
import chat_templates
import jsonschema
import numpy as np
import pytest
from chat_templates import TEMPLATES, WRITTEN, family_of
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import CHECKER
from test_chat_parser import SOUP_WORDS

from models import write_model
from uma.chat.families import Family, Thinking, by_hand, thinking_of
from uma.chat.forms import COUNT, KIND, BracesForm, ElementsForm, NamedForm, PairsForm
from uma.chat.grammar import calls_grammar
from uma.chat.harmony import HarmonyParser
from uma.chat.lark import LarkRules, Specials
from uma.chat.parser import Parser
from uma.chat.parts import AnswerText, CallBroken, CallEnded, Part
from uma.chat.schema import UnservableError, kinds_of, schema_of
from uma.chat.thought import thought_first
from uma.llama.grammar import GrammarCompiler, GrammarMasks, GrammarState
from uma.llama.model import Model
from uma.llama.vocab import Vocab
from uma.types import Grammar, Tool

PLACE = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}
SUM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NOTE = {
    "$defs": {"word": {"type": "string", "pattern": "^[a-z]{1,3}$"}},
    "type": "object",
    "properties": {
        "about": {"$ref": "#/$defs/word"},
        "text": {"type": "string", "maxLength": 5},
        "due": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}, {"type": "integer"}]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 2},
        "more": {"type": "object", "properties": {"x": {"enum": ["a", "b c"]}, "y": {"type": "number"}}},
    },
    "additionalProperties": False,
}
TOOLS = (
    Tool("weather", "", {**PLACE, "additionalProperties": False}),
    Tool("add", "", SUM),
    Tool("now"),
    Tool("note", "", NOTE),
)
SCHEMAS = {tool.name: schema_of(tool) for tool in TOOLS}
THINKING = Thinking("<think>", "</think>")
FAMILIES = {name: family for name, text in TEMPLATES.items() if isinstance(family := family_of(text), Family)}
TOKENS = Family("tokens", open="<|im_start|>", close="<shown>", lead="\n", trail="\n")
"""Marks that are a control token and a user-defined one of the tiny models' vocabulary."""
FAMILIES |= {
    "tokens": TOKENS,
    "tokens-inside": attrs.evolve(TOKENS, open="<x<|im_start|>call>", close="</x<shown>call>"),
    "tokens-named": Family("named", open="<|im_start|>", form=NamedForm("", "<shown>")),
    "tokens-braces": attrs.evolve(TOKENS, form=BracesForm("<shown>"), close="<|im_end|>", ends_answer=True),
    "tokens-pairs": attrs.evolve(TOKENS, form=PairsForm("", "\n", "k=", ":", "<shown>", "", "\n", "end"), close=""),
    "tokens-elements": attrs.evolve(
        TOKENS, form=ElementsForm("<shown>", '<shown><i "', '">', "<shown></i>"), close="", is_block=True
    ),
    "tokens-silent": Family(
        "silent",
        open="<|im_start|>tools<shown>",
        close="<|im_start|>/tools<shown>",
        form=PairsForm(
            "<|im_start|>c ",
            f"#{COUNT}<shown>",
            "<|im_start|>k ",
            f" {KIND}<shown>",
            "<|im_start|>/k<shown>",
            "",
            "",
            "end",
        ),
        is_block=True,
        silent=("<|im_start|>said<shown>",),
    ),
    "tokens-header": attrs.evolve(TOKENS, open="<c>", close="</c>", silent=(" to={}<shown>", "<|im_start|>")),
    "tokens-answer": cast(Family, by_hand(">>>all")),
    **{mark: cast(Family, by_hand(mark)) for mark in ("<atem:function_calls>", "<|end_of_msg|>", "]<]minimax[>[")},
}
MOST = 120
"""Words and tokens of one output."""


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    with Model.load(write_model(tmp_path_factory.mktemp("chat") / "tiny.gguf"), vocab_only=True) as model:
        yield model.vocab


def specials_of(vocab: Vocab, family: Family) -> Specials:
    ids = {id for text in family.texts for id in vocab.tokenize(text, add_special=False, parse_special=True).tolist()}
    marks = {vocab.text_of(id): id for id in ids & set(vocab.special_ids)}
    return Specials(marks, sorted(set(vocab.special_ids) - set(marks.values()) - vocab.eog))


def state_of(compiler: GrammarCompiler, vocab: Vocab, family: Family, **how: bool) -> GrammarState:
    flags: dict[str, Any] = {"must_call": False, "is_parallel": True, "begins_thinking": False, **how}
    return compiler.compile(Grammar(lark=calls_grammar(family, TOOLS, specials_of(vocab, family), THINKING, **flags)))


class Walk:
    """An output, in part of words that calls consist of, wherever the grammar allows them, in part of any tokens."""

    def __init__(self, vocab: Vocab, masks: GrammarMasks, state: GrammarState, random: Random) -> None:
        self.tokens: list[int] = []
        self._vocab, self._masks, self._state, self._random = vocab, masks, state, random

    def run(self) -> None:
        self.tokens += self._state.force()
        for _ in range(MOST):
            if self._state.is_over or not self._step():
                return

    def _step(self) -> bool:
        word = self._vocab.tokenize(self._random.choice(SOUP_WORDS), add_special=False, parse_special=False).tolist()
        if self._random.random() < 0.5:
            count = self._state.matcher.validate_tokens(word)
            for token in word[:count]:
                self._state.accept(token)
            self.tokens += word[:count]
            if count or self._state.is_over:
                return True
        self._masks.begin([self._state])
        (row,) = self._masks.wait()
        token = int(self._random.choice(np.flatnonzero(row == 0)))
        if token in self._vocab.eog:
            return False
        self._state.accept(token)
        self.tokens += [token, *self._state.force()]
        return True


def parsed(
    vocab: Vocab, family: Family, tokens: list[int], schemas: Mapping[str, Any] = SCHEMAS, **how: bool
) -> list[Part]:
    plain = Parser(family, schemas, THINKING, **how)
    parser = HarmonyParser(schemas) if family.has_channels else plain
    spelled = {token: mark for mark, token in specials_of(vocab, family).marks.items()}
    text = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = (text.decode(vocab.piece(token)) or spelled.get(token, "") for token in tokens)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return [*parts, *parser.finish()]


@pytest.mark.parametrize("name", sorted(FAMILIES))
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), must_call=st.booleans(), is_parallel=st.booleans(), begins=st.booleans())
def test_every_call_that_is_parsed_validates(
    vocab: Vocab,
    compiler: GrammarCompiler,
    masks: GrammarMasks,
    name: str,
    seed: int,
    must_call: bool,
    is_parallel: bool,
    begins: bool,
) -> None:
    family = FAMILIES[name]
    state = state_of(compiler, vocab, family, must_call=must_call, is_parallel=is_parallel, begins_thinking=begins)
    walk = Walk(vocab, masks, state, Random(seed))
    walk.run()
    parts = parsed(vocab, family, walk.tokens, begins_thinking=begins)
    calls = [part for part in parts if isinstance(part, CallEnded)]
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert not any(isinstance(part, CallBroken) for part in parts)
    assert is_parallel or len(calls) <= 1
    if must_call and state.is_over:
        assert calls
        assert not "".join(part.text for part in parts if isinstance(part, AnswerText)).strip()


@pytest.mark.parametrize("name", sorted(name for name in FAMILIES if not name.startswith("tokens")))
def test_text_that_is_no_call_is_written_as_without_tools(vocab: Vocab, compiler: GrammarCompiler, name: str) -> None:
    texts = [
        "Hello <b>\n",
        '{"name": "Bob", "age": 4}',
        '{"city": [1]}',
        "[1, 2]",
        "<think>hm</think>\n\n{}",
        "<tool_ca",
    ]
    header = "<|channel|>final<|message|>" if FAMILIES[name].has_channels else ""
    for text in (header + each for each in texts):
        state = state_of(compiler, vocab, FAMILIES[name])
        tokens = vocab.tokenize(text, add_special=False, parse_special=False).tolist()
        assert state.matcher.validate_tokens(tokens) == len(tokens), text
        state.matcher.consume_tokens(tokens)
        assert state.matcher.is_accepting(), text


def test_a_mark_with_a_token_in_its_midst_can_follow_text(vocab: Vocab, compiler: GrammarCompiler) -> None:
    family = FAMILIES["tokens-inside"]
    text = 'I look <x<|im_start|>call>\n{"name": "now", "arguments": {}}\n</x<shown>call>'
    tokens = vocab.tokenize(text, add_special=False, parse_special=True).tolist()
    assert set(specials_of(vocab, family).marks.values()) <= set(tokens)
    state = state_of(compiler, vocab, family)
    assert state.matcher.validate_tokens(tokens) == len(tokens)
    parts = parsed(vocab, family, tokens)
    assert "".join(part.text for part in parts if isinstance(part, AnswerText)) == "I look"
    assert [part.name for part in parts if isinstance(part, CallEnded)] == ["now"]


def test_whatever_a_tool_is_called_its_grammar_compiles(vocab: Vocab, compiler: GrammarCompiler) -> None:
    tool = Tool('a/b "c\\d" é[x]', "", SUM)
    for family in FAMILIES.values():
        for must_call in (False, True):
            source = calls_grammar(
                family,
                [tool],
                specials_of(vocab, family),
                None,
                must_call=must_call,
                is_parallel=True,
                begins_thinking=False,
            )
            compiler.compile(Grammar(lark=source))


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"generic", "harmony"}))
def test_calls_can_be_written_as_templates_show_them(vocab: Vocab, compiler: GrammarCompiler, name: str) -> None:
    tools = [Tool(each, "", schema) for each, schema in chat_templates.TOOLS.items()]
    for must_call in (False, True):
        source = calls_grammar(
            FAMILIES[name],
            tools,
            specials_of(vocab, FAMILIES[name]),
            None,
            must_call=must_call,
            is_parallel=True,
            begins_thinking=False,
        )
        tokens = vocab.tokenize(WRITTEN[name], add_special=False, parse_special=False).tolist()
        matcher = compiler.compile(Grammar(lark=source)).matcher
        assert matcher.validate_tokens(tokens) == len(tokens)
        matcher.consume_tokens(tokens)
        assert matcher.is_accepting()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(json_schema={"const": "ab1"}),
        Grammar(regex='"ab[0-9]"'),
        Grammar(choice=['"ab1"', "x"]),
        Grammar(lark='start: "\\"ab" /[0-9]/ "\\""\n%ignore " "'),
        Grammar(gbnf='root ::= "\\"ab" [0-9] "\\""'),
    ],
    ids=["json_schema", "regex", "choice", "lark", "gbnf"],
)
@pytest.mark.parametrize(
    ("open_", "close", "before", "begins_thinking"),
    [
        ("<think>", "</think>", "<think>Is it </tool_call>?</think>\n\n", False),
        ("<think>", "</think>", "", False),
        ("<think>", "</think>", "Is it <think>?</think>", True),
        ("<|im_start|>", "<shown>", "<|im_start|>Hm.<shown>\n", False),
        ("<|im_start|>", "<shown>", "Hm.<shown>", True),
    ],
)
def test_a_grammar_of_any_kind_holds_behind_the_thinking(
    vocab: Vocab,
    compiler: GrammarCompiler,
    grammar: Grammar,
    open_: str,
    close: str,
    before: str,
    begins_thinking: bool,
) -> None:
    marks = {each: vocab.tokenize(each, add_special=False, parse_special=True).tolist() for each in (open_, close)}
    specials = Specials({mark: found[0] for mark, found in marks.items() if len(found) == 1}, [])
    source = thought_first(
        LarkRules(specials), Thinking(open_, close), begins_thinking=begins_thinking, has_channels=False
    )
    for text, is_right in (('"ab1"', True), ('"ab', False), ("Hello", False)):
        matcher = compiler.compile(grammar, source).matcher
        tokens = vocab.tokenize(before + text, add_special=False, parse_special=True).tolist()
        allowed = matcher.validate_tokens(tokens)
        assert (allowed == len(tokens)) == (text != "Hello"), text
        matcher.consume_tokens(tokens[:allowed])
        assert matcher.is_accepting() == is_right, text


def test_a_grammar_holds_in_the_final_channel(vocab: Vocab, compiler: GrammarCompiler) -> None:
    family = FAMILIES["harmony"]
    thinking = thinking_of(TEMPLATES["harmony"])
    assert thinking is not None
    source = thought_first(LarkRules(specials_of(vocab, family)), thinking, begins_thinking=False, has_channels=True)
    thought, final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "<|channel|>final<|message|>"
    for before in (final, thought + final):
        matcher = compiler.compile(Grammar(json_schema={"const": [1]}), source).matcher
        tokens = vocab.tokenize(f"{before}[1]", add_special=False, parse_special=False).tolist()
        assert matcher.validate_tokens(tokens) == len(tokens)
        assert matcher.consume_tokens(tokens)
        assert matcher.is_accepting()
        (parts,) = [HarmonyParser({}, ends_with_answer=True).push(f"{before}[1]<|end|>")]
        assert "".join(part.text for part in parts if isinstance(part, AnswerText)) == "[1]<|end|>"


HARD: dict[str, Any] = {
    "string or null": {"type": ["string", "null"], "maxLength": 2},
    "string or object": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "object"}]},
    "enum": {"enum": ["a", "b c", "</x>"]},
    "oneOf of constants": {"oneOf": [{"const": "yes"}, {"const": "no"}]},
    "pattern": {"type": "string", "pattern": r"^(\d{2}|x)$|^\w[^|$]$"},
    "format": {"type": "string", "format": "date-time"},
    "allOf": {"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^[ab]*$", "maxLength": 3}]},
    "range": {"type": "integer", "minimum": 5, "maximum": 30},
    "list": {"type": "array", "items": {"type": "string", "enum": ["q", "r"]}, "minItems": 1, "maxItems": 3},
    "object": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"]},
    "dictionary": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
}


@pytest.mark.parametrize("name", ["qwen3-coder", "glm-4", "gemma", "tokens-braces", "tokens-pairs"])
@pytest.mark.parametrize("feature", HARD)
def test_arguments_without_quotes_keep_to_their_schema(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, name: str, feature: str
) -> None:
    family = FAMILIES[name]
    root: dict[str, Any] = {"type": "object", "properties": {"v": HARD[feature]}, "required": ["v"]}
    tool = Tool("f", "", root)
    source = calls_grammar(
        family, [tool], specials_of(vocab, family), None, must_call=True, is_parallel=False, begins_thinking=False
    )
    done = 0
    for seed in range(12):
        walk = Walk(vocab, masks, compiler.compile(Grammar(lark=source)), Random(seed))
        walk.run()
        calls = [
            part for part in parsed(vocab, family, walk.tokens, schemas={"f": root}) if isinstance(part, CallEnded)
        ]
        for call in calls:
            jsonschema.Draft202012Validator(root, format_checker=CHECKER).validate(json.loads(call.arguments))
        done += len(calls)
    assert done


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"v": {"type": "string", "not": {"const": "a"}}}}, ".properties.v.not"),
        ({"properties": {"v": {"type": "string", "pattern": "a(^b)"}}}, ".properties.v.pattern"),
        ({"properties": {"v": {"type": "string", "format": "idn-email"}}}, ".properties.v.format"),
        ({"properties": {"v": {"$ref": "#/$defs/none"}}}, ".properties.v.$ref"),
        ({"properties": {"a>b": {}}}, ".properties.a>b"),
        ({"properties": {"v": {"type": ["string", "integer"], "minimum": 3}}}, ".properties.v.minimum"),
        ({"properties": {"v": {"oneOf": [{"type": "string"}, {"type": "string"}]}}}, ".properties.v.oneOf"),
        ({"minProperties": 1}, ".minProperties"),
        ({"properties": {"v": {"type": 5}}}, ".properties.v.type"),
        ({"properties": {"v": {"anyOf": {}}}}, ".properties.v.anyOf"),
        ({"properties": {"v": {"allOf": [{"anyOf": [{"pattern": "a"}] * 9}] * 9}}}, ".properties.v"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_such_arguments_cannot_keep_to_is_refused_with_its_place(
    vocab: Vocab, schema: dict[str, Any], place: str
) -> None:
    family = FAMILIES["qwen3-coder"]
    with pytest.raises(UnservableError) as caught:
        calls_grammar(
            family,
            [Tool("ok"), Tool("f", "", schema)],
            specials_of(vocab, family),
            None,
            must_call=True,
            is_parallel=False,
            begins_thinking=False,
        )
    assert (caught.value.place, caught.value.tool) == (place, 1)


JSON_CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": null, %s}}\n</tool_call>',
    "mistral-args": '[TOOL_CALLS]f[ARGS]{"a": null, %s}',
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": null, %s}',
}


@pytest.mark.parametrize("name", JSON_CALLS)
def test_arguments_in_json_have_each_name_spelled_in_one_way(
    vocab: Vocab, compiler: GrammarCompiler, name: str
) -> None:
    def source(schema: dict[str, Any]) -> str:
        family, tools = FAMILIES[name], [Tool("ok"), Tool("f", "", schema)]
        flags: dict[str, Any] = {"must_call": True, "is_parallel": False, "begins_thinking": False}
        return calls_grammar(family, tools, specials_of(vocab, family), None, **flags)

    matcher = compiler.compile(Grammar(lark=source({"properties": {"a": {"type": "null"}}, "required": ["a"]}))).matcher
    for member, is_served in (('"b": 1', True), (r'"\u0061": 1', False)):
        text = JSON_CALLS[name] % member
        tokens = vocab.tokenize(text, add_special=False, parse_special=False).tolist()
        assert (matcher.validate_tokens(tokens) == len(tokens)) == is_served, text
    for schema, place in (
        ({"properties": {"x": {"minProperties": 2}}}, ".properties.x.minProperties"),
        ({"x-guidance": {"lenient": True}}, '["x-guidance"].lenient'),
    ):
        with pytest.raises(UnservableError) as caught:
            source(schema)
        assert (caught.value.place, caught.value.tool) == (place, 1)


def test_references_that_multiply_are_refused_before_they_are_followed() -> None:
    words: dict[str, Any] = {"0": {"type": "string"}}
    words |= {str(at): {"anyOf": [{"$ref": f"#/$defs/{at - 1}"}] * 8} for at in range(1, 15)}
    with pytest.raises(UnservableError, match="too many alternatives"):
        kinds_of({"$ref": "#/$defs/14"}, {"$defs": words})


STRINGS = {f"{at:x}": {"type": "string"} for at in range(500)}
MANY_WAYS = {"anyOf": [{"type": "string", "maxLength": most} for most in range(1, 61)]}


@pytest.mark.parametrize(
    ("name", "schemas", "place"),
    [
        (
            "qwen3-coder",
            [{"$defs": {"a": MANY_WAYS}, "properties": {f"p{at}": {"$ref": "#/$defs/a"} for at in range(500)}}],
            ".properties.p",
        ),
        (
            "qwen3-coder",
            [
                {
                    "$defs": {"much": {"description": "x" * 20_000}},
                    "properties": {f"p{at}": {"type": "integer"} for at in range(100)},
                }
            ],
            ".properties.p25",
        ),
        ("gemma", [{"properties": {f"o{at}": {"properties": STRINGS} for at in range(5)}}] * 2, ".properties.o"),
        ("hermes", [{"description": "x" * 60_000}] * 9, ""),
    ],
)
def test_rules_that_would_take_long_to_compile_are_refused_where_they_become_too_long(
    vocab: Vocab, name: str, schemas: list[dict[str, Any]], place: str
) -> None:
    family = FAMILIES[name]
    tools = [Tool(f"f{at}", "", schema) for at, schema in enumerate(schemas)]
    with pytest.raises(UnservableError, match=r"up to here the rules of the tools have more than 524,288") as caught:
        calls_grammar(
            family,
            tools,
            specials_of(vocab, family),
            None,
            must_call=False,
            is_parallel=True,
            begins_thinking=False,
        )
    assert caught.value.place.startswith(place)
    assert caught.value.tool == len(tools) - 1

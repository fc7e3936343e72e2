"""Whatever a model draws under the grammar of its tools, each call that is parsed has arguments that validate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_chat_parser import SOUP_WORDS, TEMPLATES

from models import write_model
from uma.chat.families import Family, Thinking, family_of
from uma.chat.grammar import Specials, calls_grammar, schema_of
from uma.chat.parser import Parser
from uma.chat.parts import CallBroken, CallEnded, Part, Text
from uma.llama.grammar import GrammarCompiler, GrammarMasks, GrammarState
from uma.llama.model import Model
from uma.llama.vocab import Vocab
from uma.types import Grammar, Tool

PLACE = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}
SUM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = (Tool("weather", "", {**PLACE, "additionalProperties": False}), Tool("add", "", SUM), Tool("now"))
SCHEMAS = {tool.name: schema_of(tool) for tool in TOOLS}
THINKING = Thinking("<think>", "</think>")
FAMILIES = {name: family for name, text in TEMPLATES.items() if isinstance(family := family_of(text), Family)}
FAMILIES["tokens"] = Family("tokens", open="<|im_start|>", close="<shown>", lead="\n", trail="\n")
"""Marks that are a control token and a user-defined one of the tiny models' vocabulary."""
MOST = 120
"""Words and tokens of one output."""


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    with Model.load(write_model(tmp_path_factory.mktemp("chat") / "tiny.gguf"), vocab_only=True) as model:
        yield model.vocab


@pytest.fixture(scope="module")
def compiler(vocab: Vocab) -> GrammarCompiler:
    return GrammarCompiler(vocab)


@pytest.fixture(scope="module")
def masks(vocab: Vocab) -> Iterator[GrammarMasks]:
    made = GrammarMasks(vocab.n_tokens)
    yield made
    made.close()


def specials_of(vocab: Vocab, family: Family) -> Specials:
    marks = {}
    for mark in filter(None, (family.open, family.close)):
        ids = vocab.tokenize(mark, add_special=False, parse_special=True).tolist()
        if len(ids) == 1:
            marks[mark] = ids[0]
    return Specials(marks, sorted(set(vocab.special_ids) - set(marks.values()) - vocab.eog))


def state_of(compiler: GrammarCompiler, vocab: Vocab, family: Family, **how: bool) -> GrammarState:
    flags = {"must_call": False, "is_parallel": True, "begins_thinking": False, **how}
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


def parsed(vocab: Vocab, family: Family, tokens: list[int], **how: bool) -> list[Part]:
    parser = Parser(family, SCHEMAS.keys(), THINKING, **how)
    spelled = {token: mark for mark, token in specials_of(vocab, family).marks.items()}
    parts = [
        part for token in tokens for part in parser.push(vocab.piece(token).decode("latin-1") or spelled.get(token, ""))
    ]
    return [*parts, *parser.finish()]


@pytest.mark.parametrize("name", sorted(FAMILIES))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        jsonschema.validate(json.loads(call.arguments.encode("latin-1")), SCHEMAS[call.name])
    assert all(part.reason == "the output ended inside it" for part in parts if isinstance(part, CallBroken))
    assert is_parallel or len(calls) <= 1
    if must_call and state.is_over:
        assert calls
        assert not "".join(part.text for part in parts if isinstance(part, Text)).strip()


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"tokens"}))
def test_text_that_is_no_call_is_written_as_without_tools(vocab: Vocab, compiler: GrammarCompiler, name: str) -> None:
    texts = [
        "Hello <b>\n",
        '{"name": "Bob", "age": 4}',
        '{"city": [1]}',
        "[1, 2]",
        "<think>hm</think>\n\n{}",
        "<tool_ca",
    ]
    for text in texts:
        state = state_of(compiler, vocab, FAMILIES[name])
        tokens = vocab.tokenize(text, add_special=False, parse_special=False).tolist()
        assert state.matcher.validate_tokens(tokens) == len(tokens), text
        state.matcher.consume_tokens(tokens)
        assert state.matcher.is_accepting(), text


def test_a_tool_s_name_is_taken_literally(vocab: Vocab, compiler: GrammarCompiler) -> None:
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

"""Grammars on llama.cpp's vocabularies: text that is forced comes byte for byte, whatever a vocabulary's tokens are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import attrs
import jsonschema
import pytest
from chat_templates import TEMPLATES, family_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLInterpreter, LLMatcher, LLTokenizer
from reference import template, template_names, vocabulary, vocabulary_names
from test_chat_grammar import parsed, specials_of
from test_llama_grammar import allowed

from uma.chat.families import Family
from uma.chat.grammar import calls_grammar
from uma.chat.parts import CallEnded
from uma.chat.schema import schema_of
from uma.json_schema import COMPACT, for_llguidance
from uma.llama import grammar as module
from uma.llama.grammar import GrammarCompiler, GrammarMasks, GrammarState
from uma.llama.model import Model
from uma.llama.vocab import Vocab
from uma.types import Grammar, Tool

OF_EMBEDDERS = ("bert-bge", "nomic-bert-moe")
"""Vocabularies of models that write no text: no token of theirs is a line break."""
CLOSED = {"type": "object", "additionalProperties": False}
CITY, DAYS = {"enum": ["Bern", " Oslo\n"]}, {"enum": [1, 20]}
ALWAYS = ("falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "qwen2")
"""Vocabularies of each kind: SentencePiece, byte pairs by four pre-tokenizers, one that lacks bytes, one of 260,000
tokens. All others are the long variant."""
TOOLS = (
    Tool("weather", "", {**CLOSED, "properties": {"city": CITY, "days": DAYS}, "required": ["city"]}),
    Tool("now"),
    Tool("mark", "", {**CLOSED, "properties": {"at": {**CLOSED, "properties": {"city": CITY}}}}),
)
"""Whose calls are forced for the most part: so each string of a form of calls is."""
SCHEMAS = {tool.name: schema_of(tool) for tool in TOOLS}
LONGEST = 1_000
"""Maximum tokens of one text here."""
RELAXED = settings(max_examples=8)


VOCABULARIES = [
    pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow)
    for name in vocabulary_names()
    if name not in OF_EMBEDDERS
]


@pytest.fixture(scope="module", params=VOCABULARIES)
def vocab(request: pytest.FixtureRequest) -> Iterator[Vocab]:
    with Model.load(vocabulary(request.param), vocab_only=True) as model:
        yield model.vocab


def written(
    vocab: Vocab, masks: GrammarMasks, state: GrammarState, random: Random, *, forces: bool = True, halves: bool = False
) -> list[int]:
    """A text's tokens, each drawn from what is allowed; with `halves` from the shortest of these."""
    tokens = state.force() if forces else []
    while not state.is_over and len(tokens) < LONGEST:
        choices = allowed(masks, state)
        if halves:
            least = min(len(vocab.piece(token)) for token in choices)
            choices = [token for token in choices if len(vocab.piece(token)) == least]
        token = random.choice(choices)
        if token in vocab.eog:
            break
        state.accept(token)
        tokens.append(token)
        if forces and not state.is_over:
            tokens += state.force()
    return tokens


def text_of(vocab: Vocab, tokens: list[int]) -> str:
    return b"".join(map(vocab.piece, tokens)).decode()


@cache
def spellable(vocab: Vocab) -> set[int]:
    """The bytes that the vocabulary has tokens for; Falcon's has none for some control characters."""
    return {piece[0] for token in range(vocab.n_tokens) if len(piece := vocab.piece(token)) == 1}


white_space = st.text(st.sampled_from(" \n\r\t\v\f\u00a0\u3000"), max_size=6)
any_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
texts = st.builds("".join, st.tuples(white_space, any_text, white_space, any_text)).filter(bool)


@RELAXED
@given(text=texts, before=st.sampled_from(["", "[a-z]", "[0-9]{2}", "[ \n]", "[éèê]"]), forces=st.booleans())
def test_forced_text_comes_byte_for_byte(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, text: str, before: str, forces: bool
) -> None:
    """At a text's beginning and behind a token that was drawn; also where each token is drawn, for its probability."""
    text = "".join(char for char in text if set(char.encode()) <= spellable(vocab))
    assume(text)
    literal = "".join(f"\\x{{{ord(char):x}}}" for char in text)
    state = compiler.compile(Grammar(regex=before + literal))
    tokens = written(vocab, masks, state, Random(0), forces=forces)
    found = text_of(vocab, tokens)
    assert found.endswith(text)
    assert len(found) - len(text) == {"": 0, "[0-9]{2}": 2}.get(before, 1)
    assert state.is_over


@pytest.mark.parametrize(
    "text", ["\nAnswer: yes", "\n\nAnswer: yes", "\n\n", "\n", "\r\n\r\n{", "  x", "\t\t}", "é\n\n"]
)
def test_text_that_begins_with_white_space_can_be_forced_in_every_form_of_a_grammar(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, text: str
) -> None:
    spelled = json.dumps(text, ensure_ascii=False)
    for grammar in (
        Grammar(choice=[text]),
        Grammar(gbnf=f"root ::= {spelled}"),
        Grammar(lark=f"start: {spelled}"),
        Grammar(regex="".join(f"\\x{{{ord(char):x}}}" for char in text)),
    ):
        for forces in (True, False):
            assert text_of(vocab, written(vocab, masks, compiler.compile(grammar), Random(0), forces=forces)) == text


def test_special_tokens_that_a_text_spells_come_as_text(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks
) -> None:
    """llama.cpp reads the spelling of tokens that were added to a vocabulary as these tokens in any text."""
    spellings = [spelling for token in vocab.special_ids[:40] if (spelling := vocab.text_of(token)).strip()]
    for spelling in ["<tool_call>", *spellings]:
        text = f"\n{spelling} \n\n{spelling}x"
        tokens = written(vocab, masks, compiler.compile(Grammar(choice=[text])), Random(0))
        assert text_of(vocab, tokens) == text
        assert not set(tokens) & set(vocab.special_ids)


@pytest.mark.parametrize("forces", [True, False])
def test_what_follows_half_a_character_is_forced_byte_for_byte(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, forces: bool
) -> None:
    words = ["é\n\nx", "è\n\nx", "日本\n", "旣\n", "🙂 ", "🙃\n\n"]
    for seed in range(6):
        state = compiler.compile(Grammar(choice=words))
        assert text_of(vocab, written(vocab, masks, state, Random(seed), forces=forces, halves=True)) in words


@cache
def families() -> tuple[Family, ...]:
    """Every form of calls that a template of llama.cpp's has, gpt-oss' too, and Phi-4-mini's."""
    found = map(family_of, (*map(template, template_names()), TEMPLATES["phi"]))
    return tuple({str(family): family for family in found if isinstance(family, Family)}.values())


def with_special_marks(vocab: Vocab) -> Iterator[Family]:
    """The form of Hermes and Qwen with a special token for its mark, as `<tool_call>` is one in Qwen's vocabularies."""
    hermes = family_of(TEMPLATES["hermes"])
    assert isinstance(hermes, Family)
    for mark in map(vocab.text_of, set(vocab.special_ids) - vocab.eog):
        if len(vocab.tokenize(mark, add_special=False, parse_special=True)) == 1:
            yield attrs.evolve(hermes, open=mark, close=mark)
            return


def test_every_form_of_a_tool_call_can_be_written(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, request: pytest.FixtureRequest
) -> None:
    """One call or more, forced or drawn: each vocabulary has one of these four ways for a form, the next another."""
    turn = sorted(vocabulary_names(), key=lambda each: each not in ALWAYS).index(request.node.callspec.params["vocab"])
    for at, family in enumerate([*families(), *with_special_marks(vocab)]):
        marks, way = specials_of(vocab, family), (turn + at) % 4
        source = calls_grammar(
            family, TOOLS, marks, None, must_call=True, is_parallel=way % 2 == 0, begins_thinking=False
        )
        state = compiler.compile(Grammar(lark=source))
        tokens = written(vocab, masks, state, Random(way), forces=way < 2)
        calls = [part for part in parsed(vocab, family, tokens, SCHEMAS) if isinstance(part, CallEnded)]
        assert calls, (family.name, text_of(vocab, tokens))
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


TEXT = "The quick brown fox, which lives near Zürich's lake, jumps over 12 lazy dogs; nothing else happened that day."
SHORT = 15
MAX_WALKED, MAX_WALKED_SHORT = 1 / 4, 1.0
"""Maximum nodes of the tree of all tokens that a mask walks through on average, as a share of the tokens: as a rule,
and in a string that can have no more than some 8 to 15 characters. The whole tree has more than two for each token.
"""


@pytest.mark.parametrize("name", [pytest.param("qwen2", marks=pytest.mark.slow), "gemma-4"])
def test_a_mask_mostly_walks_through_few_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In strings that are bounded, too: what is free there is a set of tokens whose mask is at hand."""
    made: list[LLTokenizer] = []

    def make(*given: Any, **how: Any) -> LLTokenizer:
        made.append(LLTokenizer(*given, **how))
        return made[0]

    monkeypatch.setattr(module, "LLTokenizer", make)
    with Model.load(vocabulary(name), vocab_only=True) as model:
        vocab = model.vocab
        GrammarCompiler(vocab).prepare()
        for schema, value in (
            ({"type": "string"}, TEXT),
            ({"type": "string", "maxLength": 1_000}, TEXT),
            ({"type": "string", "maxLength": 200}, TEXT),
            ({"type": "string", "maxLength": SHORT}, "Zürich"),
            ({"type": "string", "pattern": "^[A-Za-z ]{1,200}$"}, "The quick brown fox jumps over some lazy dogs"),
            ({"type": "string", "pattern": "^[A-Za-z0-9 .,;]{1,200}$"}, "The quick brown fox, 12 of them; it jumps."),
            ({"type": "object"}, {"name": "Ada", "age": 36, "tags": ["math", "poetry"], "said": TEXT}),
            ({"enum": ["red", "green", "ultraviolet"]}, "ultraviolet"),
            ({"type": "array", "items": {"type": "number"}}, [1, 22.5, -333, 4e44]),
        ):
            text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            source = LLMatcher.grammar_from_json_schema(for_llguidance(schema, COMPACT))
            position = LLInterpreter(made[0], source, enable_backtrack=False, enable_ff_tokens=False, log_level=0)
            position.start_without_prompt()
            walked: list[int] = []
            for token in vocab.tokenize(text, add_special=False, parse_special=False).tolist():
                _, report = position.compute_mask()
                told = (each.get("stats", {}) for each in json.loads(report)["progress"])
                walked += [each["trie_nodes_walked"] for each in told if each]
                position.commit_token(token)
            most = MAX_WALKED_SHORT if schema.get("maxLength") == SHORT else MAX_WALKED
            assert sum(walked) / len(walked) < most * vocab.n_tokens, schema

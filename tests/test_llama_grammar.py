"""Grammars on real vocabularies: what masks and forced tokens allow is what was asked for, and a bad one says where."""

from __future__ import annotations

import gc
import json
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from json_schemas import CHECKER, FORMATS, schemas
from llguidance import LLParserLimits
from reference import vocabulary

from harness import PATIENCE_SEC, run_to_end
from models import write_model
from uma.chat.relaxed import relaxed_schema
from uma.errors import BadRequest, DecodeFailed
from uma.llama import grammar as module
from uma.llama.builtin import builtin_path
from uma.llama.grammar import GrammarCompiler, GrammarDelayedError, GrammarMasks, GrammarState
from uma.llama.model import Model
from uma.llama.vocab import Vocab
from uma.types import Grammar

SHORTEST_FIRST, LONGEST = 200, 2000
"""Tokens after which the walk below takes a way out where there is one, and after which it gives up."""
CLOSING = (b'"', b"}", b"]")


@pytest.fixture(scope="module", params=["merged words", "bytes"])
def vocab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    """The built-in model's vocabulary of merged words, and one that is little more than the bytes."""
    path = builtin_path()
    if request.param == "bytes":
        path = write_model(tmp_path_factory.mktemp("models") / "tiny.gguf")
    with Model.load(path, vocab_only=True) as model:
        yield model.vocab


def allowed(masks: GrammarMasks, state: GrammarState) -> list[int]:
    masks.begin([state])
    (row,) = masks.wait()
    assert set(np.unique(row)) <= {0.0, -np.inf}
    return [int(token) for token in np.flatnonzero(row == 0)]


def walk(vocab: Vocab, masks: GrammarMasks, state: GrammarState, random: Random) -> str:
    """A complete text, each token drawn evenly from what is allowed: no model is as unwilling."""
    tokens = state.force()
    while not state.is_over:
        choices = allowed(masks, state)
        if not choices:
            state.check()
        if len(tokens) > LONGEST:
            reject()
        if len(tokens) > SHORTEST_FIRST:
            choices = [token for token in choices if token in vocab.eog or vocab.piece(token) in CLOSING] or choices
        token = random.choice(choices)
        if token in vocab.eog:
            break
        state.accept(token)
        tokens += [token, *state.force()]
    return b"".join(map(vocab.piece, tokens)).decode()


@given(schema=schemas, seed=st.integers(0, 2**32))
def test_every_walk_through_a_schemas_grammar_validates(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, schema: dict[str, Any], seed: int
) -> None:
    text = walk(vocab, masks, compiler.compile(Grammar(json_schema=schema)), Random(seed))
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))


SERVED: dict[str, dict[str, Any]] = {
    "$ref": {
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
        },
        "$ref": "#/$defs/node",
    },
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "disjoint oneOf": {"oneOf": [{"type": "boolean"}, {"type": "null"}, {"enum": ["x", "y"]}]},
    "pattern": {"type": "string", "pattern": "^(a|b){2}[0-9]?$"},
    "pattern and length": {"type": "string", "pattern": "^a+$", "minLength": 3, "maxLength": 5},
    **{f"format {form}": {"type": "string", "format": form, "maxLength": 80} for form in FORMATS},
    "numeric range": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 50},
    "unicode keys": {
        "type": "object",
        "properties": {"clé ☃ 日本": {"type": "boolean"}},
        "required": ["clé ☃ 日本"],
        "additionalProperties": False,
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "null"}],
        "items": False,
        "minItems": 2,
    },
    "uniqueItems that need not be": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "null"}, "uniqueItems": False, "maxItems": 2},
        "uniqueItems": False,
        "minItems": 2,
        "maxItems": 2,
    },
    "$anchor": {
        "$defs": {"x": {"$anchor": "here", "type": "null"}},
        "prefixItems": [{"$ref": "#here"}],
        "type": "array",
    },
    "nested $id": {"$defs": {"x": {"$id": "https://a.example/x", "type": "null"}}, "$ref": "https://a.example/x"},
    "escaped $ref": {"$defs": {"%a/b~c": {"type": "null"}}, "$ref": "#/$defs/%25a~1b~0c"},
    "several types": {"type": ["string", "null", "integer"], "maxLength": 3},
    "data like schemas": {
        "properties": {
            "minProperties": {"const": {"type": "nonsense", "minProperties": 9}, "default": {"enum": ["\0"]}},
            "enum": {"enum": [{"minProperties": 9, "$ref": "#/$defs/const"}], "examples": [{"const": "\0"}]},
        },
        "required": ["minProperties", "enum"],
        "additionalProperties": False,
        "$defs": {"const": {"type": "nonsense"}},
    },
}


@pytest.mark.parametrize("feature", SERVED)
def test_each_hard_feature_that_is_served_is_served_exactly(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, feature: str
) -> None:
    schema = SERVED[feature]
    assert schema.get("format", "date") in CHECKER.checkers
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    for seed in range(20):
        validator.validate(json.loads(walk(vocab, masks, compiler.compile(Grammar(json_schema=schema)), Random(seed))))


LOOKING_VALID: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "additional": (
        {"properties": {"a": {"type": "null"}}, "required": ["a"], "type": "object"},
        '{"a":null,"b":{"c":1}}',
        [r'{"a":null,"\u0061":1}', '{"a":null,"a":1}', '{"b":1}'],
    ),
    "none required": ({"properties": {"a": {"type": "null"}}}, '{"b":1}', [r'{"\u0061":1}', '{"a":1}']),
    "typed additional": (
        {"properties": {"a\n": {"type": "null"}}, "additionalProperties": {"type": "integer"}, "type": "object"},
        r'{"a\n":null,"\n":1}',
        [r'{"a\u000a":1}', r'{"a\n":1}', '{"b":null}'],
    ),
    "patterns": (
        {"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": {"type": "integer"}, "type": "object"},
        '{"b":1,"a":null,"ab":null}',
        [r'{"\u0061":1}', '{"ab":1}'],
    ),
    "no leap year": (
        {"properties": {"d": {"format": "date-time"}}},
        '{"d":"2024-02-29T00:00:00Z"}',
        [
            '{"d":"2023-02-29T00:00:00Z"}',
            '{"d":"1900-02-29T00:00:00Z"}',
            '{"d":"2024-02-29T00:00:60Z"}',
            '{"d":"2024-02-29t00:00:00Z"}',
            '{"d":"2024-02-29T00:00:00z"}',
        ],
    ),
    "behind a reference": (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"allOf": [{"properties": {"a": {"type": "null"}}}, {"type": "object"}]}},
        },
        '{"a":null,"b":"é\\n"}',
        [r'{"\u0061":1}'],
    ),
    "to the last integer": (
        {"type": "integer", "minimum": 10**17, "maximum": 2**63 - 1},
        f"{2**63 - 1}",
        [f"{10**17 - 1}", f"{2**63}"],
    ),
    "beyond exact floats": (
        {"minimum": 10**17, "maximum": 10**18, "type": "number"},
        f"{10**17}",
        [f"{10**17 - 1}", f"{10**18 + 1}", f"{10**17 - 1}.5"],
    ),
    "multiples in common": (
        {"multipleOf": 0.25, "allOf": [{"multipleOf": 1_000}], "type": "integer"},
        "2000",
        ["1500", "14100", "0.25"],
    ),
    "multiples of a round number": (
        {"type": "integer", "multipleOf": 25_000_000},
        "75000000",
        ["80000000", "7500000"],
    ),
    "at least two": (
        {"type": "object", "minProperties": 2, "required": ["a"]},
        '{"a":1,"b":1}',
        ['{"a":1}', '{"b":1}'],
    ),
}


@pytest.mark.parametrize("name", LOOKING_VALID)
def test_no_text_that_only_looks_valid_is_allowed(vocab: Vocab, compiler: GrammarCompiler, name: str) -> None:
    """No key stands for another, or comes twice to be counted twice; no day is in no calendar."""
    schema, served, refused = LOOKING_VALID[name]
    jsonschema.validate(json.loads(served), schema)
    for text in (served, *refused):
        matcher = compiler.compile(Grammar(json_schema=schema)).matcher
        tokens = vocab.tokenize("\n" + text, add_special=False, parse_special=False).tolist()
        while b"".join(map(vocab.piece, tokens)).decode() != text:
            tokens = tokens[1:]
        is_whole = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
        assert (is_whole and matcher.is_accepting()) == (text == served), text


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"lenient": True}, ".lenient: not available; available are"),
        ({"coerce_one_of": True}, ".coerce_one_of: not available"),
        ({"json_allowed_escapes": "u"}, ".json_allowed_escapes: not available"),
        ({"whitespace_flexible": 1}, ".whitespace_flexible: expected true or false"),
        ({"item_separator": ", x"}, ".item_separator: expected the comma"),
        (5, ": expected an object"),
    ],
    ids=str,
)
def test_a_schemas_own_options_cannot_loosen_it(compiler: GrammarCompiler, options: Any, place: str) -> None:
    with pytest.raises(BadRequest) as caught:
        compiler.compile(Grammar(json_schema={"not": {"type": "string"}, "x-guidance": options}))
    assert caught.value.message.startswith(f'grammar.json_schema["x-guidance"]{place}')


def test_a_schemas_own_white_space_is_kept(vocab: Vocab, compiler: GrammarCompiler) -> None:
    schema = {"const": {"a": [1, 2]}, "x-guidance": {"item_separator": ", ", "key_separator": ": "}}
    forced = b"".join(map(vocab.piece, compiler.compile(Grammar(json_schema=schema)).force()))
    assert forced.decode() == '{"a": [1, 2]}'


@pytest.mark.parametrize(
    "inner",
    [
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"else": {"type": "string"}},
        {"type": "array", "contains": {"type": "integer"}},
        {"minContains": 1},
        {"dependentSchemas": {"a": {}}},
        {"unevaluatedItems": False},
        {"$dynamicRef": "#a"},
        {"type": "object", "minProperties": 2},
        {"minProperties": 2, "additionalProperties": {"type": "integer"}},
        {"minProperties": 3, "patternProperties": {"^a": {"type": "null"}}, "required": ["a"]},
        {"enum": ["a", {"b": ["\0"]}]},
        {"enum": [1, {"b": [12_345_678_901_234_567_890]}]},
        {"type": "integer", "maximum": 2**53 + 1},
        {"type": "integer", "maximum": 2**63},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"minimum": -(2**53) - 3},
        {"type": "integer", "minimum": 1_234_567_890_123_456_800},
        {"type": "integer", "minimum": -(2**63)},
        {"type": "number", "maximum": 2**60},
        {"type": "number", "maximum": 1.2345678901234568e18},
        {"type": "integer", "exclusiveMinimum": 2**53},
        {"minimum": -(10**17), "exclusiveMinimum": True},
        {"type": "integer", "multipleOf": 10**9},
        {"type": "number", "multipleOf": 1.7000000000000002},
        {"type": "integer", "multipleOf": 99_999_999},
        {"type": "number", "multipleOf": 99.9983},
        {"type": "integer", "multipleOf": 997, "allOf": [{"multipleOf": 991}]},
        {"type": "integer", "multipleOf": 100_000, "allOf": [{"multipleOf": 100_000}]},
        {"type": "array", "uniqueItems": True},
        {"dependentRequired": {"a": ["b"]}},
        {"propertyNames": {"pattern": "a"}},
        {"unevaluatedProperties": False},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "format": "idn-email"},
        {"default": {"minProperties": 2}, "$ref": "#/properties/a%20b/items/anyOf/1/default"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.com/schema"},
        {"type": "strange"},
    ],
    ids="+".join,
)
def test_what_cannot_be_served_exactly_is_refused_with_its_place(
    compiler: GrammarCompiler, inner: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"a b": {"type": "array", "items": {"anyOf": [{"type": "null"}, inner]}}}}
    with pytest.raises(BadRequest) as caught:
        compiler.compile(Grammar(json_schema=schema))
    assert caught.value.message.startswith('grammar.json_schema.properties["a b"].items.anyOf[1]')
    assert "\n" not in caught.value.message


def test_a_refused_range_of_integers_says_which_is_served(compiler: GrammarCompiler) -> None:
    with pytest.raises(BadRequest, match=r"maximum: not available over 9,223,372,036,854,775,807, .*: name that, or"):
        compiler.compile(Grammar(json_schema={"type": "integer", "maximum": 2**64 - 1}))


@pytest.mark.parametrize(
    ("grammar", "place"),
    [
        (Grammar(regex="ab(c"), "grammar.regex: unclosed group (character 3 of"),
        (Grammar(lark="start: x"), 'grammar.lark: at 1(8): unknown name: "x"'),
        (Grammar(json_schema={"$ref": "#"}), "grammar.json_schema: "),
        (Grammar(gbnf="root ::= foo"), "grammar.gbnf: Rule 'foo' not found"),
        (Grammar(gbnf="root ::= " + "(" * 5000), "grammar.gbnf: "),
    ],
    ids=["regex", "lark", "endless schema", "gbnf", "deep gbnf"],
)
def test_a_grammar_that_cannot_be_read_says_why(compiler: GrammarCompiler, grammar: Grammar, place: str) -> None:
    with pytest.raises(BadRequest) as caught:
        compiler.compile(grammar)
    assert caught.value.message.startswith(place)


WORDS = [f"w{index}x" for index in range(2_500)]
BEYOND: dict[str, tuple[Grammar, str]] = {
    "alternatives": (Grammar(gbnf=f"root ::= {' | '.join(map(json.dumps, WORDS))}"), "gbnf: .* more than 2,000 ways"),
    "alternatives later": (
        Grammar(gbnf=f"root ::= [ab] ({' | '.join(f'{json.dumps(word)} root' for word in WORDS)})"),
        "grammar: .* more than 2,000 ways",
    ),
    "rules": (
        Grammar(
            lark="start: "
            + " | ".join(f"r{at}" for at in range(2_500))
            + "".join(f'\nr{at}: "w{at}" r{at}' for at in range(2_500))
        ),
        "more than 2,000 ways",
    ),
    "no end": (Grammar(gbnf='root ::= "a" root'), r"gbnf: .* more than 50,000 steps .* no end"),
    "repeats": (Grammar(gbnf='root ::= ("a" "b"){100000}'), "gbnf: .* more than 50,000 steps"),
    "left recursion": (Grammar(gbnf='root ::= root "a"'), "gbnf: no text fits it"),
    "itself": (Grammar(json_schema={"$ref": "#"}), "json_schema: no text fits it"),
    "nothing": (Grammar(regex=r"[^\s\S]"), "regex: no text fits it"),
    "overlap": (Grammar(json_schema={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf is not available"),
    "keyword": (Grammar(json_schema={"not": {}}), "json_schema: not available: not"),
    "a place": (Grammar(gbnf='root ::= "a"{3,2}'), r"grammar\.gbnf: range end must be >= start"),
}
INTERNALS = re.compile(
    r"NoExtension|Parser|[Ll]exer|panic|Unimplemented|coerce|forced bytes|Current row|Too many items|limits?\.|<state>"
)
"""Words of llguidance's own parts and settings."""


@pytest.mark.parametrize("name", BEYOND)
def test_a_grammar_beyond_a_bound_is_refused_in_words_that_name_it(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, name: str
) -> None:
    """Before its request is queued, or where the text comes to the place."""
    grammar, words = BEYOND[name]
    with pytest.raises(BadRequest) as caught:
        walk(vocab, masks, compiler.compile(grammar), Random(0))
    assert re.search(words, caught.value.message)
    assert not INTERNALS.search(caught.value.message)
    assert "\n" not in caught.value.message


def test_a_text_that_the_vocabulary_cannot_spell_is_refused(tmp_path: Path) -> None:
    """Falcon's has no token for some bytes."""
    with Model.load(vocabulary("falcon"), vocab_only=True) as model:
        compiler, masks = GrammarCompiler(model.vocab), GrammarMasks(model.vocab.n_tokens)
        for grammar in (Grammar(choice=["\v"]), Grammar(regex=r"a\x0b"), Grammar(regex=r"[ab]\x0b+")):
            with pytest.raises((BadRequest, DecodeFailed)) as caught:
                walk(model.vocab, masks, compiler.compile(grammar), Random(0))
            assert "no tokens for" in caught.value.message
            assert not INTERNALS.search(caught.value.message)
        masks.close()


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Grammar(regex=r"[0-9]{3}-(a|é)+☃"), r"[0-9]{3}-(a|é)+☃"),
        (Grammar(lark='start: "a" | "b" start "c"'), r"b*ac*"),
        (Grammar(gbnf='root ::= "a" foo-bar{2,3}\nfoo-bar ::= [x-z] | "<shown>"'), r"a([x-z]|<shown>){2,3}"),
    ],
    ids=["regex", "lark", "gbnf"],
)
def test_each_other_kind_of_grammar_holds(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, grammar: Grammar, matches: str
) -> None:
    for seed in range(20):
        assert re.fullmatch(matches, walk(vocab, masks, compiler.compile(grammar), Random(seed)))


@given(
    words=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_a_choice_is_one_of_its_strings(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, words: list[str], seed: int
) -> None:
    assert walk(vocab, masks, compiler.compile(Grammar(choice=words)), Random(seed)) in words


def test_a_json_object_is_one(vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks) -> None:
    state = compiler.compile(Grammar(json_object=True))
    assert vocab.piece(state.force()[0]) == b"{"
    assert not state.is_over
    assert set(allowed(masks, state)).isdisjoint(vocab.eog)


def test_what_has_no_alternative_is_forced_without_white_space(vocab: Vocab, compiler: GrammarCompiler) -> None:
    constant = {"answer": {"to everything": [42, None]}}
    state = compiler.compile(Grammar(json_schema={"const": constant}))
    forced = b"".join(map(vocab.piece, state.force()))
    assert state.is_over
    assert forced.decode() == json.dumps(constant, separators=(",", ":"))


def test_forced_text_is_tokenized_as_the_vocabulary_would(vocab: Vocab, compiler: GrammarCompiler) -> None:
    text = "Once upon a time there was the fox"
    state = compiler.compile(Grammar(choice=[text]))
    assert state.force() == vocab.tokenize(text, add_special=False, parse_special=False).tolist()


def test_forced_text_of_any_length_is_tokenized(compiler: GrammarCompiler, vocab: Vocab) -> None:
    """A single word of this length would overflow the stack of llama.cpp's own pre-tokenizer."""
    state = compiler.compile(Grammar(choice=["a" * 60_000]))
    assert len(b"".join(map(vocab.piece, state.force()))) == 60_000


def test_special_tokens_are_no_text(vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks) -> None:
    state = compiler.compile(Grammar(regex=".{1,9}"))
    assert not [token for token in allowed(masks, state) if not vocab.piece(token)]


def test_the_end_is_allowed_exactly_where_the_text_is_complete(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks
) -> None:
    state = compiler.compile(Grammar(regex="ab?"))
    first, rest = (int(vocab.tokenize(text, add_special=False, parse_special=False)[0]) for text in "ab")
    assert vocab.eog.isdisjoint(allowed(masks, state))
    state.accept(first)
    assert set(allowed(masks, state)) == vocab.eog | {rest}
    state.accept(rest)
    assert state.is_over


def test_a_token_against_the_grammar_fails_its_request(vocab: Vocab, compiler: GrammarCompiler) -> None:
    state = compiler.compile(Grammar(regex="[0-9]+"))
    (letter,) = vocab.tokenize("a", add_special=False, parse_special=False)
    with pytest.raises(DecodeFailed, match="the grammar cannot be followed"):
        state.accept(int(letter))


def test_masks_of_several_rows_are_each_rows_own(vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks) -> None:
    grammars = [Grammar(regex="[0-9]+"), Grammar(regex="[a-z]+"), Grammar(json_schema={}), Grammar(regex="☃?x")]
    alone = [allowed(masks, compiler.compile(each)) for each in grammars]
    masks.begin([compiler.compile(each) for each in grammars])
    assert [np.flatnonzero(row == 0).tolist() for row in masks.wait()] == alone


def test_a_row_whose_grammar_has_failed_leaves_the_others_alone(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks
) -> None:
    good, bad = compiler.compile(Grammar(regex="[0-9]+")), compiler.compile(Grammar(regex="[0-9]+"))
    expected = allowed(masks, good)
    (letter,) = vocab.tokenize("a", add_special=False, parse_special=False)
    with pytest.raises(DecodeFailed):
        bad.accept(int(letter))
    masks.begin([bad, good])
    rows = masks.wait()
    assert not (rows[0] == 0).any()
    assert np.flatnonzero(rows[1] == 0).tolist() == expected


def test_requests_with_one_grammar_do_not_disturb_each_other(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks
) -> None:
    grammar = Grammar(regex="[ab]{3}")
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    begin = allowed(masks, second)
    first.accept(allowed(masks, first)[0])
    assert allowed(masks, second) == begin


def sources(monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    """Grammars that are compiled from now on."""
    made: list[Grammar] = []
    real = module._source

    def source(grammar: Grammar) -> str:
        made.append(grammar)
        return real(grammar)

    monkeypatch.setattr(module, "_source", source)
    return made


def test_grammars_are_kept_for_the_next_request(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, made = GrammarCompiler(vocab), sources(monkeypatch)
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    a, b, c = (Grammar(choice=[word]) for word in ("a", "b", "c"))
    for each in (a, a, b, a, c, a, b):
        compiler.compile(each)
    assert made == [a, b, c, b]


def test_nothing_is_left_of_a_vocabulary_once_its_grammars_are_gone(tmp_path: Path) -> None:
    """A large one's tokens take 36 MB in llguidance, which stayed with every engine that was opened and closed."""
    with Model.load(write_model(tmp_path / "tiny.gguf"), vocab_only=True) as model:
        GrammarCompiler(model.vocab).compile(Grammar(choice=["a"]))
        left = weakref.ref(model.vocab)
    del model
    gc.collect()
    assert left() is None


def test_a_vocabulary_without_an_end_has_no_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    with Model.load(path, vocab_only=True) as model:
        monkeypatch.setitem(model.vocab.__dict__, "eog", frozenset())
        compiler = GrammarCompiler(model.vocab)
        assert not compiler.is_available
        with pytest.raises(BadRequest, match="no token that ends a text"):
            compiler.compile(Grammar(json_object=True))


def count_made(monkeypatch: pytest.MonkeyPatch, states: int) -> list[Grammar]:
    """Grammars that are compiled from now on, where those with so many states at most are kept."""
    monkeypatch.setattr(module, "KEPT_LIMITS", LLParserLimits(max_lexer_states=states, verbose_errors=False))
    return sources(monkeypatch)


def serve_many(vocab: Vocab, compiler: GrammarCompiler, requests: int) -> None:
    """Serve requests with one grammar, whose automaton has more states with each of their texts."""
    masks = GrammarMasks(vocab.n_tokens)
    for seed in range(requests):
        random, state = Random(seed), compiler.compile(Grammar(regex="[a-z]*[aeiou][a-z]{40}"))
        text = "".join(random.choices("aeiourstlnm", k=60))
        for token in vocab.tokenize(text, add_special=False, parse_special=False).tolist():
            choices = allowed(masks, state)
            try:
                state.check()
            except GrammarDelayedError as delay:
                delay.renewed.result(PATIENCE_SEC)
                choices = allowed(masks, state)
            assert token in choices, seed
            state.accept(token)
    masks.close()


def test_requests_with_one_grammar_do_not_use_up_each_other_s_bound(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW_USES", 0)
    made = count_made(monkeypatch, 8_000 if vocab.n_tokens > 1_000 else 2_000)  # some need more together, none alone
    serve_many(vocab, GrammarCompiler(vocab), 12)
    assert 1 < len(made) < 12


@pytest.mark.parametrize("states", [1, 150])  # which the grammar has at its beginning, or behind some of its text
def test_a_grammar_that_is_too_large_to_be_kept_is_compiled_for_each_request(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch, states: int
) -> None:
    compiler, made = GrammarCompiler(vocab), count_made(monkeypatch, states)
    serve_many(vocab, compiler, 3)
    assert len(made) == 4, "the first is kept until it is known to be too large"
    assert compiler.kept(module.key_of(made[0], "")) is None


COMPILING = """
import threading
from uma.llama import grammar
from uma.llama.builtin import builtin_path
from uma.llama.grammar import GrammarCompiler
from uma.llama.model import Model
from uma.types import Grammar

part = {"type": "string", "pattern": "^[a-z]*[aeiou][a-z]{30}$"}
schema = {"type": "object", "properties": {f"field{at}": part for at in range(300)}, "additionalProperties": False}
compiler, begun = GrammarCompiler(Model.load(builtin_path(), vocab_only=True).vocab), threading.Event()
compiler.prepare()

real = grammar._source
grammar._source = lambda asked: (real(asked), begun.set())[0]
threading.Thread(target=compiler.compile, args=[Grammar(json_schema=schema)], daemon=True).start()
begun.wait()
"""


def test_a_process_ends_well_while_a_grammar_is_compiled_for_nobody() -> None:
    done = run_to_end(sys.executable, "-c", COMPILING)
    assert (done.returncode, done.stdout) == (0, "")


def chain(count: int, rule: str) -> str:
    return "".join(f"{rule.format(f'r{at}', f'r{at + 1}')}\n" for at in range(count))


def references(count: int, link: str) -> dict[str, Any]:
    """A schema in which so many objects lead from one to the next."""
    of = [json.loads(link % f'{{"$ref": "#/of/{at + 1}"}}') for at in range(count)]
    return {"of": [*of, {}], "$ref": "#/of/0"}


DEEP = {
    "properties": Grammar(json_schema=references(1_200, '{"properties": {"a": %s}}')),
    "items": Grammar(json_schema=references(1_400, '{"items": %s}')),
    "nested and named": Grammar(json_schema=references(60, '{"items": ' * 40 + "%s" + "}" * 40)),
    "JSON in Lark": Grammar(lark="start: %json " + json.dumps(references(6_000, '{"items": %s}'))),
    "rules": Grammar(lark="start: r0\n" + chain(6_000, '{}: "a" {}?') + 'r6000: "b"'),
    "terminals": Grammar(lark="start: R0\n" + chain(6_000, '{}: "a" {}').upper() + 'R6000: "b"'),
    "GBNF": Grammar(gbnf="root ::= r0\n" + chain(6_000, '{} ::= "a" {}') + 'r6000 ::= "b" r0?'),
}


@pytest.mark.parametrize("grammar", DEEP.values(), ids=DEEP)
def test_a_grammar_that_llguidance_s_calls_are_too_deep_for_is_refused(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    """Each of these ended the process, or took minutes."""
    with pytest.raises(BadRequest, match="lead from one to the next"):
        compiler.compile(grammar)


def test_of_a_tool_s_schema_that_is_too_deep_the_references_are_left_out() -> None:
    deep = references(1_200, '{"properties": {"a": %s}}')
    properties = {"deep": {"$ref": "#/of/0"}, "name": {"type": "string"}}
    found, places = relaxed_schema({**deep, "$ref": "#/of/1200", "properties": properties}, lambda _: True)
    assert found["properties"]["name"] == {"type": "string"} and '.properties.deep["$ref"]' in places


def test_many_rules_and_schemas_that_are_not_deep_are_served(compiler: GrammarCompiler) -> None:
    names = [f"rule{at}" for at in range(1_500)]
    rules = "\n".join(f'{name} ::= "{" ".join(names[:3])}" [{names[0]}] leaf # {names[0]}' for name in names)
    compiler.compile(Grammar(gbnf=f'root ::= {" | ".join(names[:40])}\n{rules}\nleaf ::= "x"'))
    kinds = {f"kind{at}": {"properties": {"left": {"$ref": "#"}, "name": {"const": at}}} for at in range(60)}
    compiler.compile(Grammar(json_schema={"$defs": kinds, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in kinds]}))
    tools = "\n".join(
        f'tool{at}: %json {{"enum": ["{" ".join(f"tool{n}" for n in range(900))}"]}}' for at in range(900)
    )
    compiler.compile(Grammar(lark=f"start: tool0 | tool1\n{tools}"))

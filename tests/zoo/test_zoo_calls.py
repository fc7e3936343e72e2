"""Every chat template of llama.cpp's that shows calls: what a grammar forces parses, and renders to the same text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from chat_templates import family_of
from reference import template, template_names

from models import write_model
from uma.chat.families import GENERIC, Family, thinking_of
from uma.chat.generic import with_calls
from uma.chat.grammar import calls_grammar
from uma.chat.harmony import HarmonyParser
from uma.chat.lark import Specials
from uma.chat.parser import Parser
from uma.chat.parts import AnswerText, CallArguments, CallBegun, CallEnded, Part, Reasoning, joined
from uma.llama.grammar import GrammarCompiler, GrammarMasks
from uma.llama.model import Model
from uma.llama.template import ChatTemplate
from uma.llama.vocab import Vocab
from uma.types import Grammar, Message, Tool, ToolCall

WORD = {"type": "string", "pattern": '^[a-zé"&:]{1,9}$'}
COUNT = {"type": "integer", "minimum": -9, "maximum": 9}


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


NESTED = an_object(place=WORD, often={"type": "array", "items": COUNT, "minItems": 1, "maxItems": 2})
FLAT_TOOLS = (Tool("set-mode.v2", "", an_object(mode=WORD, level=COUNT)), Tool("look", "", an_object(city=WORD)))
TOOLS = (*FLAT_TOOLS, Tool("plan", "", an_object(title=WORD, when=NESTED, again={"type": "boolean"})))
FORTY = tuple(Tool(f"tool_{at}", "", an_object(city=WORD)) for at in range(40))
WRITES_PYTHON = {"ByteDance-Seed-OSS.jinja", "openbmb-MiniCPM5-1B.jinja"}
"""Templates that write a nested value as Python does: the model is asked for JSON, as it was trained."""
INDENTS = "CohereForAI-c4ai-command-r-plus-tool_use.jinja"
"""This template shows arguments as indented JSON; the model's stand in one line."""
CLOSES_EACH = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja"
"""This template ends the calls behind each one but the first."""
NOT_SHOWN = {
    "ibm-granite-granite-3.3-2B-Instruct.jinja",
    "HuggingFaceTB-SmolLM3-3B.jinja",
    "google-gemma-2-2b-it.jinja",
    "llama-cpp-rwkv-world.jinja",
    "microsoft-Phi-3.5-mini-instruct.jinja",
}
"""Templates that show no calls."""
SERVED = [name for name in template_names() if name not in NOT_SHOWN]
NUMBERED = re.compile(
    r'(\[CALL_ID\]|"id": "|<\|tool_call:begin\|>|"tool_call_id": "|functions\.[^:<]*:(?=\d)|" index=")\w+', re.ASCII
)
"""Identifiers and numbers of calls, which templates write by themselves."""


def alike(text: str) -> str:
    """A text without what templates write as they like: numbers of calls, escapes, Python's words, CDATA."""
    text = re.sub(r"\\u00e9", "é", NUMBERED.sub(r"\1#", text))
    text = re.sub(r"(?<=\n|=)(True|False)(?=\n|,|\))", lambda word: word[0].lower(), text)
    return re.sub(r"<!\[CDATA\[(.*?)\]\]>", r"\1", text)


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    with Model.load(write_model(tmp_path_factory.mktemp("calls") / "tiny.gguf"), vocab_only=True) as model:
        yield model.vocab


def served(name: str) -> Family:
    family = family_of(template(name))
    assert isinstance(family, Family), family
    return family


def forced(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, family: Family, tools: tuple[Tool, ...], seed: int
) -> str:
    """What a random model writes that has to call: the text of calls alone."""
    none = Specials({}, sorted(set(vocab.special_ids) - vocab.eog))
    source = calls_grammar(family, tools, none, None, must_call=True, is_parallel=True, begins_thinking=False)
    state, random, tokens = compiler.compile(Grammar(lark=source)), Random(seed), list[int]()
    for _ in range(4_000):
        tokens += state.force()
        if state.is_over:
            break
        masks.begin([state])
        (row,) = masks.wait()
        allowed = np.flatnonzero(row == 0)
        token = int(random.choice(allowed))
        if token in vocab.eog:
            break
        state.accept(token)
        tokens.append(token)
    return b"".join(map(vocab.piece, tokens)).decode()


def parts_of(name: str, family: Family, text: str, tools: tuple[Tool, ...], cut: int) -> list[Part]:
    schemas = {tool.name: tool.parameters or {} for tool in tools}
    thinking = thinking_of(template(name))
    parser = HarmonyParser(schemas) if family.has_channels else Parser(family, schemas, thinking)
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    return [*(part for piece in pieces for part in parser.push(piece)), *parser.finish()]


@pytest.mark.parametrize("name", template_names())
def test_every_template_that_shows_calls_is_served(name: str) -> None:
    family = family_of(template(name))
    assert isinstance(family, Family)
    assert family is not GENERIC or name in NOT_SHOWN


@pytest.mark.usefixtures("renders_here")
@pytest.mark.parametrize("name", SERVED)
def test_calls_that_a_grammar_forces_render_to_the_same_text(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, name: str
) -> None:
    family = served(name)
    shown = ChatTemplate(template(name), "", "")
    try:
        for seed, tools in enumerate((FLAT_TOOLS if name in WRITES_PYTHON else TOOLS, FORTY, FLAT_TOOLS)):
            text = forced(vocab, compiler, masks, family, tools, seed)
            parts = joined(parts_of(name, family, text, tools, 1))
            ended = [part for part in parts if isinstance(part, CallEnded)]
            assert ended, text
            assert not any(isinstance(part, AnswerText) and part.text.strip() for part in parts), text
            for call in ended:
                schema = next(tool.parameters for tool in tools if tool.name == call.name)
                jsonschema.validate(json.loads(call.arguments), schema or {})
            grown = [""] * len(ended)
            at = -1
            for part in parts:
                at += isinstance(part, CallBegun)
                grown[at] += part.text if isinstance(part, CallArguments) else ""
            assert grown == [call.arguments for call in ended]
            if family.has_channels or (family.is_bare and len(ended) > 1):
                continue  # a header of its own for each call; these templates refuse two calls in a message
            calls = tuple(ToolCall(f"callcall{at}", call.name, call.arguments) for at, call in enumerate(ended))
            turns: tuple[Message, ...] = (Message("user", "Go."), Message("assistant", "", calls))
            turns = turns if family.shows_calls else with_calls(turns, family)
            again = shown.render(turns, tools, opens_answer=False)
            if name == INDENTS:
                text, again = (re.sub(r"(?<=[\[{,])\s+|\s+(?=[\]}])", "", shape) for shape in (text, again))
            if name != CLOSES_EACH or len(calls) == 2:
                assert alike(text) in alike(again)
    finally:
        shown.close()


@pytest.mark.parametrize("name", SERVED)
def test_text_and_thinking_come_before_calls_and_are_told_apart(
    vocab: Vocab, compiler: GrammarCompiler, masks: GrammarMasks, name: str
) -> None:
    family, thinking = served(name), thinking_of(template(name))
    if family.has_channels or family.is_bare:
        return  # text has a channel; a call without a mark begins the answer
    text = forced(vocab, compiler, masks, family, FLAT_TOOLS, 7)
    said = (
        f"Well:\n{text}" if thinking is None else f"{thinking.open}{thinking.label}Hm.{thinking.close}\nWell:\n{text}"
    )
    if family.to_answer:  # which the prompt has opened, or a call
        said = f"{family.to_answer}Well:\n{family.open}{text}"
    for cut in (1, 7, len(said)):
        parts = joined(parts_of(name, family, said, FLAT_TOOLS, cut))
        assert [part.text for part in parts if isinstance(part, Reasoning)] == ([] if thinking is None else ["Hm."])
        assert "".join(part.text for part in parts if isinstance(part, AnswerText)).strip() == "Well:"
        alone = [part for part in parts_of(name, family, text, FLAT_TOOLS, 1) if isinstance(part, CallEnded)]
        assert [part for part in parts if isinstance(part, CallEnded)] == alone

"""Prompts are llama-server's, token by token, for every template: but for what docs/templates.md tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conversations import PROMPTS, given
from differences import DIFFERENT, differences_of
from llama_server import (
    RECORDED,
    REFUSED,
    digest,
    llama_server,
    prompt_of,
    running_llama_server,
    tokens_of,
    without_today,
)
from reference import llama_cpp, template, template_names, vocabulary
from zoo_models import nearest_vocabulary, write_zoo_model

from uma.engine.intake.rendering import rendered
from uma.llama.model import Model
from uma.llama.template import ChatTemplate
from uma.llama.vocab import Vocab
from uma.types import Request

LIVE = "google-gemma-4-31B-it-interleaved.jinja"
"""The template that is compared with the llama-server that is here, if one is."""


@cache
def vocab_of(name: str) -> Vocab:
    return Model.load(vocabulary(name), vocab_only=True).vocab


@pytest.fixture
def zoo(name: str, renders_here: None) -> Iterator[ChatTemplate]:
    vocab = vocab_of(nearest_vocabulary(name))
    made = ChatTemplate(template(name), vocab.bos_text, vocab.eos_text)
    yield made
    made.close()


def digests(zoo: ChatTemplate, name: str) -> dict[str, str]:
    """Of the tokens of UMA's prompts."""
    vocab, found = vocab_of(nearest_vocabulary(name)), {}
    for cell, each in PROMPTS.items():
        request = given(zoo.source, Request("a", messages=each.messages, tools=each.tools, reasoning=each.reasoning))
        if request is None:
            found[cell] = REFUSED
            continue
        text = without_today(rendered(zoo, request))
        found[cell] = digest(vocab.tokenize(text, add_special=zoo.needs_bos(text), parse_special=True).tolist())
    return found


def different(found: dict[str, str], theirs: dict[str, str]) -> set[str]:
    """The conversations that llama-server's template takes, and of which UMA makes another prompt or none."""
    return {cell for cell, ours in found.items() if theirs[cell] not in (REFUSED, ours)}


@pytest.mark.parametrize("name", template_names())
def test_prompts_are_those_recorded_of_llama_server(zoo: ChatTemplate, name: str) -> None:
    recorded: dict[str, str] = json.loads(RECORDED.read_text())["prompts"][name]
    assert different(digests(zoo, name), recorded) == differences_of(name)


@pytest.mark.parametrize("name", [LIVE])
def test_prompts_are_those_of_the_llama_server_here(zoo: ChatTemplate, name: str, tmp_path: Path) -> None:
    llama_server()
    model = write_zoo_model(tmp_path / "zoo.gguf", nearest_vocabulary(name), template(name))
    file = llama_cpp() / "models" / "templates" / name
    found = digests(zoo, name)
    with running_llama_server(model, "--jinja", "--chat-template-file", str(file), "-c", "256", "-t", "1") as client:
        texts = {cell: prompt_of(client, cell) for cell in found}
        theirs = {cell: REFUSED if text is None else digest(tokens_of(client, text)) for cell, text in texts.items()}
    assert different(found, theirs) == differences_of(name)


def test_every_difference_is_told_with_its_reason() -> None:
    told = (Path(__file__).parents[2] / "docs" / "templates.md").read_text()
    assert all(difference in told for difference in DIFFERENT)

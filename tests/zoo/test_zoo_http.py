"""Chat templates over HTTP, on real vocabularies: a random model's forced calls are parsed, nothing ends in a 500.

One template of each form of calls is asked each question in one dialect, whole or streamed, so that it is asked for
calls in all of them; the next form is asked in the next ones. `TEST_ZOO=all` asks every template in every way, on the
vocabulary that is nearest to its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import jsonschema
import pytest
from chat_templates import TEMPLATES, family_of
from conversations import ASKED, CALLED, CITY_AND_DAYS, CONVERSATIONS, SAID, SYSTEM
from dialects import PATHS, Cell, DialectName, Said, body_of, said
from engine_world import config_for
from http_server import Answered, HostedHttp, RawHttp, hosted_http
from reference import template, template_names
from zoo_models import nearest_vocabulary, write_zoo_model

from uma.types import Tool

IS_WHOLE = os.environ.get("TEST_ZOO") == "all"
PHI = "Phi-4-mini"
"""A template written for the tests: its form of calls is in docs/templates.md and in no template of llama.cpp's."""
LARGE = ("command-r", "deepseek-llm", "gemma-4", "llama-bpe", "qwen2")
"""Vocabularies that take seconds to load and to make a grammar's tokenizer of."""
WITH_LARGE = {
    "Qwen-Qwen3-0.6B.jinja",
    "deepseek-ai-DeepSeek-V3.1.jinja",
    "google-gemma-4-31B-it.jinja",
    "meta-llama-Llama-3.1-8B-Instruct.jinja",
}
"""Templates with their own of these. Others have `SMALL` in its place."""
SMALL = "gpt-neox"
"""It, too, has tokens of two line breaks."""
TOOLS = (Tool("weather", "Tells the weather.", CITY_AND_DAYS), Tool("time", "Tells the time.", CITY_AND_DAYS))
QUESTION = (SYSTEM, ASKED)
FORCED = 300
"""Maximum tokens of an answer whose length is its grammar's."""

CELLS = {
    "plain": Cell(messages=CONVERSATIONS["plain"], thinks=None),
    "system": Cell(messages=QUESTION),
    "thinking on": Cell(messages=QUESTION, thinks=True),
    "thinking sent back": Cell(messages=CALLED["thought before a call"], tools=TOOLS, choice="auto"),
    "two results": Cell(messages=CALLED["two results"], tools=TOOLS, choice="required", max_tokens=FORCED),
    "call, then text": Cell(messages=CALLED["call, then text"], tools=TOOLS, choice="auto"),
    "calls before, none now": Cell(messages=CALLED["two results"], tools=TOOLS, choice="none"),
    "none": Cell(messages=QUESTION, tools=TOOLS, choice="none"),
    "auto": Cell(messages=QUESTION, tools=TOOLS, choice="auto", is_parallel=True),
    "required": Cell(messages=QUESTION, tools=TOOLS, choice="required", max_tokens=FORCED),
    "named": Cell(messages=QUESTION, tools=TOOLS, choice="time", max_tokens=FORCED),
    "parallel": Cell(messages=QUESTION, tools=TOOLS, choice="required", is_parallel=True, max_tokens=FORCED),
    "schema": Cell(messages=QUESTION, has_schema=True, max_tokens=FORCED),
    "stop": Cell(messages=QUESTION, stop=("a", "e"), max_tokens=12),
    "begun": Cell(messages=(*QUESTION, SAID)),
}
WAYS: tuple[tuple[DialectName, bool], ...] = (
    *(("openai", False), ("anthropic", True), ("ollama", False), ("responses", True)),
    *(("openai", True), ("anthropic", False), ("ollama", True), ("responses", False)),
)
"""Dialects, whole or streamed; any four neighbours are all dialects."""
AT_A_TIME = 8
"""Questions that are asked at once."""


def source_of(name: str) -> str:
    return TEMPLATES["phi"] if name == PHI else template(name)


def vocabulary_of(name: str) -> str:
    nearest = "phi-3" if name == PHI else nearest_vocabulary(name)
    return SMALL if nearest in LARGE and name not in WITH_LARGE and not IS_WHOLE else nearest


@cache
def form_of(name: str) -> str:
    """The form of a template's calls, by its name, or why they cannot be told from text."""
    family = family_of(source_of(name))
    return family if isinstance(family, str) else family.name


@cache
def alike(form: str) -> list[str]:
    """The templates with this form of calls that are asked: one with a large vocabulary of its own, or the first."""
    found = [each for each in (*template_names(), PHI) if form_of(each) == form]
    return found if IS_WHOLE else sorted(found, key=lambda each: each not in WITH_LARGE)[:1]


@pytest.fixture(scope="module", params=[each for each in (*template_names(), PHI) if each in alike(form_of(each))])
def name(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


@pytest.fixture(scope="module")
def hosted(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedHttp]:
    model = write_zoo_model(tmp_path_factory.mktemp("zoo") / "zoo.gguf", vocabulary_of(name), source_of(name))
    with hosted_http(config_for(model, n_ctx=8_192, max_sequences=AT_A_TIME, http="127.0.0.1:0")) as hosted:
        yield hosted
    model.unlink()


def test_every_form_of_calls_is_served_in_every_dialect(hosted: HostedHttp, name: str) -> None:
    """What is refused is told why."""
    has_calls = not isinstance(family_of(source_of(name)), str)
    asked = list(questions(name))

    def ask(each: tuple[str, DialectName, bool]) -> Answered:
        cell, dialect, stream = each
        raw = RawHttp(hosted.port)
        try:
            return raw.ask("POST", PATHS[dialect], body_of(dialect, CELLS[cell], stream=stream))
        finally:
            raw.close()

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        answers = list(threads.map(ask, asked))
    for (cell, dialect, stream), answered in zip(asked, answers, strict=True):
        where = (cell, dialect, stream, answered.body)
        if CELLS[cell].has_calls and not has_calls:
            assert answered.status == 400, where
            assert b"the calls of this model cannot be told from its text" in answered.body, where
            continue
        assert answered.status == 200, where
        check(cell, said(dialect, answered, stream=stream), where)
    print(f"{name}: {len(asked)} asked, {sum(each.status == 400 for each in answers)} refused by name")


def questions(name: str) -> Iterator[tuple[str, DialectName, bool]]:
    """Cells, and the ways in which each is asked."""
    begin = (*template_names(), PHI).index(name)
    for at, (cell, asked) in enumerate(CELLS.items(), begin):
        ways = [way for way in WAYS if asked.fits(way[0])]
        for turn in range(len(ways) if IS_WHOLE else 1):
            yield cell, *ways[(at + turn) % len(ways)]


def check(cell: str, answer: Said, where: object) -> None:
    """The answer is what the cell asks for."""
    asked = CELLS[cell]
    calls = answer.calls[:-1] if answer.is_cut else answer.calls
    for tool, arguments in calls:
        assert tool in {each.name for each in asked.tools}, where
        jsonschema.validate(json.loads(arguments), CITY_AND_DAYS)
    if asked.choice in ("required", "time"):
        assert calls, where
        assert asked.is_parallel or len(calls) == 1, where
    if asked.choice == "time":
        assert calls[0][0] == "time", where
    if asked.choice in (None, "none"):
        assert not answer.calls, where
    if asked.has_schema:
        jsonschema.validate(json.loads(answer.text), CITY_AND_DAYS)
    assert not any(stop in answer.text for stop in asked.stop), where

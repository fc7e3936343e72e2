"""Every family over HTTP, on its vocabulary: a random model's forced calls are parsed, and nothing ends in a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import jsonschema
import pytest
from conversations import ASKED, CALLED, CITY_AND_DAYS, CONVERSATIONS, SAID, SYSTEM
from dialects import PATHS, Cell, DialectName, Said, body_of, said
from engine_world import config_for
from http_server import Answered, HostedHttp, RawHttp, hosted_http
from reference import template
from zoo_models import write_zoo_model

from uma.chat.families import family_of
from uma.types import Tool

FAMILIES = {
    "GLM-4.6.jinja": "gpt-neox",
    "Mistral-Small-3.2-24B-Instruct-2506.jinja": "llama-spm",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja": "llama-bpe",
    "Qwen-Qwen3-0.6B.jinja": "qwen2",
    "Qwen3.5-4B.jinja": "qwen35",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja": "llama-bpe",
    "deepseek-ai-DeepSeek-V3.1.jinja": "deepseek-llm",
    "LFM2.5-Instruct.jinja": "llama-spm",
    "google-gemma-2-2b-it.jinja": "llama-spm",
    "google-gemma-4-31B-it.jinja": "gemma-4",
    "ibm-granite-granite-3.3-2B-Instruct.jinja": "starcoder",
    "meta-llama-Llama-3.1-8B-Instruct.jinja": "llama-bpe",
    "microsoft-Phi-3.5-mini-instruct.jinja": "phi-3",
    "mistralai-Mistral-Nemo-Instruct-2407.jinja": "llama-spm",
    "openai-gpt-oss-120b.jinja": "gpt-2",
}
"""A template of each family of docs/tools.md, and one whose calls are not parsed. Each has its own vocabulary, or a
small one of the same kind.
"""
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
    "none": Cell(messages=QUESTION, tools=TOOLS, choice="none"),
    "auto": Cell(messages=QUESTION, tools=TOOLS, choice="auto", is_parallel=True),
    "required": Cell(messages=QUESTION, tools=TOOLS, choice="required", max_tokens=FORCED),
    "named": Cell(messages=QUESTION, tools=TOOLS, choice="time", max_tokens=FORCED),
    "parallel": Cell(messages=QUESTION, tools=TOOLS, choice="required", is_parallel=True, max_tokens=FORCED),
    "schema": Cell(messages=QUESTION, has_schema=True, max_tokens=FORCED),
    "stop": Cell(messages=QUESTION, stop=("a", "e"), max_tokens=12),
    "begun": Cell(messages=(*QUESTION, SAID)),
}
AT_A_TIME = 8
"""Questions that are asked at once."""


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


@pytest.fixture(scope="module")
def hosted(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedHttp]:
    model = write_zoo_model(tmp_path_factory.mktemp("zoo") / "zoo.gguf", FAMILIES[name], name)
    with hosted_http(config_for(model, n_ctx=8_192, max_sequences=AT_A_TIME, http="127.0.0.1:0")) as hosted:
        yield hosted


def test_every_dialect_is_served_by_every_family(hosted: HostedHttp, name: str) -> None:
    """Whole and streamed, where the answer's form is at stake. What is refused is told why."""
    has_calls = not isinstance(family_of(template(name)), str)
    asked = [each for each in product(CELLS, PATHS, (False, True)) if is_asked(*each)]

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
        if CELLS[cell].tools and CELLS[cell].choice != "none" and not has_calls:
            assert answered.status == 400, where
            assert b"the calls of this model cannot be told from its text" in answered.body, where
            continue
        assert answered.status == 200, where
        check(cell, said(dialect, answered, stream=stream), where)


def is_asked(cell: str, dialect: DialectName, stream: bool) -> bool:
    """Free text is streamed in every second cell, and differently in each dialect."""
    place = list(CELLS).index(cell) + list(PATHS).index(dialect)
    is_free = CELLS[cell].max_tokens < FORCED and not CELLS[cell].stop
    return CELLS[cell].fits(dialect) and not (is_free and stream == place % 2)


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

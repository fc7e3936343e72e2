"""Grammars on real models, whose vocabularies have tokens of several line breaks: what is asked for is what comes."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from chat_templates import HERMES_CALLS
from engine_world import answer, ask, config_for
from reference import real_model

from benchmarks.reference import RealModel
from uma import Request, SamplingParams, open_engine
from uma.engine import Engine
from uma.llama.model import Model
from uma.types import Finished, Grammar, Message, Tool

HERMES = (
    "{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + HERMES_CALLS
    + "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
"""A template of the form in which Hermes and Qwen write calls."""
FORCED = {
    "gbnf": (Grammar(gbnf='root ::= "\\nAnswer: " ("yes" | "no")'), "\nAnswer: (yes|no)"),
    "gbnf of two": (Grammar(gbnf='root ::= "\\n\\nAnswer: " ("yes" | "no")'), "\n\nAnswer: (yes|no)"),
    "gbnf of breaks alone": (Grammar(gbnf='root ::= "\\n\\n"'), "\n\n"),
    "choice": (Grammar(choice=["\n\nYes"]), "\n\nYes"),
    "choices": (Grammar(choice=["\n\nYes", "\nNo", "\n\n\n"]), "\n\nYes|\nNo|\n\n\n"),
    "regex": (Grammar(regex=r"\n\n[ab]\n\nEnd"), "\n\n[ab]\n\nEnd"),
    "lark": (Grammar(lark='start: "\\n\\nSo " ("a" | "b") "\\n\\n.\\n"'), "\n\nSo [ab]\n\n.\n"),
    "mid-text": (Grammar(regex=r"[a-z]{3}:\n\n\n- (yes|no)\n\n"), "[a-z]{3}:\n\n\n- (yes|no)\n\n"),
}


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    name: RealModel = request.param
    return real_model(name)


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with open_engine(config_for(model, n_ctx=512)) as engine:
        yield engine


async def test_text_that_begins_with_line_breaks_is_forced(engine: Engine) -> None:
    """With log probabilities each token is drawn, also where only one is possible."""
    for name, (grammar, matches) in FORCED.items():
        for logprobs in (None, 1):
            asked = ask("Is the sky blue?", 60, grammar=grammar, ignore_eos=False, logprobs=logprobs)
            got = await answer(engine, asked)
            assert re.fullmatch(matches, got.text), (name, logprobs, got.text)
            assert got.finished.reason == "stop"


async def test_a_call_in_the_form_of_hermes_and_qwen_comes_from_a_real_model(tmp_path: Path) -> None:
    whole = real_model("smollm2").read_bytes()
    with Model.load(real_model("smollm2"), vocab_only=True) as known:
        template = known.chat_template.source.encode()
    path = tmp_path / "hermes.gguf"
    path.write_bytes(whole.replace(template, HERMES.encode().ljust(len(template)), 1))
    city: dict[str, Any] = {"properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    weather = Tool("weather", "Tells the weather.", {**city, "type": "object", "additionalProperties": False})
    async with open_engine(config_for(path)) as engine:
        for choice in ("required", "weather"):
            for logprobs in (None, 1):
                request = Request(
                    "a",
                    messages=(Message("user", "How is the weather in Oslo?"),),
                    tools=(weather,),
                    tool_choice=choice,
                    parallel_tool_calls=False,
                    sampling=SamplingParams(max_tokens=80, temperature=0, logprobs=logprobs),
                )
                async with engine.generate(request) as stream:
                    last = [event async for event in stream][-1]
                assert isinstance(last, Finished)
                (call,) = last.tool_calls
                assert (call.name, last.reason) == ("weather", "stop")
                assert list(json.loads(call.arguments)) == ["city"]

"""Real models at temperature 0: 15 questions, and the text of each answer is llama-server's.

Compared up to the first token that another one nearly was: other CPUs add in other orders, and so do the batches that
a prompt is read in. Nothing is cached: attention's sums depend on where cells lie, and a cache's lie before a prompt's.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from engine_world import answer, config_for
from llama_server import RECORDED, llama_server, running_llama_server
from questions import MODELS, QUESTIONS, SAME_ARITHMETIC, replied, request
from reference import real_model

from benchmarks.reference import RealModel
from uma import open_engine
from uma.engine import Engine


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> RealModel:
    name: RealModel = request.param
    real_model(name)
    return name


@pytest.fixture
async def engine(model: RealModel) -> AsyncIterator[Engine]:
    async with open_engine(config_for(real_model(model), n_ctx=1_024, cache_tokens=0, cache_ram_mb=0)) as engine:
        yield engine


async def test_answers_at_temperature_0_are_those_recorded_of_llama_server(engine: Engine, model: RealModel) -> None:
    """As far as no other token was nearly as likely, since other CPUs add in other orders."""
    recorded: dict[str, str] = json.loads(RECORDED.read_text())["answers"][model]
    assert list(recorded) == list(QUESTIONS)
    for question, clear in recorded.items():
        if not clear:  # another token was nearly as likely from the beginning
            continue
        given = await answer(engine, request(model, question))
        assert given.text.startswith(clear), question


async def test_answers_at_temperature_0_are_those_of_the_llama_server_here(engine: Engine, model: RealModel) -> None:
    llama_server()
    with running_llama_server(real_model(model), *SAME_ARITHMETIC) as client:
        for question in QUESTIONS:
            given = await answer(engine, request(model, question))
            assert given.text.startswith(replied(client, model, question).clear), question

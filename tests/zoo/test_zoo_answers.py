"""Real models at temperature 0: 15 questions, and the whole text of each answer is llama-server's.

They are questions of whose answers each token is clearly the likeliest: other CPUs add in other orders, and so do the
batches that a prompt is read in, and attention where cells lie elsewhere. So nothing has to be set for them.
"""

from __future__ import annotations

import json

import pytest
from engine_world import answer, config_for
from llama_server import RECORDED, llama_server, running_llama_server
from questions import MODELS, QUESTIONS, SAME_ARITHMETIC, replied, request
from reference import real_model

from benchmarks.reference import RealModel
from uma import RuntimeConfig, open_engine


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> RealModel:
    name: RealModel = request.param
    real_model(name)
    return name


async def test_answers_at_temperature_0_are_those_recorded_of_llama_server(model: RealModel) -> None:
    recorded: dict[str, str] = json.loads(RECORDED.read_text())["answers"][model]
    assert tuple(recorded) == QUESTIONS[model]
    async with open_engine(RuntimeConfig(model=str(real_model(model)), n_ctx=2_048)) as engine:
        for question, text in recorded.items():
            given = await answer(engine, request(model, question))
            assert given.text == text, question


async def test_answers_at_temperature_0_are_those_of_the_llama_server_here(model: RealModel) -> None:
    llama_server()
    config = config_for(real_model(model), n_ctx=1_024)
    async with open_engine(config) as engine:
        with running_llama_server(real_model(model), *SAME_ARITHMETIC) as client:
            for question in QUESTIONS[model]:
                given = await answer(engine, request(model, question, cache_prompt=False))
                assert given.text == replied(client, model, question).text, question

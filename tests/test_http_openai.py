"""OpenAI's dialect on the real server, through the client that people use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from http_server import HttpServer

STORY: Any = [{"role": "user", "content": "Tell me a story about a fox"}]


@pytest.fixture
def client(http_server: HttpServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, with only its address changed."""
    with openai.OpenAI(base_url=f"{http_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_stream_and_a_whole_answer_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="builtin", messages=STORY, max_tokens=24, seed=7)
    pieces = client.chat.completions.create(
        model="builtin",
        messages=STORY,
        max_tokens=24,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_a_value_out_of_range_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="builtin", messages=STORY, temperature=-1)
    assert refused.value.param == "temperature"
    assert "-1 must be from 0 to 2" in refused.value.message


def test_a_model_that_is_not_there_is_not_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-4", messages=STORY)
    assert refused.value.code == "model_not_found"


def test_a_prompt_over_the_context_is_refused_before_the_stream_begins(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "a fox " * 4000}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="builtin", messages=long, stream=True)
    assert refused.value.code == "context_length_exceeded"

"""The clients that people use, unchanged but for the address: Anthropic's, Ollama's, OpenAI's asynchronous one."""

from __future__ import annotations

from typing import Any

import anthropic
import ollama
import openai
import pytest
from http_server import HttpServer

from harness import PATIENCE_SEC

GREEDY = {"temperature": 0}
"""Anthropic's newest client has no parameter for it."""
TURNS: Any = [{"role": "user", "content": "Tell me a story about a fox"}]


def test_anthropic_s_stream_adds_up_to_its_message(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "builtin", "max_tokens": 16, "messages": TURNS, "system": "Be brief.", "extra_body": GREEDY}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == "text"
    assert text == whole.content[0].text
    assert whole.stop_reason in ("max_tokens", "end_turn")
    assert final.usage.output_tokens == whole.usage.output_tokens <= 16
    counted = claude.messages.count_tokens(model="builtin", messages=TURNS, system="Be brief.").input_tokens
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == counted


def test_every_dialect_tells_which_stop_string_ended_an_answer(
    claude: anthropic.Anthropic, openai_client: openai.OpenAI, http_server: HttpServer
) -> None:
    asked: dict[str, Any] = {"model": "builtin", "max_tokens": 60, "messages": TURNS, "extra_body": GREEDY}
    ended = claude.messages.create(**asked, stop_sequences=["zzz", "e"])
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "e")
    with claude.messages.stream(**asked, stop_sequences=["zzz", "e"]) as stream:
        last = stream.get_final_message()
    assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", "e")
    native = http_server.ask("POST", "/completion", {"prompt": "Once upon", "stop": ["e"], "n_predict": 60}).json
    assert (native["stop_type"], native["stopping_word"]) == ("word", "e")
    free = http_server.ask("POST", "/completion", {"prompt": "Once upon", "n_predict": 2}).json
    assert (free["stop_type"], free["stopping_word"]) == ("limit", "")
    plain: Any = {"model": "builtin", "prompt": "Once upon", "max_tokens": 60, "stop": ["e"]}
    assert openai_client.completions.create(**plain).choices[0].model_extra == {"stop_reason": "e"}
    *_, final = [chunk.choices[0] for chunk in openai_client.completions.create(**plain, stream=True)]
    assert (final.finish_reason, final.model_extra) == ("stop", {"stop_reason": "e"})
    chat = openai_client.chat.completions.create(model="builtin", messages=TURNS, max_tokens=60, stop=["e"])
    assert chat.choices[0].model_extra == {"stop_reason": "e"}


def test_anthropic_s_client_finds_the_models(claude: anthropic.Anthropic) -> None:
    (found,) = claude.models.list()
    assert (found.type, found.display_name, found.created_at.year > 2000) == ("model", found.id, True)
    assert claude.models.retrieve(found.id) == found
    assert claude.models.retrieve("builtin").id == "builtin"
    with pytest.raises(anthropic.NotFoundError) as refused:
        claude.models.retrieve("claude-x")
    assert isinstance(refused.value.body, dict) and refused.value.body["error"]["type"] == "not_found_error"
    page = claude.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, found.id, found.id)


def test_anthropic_s_errors_have_their_classes(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="llama-x", max_tokens=1, messages=TURNS)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(model="builtin", max_tokens=1, messages=TURNS, extra_body={"temperature": 1.5})
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="this model does not support image input"):
        claude.messages.create(model="builtin", max_tokens=1, messages=[{"role": "user", "content": [image]}])


def test_ollama_s_client_chats_and_generates(llama: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 12}
    whole = llama.chat("builtin", messages=TURNS, options=options)
    pieces = list(llama.chat("builtin", messages=TURNS, options=options, stream=True))
    assert "".join(each.message.content or "" for each in pieces) == whole.message.content
    assert pieces[-1].done_reason == whole.done_reason == "length"
    assert pieces[-1].eval_count == whole.eval_count == 12
    generated = llama.generate("builtin", prompt=TURNS[0]["content"], options=options)
    assert generated.response == whole.message.content


def test_openai_s_client_sees_the_model(openai_client: openai.OpenAI) -> None:
    assert [each.id for each in openai_client.models.list()] == ["builtin"]
    assert openai_client.models.retrieve("builtin").id == "builtin"
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("gpt-4")


def test_ollama_s_client_sees_the_model(llama: ollama.Client) -> None:
    (model,) = llama.list().models
    assert model.model == "builtin"
    assert llama.show("builtin").details is not None
    assert llama.ps().models[0].model == "builtin"
    with pytest.raises(ollama.ResponseError) as refused:
        llama.show("llama3")
    assert refused.value.status_code == 404


def test_openai_s_responses_stream_in_their_documented_order(openai_client: openai.OpenAI) -> None:
    asked: Any = {"model": "builtin", "input": "Tell me a story", "temperature": 0, "extra_body": {"stop": "."}}
    whole = openai_client.responses.create(**asked)
    assert whole.output_text
    with openai_client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert final.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    for usage in (whole.usage, final.usage):
        assert usage is not None
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens > usage.input_tokens


def test_openai_s_asynchronous_client_streams(http_server: HttpServer) -> None:
    import asyncio

    async def text() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"{http_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SEC
        ) as client:
            stream = await client.chat.completions.create(
                model="builtin", messages=TURNS, max_tokens=8, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    assert asyncio.run(text())

"""A bound on thinking over HTTP, in every dialect's words, and the end of thinking that a client asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from http_server import HttpServer, RawHttp, events_of, running_http
from script_model import write_script_model

from harness import PATIENCE_SEC, short_directory
from models import CHATML
from uma import Request, SamplingParams, connect
from uma.http.keys import KeyFile, add
from uma.types import Message, ReasoningDelta, Token

THOUGHT = tuple(f"w{number:02} " for number in range(30))
THINKS = CHATML + "{# <think></think> #}"
ASKED = [{"role": "user", "content": "Go."}]
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
DEFAULT, OF_BOB = 9, 2
"""The server's own bound, and that of one of its keys."""
TOKENS = 24
"""Of each answer."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The file, a key without bounds and one that thinks no longer than `OF_BOB`."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    ada = add(path, "ada")
    bob = add(path, "bob")
    path.write_text(path.read_text(encoding="utf-8") + f"max_reasoning_tokens = {OF_BOB}\n", encoding="utf-8")
    assert KeyFile.open(path).find(bob)
    return path, ada, bob


@pytest.fixture(scope="module")
def server(keys: tuple[Path, str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Its model never ends its thinking by itself, and says one character again and again behind the mark."""
    model = write_script_model(
        tmp_path_factory.mktemp("bound") / "endless.gguf", ("<think>", *THOUGHT), template=THINKS, is_endless=True
    )
    arguments = (
        "--model",
        str(model),
        "--http-keys",
        str(keys[0]),
        "--reasoning-budget",
        str(DEFAULT),
        "--threads",
        "1",
    )
    with short_directory() as directory, running_http(directory, *arguments) as server:
        yield server


def body_for(path: str, *, stream: bool, **fields: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"input": ASKED, "max_output_tokens": TOKENS, "temperature": 0, "stream": stream, **fields}
    if path == OLLAMA:
        options = {"num_predict": TOKENS, "temperature": 0, **fields}
        return {"messages": ASKED, "stream": stream, "think": True, "options": options}
    return {"messages": ASKED, "max_tokens": TOKENS, "temperature": 0, "stream": stream, **fields}


def thought_of(path: str, stream: bool, data: bytes) -> str:
    """The thinking of an answer, which must have a text behind it."""
    if stream:
        thought, text = map("".join, zip(*(piece_of(path, each) for each in events_of(data)), strict=True))
    else:
        thought, text = whole_of(path, json.loads(data))
    assert text
    return thought


def whole_of(path: str, body: dict[str, Any]) -> tuple[str, str]:
    if path == CHAT:
        message = body["choices"][0]["message"]
        return message["reasoning_content"], message["content"]
    if path == RESPONSES:
        return tuple(item["content"][0]["text"] for item in body["output"])
    if path == MESSAGES:
        return body["content"][0]["thinking"], body["content"][1]["text"]
    return body["message"]["thinking"], body["message"]["content"]


def piece_of(path: str, event: dict[str, Any]) -> tuple[str, str]:
    if path == CHAT:
        delta = event["choices"][0]["delta"] if event["choices"] else {}
        return delta.get("reasoning_content", ""), delta.get("content", "")
    if path == OLLAMA:
        return event["message"].get("thinking", ""), event["message"].get("content", "")
    if path == MESSAGES:
        delta = event.get("delta", {})
        return delta.get("thinking", ""), delta.get("text", "")
    kind = event["type"]
    return (
        event["delta"] if kind == "response.reasoning_text.delta" else "",
        event["delta"] if kind == "response.output_text.delta" else "",
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_reasoning_tokens": 4}),
        (CHAT, {"reasoning": {"max_tokens": 4}}),
        (CHAT, {"thinking_budget": 4}),
        (CHAT, {"thinking_token_budget": 4}),
        (CHAT, {"reasoning_budget_tokens": 4}),
        (CHAT, {"thinking_budget_tokens": 4}),
        (CHAT, {"chat_template_kwargs": {"thinking_budget": 4}}),
        (RESPONSES, {"reasoning": {"max_tokens": 4}}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 4}}),
        (OLLAMA, {"max_reasoning_tokens": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_each_dialect_has_a_bound_of_thinking(
    server: HttpServer, keys: tuple[Path, str, str], path: str, fields: dict[str, Any], stream: bool
) -> None:
    answer = server.ask("POST", path, body_for(path, stream=stream, **fields), authorization=f"Bearer {keys[1]}")
    assert answer.status == 200, answer.body
    assert thought_of(path, stream, answer.body) == "".join(THOUGHT[:4])
    assert "x-uma-ignored" not in answer.headers
    assert b"ended by its limit of 4 tokens" in answer.body


def test_usage_tells_the_tokens_of_bounded_thinking(server: HttpServer, keys: tuple[Path, str, str]) -> None:
    body = body_for(CHAT, stream=False, thinking_budget=4)
    usage = server.ask("POST", CHAT, body, authorization=f"Bearer {keys[1]}").json["usage"]
    assert usage["completion_tokens"] == TOKENS
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 1 + 4 + len("</think>") - 1  # "th" is a token


@pytest.mark.parametrize(
    ("key", "fields", "bound"),
    [
        (1, {}, DEFAULT),
        (1, {"thinking_budget": -1}, DEFAULT),
        (1, {"thinking_budget": 12}, 12),
        (2, {}, OF_BOB),
        (2, {"thinking_budget": 5}, OF_BOB),
        (2, {"thinking_budget": 1}, 1),
    ],
)
def test_the_server_has_a_bound_for_requests_without_one_and_keys_have_their_own(
    server: HttpServer, keys: tuple[Path, str, str], key: int, fields: dict[str, Any], bound: int
) -> None:
    answer = server.ask("POST", CHAT, body_for(CHAT, stream=False, **fields), authorization=f"Bearer {keys[key]}")
    assert thought_of(CHAT, False, answer.body) == "".join(THOUGHT[:bound])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reasoning": {"max_tokens": 4, "exclude": True}}, "reasoning.exclude"),
        ({"reasoning": {"max_tokens": 4}, "thinking_budget": 5}, "thinking_budget"),
        ({"reasoning": "high", "thinking_budget": 4}, "reasoning"),
        ({"reasoning": {"enabled": False, "max_tokens": 4}}, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": 4, "colour": 1}}, "reasoning.colour"),
    ],
)
def test_what_has_no_effect_is_named(
    server: HttpServer, keys: tuple[Path, str, str], fields: dict[str, Any], named: str
) -> None:
    answer = server.ask("POST", CHAT, body_for(CHAT, stream=False, **fields), authorization=f"Bearer {keys[1]}")
    assert answer.status == 200
    assert answer.headers["x-uma-ignored"].split(", ") == [named]


def test_a_bound_that_is_no_number_is_refused(server: HttpServer, keys: tuple[Path, str, str]) -> None:
    for fields in ({"reasoning": {"max_tokens": "4"}}, {"thinking_budget": -2}, {"max_reasoning_tokens": -1}):
        answer = server.ask("POST", CHAT, body_for(CHAT, stream=False, **fields), authorization=f"Bearer {keys[1]}")
        assert answer.status == 400
        assert next(iter(fields)) in answer.json["error"]["message"]


def events(http: RawHttp) -> Iterator[dict[str, Any]]:
    """Of a stream of server-sent events, which the server sends in chunks of whole ones."""
    for chunk in http.chunks():
        yield from events_of(chunk)


def asking(server: HttpServer, path: str, key: str, **fields: Any) -> RawHttp:
    http = RawHttp(server.port)
    http.send("POST", path, body_for(path, stream=True, **fields), authorization=f"Bearer {key}")
    assert http.head()[0] == 200
    return http


LONG = {"max_tokens": 1_000, "max_reasoning_tokens": 1_000}


@pytest.mark.parametrize("how", ["answer", "control"])
def test_thinking_is_ended_by_the_id_that_the_stream_carries(
    server: HttpServer, keys: tuple[Path, str, str], how: str
) -> None:
    _, ada, bob = keys
    http = asking(server, CHAT, ada, **LONG)
    stream = events(http)
    id = next(event["id"] for event in stream if piece_of(CHAT, event)[0])
    path, body = (
        (f"/v1/requests/{id}/answer", None)
        if how == "answer"
        else (
            "/v1/chat/completions/control",
            {"id": id, "action": "reasoning_end"},
        )
    )
    refused = server.ask("POST", path, body, authorization=f"Bearer {bob}")
    assert (refused.status, "request not found" in refused.json["error"]["message"]) == (404, True)
    told = server.ask("POST", path, body, authorization=f"Bearer {ada}")
    assert told.status == 200
    assert told.json == ({"id": id, "object": "request.answer"} if how == "answer" else {"success": True})
    assert any(piece_of(CHAT, event)[1] for event in stream)
    assert not any(piece_of(CHAT, next(stream))[0] for _ in range(8)), "it thinks no more"
    http.close()


def test_other_dialects_ids_are_known_too(server: HttpServer, keys: tuple[Path, str, str]) -> None:
    http = asking(server, MESSAGES, keys[1], max_tokens=1_000, thinking={"type": "enabled", "budget_tokens": 1_000})
    stream = events(http)
    id = next(event["message"]["id"] for event in stream if event["type"] == "message_start")
    assert server.ask("POST", f"/v1/requests/{id}/answer", authorization=f"Bearer {keys[1]}").status == 200
    assert any(piece_of(MESSAGES, event)[1] for event in stream)
    http.close()


def test_an_id_of_nothing_or_of_what_has_ended_is_not_found(server: HttpServer, keys: tuple[Path, str, str]) -> None:
    ended = server.ask("POST", CHAT, body_for(CHAT, stream=False), authorization=f"Bearer {keys[1]}").json["id"]
    for id in (ended, "x", "chatcmpl-", "0" * 24, "%00"):
        assert server.ask("POST", f"/v1/requests/{id}/answer", authorization=f"Bearer {keys[1]}").status == 404


def test_the_page_ends_the_thinking_of_its_answer_by_its_token(server: HttpServer, keys: tuple[Path, str, str]) -> None:
    ask = {"messages": ASKED, "sampling": LONG, "token": "t" * 32}
    http = RawHttp(server.port)
    http.send("POST", "/ui/api/answers", ask, authorization=f"Bearer {keys[1]}")
    http.head()
    stream = events(http)
    assert any(event.get("thinking") for event in stream)
    path = f"/ui/api/answers/{ask['token']}/answer"
    assert server.ask("POST", path, authorization=f"Bearer {keys[2]}").status == 404
    assert server.ask("POST", path, authorization=f"Bearer {keys[1]}").status == 204
    assert any(event.get("text") for event in stream)
    http.close()


async def test_a_client_on_the_socket_ends_thinking_too(server: HttpServer) -> None:
    sampling = SamplingParams(max_tokens=1_000, max_reasoning_tokens=1_000)
    request = Request("a", messages=(Message("user", "Go."),), sampling=sampling, reasoning="auto")
    with trio.fail_after(PATIENCE_SEC):
        async with connect(server.process.socket) as client, client.generate(request) as stream:
            async for event in stream:
                if isinstance(event, ReasoningDelta):
                    stream.end_thinking()
                    break
            async for event in stream:
                if isinstance(event, Token) and event.text:
                    break
            else:
                raise AssertionError("it never answered")

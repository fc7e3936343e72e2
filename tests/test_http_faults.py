"""A fault in the server itself: whatever raises, and wherever, the client is told so in the form of its dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import pytest
from engine_world import config_for
from http_server import Answered, HostedHttp, RawHttp, hosted_http

from uma.engine import Engine
from uma.types import EventStream, Finished, Request, Source


class Broken:
    """The real engine, which can be asked for nothing."""

    def __init__(self, engine: Engine) -> None:
        self.info = engine.info
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


@pytest.fixture(scope="module")
def broken(tiny: Path) -> Iterator[HostedHttp]:
    with hosted_http(config_for(tiny, http="127.0.0.1:0"), lambda engine: cast(Source, Broken(engine))) as hosted:
        yield hosted


def ask(port: int, method: str, path: str, body: Any) -> Answered:
    with closing(RawHttp(port)) as raw:
        return raw.ask(method, path, body)


def openai(body: Any) -> bool:
    return set(body["error"]) == {"message", "type", "param", "code"} and str(body["error"]["type"]) == "server_error"


def llama_server(body: Any) -> bool:
    return (str(body["error"]["type"]), int(body["error"]["code"])) == ("server_error", 500)


def anthropic(body: Any) -> bool:
    return (str(body["type"]), str(body["error"]["type"])) == ("error", "api_error")


def ollama(body: Any) -> bool:
    return list(body) == ["error"] and isinstance(body["error"], str)


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("method", "path", "body", "is_told"),
    [
        ("POST", "/v1/chat/completions", CHAT, openai),
        ("POST", "/v1/completions", {"prompt": ["a", "b"]}, openai),
        ("POST", "/v1/responses", {"input": "a"}, openai),
        ("POST", "/v1/embeddings", {"input": "a"}, openai),
        ("POST", "/v1/messages", CHAT, anthropic),
        ("POST", "/v1/messages/count_tokens", CHAT, anthropic),
        ("POST", "/api/chat", CHAT, ollama),
        ("POST", "/api/generate", {"prompt": "a"}, ollama),
        ("POST", "/completion", {"prompt": "a"}, llama_server),
        ("POST", "/tokenize", {"content": "a"}, llama_server),
        ("GET", "/slots", None, llama_server),
        ("GET", "/metrics", None, llama_server),
        ("GET", "/health", None, llama_server),
    ],
)
def test_a_fault_is_told_in_the_form_of_the_dialect(
    broken: HostedHttp,
    method: str,
    path: str,
    body: Any,
    is_told: Callable[[Any], bool],
    stream: bool,
) -> None:
    answer = ask(broken.port, method, path, None if body is None else {**body, "stream": stream})
    assert (answer.status, answer.headers["content-type"]) == (500, "application/json")
    assert is_told(answer.json)
    assert "broken" not in str(answer.json)
    assert answer.headers["x-request-id"]


def test_what_no_endpoint_takes_is_told_in_the_form_of_the_dialect(broken: HostedHttp) -> None:
    known = {"/v1/models": "error", "/api/tags": "error", "/v1/messages": "type", "/slots": "error"}
    for path, is_told in known.items():
        answer = ask(broken.port, "BREW", path, None)
        assert (answer.status, answer.headers["content-type"]) == (405, "application/json")
        assert is_told in answer.json


class BreakingOff:
    """The real engine, whose streams end with a fault behind some tokens."""

    def __init__(self, engine: Engine) -> None:
        self.info = engine.info
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[Any]:
        async with self._engine.generate(request) as stream:
            yield BrokenStream(stream)


class BrokenStream:
    """A stream that ends with a fault."""

    def __init__(self, stream: EventStream) -> None:
        self.tap: Any = None
        self._stream = stream
        self._left = 4

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        self._left -= 1
        event = await anext(self._stream)
        if not self._left or isinstance(event, Finished):
            raise RuntimeError("the stream is broken")
        return event


@pytest.fixture(scope="module")
def breaking(tiny: Path) -> Iterator[HostedHttp]:
    with hosted_http(config_for(tiny, http="127.0.0.1:0"), lambda engine: cast(Source, BreakingOff(engine))) as hosted:
        yield hosted


def responses(body: Any) -> bool:
    return (str(body["type"]), set(body)) == ("error", {"type", "sequence_number", "code", "message", "param"})


@pytest.mark.parametrize(
    ("path", "body", "is_told"),
    [
        ("/v1/chat/completions", CHAT, openai),
        ("/v1/completions", {"prompt": "a"}, openai),
        ("/v1/completions", {"prompt": ["a", "b"]}, openai),
        ("/v1/responses", {"input": "a"}, responses),
        ("/v1/messages", CHAT, anthropic),
        ("/api/chat", {**CHAT, "options": {"ignore_eos": True}}, ollama),
        ("/api/generate", {"prompt": "a", "options": {"ignore_eos": True}}, ollama),
        ("/completion", {"prompt": "a"}, llama_server),
        ("/completion", {"prompt": "a", "return_progress": True}, llama_server),
    ],
)
def test_a_fault_in_mid_stream_is_told_in_the_form_of_the_dialect(
    breaking: HostedHttp,
    path: str,
    body: dict[str, Any],
    is_told: Callable[[Any], bool],
) -> None:
    answer = ask(breaking.port, "POST", path, {**body, "stream": True, "max_tokens": 50, "ignore_eos": True})
    assert answer.status == 200
    *before, last = [line for line in answer.body.decode().splitlines() if line.strip(" :")]
    assert before  # of the tokens that came
    assert is_told(json.loads(last.removeprefix("data: ")))
    assert "is broken" not in last

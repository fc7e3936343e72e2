"""The event that opens a message of Anthropic's says how many tokens the prompt has, and how many of them come from the
cache, whatever else the server does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_world import config_for
from http_server import HostedHttp, HttpServer, events_of, hosted_http, running_gateway

from uma.engine.activity import activity_of
from uma.types import Activity

TURNS = [{"role": "user", "content": "Tell me about the fox, the owl and the river."}]
TOOLS = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]


def prompt_of(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["input_tokens"], usage["cache_read_input_tokens"]


@pytest.fixture(scope="module")
def hosted(tiny: Path) -> Iterator[HostedHttp]:
    with hosted_http(config_for(tiny, http="127.0.0.1:0")) as hosted:
        yield hosted


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"system": "Be brief."}])
def test_a_message_opens_with_the_prompt_s_tokens(hosted: HostedHttp, more: dict[str, Any]) -> None:
    body = {"messages": TURNS, **more}
    with hosted.connect() as raw:
        counted = raw.ask("POST", "/v1/messages/count_tokens", body).json["input_tokens"]
        asked = {**body, "max_tokens": 4, "stream": True}
        answers = [raw.ask("POST", "/v1/messages", asked).events for _ in range(2)]  # from the cache, too
    for said in answers:
        assert said[0]["type"] == "message_start"
        opened = prompt_of(said[0]["message"]["usage"])
        assert (sum(opened), opened) == (counted, prompt_of(said[-2]["usage"]))
    assert opened[1] > 0


def test_a_gateway_s_message_opens_with_them_too(http_server: HttpServer) -> None:
    counted = http_server.ask("POST", "/v1/messages/count_tokens", {"messages": TURNS}).json["input_tokens"]
    with running_gateway(http_server.process) as gateway:
        body = {"messages": TURNS, "max_tokens": 4, "stream": True}
        said = gateway.ask("POST", "/v1/messages", body).events
    assert sum(prompt_of(said[0]["message"]["usage"])) == counted


TELLING = {"/v1/messages": {"messages": TURNS}, "/completion": {"prompt": "Once", "return_progress": True}}


@pytest.mark.parametrize(("path", "body"), TELLING.items())
def test_a_stream_that_tells_of_its_prompt_has_the_engine_look_at_its_own_request_alone(
    hosted: HostedHttp, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    looked_at: list[str] = []

    def look(*about: Any) -> Activity:
        looked_at.append(about[-1])
        return activity_of(*about)

    monkeypatch.setattr("uma.engine.engine.activity_of", look)
    with hosted.connect() as raw:
        answer = raw.ask("POST", path, {**body, "max_tokens": 4, "stream": True})
    assert looked_at
    assert set(looked_at) == {answer.headers["x-request-id"]}


@pytest.fixture
def one_at_a_time(heavy: Path) -> Iterator[HostedHttp]:
    with hosted_http(config_for(heavy, http="127.0.0.1:0", max_sequences=1)) as hosted:
        yield hosted


def test_a_message_that_waits_is_alive_before_it_opens_and_opens_with_them(one_at_a_time: HostedHttp) -> None:
    long = {"messages": TURNS, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with one_at_a_time.connect() as first, one_at_a_time.connect() as second:
        first.send("POST", "/v1/messages", long)
        assert first.head()[0] == 200
        second.send("POST", "/v1/messages", {**long, "max_tokens": 2})
        assert second.head()[0] == 200  # while it waits for the first one's sequence
        chunks = second.chunks()
        opening = next(chunks)
        while b"message_start" not in opening:
            assert opening.startswith(b": "), opening  # nothing but comments
            opening = next(chunks)
        first.close()
        rest = opening + b"".join(chunks)
    (start, *_, last, _) = events_of(rest)
    assert sum(opened := prompt_of(start["message"]["usage"])) > 0
    assert opened == prompt_of(last["usage"])

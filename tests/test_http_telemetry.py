"""How far and how fast a stream is, as llama-server tells it, and what a chat's prompt is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_world import config_for
from http_server import hosted_http
from test_http_native import Server, events

from uma.http.telemetry import PromptState, Telemetry

ASKED: dict[str, dict[str, Any]] = {
    "/completion": {"n_predict": 5},
    "/v1/completions": {"max_tokens": 5},
    "/v1/chat/completions": {"max_tokens": 5},
    "/v1/responses": {"max_output_tokens": 5},
}
TOLD = {"return_progress": True, "timings_per_token": True, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    """A prompt of more than 32 tokens takes several batches."""
    with hosted_http(config_for(tiny, http="127.0.0.1:0", n_batch=32, n_ubatch=32)) as hosted:
        yield Server(hosted.port)


def asked(path: str, text: str, **more: Any) -> dict[str, Any]:
    """A body that asks about `text`."""
    if path == "/v1/chat/completions":
        return {**ASKED[path], "messages": [{"role": "user", "content": text}], **more}
    return {**ASKED[path], "input" if path == "/v1/responses" else "prompt": text, **more}


@pytest.mark.parametrize("path", ASKED)
def test_the_progress_of_a_prompt_begins_with_what_is_cached_and_ends_with_all(server: Server, path: str) -> None:
    text = f"{path} and so on, {path} and so on, {path}"
    cached = []
    for _ in range(2):
        told = events(server, path, asked(path, text, **TOLD))
        progress = [each["prompt_progress"] for each in told if "prompt_progress" in each]
        assert progress[0]["processed"] == progress[0]["cache"]
        cached.append(progress[0]["cache"])
        done = [each["processed"] for each in progress]
        assert done == sorted(done)
        assert done[-1] == progress[0]["total"] > 32
        assert {(each["total"], each["cache"]) for each in progress} == {(progress[0]["total"], progress[0]["cache"])}
    assert cached[0] < 32 < cached[1]


def test_progress_is_told_twice_a_second_also_while_one_batch_takes_longer() -> None:
    now = 10.0
    telemetry = Telemetry(tells_progress=True, times_tokens=False, now=lambda: now)
    told: dict[int, list[tuple[int, float]]] = {0: [], 1: []}
    for look in range(36):
        now = 10.0 + look / 8
        for index in told:
            state = PromptState(300, 100, 164 if now < 12.0 else 228)
            told[index] += [
                (each["prompt_progress"]["processed"], each["prompt_progress"]["time_ms"])
                for each in telemetry.looked(index, state)
            ]
    assert told[0] == told[1]
    first, *later = told[0]
    assert first == (100, 0.0)
    assert later == [(164, 500.0 * half) for half in range(4)] + [(228, 500.0 * half) for half in range(4, 9)]


@pytest.mark.parametrize("path", ASKED)
def test_a_body_that_is_read_in_a_thread_of_its_own_tells_as_much(server: Server, path: str) -> None:
    told = events(server, path, asked(path, "long ago", **TOLD, user="x" * 300_000))
    assert any("prompt_progress" in each for each in told)


@pytest.mark.parametrize("path", ASKED)
def test_each_token_comes_with_timings_where_they_are_asked_for(server: Server, path: str) -> None:
    told = events(server, path, asked(path, f"{path} 0123456789", **TOLD))
    timings = [each["timings"] for each in told if "timings" in each and "prompt_progress" not in each]
    counts = [each["predicted_n"] for each in timings]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 5)
    assert len(counts) > 3
    assert len({(each["prompt_n"], each["cache_n"]) for each in timings}) == 1
    before = [each["timings"] for each in told if "prompt_progress" in each]
    assert (before[0]["prompt_n"], before[0]["prompt_ms"], before[0]["predicted_n"]) == (0, 0.0, 0)


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_asks_for_neither_has_neither(server: Server, path: str) -> None:
    told = events(server, path, asked(path, "a", ignore_eos=True))
    assert not any("prompt_progress" in each for each in told)
    assert sum("timings" in each for each in told) <= 1


@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_that_is_verbose_tells_its_prompt(server: Server, streams: bool) -> None:
    body = asked("/v1/chat/completions", "Who?", verbose=True)
    prompt = server.ask("POST", "/apply-template", {"messages": body["messages"]}).json["prompt"]
    told = events(server, "/v1/chat/completions", body) if streams else None
    last = server.ask("POST", "/v1/chat/completions", body).json if told is None else told[-1]
    assert last["__verbose"]["prompt"] == prompt
    assert "__verbose" not in server.ask("POST", "/v1/chat/completions", {**body, "verbose": False}).json


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_prompt_s_tokens_are_counted_without_an_answer(server: Server, path: str) -> None:
    body = asked(path, "Who are you?")
    usage = server.ask("POST", path, body).json["usage"]
    told = server.ask("POST", f"{path}/input_tokens", body).json
    assert told == {
        "object": "response.input_tokens",
        "input_tokens": usage["prompt_tokens" if "prompt_tokens" in usage else "input_tokens"],
    }

"""A coding agent's session of over 35,000 tokens, and as a long variant of over 100,000, by the shape of what agents
send: texts are these tests' own.

The model is a tiny Mamba, which reads as many tokens in seconds; its context is long and the server's defaults take it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from http_server import HttpServer, running_http

from harness import short_directory, until
from models import write_model

RESULT_CHARS = 13_000
"""Of the file that each turn reads. A token is a character here, but for a few pairs."""
MIN_CACHED = 0.97
"""Of what a turn has in common with the one before."""


@attrs.frozen
class Size:
    """How long a session is."""

    turns: int
    context: int

    @property
    def least_tokens(self) -> int:
        """What its whole prompt has more tokens than."""
        return 12_500 * self.turns


SHORT, LONG = Size(3, 49_152), Size(8, 131_072)
LOOK = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}


@pytest.fixture(scope="module", params=[SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
def size(request: pytest.FixtureRequest) -> Size:
    given: Size = request.param
    return given


@pytest.fixture(scope="module")
def server(size: Size, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A model whose whole context is served."""
    path = write_model(tmp_path_factory.mktemp("long") / "long.gguf", kind="recurrent", context_length=size.context)
    with short_directory() as directory, running_http(directory, "--model", str(path)) as running:
        yield running


@pytest.fixture(scope="module")
def session(server: HttpServer, size: Size) -> list[dict[str, Any]]:
    """The messages of a session that has read file after file, each turn of which was answered."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Make the test pass."}]}]
    before = 0
    for turn in range(size.turns):
        said = server.ask("POST", "/v1/messages?beta=true", claude(messages, f"{turn:05x}"))
        assert said.status == 200, said.body
        usage = said.json["usage"]
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert usage["cache_read_input_tokens"] >= MIN_CACHED * before, (turn, usage)
        assert prompt > before + RESULT_CHARS // 2 or not turn
        before = prompt
        messages += read_a_file(turn)
    return messages


def claude(messages: list[dict[str, Any]], build: str, **more: Any) -> dict[str, Any]:
    """As Claude Code asks; `build` changes with each of its requests."""
    return {
        "model": "claude-sonnet-4-5",
        "max_tokens": 4,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={build};"},
            {"type": "text", "text": "You help with code. " * 100, "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [LOOK],
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "a"},
        "messages": messages,
        **more,
    }


def read_a_file(turn: int) -> list[dict[str, Any]]:
    """A call and what it brought, as the next request has them."""
    use = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Read", "input": {"path": f"src/part{turn}.py"}}
    text = "".join(f"{line:5}  value_{turn} = {line * 7919 % 1000}\n" for line in range(RESULT_CHARS))[:RESULT_CHARS]
    result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": text}
    return [
        {"role": "assistant", "content": [{"type": "text", "text": f"I read part {turn}."}, use]},
        {"role": "user", "content": [result]},
    ]


def opencode(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """As opencode asks for the same conversation, by another dialect."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": "You help with code. " * 100}]
    for message in messages:
        for part in message["content"]:
            if part["type"] == "text":
                turns.append({"role": message["role"], "content": part["text"]})
            elif part["type"] == "tool_use":
                function = {"name": part["name"], "arguments": '{"path": "a"}'}
                turns[-1]["tool_calls"] = [{"id": part["id"], "type": "function", "function": function}]
            else:
                turns.append({"role": "tool", "tool_call_id": part["tool_use_id"], "content": part["content"]})
    function = {"name": "read", "description": "Reads a file.", "parameters": LOOK["input_schema"]}
    return {
        "model": "long",
        "max_tokens": 32_000,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "messages": turns,
    }


def test_a_long_session_is_read_once(server: HttpServer, size: Size, session: list[dict[str, Any]]) -> None:
    said = server.ask("POST", "/v1/messages?beta=true", claude(session, "fffff"))
    assert said.status == 200, said.body
    usage = said.json["usage"]
    assert usage["cache_read_input_tokens"] + usage["input_tokens"] > size.least_tokens
    # Only the last file is new.
    assert usage["input_tokens"] < 2 * RESULT_CHARS


def test_a_long_session_that_is_given_up_while_it_is_read_frees_the_server(
    server: HttpServer, size: Size, session: list[dict[str, Any]]
) -> None:
    """opencode hangs up; its question, in another dialect, is another prompt that is read from its first token."""

    def metrics() -> dict[str, Any]:
        return dict(server.process.metrics())

    before = metrics()
    with server.connect() as raw:
        raw.send("POST", "/v1/chat/completions", opencode(session))
        until(metrics, lambda now: now["active_sequences"] == 1)
    cancelled = before["requests_cancelled"] + 1
    after = until(metrics, lambda now: now["active_sequences"] == 0 and now["requests_cancelled"] == cancelled)
    assert after["prefill_tokens_total"] - before["prefill_tokens_total"] < size.least_tokens
    again = server.ask("POST", "/v1/messages?beta=true", claude(session, "eeeee"))
    assert again.status == 200, again.body
    assert again.json["usage"]["input_tokens"] < RESULT_CHARS


def test_a_session_beyond_the_context_is_told_in_the_words_by_which_it_is_shortened(
    server: HttpServer, size: Size, session: list[dict[str, Any]]
) -> None:
    more = range(size.turns, size.turns + 3)
    longer = [*session, *(message for turn in more for message in read_a_file(turn))]
    refused = server.ask("POST", "/v1/messages?beta=true", claude(longer, "ddddd"))
    assert refused.status == 400
    assert refused.json["error"]["message"].startswith("prompt is too long: ")
    assert f" > {size.context - 1} maximum" in refused.json["error"]["message"]

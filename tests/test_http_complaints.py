"""What users of other servers complain about most does not happen here, in any dialect.

What is not here is beside what it belongs to: cancels in `test_http_hangups`, keys and origins in `test_http_access`,
tools in `test_http_tools`, log probabilities in `test_http_openai`, faults in `test_http_fuzz`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer, RawHttp, running_gateway, running_http

from harness import short_directory, until

LONG = "a fox " * 9000
"""More than the built-in model's context."""


def turns(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": turns(LONG)}),
        ("/v1/completions", {"prompt": ["a fox", LONG]}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": turns(LONG), "max_tokens": 2}),
        ("/api/chat", {"messages": turns(LONG)}),
        ("/api/generate", {"prompt": LONG}),
        ("/completion", {"prompt": LONG}),
    ],
)
def test_a_prompt_is_refused_and_never_cut(
    http_server: HttpServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    refused = http_server.ask("POST", path, {**body, "stream": stream})
    assert refused.status == 400
    assert refused.headers["content-type"] == "application/json"
    assert "prompt too large" in str(refused.json["error"])


MANY_TOKENS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": turns("x"), "max_tokens": 32_769}, "max_tokens"),
    ("/v1/chat/completions", {"messages": turns("x"), "max_completion_tokens": 32_769}, "max_completion_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 32_769}, "max_tokens"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 32_769}, "max_output_tokens"),
    ("/v1/messages", {"messages": turns("x"), "max_tokens": 32_769}, "max_tokens"),
    ("/api/chat", {"messages": turns("x"), "options": {"num_predict": 32_769, "stop": ["e"]}}, "options.num_predict"),
    ("/api/generate", {"prompt": "x", "options": {"num_predict": 32_769, "stop": ["e"]}}, "options.num_predict"),
    ("/completion", {"prompt": "x", "n_predict": 32_769}, "n_predict"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "field"), MANY_TOKENS)
def test_more_tokens_than_the_server_s_limit_are_refused_by_the_field_s_own_name(
    narrow: HttpServer, path: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    refused = narrow.ask("POST", path, {**body, "stream": stream})
    assert refused.status == 400
    assert f"{field}: 32,769 is over this server's limit of 32,768" in str(refused.json["error"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "field"), MANY_TOKENS)
def test_more_tokens_than_the_context_holds_are_served_to_its_end_and_the_answer_says_so(
    http_server: HttpServer, path: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    answer = http_server.ask("POST", path, {"stop": ["e"], **body, "stream": stream})
    assert answer.status == 200
    assert b'"warnings":["max_tokens: 32,769 do not fit the context beside the prompt, which leaves ' in answer.body


def test_an_answer_that_fills_the_context_ends_by_length(http_server: HttpServer) -> None:
    n_ctx = http_server.ask("GET", "/props").json["limits"]["n_ctx"]
    asked = {"prompt": [300] * (n_ctx - 4), "max_tokens": 32_000, "ignore_eos": True}
    answer = http_server.ask("POST", "/v1/completions", asked).json
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["total_tokens"]) == ("length", n_ctx)


IMPOSSIBLE = {"type": "object", "properties": {"kind": {"not": {"const": 1}}}}
"""A schema that no grammar describes."""


WRAPPED = {"type": "json_schema", "json_schema": {"name": "x", "schema": IMPOSSIBLE}}
FLAT = {"type": "json_schema", "name": "x", "schema": IMPOSSIBLE}


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [
        (
            "/v1/chat/completions",
            {"messages": turns("x"), "response_format": WRAPPED},
            "response_format.json_schema.schema",
        ),
        ("/v1/completions", {"prompt": "x", "response_format": WRAPPED}, "response_format.json_schema.schema"),
        ("/v1/responses", {"input": "x", "text": {"format": FLAT}}, "text.format.schema"),
        ("/api/chat", {"messages": turns("x"), "format": IMPOSSIBLE}, "format"),
        ("/api/generate", {"prompt": "x", "format": IMPOSSIBLE}, "format"),
        ("/completion", {"prompt": "x", "json_schema": IMPOSSIBLE}, "json_schema"),
    ],
)
def test_a_schema_is_enforced_or_refused_with_its_place_in_the_body(
    http_server: HttpServer, path: str, body: dict[str, Any], schema: str
) -> None:
    refused = http_server.ask("POST", path, body)
    place = f"{schema}.properties.kind"
    message = refused.json["error"] if path.startswith("/api/") else refused.json["error"]["message"]
    assert (refused.status, message.startswith(f"{place}: ")) == (400, True), message
    if path.startswith("/v1/"):
        assert refused.json["error"]["param"] == place


@pytest.mark.parametrize("is_gateway", [False, True])
def test_special_tokens_and_parts_of_characters_are_told_as_llama_server_tells_them(
    http_server: HttpServer, is_gateway: bool
) -> None:
    with running_gateway(http_server.process) if is_gateway else nullcontext(http_server) as server:
        body = {"content": "<|im_start|>a狐", "add_special": True, "with_pieces": True}
        tokens = server.ask("POST", "/tokenize", body).json["tokens"]
        pieces = [each["piece"] for each in tokens]
        assert pieces[0].startswith("<") and pieces[1:] == ["<|im_start|>", "a", [0xE7], [0x8B], [0x90]]
        ids = [each["id"] for each in tokens]
        assert server.ask("POST", "/tokenize", {**body, "with_pieces": False}).json["tokens"] == ids
        assert server.ask("POST", "/detokenize", {"tokens": ids}).json["content"] == f"{pieces[0]}<|im_start|>a狐"
        assert "\N{REPLACEMENT CHARACTER}" in server.ask("POST", "/detokenize", {"tokens": ids[:-1]}).json["content"]
        refused = server.ask("POST", "/detokenize", {"tokens": ids[:2] * 100_000})
        assert (refused.status, "tokens: prompt too large" in refused.json["error"]["message"]) == (400, True)


def test_tokens_can_be_counted_and_turned_back_into_text(http_server: HttpServer) -> None:
    text = "The fox said: “Grüße, 狐!”"
    found = http_server.ask("POST", "/tokenize", {"content": text, "with_pieces": True}).json
    ids = [each["id"] for each in found["tokens"]]
    assert http_server.ask("POST", "/detokenize", {"tokens": ids}).json["content"] == text
    told = (each["piece"] for each in found["tokens"])
    assert b"".join(bytes(each) if isinstance(each, list) else each.encode() for each in told) == text.encode()
    assert found["count"] == len(ids)
    whole = http_server.ask("POST", "/tokenize", {"content": text, "add_special": True}).json["count"]
    done = http_server.ask("POST", "/v1/completions", {"prompt": text, "max_tokens": 1}).json
    assert done["usage"]["prompt_tokens"] == whole
    rendered = http_server.ask("POST", "/apply-template", {"messages": turns(text)}).json["prompt"]
    assert text in rendered
    counted = http_server.ask("POST", "/v1/messages/count_tokens", {"messages": turns(text)}).json["input_tokens"]
    chat = http_server.ask("POST", "/v1/chat/completions", {"messages": turns(text), "max_tokens": 1}).json
    assert chat["usage"]["prompt_tokens"] == counted


def test_a_block_of_billing_in_front_of_the_instructions_is_left_out_and_named(http_server: HttpServer) -> None:
    asked = {"messages": turns("Hello"), "max_tokens": 2}
    rules = {"type": "text", "text": "Answer in one word."}
    plain = http_server.ask("POST", "/v1/messages/count_tokens", {**asked, "system": [rules]})
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f3a9;"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        told = http_server.ask("POST", path, {**asked, "system": [billing, rules]})
        assert told.status == 200 and "system[0]" in told.headers["x-uma-ignored"].split(", ")
    assert told.json == plain.json


def test_usage_tells_the_cached_tokens_streamed_or_not(http_server: HttpServer) -> None:
    messages = turns("Tell me of the heron who counted the same eleven reeds twice, and of nothing else")
    asked = {"messages": messages, "max_tokens": 2}
    first = http_server.ask("POST", "/v1/chat/completions", asked).json["usage"]
    again = http_server.ask("POST", "/v1/chat/completions", asked).json["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert again["prompt_tokens"] == first["prompt_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] < cached < again["prompt_tokens"]
    streamed = http_server.ask(
        "POST", "/v1/chat/completions", {**asked, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert b'"cached_tokens":%d' % cached in streamed.body
    claude = http_server.ask("POST", "/v1/messages", asked).json["usage"]
    assert (claude["cache_read_input_tokens"], claude["input_tokens"]) == (cached, again["prompt_tokens"] - cached)


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[HttpServer]:
    """A server that computes one request at a time, for long."""
    flags = ("--model", str(tiny), "--max-sequences", "1", "--n-ctx", "32768", "--max-tokens", "32768")
    with short_directory() as directory, running_http(directory, *flags) as process:
        yield process


def test_a_stream_that_waits_shows_that_it_lives_and_leaves_the_queue_with_its_client(narrow: HttpServer) -> None:
    endless = {"max_tokens": 30_000, "ignore_eos": True, "stream": True}
    waiting: list[tuple[str, dict[str, Any], bytes]] = [
        ("/v1/completions", {"prompt": "a", **endless}, b": waiting\n\n"),
        ("/v1/messages", {"messages": turns("a"), **endless}, b": waiting\n\n"),  # a ping comes behind message_start
        ("/api/generate", {"prompt": "a", "options": {"num_predict": 9}}, b" "),
    ]
    raws = [RawHttp(narrow.port) for _ in range(4)]
    try:
        raws[0].send("POST", "/v1/completions", {"prompt": "a", **endless})
        assert raws[0].head()[0] == 200
        for raw, (path, body, _) in zip(raws[1:], waiting, strict=True):
            raw.send("POST", path, body)
        for raw, (_, _, sign) in zip(raws[1:], waiting, strict=True):
            assert raw.head()[0] == 200
            assert next(chunk for chunk in raw.chunks() if sign in chunk)
        assert narrow.process.metrics()["queued_requests"] == 3
        for raw in raws[1:]:
            raw.close()
        found = until(narrow.process.metrics, lambda metrics: metrics["requests_cancelled"] == 3)
        assert (found["queued_requests"], found["active_sequences"]) == (0, 1)
    finally:
        for raw in raws:
            raw.close()

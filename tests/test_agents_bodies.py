"""What coding agents send, by its shape: with texts of these tests' own, on the real server and the built-in model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer, running_http

from harness import short_directory

ASKED = {"role": "user", "content": "What is in the picture?"}
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
URL = "data:image/png;base64,iVBORw0KGgo="
UNSEEN = "[an image, which this model cannot see]"
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": LOOK["input_schema"]}}


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[HttpServer]:
    """A model that does not think, and whose template writes every turn as it is."""
    with short_directory() as directory, running_http(directory, "--model", str(tiny)) as server:
        yield server


def ignored(answer: Any) -> list[str]:
    return [each for each in answer.headers.get("x-uma-ignored", "").split(", ") if each]


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 2000}])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_thinking_that_a_model_cannot_do_is_named_as_ignored(
    plain: HttpServer, thinking: dict[str, Any], path: str
) -> None:
    said = plain.ask("POST", path, {"messages": [ASKED], "max_tokens": 1, "thinking": thinking})
    assert said.status == 200, said.body
    assert "thinking" in ignored(said)


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        ("/api/chat", {"think": True}, "think"),
        ("/api/chat", {"think": "high"}, "think"),
    ],
)
def test_other_words_for_thinking_are_named_too(
    plain: HttpServer, path: str, fields: dict[str, Any], named: str
) -> None:
    said = plain.ask("POST", path, {"messages": [ASKED], "max_tokens": 1, "options": {"num_predict": 1}, **fields})
    assert said.status == 200, said.body
    assert ignored(said).count(named) == 1


def counted(server: HttpServer, messages: list[Any]) -> Any:
    return server.ask("POST", "/v1/messages/count_tokens", {"messages": messages, "tools": [LOOK]})


def with_result(content: Any) -> list[Any]:
    use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": content}
    return [ASKED, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


RESULTS: list[tuple[Any, str, bool]] = [
    ({"type": "image", "source": PNG}, UNSEEN, True),
    (
        {"type": "document", "source": {**PNG, "media_type": "application/pdf"}},
        "[a file, which this model cannot read]",
        True,
    ),
    (
        {
            "type": "document",
            "title": "Notes",
            "source": {"type": "text", "media_type": "text/plain", "data": "A fox."},
        },
        "Notes\nA fox.",
        False,
    ),
    (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "A fox."}]}},
        "A fox.",
        False,
    ),
    ({"type": "tool_reference", "tool_name": "look"}, "look", False),
    (
        {
            "type": "search_result",
            "source": "file:///a",
            "title": "A",
            "content": [{"type": "text", "text": "A fox."}],
        },
        "A\nfile:///a\nA fox.",
        False,
    ),
]


@pytest.mark.parametrize(("part", "text", "is_named"), RESULTS)
def test_what_a_tool_brought_is_read_as_text_in_every_later_turn(
    plain: HttpServer, part: Any, text: str, is_named: bool
) -> None:
    later = [{"role": "assistant", "content": "A fox."}, {"role": "user", "content": "And now?"}]
    words = {"type": "text", "text": "Here:"}
    for rest in ([], later):
        got = counted(plain, [*with_result([words, part]), *rest])
        assert got.status == 200, got.body
        assert got.json == counted(plain, [*with_result(f"Here:\n{text}"), *rest]).json
        assert ("messages[2].content[0].content[1]" in ignored(got)) is is_named


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": URL}}


def test_an_image_of_a_tool_or_an_earlier_turn_is_a_text_in_every_dialect(plain: HttpServer) -> None:
    brought, later = {"role": "tool", "tool_call_id": "call_1", "content": "Read."}, {"role": "user", "content": "So?"}
    chat_image, said = {"role": "user", "content": [CHAT_IMAGE]}, {"role": "assistant", "content": "A fox."}
    answers = {
        "messages[3].content[0]": ("/v1/chat/completions", [ASKED, CALLED, brought, chat_image]),
        "messages[0].content[0]": ("/v1/chat/completions", [chat_image, said, later]),
        "messages[0].images": ("/api/chat", [{**ASKED, "images": ["AA=="]}, said, later]),
    }
    for named, (path, messages) in answers.items():
        got = plain.ask("POST", path, {"messages": messages, "max_tokens": 1, "options": {"num_predict": 1}})
        assert (got.status, named in ignored(got)) == (200, True), got.body
    template = plain.ask("POST", "/apply-template", {"messages": [chat_image, said, later]}).json["prompt"]
    assert UNSEEN in template
    items = [
        ASKED,
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_image", "image_url": URL}]},
    ]
    got = plain.ask("POST", "/v1/responses", {"input": items, "max_output_tokens": 1})
    assert (got.status, "input[2].output[0]" in ignored(got)) == (200, True), got.body


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": PNG}]}]},
            "messages[0]",
        ),
        (
            "/v1/chat/completions",
            {"messages": [ASKED, CALLED, {"role": "user", "content": [CHAT_IMAGE]}]},
            "messages[2]",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [CHAT_IMAGE]}, {"role": "system", "content": "Be brief."}]},
            "messages[0]",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
            "input[0]",
        ),
        ("/api/chat", {"messages": [{**ASKED, "images": ["AA=="]}]}, "messages[0]"),
    ],
)
def test_an_image_in_the_question_is_refused(plain: HttpServer, path: str, fields: dict[str, Any], named: str) -> None:
    refused = plain.ask("POST", path, {**fields, "max_tokens": 1})
    assert refused.status == 400
    assert named in str(refused.json["error"])


def test_what_anthropic_s_own_tools_left_behind_is_named_and_the_rest_answered(plain: HttpServer) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    turn: list[Any] = [
        {"type": "text", "text": "I search."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "fox"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "text", "text": "A fox."},
    ]
    messages = [ASKED, {"role": "assistant", "content": turn}, ASKED]
    body = {"messages": messages, "max_tokens": 1, "tools": [search, LOOK]}
    said = plain.ask("POST", "/v1/messages", body)
    assert said.status == 200, said.body
    assert {"tools[0]", "messages[1].content[1]", "messages[1].content[2]"} <= set(ignored(said))
    alike = [ASKED, {"role": "assistant", "content": "I search.\nA fox."}, ASKED]
    assert counted(plain, messages).json == counted(plain, alike).json


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (
            "/v1/responses",
            {
                "input": [ASKED],
                "tools": [{"type": "function", "name": "look", "parameters": LOOK["input_schema"]}],
                "tool_choice": {"type": "function", "name": "look"},
                "text": {"format": {"type": "json_object"}},
                "max_output_tokens": 40,
            },
            "text.format",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [ASKED],
                "tools": [FUNCTION],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
                "max_tokens": 40,
            },
            "response_format",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [ASKED],
                "tools": [FUNCTION],
                "tool_choice": "required",
                "guided_regex": "a+",
                "max_tokens": 40,
            },
            "guided_regex",
        ),
        (
            "/v1/messages",
            {
                "messages": [ASKED],
                "tools": [LOOK],
                "tool_choice": {"type": "tool", "name": "look"},
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
                "max_tokens": 40,
            },
            "output_config.format",
        ),
    ],
)
def test_a_form_of_the_answer_is_named_where_a_call_is_demanded(
    http_server: HttpServer, path: str, fields: dict[str, Any], named: str
) -> None:
    said = http_server.ask("POST", path, {**fields, "temperature": 0})
    assert said.status == 200, said.body
    assert ignored(said) == [named]
    assert b'"look"' in said.body


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_a_client_is_told_that_the_model_is_not_unloaded(plain: HttpServer, path: str) -> None:
    """Open WebUI's button would say that it was."""
    for unload in (0, "0s"):
        refused = plain.ask("POST", path, {"keep_alive": unload})
        assert (refused.status, refused.json["error"].startswith("keep_alive: ")) == (400, True)
    for kept in ("5m", -1, None):
        assert plain.ask("POST", path, {"keep_alive": kept}).json["done_reason"] == "load"


@pytest.mark.parametrize("size", [20_000, 200_000])
def test_anthropic_s_words_tell_how_much_too_long_a_prompt_is(plain: HttpServer, size: int) -> None:
    """By these numbers Claude Code shortens a conversation. A very long text is refused before it is counted."""
    most = plain.ask("GET", "/v1/models").json["data"][0]["max_model_len"]
    refused = plain.ask(
        "POST", "/v1/messages", {"messages": [{"role": "user", "content": "fox " * size}], "max_tokens": 1}
    )
    message = refused.json["error"]["message"]
    found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum; ", message)
    assert found is not None, message
    assert (refused.status, int(found[2])) == (400, most - 1)
    assert int(found[1]) > most - 1

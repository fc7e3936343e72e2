"""What templates are told over HTTP, in every dialect: thinking on and off, thinking of earlier turns, an answer that
goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from http_server import HttpServer, running_http

from harness import short_directory
from models import write_model

TEMPLATE = (
    "{% if enable_thinking is defined %}[{{ 'on' if enable_thinking else 'off' }}]{% endif %}"
    "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    "{% if thinking_budget is defined %}[{{ thinking_budget }}]{% endif %}"
    "{% if mood is defined %}[{{ mood }}]{% endif %}"
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% if m.role != 'assistant' or add_generation_prompt or not loop.last %}|{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED = [{"role": "user", "content": "Hi"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "Well,"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    model = write_model(tmp_path_factory.mktemp("templates") / "tiny.gguf", chat_template=TEMPLATE)
    with short_directory() as directory, running_http(directory, "--model", str(model)) as server:
        yield server


def prompt_tokens(server: HttpServer, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Tokens of the prompt, and what was ignored. Every character of these prompts is a token."""
    bound: dict[str, Any] = {"max_tokens": 1}
    if path == "/api/chat":
        bound = {"options": {"num_predict": 1}, "stream": False}
    elif path == "/v1/responses":
        bound = {"max_output_tokens": 1}
    answer = server.ask("POST", path, {**bound, **body})
    assert answer.status == 200, answer.body
    usage = answer.json if path == "/api/chat" else answer.json["usage"]
    names = ("prompt_tokens", "prompt_eval_count", "input_tokens")
    tokens = next(usage[name] for name in names if name in usage) + usage.get("cache_read_input_tokens", 0)
    return tokens, answer.headers.get("x-uma-ignored", "")


def length(server: HttpServer, text: str) -> int:
    answer = server.ask("POST", "/tokenize", {"content": text, "add_special": True})
    return int(answer.json["count"])


@pytest.mark.parametrize(
    ("path", "body", "opening"),
    [
        ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": True}}, "[on]"),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"enable_thinking": False, "mood": "calm"}},
            "[off][0][calm]",
        ),
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "[high]"),
        ("/v1/chat/completions", {"reasoning_effort": "none"}, "[off][0]"),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "[low]"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 2048}}, "[on][2048]"),
        ("/v1/messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "[on][max]"),
        ("/v1/messages", {}, "[off][0]"),
        ("/api/chat", {"think": True}, "[on]"),
        ("/api/chat", {"think": "medium"}, "[on][medium]"),
        ("/api/chat", {"think": False}, "[off][0]"),
    ],
)
def test_a_wish_for_thinking_reaches_the_template(
    server: HttpServer, path: str, body: dict[str, Any], opening: str
) -> None:
    asked = {"input": "Hi"} if path == "/v1/responses" else {"messages": ASKED}
    tokens, ignored = prompt_tokens(server, path, {**asked, **body})
    assert (tokens, ignored) == (length(server, f"{opening}user:Hi|assistant:"), "")


def test_what_a_template_does_not_read_is_named(server: HttpServer) -> None:
    body = {
        "messages": ASKED,
        "chat_template_kwargs": {"mood": "calm", "colour": "red"},
        "add_generation_prompt": False,
    }
    _, ignored = prompt_tokens(server, "/v1/chat/completions", body)
    assert set(ignored.split(", ")) == {"chat_template_kwargs.colour", "add_generation_prompt"}
    refused = server.ask(
        "POST", "/v1/chat/completions", {"messages": ASKED, "chat_template_kwargs": {"enable_thinking": "yes"}}
    )
    assert refused.status == 400
    assert "chat_template_kwargs.enable_thinking" in refused.json["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_an_answer_that_has_begun_goes_on(server: HttpServer, path: str) -> None:
    turns = {"input": BEGUN} if path == "/v1/responses" else {"messages": BEGUN}
    opening = "[off][0]" if path == "/v1/messages" else ""
    tokens, _ = prompt_tokens(server, path, turns)
    assert tokens == length(server, f"{opening}user:Hi|assistant:Well,")


@pytest.mark.parametrize("more", [{"continue_final_message": False}, {"add_generation_prompt": True}])
def test_another_turn_begins_where_it_is_asked_for(server: HttpServer, more: dict[str, bool]) -> None:
    tokens, _ = prompt_tokens(server, "/v1/chat/completions", {"messages": BEGUN, **more})
    assert tokens == length(server, "user:Hi|assistant:Well,|assistant:")


def test_what_cannot_go_on_is_refused(server: HttpServer) -> None:
    for body in ({"messages": BEGUN, "add_generation_prompt": True}, {"messages": ASKED}):
        refused = server.ask("POST", "/v1/chat/completions", {**body, "continue_final_message": True})
        assert refused.status == 400
        assert "continue_final_message" in refused.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "turns"),
    [
        ("/v1/chat/completions", [{"role": "assistant", "content": "No.", "reasoning_content": "Hm."}]),
        ("/v1/chat/completions", [{"role": "assistant", "content": "No.", "reasoning": "Hm."}]),
        (
            "/v1/responses",
            [
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"role": "assistant", "content": "No."},
            ],
        ),
        (
            "/v1/messages",
            [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        {"type": "text", "text": "No."},
                    ],
                }
            ],
        ),
        ("/api/chat", [{"role": "assistant", "content": "No.", "thinking": "Hm."}]),
    ],
)
def test_thinking_of_earlier_turns_reaches_the_template(server: HttpServer, path: str, turns: list[Any]) -> None:
    whole = [*ASKED, *turns, {"role": "user", "content": "Why?"}]
    opening = "[off][0]" if path == "/v1/messages" else ""
    tokens, ignored = prompt_tokens(server, path, {"input": whole} if path == "/v1/responses" else {"messages": whole})
    expected = f"{opening}user:Hi|assistant:<think>Hm.</think>No.|user:Why?|assistant:"
    assert (tokens, ignored) == (length(server, expected), "")

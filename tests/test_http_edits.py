"""Anthropic's `context_management`: what is cleared, that the next requests begin alike, and that all is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from http_clients import claude_of
from http_server import HttpServer, running_http
from script_model import write_script_model
from test_engine_tools import QWEN

from harness import short_directory

CLEAR: dict[str, Any] = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 2_500}}
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "note")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    model = write_script_model(tmp_path_factory.mktemp("edits") / "model.gguf", "Done.", template=QWEN)
    with short_directory() as directory, running_http(directory, "--model", str(model)) as process:
        yield process


def asked(uses: int, *edits: dict[str, Any], name: str = "look") -> dict[str, Any]:
    """A question, and so many uses of a tool with results of a hundred and fifty tokens."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look around."}]
    for at in range(uses):
        call = {"type": "tool_use", "id": f"c{at}", "name": name, "input": {"place": f"here {at}"}}
        thought = {"type": "thinking", "thinking": "Well.", "signature": ""}
        result = {"type": "tool_result", "tool_use_id": f"c{at}", "content": f"{at} " + "x" * 148}
        messages += [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]
    body = {"messages": messages, "max_tokens": 2, "tools": TOOLS, "model": "model"}
    return {**body, "context_management": {"edits": list(edits)}} if edits else body


def applied(server: HttpServer, *edits: dict[str, Any], uses: int = 12, name: str = "look") -> Any:
    told = server.ask("POST", "/v1/messages", asked(uses, *edits, name=name))
    assert told.status == 200, told.body
    return told.json["context_management"]["applied_edits"]


def test_results_over_the_trigger_are_cleared_and_told_whole_streamed_and_counted(server: HttpServer) -> None:
    plain = server.ask("POST", "/v1/messages/count_tokens", asked(12)).json["input_tokens"]
    (edit,) = applied(server, CLEAR)
    assert edit["cleared_tool_uses"] >= 3 and edit["cleared_input_tokens"] > 100
    counted = server.ask("POST", "/v1/messages/count_tokens", asked(12, CLEAR)).json
    assert counted["input_tokens"] == plain - edit["cleared_input_tokens"]
    assert counted["context_management"]["original_input_tokens"] == plain
    with claude_of(server) as client:
        whole = client.beta.messages.create(**asked(12, CLEAR))
        with client.beta.messages.stream(**asked(12, CLEAR)) as stream:
            ended = stream.get_final_message()
    for each in (whole, ended):
        usage = each.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted["input_tokens"]
        assert each.context_management is not None
        assert [found.model_dump() for found in each.context_management.applied_edits] == [edit]


def test_as_a_conversation_grows_it_is_cleared_in_steps_between_which_it_is_cached(server: HttpServer) -> None:
    cleared, dear = list[int](), 0
    for uses in range(1, 19):
        told = server.ask("POST", "/v1/messages", asked(uses, CLEAR)).json
        edits, usage = told["context_management"]["applied_edits"], told["usage"]
        cleared.append(edits[0]["cleared_tool_uses"] if edits else 0)
        dear += usage["input_tokens"] > 450
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] < 4_000
    assert cleared == sorted(cleared) and cleared[0] == 0 and cleared[-1] >= 8
    assert dear <= len(set(cleared)) < 6, cleared


def test_what_a_body_says_of_an_edit_is_kept_to(server: HttpServer) -> None:
    counted = {**CLEAR, "trigger": {"type": "tool_uses", "value": 10}, "keep": {"type": "tool_uses", "value": 1}}
    assert applied(server, counted)[0]["cleared_tool_uses"] == 10
    assert applied(server, counted, uses=10) == []
    assert applied(server, {**CLEAR, "clear_at_least": {"type": "input_tokens", "value": 5_000}}) == []
    assert applied(server, {**CLEAR, "exclude_tools": ["note"]}, name="note") == []


def test_an_edit_that_is_not_known_is_named_and_a_wrong_one_refused(server: HttpServer) -> None:
    told = server.ask("POST", "/v1/messages", asked(1, {"type": "clear_thinking_20251015", "keep": "all"}))
    assert told.status == 200 and "context_management.edits[0]" in told.headers["x-uma-ignored"]
    wrong = server.ask("POST", "/v1/messages", asked(1, {**CLEAR, "keep": {"type": "tool_uses", "value": -1}}))
    assert wrong.status == 400 and "context_management.edits[0].keep.value" in wrong.json["error"]["message"]

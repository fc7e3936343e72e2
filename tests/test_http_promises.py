"""What holds on every path: ids in answers and log, fields that are ignored by name, urgency by header, refusals that
say when to come back, and what cannot be done."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from engine_world import config_for
from http_bodies import BODIES
from http_server import HttpServer, RawHttp, hosted_http, running_http

from harness import short_directory, until
from uma.engine import Engine
from uma.errors import ShuttingDown
from uma.http.anthropic import ANTHROPIC
from uma.http.openai_responses import RESPONSES as RESPONSES_DIALECT
from uma.http.problem import Problem
from uma.types import EventStream, Request, Slo

GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"prompt": "a"},
    "/completion": {"prompt": "a"},
}
LASTING = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[HttpServer]:
    """A server that computes one request at a time and lets one wait."""
    flags = ["--model", str(tiny), "--max-sequences", "1", "--max-queue", "1", "--n-ctx", "32768"]
    flags += ["--max-tokens", "30000", "--alias", "gpt-x, claude-x", "--alias", "org/model:7b"]
    with short_directory() as directory, running_http(directory, *flags) as process:
        yield process


@pytest.mark.parametrize("path", [*GENERATING, "/v1/models", "/nothing"])
def test_an_answer_s_id_is_in_its_headers_and_in_the_log(server: HttpServer, path: str) -> None:
    method = "POST" if path in GENERATING else "GET"
    body = {**GENERATING[path], "temperature": 99} if path in GENERATING else None
    answer = server.ask(method, path, body)
    assert answer.headers["x-request-id"] == answer.headers["request-id"]
    assert f"path={path} " in server.process.log.wait_for(f"http.request request={answer.headers['x-request-id']}")


@pytest.mark.parametrize("path", GENERATING)
def test_a_field_that_is_not_known_is_named_in_a_header(server: HttpServer, path: str) -> None:
    limit: dict[str, Any] = (
        {"options": {"num_predict": 1}} if path.startswith("/api/") else {"n_predict": 1, "max_tokens": 1}
    )
    limit |= {"max_output_tokens": 1} if path == "/v1/responses" else {}
    answer = server.ask("POST", path, {**GENERATING[path], **limit, "stream": False, "entropy_dial": 3})
    assert answer.status == 200
    assert "entropy_dial" in answer.headers["x-uma-ignored"].split(", ")


BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict")
"""What dialects and other servers call the bound of an answer's tokens."""


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    bound = {"max_tokens": 2} if path == "/v1/messages" and not fields.keys() & set(BOUNDS) else {}
    return {**{name: each for name, each in GENERATING[path].items() if name not in BOUNDS}, **bound, **fields}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("path", GENERATING)
def test_a_bound_holds_by_each_of_its_names_and_as_a_whole_number_with_a_point(
    server: HttpServer, path: str, name: str
) -> None:
    goes_on: dict[str, Any] = {"ignore_eos": True}
    own = {"options": goes_on} if path.startswith("/api/") else goes_on
    answer = server.ask("POST", path, body_of(path, **{name: 2.0}, **own, stream=False))
    assert answer.status == 200, answer.body
    told = answer.json.get("usage") or answer.json
    counts = ("completion_tokens", "output_tokens", "eval_count", "tokens_predicted")
    assert [told[count] for count in counts if count in told] == [2]
    assert name not in answer.headers.get("x-uma-ignored", "")
    refused = server.ask("POST", path, body_of(path, **{name: 5.5}))
    assert (refused.status, name in refused.body.decode()) == (400, True), refused.body


@pytest.mark.parametrize("name", ["stop", "stop_sequences", "stopping_strings"])
@pytest.mark.parametrize("path", GENERATING)
def test_strings_that_end_an_answer_do_so_by_each_of_their_names(server: HttpServer, path: str, name: str) -> None:
    refused = server.ask("POST", path, body_of(path, **{name: ["a", ""]}))
    assert (refused.status, "must have 1 to 1,024 characters" in refused.body.decode()) == (400, True), refused.body


@pytest.mark.parametrize("path", GENERATING)
def test_a_form_under_another_endpoint_s_name_is_taken_or_refused(server: HttpServer, path: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "integer"}, "json_schema": {"schema": {"type": "integer"}}}
    forms = ("response_format", "format", "output_format", "regex", "ebnf", "structural_tag", "stop_token_ids")
    asked = [{name: form} for name in forms] + [{"text": {"format": form}}, {"output_config": {"format": form}}]
    for fields in asked:
        answer = server.ask("POST", path, body_of(path, **fields, stream=False))
        (name,) = fields
        assert (answer.status in (200, 400), name in answer.headers.get("x-uma-ignored", "")) == (True, False)
        if answer.status == 400:
            assert f"{name}" in answer.body.decode()


def test_messages_take_the_beta_s_name_of_a_format(server: HttpServer) -> None:
    form = {"type": "json_schema", "schema": {"type": "integer", "minimum": 10, "maximum": 99}}
    answer = server.ask("POST", MESSAGES, body_of(MESSAGES, output_format=form, max_tokens=9))
    assert 10 <= int(answer.json["content"][0]["text"]) <= 99
    wrong = server.ask("POST", MESSAGES, body_of(MESSAGES, output_format={"type": "json"}))
    assert wrong.json["error"]["message"].startswith("output_format: expected an object of type json_schema")


def test_a_refusal_in_the_history_is_its_text(server: HttpServer) -> None:
    def tokens(path: str, said: dict[str, Any]) -> int:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", **said}, {"role": "user", "content": "b"}]
        name = "input" if path == RESPONSES else "messages"
        answer = server.ask("POST", f"{path}/input_tokens", {name: turns})
        assert answer.status == 200, answer.body
        return int(answer.json["input_tokens"])

    part = {"type": "refusal", "refusal": "I cannot do that."}
    for path in (CHAT, RESPONSES):
        assert tokens(path, {"content": [part]}) == tokens(path, {"content": part["refusal"]})
    assert tokens(CHAT, {"content": None, "refusal": part["refusal"]}) == tokens(CHAT, {"content": part["refusal"]})


SHORT = {"max_output_tokens": 1}
CALL = {"name": "f"}
TOOL_USE = {"type": "tool_use", "id": "c", **CALL, "input": {}}
TONED = {"type": "text", "text": "a", "tone": 1}
CHAT, RESPONSES, MESSAGES, OLLAMA, NATIVE = (
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/completion"),
)


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"reasoning_effort": "high", "max_tokens": 1}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "low"}, "max_output_tokens": 1}, "reasoning.effort"),
        (RESPONSES, {"reasoning": {"summary": "auto"}, "max_output_tokens": 1}, "reasoning.summary"),
        (RESPONSES, {"text": {"verbosity": "loud"}, "max_output_tokens": 1}, "text.verbosity"),
        (RESPONSES, {"reasoning": {"summary": "long"}, "max_output_tokens": 1}, "reasoning.summary"),
        (RESPONSES, {"include": ["everything.new"], "max_output_tokens": 1}, "include.everything.new"),
        (
            RESPONSES,
            {"include": ["file_search_call.results"], "max_output_tokens": 1},
            "include.file_search_call.results",
        ),
        (MESSAGES, {"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
        (MESSAGES, {"stop_sequences": ["zz"], "stop": "yy"}, "stop"),
        (NATIVE, {"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repetition_penalty"),
        (OLLAMA, {"options": {"num_predict": 1, "repeat_last_n": 3, "penalty_window": 4}}, "penalty_window"),
        ("/api/generate", {"raw": True, "system": "s", "stream": False}, "system"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "prompt"),
        ("/embedding", {"content": "a", "input": "b"}, "content"),
        (CHAT, {"response_format": {"type": "text", "tone": 1}, "max_tokens": 1}, "response_format.tone"),
        ("/api/generate", {"raw": True, "think": True, "stream": False}, "think"),
        (CHAT, {"messages": [{"role": "user", "content": [TONED]}], "max_tokens": 1}, "messages[0].content[0].tone"),
        (RESPONSES, {"input": [{"role": "user", "content": [TONED]}], **SHORT}, "input[0].content[0].tone"),
        (RESPONSES, {"input": [{"role": "user", "content": "a", "tone": 1}], **SHORT}, "input[0].tone"),
        (MESSAGES, {"system": [TONED]}, "system[0].tone"),
        (MESSAGES, {"messages": [{"role": "user", "content": [TONED]}]}, "messages[0].content[0].tone"),
    ],
)
def test_a_wish_that_is_known_and_not_done_is_named_too(
    server: HttpServer, path: str, fields: dict[str, Any], named: str
) -> None:
    answer = server.ask("POST", path, {**GENERATING.get(path, {}), **fields})
    assert (answer.status, answer.headers["x-uma-ignored"]) == (200, named)


@pytest.mark.parametrize(("path", "place"), [("/v1/models/", "/v1/models"), ("/v1/models/?a=b", "/v1/models?a=b")])
def test_a_slash_behind_the_list_of_models_leads_to_the_list(server: HttpServer, path: str, place: str) -> None:
    answer = server.ask("GET", path)
    assert (answer.status, answer.headers["location"]) == (307, place)


def test_an_error_before_a_response_s_stream_is_an_event_of_type_error() -> None:
    failed = RESPONSES_DIALECT.failed(Problem(500, "fault", "m: cannot be loaded"), "id")
    event = json.loads(failed.partition(b"data: ")[2])
    assert (event["type"], event["message"]) == ("error", "m: cannot be loaded")


@pytest.mark.parametrize("nested", ["response_format", "chat_template_kwargs"])
@pytest.mark.parametrize("name", ["tone ", " tone", "a\0b", "\v", "\r\nx-a: b", "é", "\u202e", "t" * 450])
def test_a_name_of_any_characters_is_written_as_visible_ascii(server: HttpServer, nested: str, name: str) -> None:
    members = {"type": "text"} if nested == "response_format" else {}
    asked = {**GENERATING[CHAT], "max_tokens": 1, nested: {**members, name: 1, **{f"{name}{i}": 1 for i in range(30)}}}
    answer = server.ask("POST", CHAT, asked)
    assert answer.status == 200, answer.body
    named = answer.headers["x-uma-ignored"]
    assert named.startswith(nested) and named.isascii() and named.isprintable() and len(named) <= 1024


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"reasoning_effort": {"a": 1}}, "reasoning_effort"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema.schema"),
        ("/v1/completions", {"echo": True, "response_format": {"type": "json_object"}}, "echo"),
        (CHAT, {"max_tokens": -2}, "max_tokens"),
        (CHAT, {"guided_choice": "yes"}, "guided_choice"),
        (CHAT, {"guided_json": "{"}, "guided_json"),
        (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (CHAT, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        (RESPONSES, {"reasoning": {"effort": "banana"}}, "reasoning.effort"),
        (RESPONSES, {"reasoning": "high"}, "reasoning"),
        (RESPONSES, {"reasoning": {"summary": 1}}, "reasoning.summary"),
        (RESPONSES, {"include": [1]}, "include[0]"),
        (RESPONSES, {"top_logprobs": 1000}, "top_logprobs"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        (MESSAGES, {"thinking": {"type": "hard"}}, "thinking.type"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "auto"}}}, "tool_choice"),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "required"}}, "tool_choice"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "none"}}, "tool_choice"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (OLLAMA, {"think": "banana"}, "think"),
        (OLLAMA, {"options": {"seed": 2**63}}, "options.seed"),
        (CHAT, {"seed": -(2**63) - 1}, "seed"),
        (OLLAMA, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logit_bias": {"200": True}}, "logit_bias"),
        (CHAT, {"logit_bias": {"200": False}}, "logit_bias"),
        (CHAT, {"logit_bias": {"200": "5"}}, "logit_bias"),
        (CHAT, {"logit_bias": 0}, "logit_bias"),
        (CHAT, {"logit_bias": ""}, "logit_bias"),
        (CHAT, {"logit_bias": [[200, False]]}, "logit_bias"),
        (NATIVE, {"logit_bias": [[200, True]]}, "logit_bias"),
        (NATIVE, {"logit_bias": [[200]]}, "logit_bias"),
        (NATIVE, {"logit_bias": [[-1, 5]]}, "logit_bias: -1"),
        (CHAT, {"logit_bias": {"200": 1, "-1": 5}}, "logit_bias: '-1'"),
        (CHAT, {"logit_bias": {"": 5}}, "logit_bias: ''"),
        (CHAT, {"logit_bias": {"200": 1, "201": 101}}, "logit_bias: '201'"),
        (MESSAGES, {"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": 1}}}, "output_config.format.schema"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
        (NATIVE, {"seed": -2}, "seed"),
        (NATIVE, {"seed": 2**32}, "seed"),
        *((RESPONSES, {"input": [{"role": each, "content": "a"}]}, "input[0].role") for each in ("tool", "function")),
        (NATIVE, {"grammar": 'root ::= "a"', "json_schema": {"type": "object"}}, "json_schema"),
        (
            RESPONSES,
            {"input": [{"type": "function_call", "call_id": "c", **CALL, "arguments": "{}"}] * 129},
            "tool_calls",
        ),
        (MESSAGES, {"messages": [{"role": "assistant", "content": [TOOL_USE] * 129}]}, "tool_calls"),
    ],
)
def test_nonsense_is_refused_by_name(server: HttpServer, path: str, fields: dict[str, Any], named: str) -> None:
    refused = server.ask("POST", path, {**GENERATING[path], **fields})
    assert (refused.status, f"{named}: " in str(refused.json["error"])) == (400, True)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/completions", "prompt: is required (a string, a list of token ids, or a list of these)"),
        ("/v1/embeddings", "input: is required (a string, a list of token ids, or a list of these)"),
        (RESPONSES, "input: is required (a string or a list of messages)"),
        (NATIVE, "prompt: is required (a string, a list of token ids, or a list of these)"),
    ],
)
def test_what_is_missing_is_told_by_what_is_expected(server: HttpServer, path: str, told: str) -> None:
    assert server.ask("POST", path, {}).json["error"]["message"] == told


@pytest.mark.parametrize("path", GENERATING)
def test_a_full_queue_and_a_target_that_cannot_be_met_are_429_with_a_time(server: HttpServer, path: str) -> None:
    hasty = server.ask("POST", path, {**GENERATING[path], "slo": {"target_ttft_ms": 1e-6}})
    # The body's own target is another one, and leaves this to the header.
    half = {**GENERATING[path], "slo": {"target_tbt_ms": 50}}
    by_header = server.ask("POST", path, half, **{"x-uma-target-ttft-ms": "1e-6"})
    with server.connect() as running, server.connect() as waiting, server.connect() as another:
        running.send("POST", "/v1/completions", LASTING)
        until(server.process.metrics, lambda found: found["active_sequences"] == 1)
        for queued, client in enumerate((waiting, another), 1):  # the second, of a client of its own, gets in still
            client.send("POST", "/v1/completions", LASTING)
            until(server.process.metrics, lambda found: found["queued_requests"] == queued)  # noqa: B023
        crowded = server.ask("POST", path, GENERATING[path])
    until(server.process.metrics, lambda found: found["active_sequences"] + found["queued_requests"] == 0)
    for refused, why in ((hasty, "target_ttft_ms"), (by_header, "target_ttft_ms"), (crowded, "the queue is full")):
        assert refused.status == 429, refused.body
        assert int(refused.headers["retry-after"]) >= 1
        assert why in str(refused.json["error"])


def test_the_lane_comes_from_the_body_or_a_header_and_a_running_request_shows_it(server: HttpServer) -> None:
    for fields, headers, lane in (({"priority": 1}, {}, 1), ({}, {"x-uma-priority": "-1"}, -1), ({}, {}, 0)):
        with server.connect() as raw:
            raw.send("POST", "/v1/completions", {**LASTING, **fields}, **headers)
            status, answer = raw.head()
            (slot,) = server.ask("GET", "/slots").json
        assert (status, slot["request"], slot["priority"]) == (200, answer["x-request-id"], lane)
        until(lambda: server.ask("GET", "/slots").json[0]["is_processing"], lambda is_busy: not is_busy)
    for name in ("x-uma-priority", "x-uma-target-ttft-ms", "x-uma-target-tbt-ms"):
        refused = server.ask("POST", "/v1/completions", {"prompt": "a"}, **{name: "soon"})
        assert refused.status == 400
        assert name in refused.json["error"]["message"].lower()


class Noting:
    """An engine, and the requests that it was given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.given: list[Request] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, request: Request) -> AbstractAsyncContextManager[EventStream]:
        self.given.append(request)
        return self._engine.generate(request)


@pytest.fixture(scope="module")
def noted(tiny: Path) -> Iterator[tuple[int, list[Request]]]:
    """The port of an engine, and the requests that reached it."""
    with hosted_http(config_for(tiny, http="127.0.0.1:0", max_tokens=4)) as hosted:
        noting: Any = Noting(hosted.engine)
        hosted.call(lambda: hosted.gateway.be_ready(noting))
        yield hosted.port, noting.given


@pytest.mark.parametrize("path", [*GENERATING, "/ui/api/answers"])
def test_lane_targets_and_pace_reach_the_engine_from_the_body_and_from_headers(
    noted: tuple[int, list[Request]], path: str
) -> None:
    port, given = noted
    fields: dict[str, Any] = {"priority": 1, "pace": "off", "cache_prompt": False}
    fields["slo"] = {"target_ttft_ms": 60_000, "target_tbt_ms": 70}
    headers = {"x-uma-priority": "1", "x-uma-pace": "off"}
    headers |= {"x-uma-target-ttft-ms": "60000", "x-uma-target-tbt-ms": "70"}
    body = GENERATING.get(path, GENERATING["/v1/chat/completions"])
    raw = RawHttp(port)
    try:
        assert raw.ask("POST", path, {**body, **fields}).status == 200
        assert raw.ask("POST", path, body, **headers).status == 200
        assert raw.ask("POST", path, {**body, **fields}, **{"x-uma-priority": "-1", "x-uma-pace": "auto"}).status == 200
        assert raw.ask("POST", path, body, **{"x-uma-pace": "slow"}).status == 400
    finally:
        raw.close()
    assert [request.cache_prompt for request in given[-3:]] == [False, True, False]
    for request in given[-3:]:
        assert (request.priority, request.pace, request.slo) == (1, "off", Slo(60_000, 70))


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", [10**6]]}, "prompt[1]"),
        ("/completion", {"prompt": [10**6]}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/v1/chat/completions", {**GENERATING[CHAT], "logit_bias": {"1000000": 1}}, "logit_bias"),
        ("/completion", {"prompt": "a", "logit_bias": [[10**6, 1]]}, "logit_bias"),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused(
    server: HttpServer, path: str, fields: dict[str, Any], named: str
) -> None:
    refused = server.ask("POST", path, fields)
    message = refused.json["error"]["message"]
    assert (refused.status, message.startswith(f"{named}: 1000000 is not in the vocabulary")) == (400, True), message


def test_the_model_has_its_aliases(server: HttpServer) -> None:
    assert {"gpt-x", "claude-x", "org/model:7b"} <= {
        each["id"] for each in server.ask("GET", "/v1/models").json["data"]
    }
    assert server.ask("GET", "/v1/models/gpt-x").json["id"] == "gpt-x"
    told = server.ask("POST", "/v1/messages", {**GENERATING["/v1/messages"], "model": "claude-x"})
    assert (told.status, told.json["model"]) == (200, "claude-x")
    assert server.ask("GET", "/v1/models/other").json["error"]["code"] == "model_not_found"


NO_MODEL = {"/health/check", "/ui/api/answers", "/v1/chat/completions/control"}
NO_MODEL |= {"/v1/requests/{id}/answer", "/ui/api/answers/{token}/answer"}
NO_MODEL |= {"/v1/files", "/v1/batches", "/v1/batches/{id}/cancel"}
NO_MODEL |= {"/lora-adapters", "/api/pull", "/api/copy", "/models/load", "/models/unload"}
"""Endpoints that are about the loaded model, whatever it is, about a request that runs, or about models of a server of
several."""
CONVERSATION, TEXTS, RANKED = GENERATING[CHAT], {"content": "a"}, {"query": "a", "documents": ["b"]}
SCORED = {"text_1": "a", "text_2": "b"}
ELSE: dict[str, dict[str, Any]] = {
    **{"/v1/messages/count_tokens": CONVERSATION, "/apply-template": CONVERSATION, "/api/show": {}},
    **{"/v1/chat/completions/input_tokens": CONVERSATION, "/v1/responses/input_tokens": {"input": "a"}},
    **{"/completions": {"prompt": "a"}, "/infill": {"input_prefix": "a", "input_suffix": "b"}},
    **{"/v1/embeddings": {"input": "a"}, "/api/embed": {"input": "a"}, "/api/embeddings": {"prompt": "a"}},
    **{"/tokenize": TEXTS, "/detokenize": {"tokens": [300]}, "/embedding": TEXTS, "/embeddings": TEXTS},
    **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), RANKED),
    **dict.fromkeys(("/score", "/v1/score"), SCORED),
    "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "b?"}]},
    "/v1/systemone": {"state": "a", "questions": {"b": {"type": "noun", "instructions": "c?"}}},
}


def test_another_model_is_404_on_every_endpoint(server: HttpServer) -> None:
    bodies = {**GENERATING, **ELSE}
    form = b'--a\r\nContent-Disposition: form-data; name="model"\r\n\r\nllama-9\r\n--a--\r\n'
    forms = {"/v1/audio/transcriptions": {"content_type": "multipart/form-data; boundary=a"}}
    assert bodies.keys() == BODIES.keys() - NO_MODEL - forms.keys()
    for path, body in {**bodies, **dict.fromkeys(forms, form)}.items():
        asked = {**body, "model": "llama-9"} if isinstance(body, dict) else body
        refused = server.ask("POST", path, asked, **forms.get(path, {}))
        assert (refused.status, "not loaded here" in str(refused.json["error"])) == (404, True), path


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/api/version", "/nothing"])
def test_a_head_is_that_of_the_whole_answer(server: HttpServer, path: str) -> None:
    with server.connect() as raw:
        whole = raw.ask("GET", path)
        raw.send("HEAD", path)
        status, headers = raw.head()
        assert (status, headers["content-length"]) == (whole.status, str(len(whole.body)))
        assert raw.ask("GET", path).body[:20] == whole.body[:20]  # nothing was left over


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
SAID = {"role": "assistant", "content": "b"}
AUDIO = [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": AUDIO}]}, "messages[0].content[0]"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["AA"]}]}, "messages[0].images"),
        ("/api/generate", {"prompt": "a", "images": ["AA"]}, "images"),
        ("/completion", {"prompt": "a", "image_data": [{"data": "AA"}]}, "image_data"),
        ("/v1/completions", {"prompt": "a", "suffix": "z"}, "suffix"),
        ("/api/generate", {"prompt": "a", "suffix": "z"}, "suffix"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": "a", "conversation": "conv_1"}, "conversation"),
        ("/v1/responses", {"input": "a", "background": True}, "background"),
        ("/v1/chat/completions", {**GENERATING[CHAT], "modalities": ["text", "audio"]}, "modalities"),
        ("/v1/chat/completions", {**GENERATING[CHAT], "audio": {"voice": "alloy", "format": "wav"}}, "modalities"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "a", "context": [1]}, "context"),
        ("/v1/chat/completions", {**GENERATING["/v1/chat/completions"], "functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    server: HttpServer, path: str, fields: dict[str, Any], named: str
) -> None:
    refused = server.ask("POST", path, fields)
    assert refused.status == 400
    assert named in str(refused.json["error"])


def test_max_completion_tokens_bounds_an_answer_and_timings_tell_its_speed(server: HttpServer) -> None:
    asked = {**GENERATING["/v1/chat/completions"], "max_completion_tokens": 3, "ignore_eos": True}
    for path, body in (("/v1/chat/completions", asked), ("/completion", {**LASTING, "n_predict": 3, "stream": False})):
        timings = server.ask("POST", path, body).json["timings"]
        assert timings["predicted_n"] == 3
        assert timings["prompt_n"] + timings["cache_n"] >= 1
        assert min(timings[f"{each}_per_second"] for each in ("prompt", "predicted")) >= 0
    for path, body in ((CHAT, asked), ("/v1/completions", {"prompt": "a", "max_tokens": 3, "ignore_eos": True})):
        told = {**body, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, done = server.ask("POST", path, told).body.split(b"\n\n")[:-1]
        assert done == b"data: [DONE]"
        told_of = [json.loads(chunk.removeprefix(b"data: ")).get("timings") for chunk in chunks]
        assert [each["predicted_n"] for each in told_of if each] == [3, 3], path  # of the prompt, and of all


def test_an_error_in_anthropic_s_stream_has_the_id_of_the_headers() -> None:
    event = ANTHROPIC.failed(Problem.of(ShuttingDown("the server is stopping")), "abc").split(b"data: ")[1]
    assert json.loads(event)["request_id"] == "abc"


def test_metrics_are_prometheus_text_with_help_and_type_for_each_family(server: HttpServer) -> None:
    answer = server.ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.body.decode()
    told = dict(re.findall(r"^# TYPE (\S+) (counter|gauge|histogram)$", text, re.MULTILINE))
    assert told.keys() == set(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE))
    samples = re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? (?:\d\S*|NaN|\+Inf)$", text, re.MULTILINE)
    assert len(samples) == sum(1 for line in text.splitlines() if line and not line.startswith("#"))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in told else name for name in samples}
    assert families == set(told)
    assert {"histogram", "counter", "gauge"} == set(told.values())
    assert (told["uma_kv_cells_total"], told["uma_tokens_generated_total"]) == ("gauge", "counter")
    for name in (name for name, kind in told.items() if kind == "histogram"):
        buckets = re.findall(rf'^{name}_bucket{{model="[^"]+",le="(\S+)"}} (\d+)$', text, re.MULTILINE)
        bounds, counts = [float(bound) for bound, _ in buckets], [int(count) for _, count in buckets]
        assert (bounds, counts) == (sorted(bounds), sorted(counts)), name
        (count,) = re.findall(rf'^{name}_count{{model="[^"]+"}} (\d+)$', text, re.MULTILINE)
        assert (bounds[-1], counts[-1]) == (float("inf"), int(count)), name

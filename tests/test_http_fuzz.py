"""Whatever is sent, the answer is the client's fault or a good one, never a fault of the server; and nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import psutil
import pytest
from http_server import HttpServer, RawHttp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import until
from uma.http import anthropic, llama_server, ollama, openai_chat, openai_completions, openai_responses
from uma.http.app import ENDPOINTS

BODIES: dict[str, type[Any]] = {
    "/v1/chat/completions": openai_chat.ChatBody,
    "/v1/completions": openai_completions.CompletionBody,
    "/v1/responses": openai_responses.ResponsesBody,
    "/v1/messages": anthropic.MessagesBody,
    "/v1/messages/count_tokens": anthropic.Conversation,
    "/api/chat": ollama.ChatBody,
    "/api/generate": ollama.GenerateBody,
    "/api/show": ollama.ShowBody,
    "/completion": llama_server.CompletionBody,
    "/tokenize": llama_server.TokenizeBody,
    "/detokenize": llama_server.DetokenizeBody,
    "/apply-template": llama_server.TemplateBody,
}

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "x"]), "content": st.text(max_size=30) | junk}
    ),
    max_size=3,
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "messages": messages,
    "prompt": st.text(max_size=30)
    | st.lists(st.integers(0, 2100), max_size=5)
    | st.lists(st.text(max_size=9), max_size=3),
    "input": st.text(max_size=30) | messages,
    "content": st.text(max_size=30),
    "tokens": st.lists(st.integers(-1, 2100), max_size=6),
    "model": st.sampled_from(["builtin", "gpt-4"]),
    "stream": st.booleans(),
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-0.5, 1.5),
    "n": st.integers(0, 3),
    "stop": st.text(max_size=5) | st.lists(st.text(max_size=5), max_size=3),
    "seed": st.integers(-2, 2**33),
}
SHORT = {name: st.integers(1, 4) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")}
"""Always there, so that the model's answers stay short."""


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(BODIES)))
    names = [field.name for field in attrs.fields(BODIES[path])]
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=6))
    main = [name for name in ("messages", "prompt", "input", "content", "tokens") if name in names]
    body = {name: draw(st.one_of(likely.get(name, junk), likely.get(name, junk), junk)) for name in {*chosen, *main}}
    body |= {name: draw(short) for name, short in SHORT.items() if name in names}
    if path.startswith("/api/"):
        body["options"] = {"num_predict": 3, **({"seed": draw(junk)} if draw(st.booleans()) else {})}
    return path, body


class Keeper:
    """A connection that is made again where the server has closed it."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.raw = RawHttp(server.port)

    def status(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        answer = self.raw.ask(method, path, body)
        return answer.status, answer.body


@pytest.fixture
def keeper(http_server: HttpServer) -> Iterator[Keeper]:
    found = Keeper(http_server)
    yield found
    found.raw.close()


@given(requests())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_no_body_of_any_endpoint_is_a_fault_of_the_server(keeper: Keeper, request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    status, said = keeper.status("POST", path, body)
    assert status in (200, 400, 404, 413, 429), (path, body, said)


@given(st.sampled_from([path for method, path, _ in ENDPOINTS if method == "POST"]), st.binary(max_size=60))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_that_are_no_request_are_refused(keeper: Keeper, path: str, body: bytes) -> None:
    assert keeper.status("POST", path, body)[0] == 400


def test_nothing_is_left_of_requests_that_failed_or_were_cancelled(http_server: HttpServer) -> None:
    process = psutil.Process(http_server.process.pid)
    before = process.num_fds()
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    for _ in range(20):
        raws = [RawHttp(http_server.port) for _ in range(5)]
        for raw in raws:
            raw.send("POST", "/v1/completions", body)
        raws[0].sock.recv(1)
        for raw in raws:
            raw.close()
    settled = until(
        http_server.process.metrics, lambda found: found["active_sequences"] + found["queued_requests"] == 0
    )
    assert settled["sequence_ids_used"] <= settled["cache_node_count"] + 1
    # The question's own session is open while it is asked; a closed connection's descriptor goes a turn later.
    until(process.num_fds, lambda count: count <= before)

"""Whatever is sent, the answer is the client's fault or a good one, never a fault of the server; and nothing leaks.

Each example is a set of field values, of which every endpoint gets some that its schema names, in several ways at once,
and as many paths to get: drawing values takes longer than answering. `TEST_HTTP_REQUESTS` says how many are sent.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import attrs
import psutil
import pytest
import trio
from http_bodies import BODIES
from http_server import Answered, HostedHttp, RawHttp, hosted_http
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import until
from models import write_encoder
from uma.config import RuntimeConfig
from uma.http.app import ENDPOINTS
from uma.http.page.endpoints import ENDPOINTS as PAGE_ENDPOINTS

GETS = [
    path for method, path, *_ in [*ENDPOINTS, *PAGE_ENDPOINTS] if method == "GET" and path != "/ui/api/live"
]  # that one never ends
FAULT = re.compile(rb'^(data: )?\{"error":|^event: (error|failed)|E_RUNTIME', re.MULTILINE)
"""What a good answer does not have on any line: a stream that breaks off has said 200 before."""
REQUESTS = int(os.environ.get("TEST_HTTP_REQUESTS", "3000"))
WAYS = 8
"""Requests that each endpoint gets of one example, all at once."""

NAMES = {path: [field.name for field in attrs.fields(cls)] for path, cls in BODIES.items()}
UNIMPLEMENTED = ("/lora-adapters",)
"""Endpoints that refuse every request."""
MAIN = frozenset({"messages", "prompt", "input", "content", "tokens", "texts", "query", "type"})
"""Fields without which most endpoints look at no other."""


def _quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="/.=&")


words = st.text(max_size=30) | st.sampled_from(["", "\0", "a\0b", "\ud800", "<|im_end|>", "\u202e"])
places = st.builds(
    lambda path, name, query: path.format_map(dict.fromkeys(("id", "name", "token", "number"), name)) + query,
    st.sampled_from([re.sub(r":\w+}", "}", path) for path in GETS]),
    (words | st.sampled_from(["builtin", "../models", "main.js", "a/b"])).map(lambda text: _quoted(text) or "x"),
    words.map(lambda text: "?" + _quoted(text)),
)
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
        {"role": st.sampled_from(["user", "system", "assistant", "x", "\0", ""]), "content": words | junk}
    ),
    max_size=3,
)
odd = st.dictionaries(st.text(max_size=8) | st.sampled_from(["tone ", "a\0b", "\v", "a, b", "é", "t" * 3_000]), junk)
likely: dict[str, st.SearchStrategy[Any]] = {
    "response_format": st.builds(lambda more: {"type": "text", **more}, odd),
    "chat_template_kwargs": odd,
    "messages": messages,
    "prompt": words | st.lists(st.integers(0, 2100), max_size=5) | st.lists(words, max_size=3),
    "input": words | messages | st.lists(words, max_size=3) | st.lists(st.integers(0, 300), max_size=5),
    "dimensions": st.integers(0, 70),
    "content": words,
    "texts": st.lists(words, max_size=2),
    "tokens": st.lists(st.integers(-1, 2100), max_size=6),
    "model": st.sampled_from(["builtin", "gpt-4"]),
    "stream": st.booleans(),
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-0.5, 1.5),
    "n": st.integers(0, 3),
    "stop": st.text(max_size=5) | st.lists(st.text(max_size=5), max_size=3),
    "seed": st.integers(-2, 2**33),
    "system": words,
    "instructions": words,
    "query": words,
    "documents": st.lists(words, max_size=3),
    "type": st.sampled_from(["generation", "embedding"]),
    "timeout_ms": st.integers(0, 2000),
}
SHORT = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"), 4)
"""Always there, so that the model's answers stay short."""
NESTED = ("response_format", "chat_template_kwargs")
"""Fields whose members are a client's to name: drawn for each example."""
OTHERS = sorted({name for names in NAMES.values() for name in names} - MAIN - SHORT.keys())


@st.composite
def fields(draw: st.DrawFn) -> dict[str, list[Any]]:
    """A few values for each of the main fields, and one for some of all others."""
    chosen = draw(st.lists(st.sampled_from(OTHERS), unique=True, min_size=8, max_size=24))
    values = {name: [draw(value_of(name))] for name in (*chosen, *NESTED)}
    return values | {name: [draw(value_of(name)) for _ in range(3)] for name in sorted(MAIN)}


@cache
def value_of(name: str) -> st.SearchStrategy[Any]:
    return likely[name] | likely[name] | junk if name in likely else junk


def body_for(path: str, values: dict[str, list[Any]], random: Random) -> dict[str, Any]:
    """One of the main fields' values each, and about a third of the other fields."""
    body = {
        name: random.choice(values[name])
        for name in NAMES[path]
        if name in values and (name in MAIN or random.random() < 1 / 3)
    }
    body |= {name: SHORT[name] for name in NAMES[path] if name in SHORT}
    if path.startswith("/api/"):
        body["options"] = {"num_predict": 3, **({"seed": body["seed"]} if "seed" in body else {})}
    if path == "/ui/api/answers":
        body["sampling"] = {"max_tokens": 3}
        body.pop("token", None)  # with it the answer would stay for a minute, and be taken for a leak
    return body


def is_good(path: str, answer: Answered) -> bool:
    """Whether an answer is the client's fault, or has none in it."""
    good = (200, 503) if path == "/health/check" else (200,)  # which says 503 where its time was too short
    refused = (501,) if path in UNIMPLEMENTED else (400, 404, 413, 429)
    return answer.status in refused or (answer.status in good and not FAULT.search(answer.body))


@pytest.fixture(scope="module")
def hosted(tiny: Path) -> Iterator[HostedHttp]:
    with hosted_http(RuntimeConfig(model=str(tiny), http="127.0.0.1:0", n_ctx=4096, threads=1)) as it:
        open_index(it)
        yield it


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedHttp]:
    path = write_encoder(tmp_path_factory.mktemp("model") / "reranker.gguf", pooling="rank")
    with hosted_http(RuntimeConfig(model=str(path), http="127.0.0.1:0", threads=1)) as it:
        open_index(it)
        yield it


def open_index(server: HostedHttp) -> None:
    """Have the index of files and the stored responses opened, which stay open from their first use on."""
    assert server.ask("GET", "/v1/files").status == 200
    assert server.ask("GET", "/v1/responses/resp_0").status == 404


@attrs.frozen
class Held:
    """What a server holds while nothing runs."""

    tasks: int
    descriptors: int
    """But for those to child processes, which stay: one each, and they start when they are needed."""
    sequences: int
    foreign_cells: int
    """KV cells in use that are not the prefix cache's."""

    @classmethod
    def by(cls, hosted: HostedHttp) -> Held:
        found = hosted.call(hosted.engine.snapshot)
        return cls(
            hosted.call(lambda: trio.lowlevel.current_statistics().tasks_living),
            psutil.Process().num_fds() - len(psutil.Process().children()),
            found["active_sequences"] + found["queued_requests"] + found["cache_protected_size"],
            found["kv_cells_used"] - found["cache_total_cached"],
        )

    def is_within(self, before: Held) -> bool:
        """Whether this is no more than `before`. Less can be: what earlier tests left open may be collected."""
        return all(map(operator.le, attrs.astuple(self), attrs.astuple(before)))


@contextmanager
def leaves_nothing(hosted: HostedHttp) -> Iterator[None]:
    """A block after which the server holds no more than it held before."""
    before = Held.by(hosted)
    assert (before.sequences, before.foreign_cells) == (0, 0)
    yield
    until(lambda: Held.by(hosted), lambda after: after.is_within(before))


def test_no_request_to_any_endpoint_is_a_fault_of_the_server_and_nothing_is_left(
    hosted: HostedHttp, reranker: HostedHttp
) -> None:
    @given(fields(), st.lists(places, min_size=WAYS, max_size=WAYS), st.integers(0, 2**32))
    @settings(max_examples=-(-REQUESTS // (WAYS * (len(BODIES) + 1))), suppress_health_check=list(HealthCheck))
    def send_all(values: dict[str, list[Any]], gets: list[str], seed: int) -> None:
        random = Random(seed)
        asked: list[tuple[str, str, Any]] = [
            ("POST", path, body_for(path, values, random)) for path in BODIES for _ in range(WAYS)
        ]
        asked += [("GET", place, None) for place in gets]
        for raw, (method, path, body) in zip(connections, asked, strict=True):
            raw.send(method, path, body)
        for raw, (_, path, body) in zip(connections, asked, strict=True):
            assert is_good(path, answer := raw.answer()), (path, body, answer.body)

    with leaves_nothing(reranker), leaves_nothing(hosted), ExitStack() as stack:
        hosts = [reranker if "rerank" in path else hosted for path in [*BODIES, "GET"] for _ in range(WAYS)]
        connections = [stack.enter_context(host.connect()) for host in hosts]
        send_all()


@given(st.sampled_from([path for method, path, *_ in ENDPOINTS if method == "POST"]), st.binary(max_size=60))
def test_bytes_that_are_no_request_are_refused(hosted: HostedHttp, path: str, body: bytes) -> None:
    raw = RawHttp(hosted.port)
    try:
        # Where the path names what is asked for there is nothing to say in a body, and no such thing.
        expected = 501 if path in UNIMPLEMENTED else 404 if "{" in path else 400
        assert raw.ask("POST", path, body).status == expected
    finally:
        raw.close()


def test_nothing_is_left_of_requests_whose_clients_hung_up(hosted: HostedHttp) -> None:
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with leaves_nothing(hosted):
        for _ in range(20):
            raws = [RawHttp(hosted.port) for _ in range(5)]
            for raw in raws:
                raw.send("POST", "/v1/completions", body)
            raws[0].sock.recv(1)
            for raw in raws:
                raw.close()

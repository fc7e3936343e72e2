"""Access over HTTP: which requests are let in, by which key, and how many of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from email.utils import parsedate_to_datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_world import config_for
from http_server import STREAM_ERRORS, Answered, HttpServer, RawHttp, hosted_http, new_key, running_http
from hypothesis import given
from hypothesis import strategies as st
from script_model import write_script_model
from test_server_users import MANY_TEXTS

from harness import (
    PATIENCE_SEC,
    RunInProcessText,
    ServerProcess,
    short_directory,
    start_server,
    until,
    write_certificate,
)
from uma.client.http import HttpClient
from uma.engine.delivery.pacing import CREDITS
from uma.errors import ConfigError, ConnectionLost
from uma.http import page
from uma.http.address import Address
from uma.http.app import ENDPOINTS
from uma.http.page.endpoints import ENDPOINTS as PAGE_ENDPOINTS
from uma.http.serve import Certificate
from uma.net.quota import Bounds, ClientAccount
from uma.types import Request, Slo, Usage

TURNS = [{"role": "user", "content": "a"}]
SMALL = {"prompt": "Once", "max_tokens": 2}
ENDLESS = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
LIMIT = 10_000
MORE_BOUNDS = {
    "leaver": "max_tokens_per_minute = 50\n",
    "embedder": "max_priority = -1\nmax_tokens_per_minute = 10\n",
    "decider": "max_priority = -1\nmax_tokens_per_minute = 10\n",
    "calm": "priority = -1\nmax_priority = -1\n",
    "hasty": "target_ttft_ms = 1e-6\n",
    "roomy": "max_tokens = 50_000\n",
    "brief": "max_tokens = 8\nmax_priority = 0\n",
    "single": "max_concurrent = 1\n",
    "prober": "max_tokens_per_minute = 20\n",
}


@pytest.fixture(scope="module")
def keys() -> Iterator[dict[str, str]]:
    """Names and keys, and under `file` the file that has their hashes."""
    with short_directory() as directory:
        file = directory / "keys.toml"
        made = {"file": str(file)}
        bound = "max_concurrent = 1\nmax_tokens = 8\nmax_priority = -1\nmax_tokens_per_minute = 100\n"
        for name, bounds in {"free": "", **MORE_BOUNDS, "bound": bound}.items():
            made[name] = new_key(name, file, bounds)
        yield made


@pytest.fixture(scope="module")
def locked(keys: dict[str, str]) -> Iterator[HttpServer]:
    """A server that asks for keys, and has small limits."""
    flags = ["--http-keys", keys["file"], "--max-frame-bytes", str(LIMIT), "--http-timeout-sec", "1"]
    flags += ["--http-cors", "https://friend.example", "--http-hosts", "uma.example", "--max-sessions", "3"]
    with short_directory() as directory, running_http(directory, *flags) as process:
        yield process


def bearer(keys: dict[str, str], name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {keys[name]}"}


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/messages", "/api/chat", "/completion", "/metrics", "/nothing"]
)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer uma-wrong"}, {"x-api-key": "uma-wrong"}])
def test_every_path_wants_a_key_that_is_known(locked: HttpServer, path: str, headers: dict[str, str]) -> None:
    answer = locked.ask("POST", path, SMALL, **headers)
    assert answer.status == 401
    assert "key" in str(answer.json)
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_refusal_is_logged_with_the_client_s_address_and_its_key(locked: HttpServer, keys: dict[str, str]) -> None:
    for key, status, told in (("free", 400, " key=free "), ("unknown", 401, " ")):
        answer = locked.ask("POST", "/v1/completions", {"temperature": 9}, **bearer({**keys, "unknown": "x"}, key))
        assert answer.status == status
        for event in ("failed", "request"):
            mine = f"event=http.{event} request={answer.headers['x-request-id']} "
            locked.process.log.wait_for(f"{mine}.*status={status} .*{told}.*client=127.0.0.1")


def test_of_all_endpoints_health_and_the_page_s_files_alone_are_open(locked: HttpServer) -> None:
    open_ones = set()
    with locked.connect() as raw:
        for method, path, *_ in [*ENDPOINTS, *PAGE_ENDPOINTS]:
            answer = raw.ask(method, path.replace("{name}", "main.js"), b"{}" if method == "POST" else None)
            if answer.status != 401:
                open_ones.add(path)
    assert open_ones == {"/health", "/", "/ui/{name}", "/ui/vendor/{name}", "/ui/vendor/cmaps/{name}"}


def test_a_key_opens_as_bearer_and_as_x_api_key(locked: HttpServer, keys: dict[str, str]) -> None:
    assert locked.ask("POST", "/v1/completions", SMALL, **bearer(keys, "free")).status == 200
    assert locked.ask("POST", "/v1/completions", SMALL, **{"x-api-key": keys["free"]}).status == 200


def test_keys_are_nowhere_in_the_log_or_the_file(locked: HttpServer, keys: dict[str, str]) -> None:
    locked.ask("POST", "/v1/completions", SMALL, **bearer(keys, "free"))
    locked.process.log.wait_for("key=free")
    for headers in ({"authorization": f"bearer {keys['free']}x"}, {"x-api-key": f"{keys['free']} "}):
        locked.ask("POST", "/v1/completions", SMALL, **headers)
    locked.ask("POST", "/v1/completions", b"{", **bearer(keys, "free"))
    locked.ask("GET", f"/nothing?key={keys['free']}", **{"x-api-key": "uma-wrong"})
    with locked.connect() as raw:
        raw.sock.sendall(f"GET /v1/models HTTP/1.1\r\nx-api-key: {keys['free']}\r\nbroken\r\n\r\n".encode())
        assert raw.head()[0] == 400
    assert keys["free"] not in locked.process.log.text
    assert keys["free"] not in Path(keys["file"]).read_text()


def test_a_key_s_bounds_hold(locked: HttpServer, keys: dict[str, str]) -> None:
    mine = bearer(keys, "bound")
    whole = locked.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, **mine)
    assert whole.json["usage"]["completion_tokens"] <= 8
    refused = locked.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 9}, **mine)
    assert (refused.status, refused.json["error"]["type"]) == (403, "permission_error")
    refused = locked.ask("POST", "/v1/completions", {**SMALL, "priority": 1}, **mine)
    assert refused.status == 403
    refused = locked.ask("POST", "/v1/completions", {"prompt": ["x", "y"], "max_tokens": 1}, **mine)
    assert (refused.status, refused.headers.get("retry-after")) == (403, None)
    assert "one for each prompt" in refused.json["error"]["message"]
    while (
        answer := locked.ask("POST", "/v1/completions", {"prompt": "a fox " * 20, "max_tokens": 8}, **mine)
    ).status == 200:
        pass
    assert answer.status == 429
    assert "max_tokens_per_minute" in answer.json["error"]["message"]
    assert locked.ask("POST", "/v1/completions", SMALL, **bearer(keys, "free")).status == 200


def test_a_key_s_max_tokens_are_those_of_all_answers(locked: HttpServer, keys: dict[str, str]) -> None:
    asked = {"prompt": "x", "n": 2, "ignore_eos": True}
    answer = locked.ask("POST", "/v1/chat/completions", {"messages": TURNS, **asked}, **bearer(keys, "brief"))
    assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 8)
    by_default = locked.ask("POST", "/v1/completions", asked, **bearer(keys, "brief"))
    assert (by_default.status, by_default.json["usage"]["completion_tokens"]) == (200, 8)
    for more in ({"max_tokens": 5}, {"max_tokens": 1, "best_of": 9}):
        refused = locked.ask("POST", "/v1/completions", {**asked, **more}, **bearer(keys, "brief"))
        assert (refused.status, "max_tokens" in refused.json["error"]["message"]) == (403, True)


def test_a_key_s_bound_of_requests_holds_for_what_generates_nothing(locked: HttpServer, keys: dict[str, str]) -> None:
    path, body = "/tokenize", {"content": "a b " * 2_000, "with_pieces": True}
    with ExitStack() as stack:
        raws = [stack.enter_context(locked.connect()) for _ in range(4)]
        for raw in raws:
            raw.send("POST", path, body, **bearer(keys, "single"))
        answers = [raw.answer() for raw in raws]
        assert sorted(answer.status for answer in answers) == [200, 429, 429, 429]
        generating = stack.enter_context(locked.connect())
        asked = {"messages": TURNS, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        generating.send("POST", "/v1/chat/completions", asked, **bearer(keys, "single"))
        assert generating.head()[0] == 200
        assert locked.ask("POST", path, body, **bearer(keys, "single")).status == 200
    until(locked.process.metrics, lambda found: found["active_sequences"] == 0)


def test_a_key_s_bounds_hold_for_the_page_s_answers(locked: HttpServer, keys: dict[str, str]) -> None:
    asked = {"messages": TURNS, "sampling": {"max_tokens": 1500, "ignore_eos": True}}
    with ExitStack() as stack:
        raws = [stack.enter_context(locked.connect()) for _ in range(4)]
        for raw in raws:  # all at once: the first has not begun to run when the others are looked at
            raw.send("POST", "/ui/api/answers", asked, **bearer(keys, "single"))
        assert sorted(raw.head()[0] for raw in raws) == [200, 429, 429, 429]
    until(locked.process.metrics, lambda found: found["active_sequences"] == 0)
    with locked.connect() as raw:
        raw.send("POST", "/ui/api/answers", asked, **bearer(keys, "single"))
        assert raw.head()[0] == 200
    for wrong in ({"sampling": {"max_tokens": 9}}, {"priority": 1}):
        refused = locked.ask("POST", "/ui/api/answers", {"messages": TURNS, **wrong}, **bearer(keys, "brief"))
        assert refused.status == 403, refused.body


def test_an_answer_of_the_page_is_there_for_its_own_key_alone(locked: HttpServer, keys: dict[str, str]) -> None:
    mine, other, token = bearer(keys, "free"), bearer(keys, "roomy"), "0123456789abcdef"
    path = f"/ui/api/answers/{token}"
    with locked.connect() as raw:
        asked = {"token": token, "messages": TURNS, "sampling": {"max_tokens": 8, "ignore_eos": True}}
        assert raw.ask("POST", "/ui/api/answers", asked, **mine).status == 200
        for method in ("GET", "DELETE"):
            refused = raw.ask(method, path, **other)
            assert (refused.status, "no such answer" in str(refused.json)) == (404, True)
        assert b"event: done" in raw.ask("GET", path, **mine).body
        assert raw.ask("DELETE", path, **mine).status == 204


def test_a_key_s_bounds_hold_for_embeddings(locked: HttpServer, keys: dict[str, str]) -> None:
    mine, few, many = bearer(keys, "embedder"), {"input": "a fox"}, {"input": "a fox in the forest " * 4}
    urgent = locked.ask("POST", "/v1/embeddings", few, **mine, **{"x-uma-priority": "1"})
    assert (urgent.status, "priority" in urgent.json["error"]["message"]) == (403, True)
    assert locked.ask("POST", "/v1/embeddings", many, **mine).status == 200
    refused = locked.ask("POST", "/api/embed", few, **mine)
    assert refused.status == 429
    assert "max_tokens_per_minute" in refused.json["error"]
    assert locked.ask("POST", "/health/check", {"type": "embedding"}, **mine).status == 429  # no word of the engine
    assert locked.ask("POST", "/api/embed", few, **bearer(keys, "free")).status == 200


def test_a_key_s_bounds_hold_for_decisions(locked: HttpServer, keys: dict[str, str]) -> None:
    mine, asked = bearer(keys, "decider"), {"input": "a fox", "questions": [{"type": "predicate", "instructions": "?"}]}
    answers = [locked.ask("POST", "/v1/decisions", asked, **mine, **more) for more in ({"x-uma-priority": "1"}, {}, {})]
    assert [answer.status for answer in answers] == [403, 200, 429]


def test_a_key_s_bounds_hold_for_health_checks(locked: HttpServer, keys: dict[str, str]) -> None:
    asked = {"type": "generation", "token_ids": [300], "max_tokens": 8}
    assert locked.ask("POST", "/health/check", asked, **bearer(keys, "brief")).json["tokens_generated"] == 8
    refused = locked.ask("POST", "/health/check", {**asked, "max_tokens": 9}, **bearer(keys, "brief"))
    assert (refused.status, "max_tokens" in refused.json["error"]["message"]) == (403, True)
    late = locked.ask("POST", "/health/check", asked, **bearer(keys, "hasty"))
    assert (late.status, "target_ttft_ms" in late.json["error"]) == (503, True)


def test_a_health_check_without_a_body_has_the_engine_generate_a_token(
    locked: HttpServer, keys: dict[str, str]
) -> None:
    checked = locked.ask("POST", "/health/check", **bearer(keys, "free"))
    assert (checked.status, checked.json["tokens_generated"]) == (200, 1)


def test_usual_names_of_a_health_check_tell_the_right_one_to_who_has_no_key(locked: HttpServer) -> None:
    for path in ("/healthz", "/livez", "/readyz"):
        told = locked.ask("GET", path)
        assert (told.status, "/health answers" in told.json["error"]["message"]) == (404, True)


def test_the_log_has_no_line_of_a_probe_that_is_answered_and_one_of_a_refused_one(
    locked: HttpServer, keys: dict[str, str]
) -> None:
    ids = [
        locked.ask("GET", path, **mine).headers["x-request-id"]
        for path, mine in (("/health", {}), ("/metrics", bearer(keys, "free")), ("/metrics", {}))
    ]
    locked.process.log.wait_for(f"event=http.request request={ids[2]}")
    assert not any(id in locked.process.log.text for id in ids[:2])


def test_a_health_check_that_was_not_waited_for_counts(locked: HttpServer, keys: dict[str, str]) -> None:
    mine = bearer(keys, "prober")
    asked = {"type": "generation", "token_ids": [300] * 40, "max_tokens": 1_500, "timeout_ms": 100}
    late = locked.ask("POST", "/health/check", asked, **mine)
    assert (late.status, late.json.keys()) == (503, {"success", "latency_ms", "error"})  # how many tokens is not known
    refused = locked.ask("POST", "/v1/completions", SMALL, **mine)
    assert (refused.status, "max_tokens_per_minute" in refused.json["error"]["message"]) == (429, True)


def test_texts_that_their_client_left_count(tmp_path: Path, tiny: Path) -> None:
    file = tmp_path / "keys.toml"
    mine = {"authorization": f"Bearer {new_key('reader', file, 'max_tokens_per_minute = 200_000')}"}
    flags = ("--model", str(tiny), "--http-keys", str(file))
    with short_directory() as directory, running_http(directory, *flags) as server:
        with server.connect() as raw:
            raw.send("POST", "/v1/embeddings", {"input": MANY_TEXTS}, **mine)
            until(server.process.metrics, lambda found: found["embed_requests_total"] == 1)
        until(
            lambda: server.ask("POST", "/v1/embeddings", {"input": "a"}, **mine),
            lambda answer: answer.status == 429,
        )
        assert server.process.metrics()["embed_tokens_total"] < 200_000, "they were not computed to their end"


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 100)), min_size=1, max_size=12), st.integers(1, 200))
def test_a_refusal_says_when_enough_tokens_are_a_minute_old(used: list[tuple[float, int]], rate: int) -> None:
    account, now = ClientAccount("x", Bounds(max_tokens_per_minute=rate)), 0.0
    for after, tokens in used:
        now += after
        account.charge(Usage(tokens, 0, 0), now)
    excess = account.objection(1, now)
    times = accumulate(after for after, _ in used)
    lately = sum(tokens for (_, tokens), at in zip(used, times, strict=True) if at > now - 60)
    assert (excess is None) == (lately < rate)
    if excess is not None:
        assert excess.retry_after_ms is not None
        assert account.objection(1, now + (excess.retry_after_ms - 2) / 1000) is not None
        assert account.objection(1, now + (excess.retry_after_ms + 1) / 1000) is None


def test_a_key_s_lane_and_targets_hold_whatever_a_request_says(locked: HttpServer, keys: dict[str, str]) -> None:
    urgent: dict[str, Any] = {**SMALL, "priority": 1, "input": "a fox"}
    for path in ("/v1/completions", "/v1/embeddings"):  # a lane of its own choice would be over max_priority
        assert locked.ask("POST", path, urgent, **bearer(keys, "calm")).status == 200
    refused = locked.ask("POST", "/v1/completions", {**SMALL, "slo": {"target_ttft_ms": 1e9}}, **bearer(keys, "hasty"))
    assert (refused.status, "target_ttft_ms" in refused.json["error"]["message"]) == (429, True)
    asked = Request("1", prompt="x", priority=-1, slo=Slo(target_ttft_ms=9, target_tbt_ms=7))
    account = ClientAccount("fixed", Bounds(priority=1, target_tbt_ms=50))
    fitted = account.fit(asked, has_priority=True, default_max_tokens=8)
    assert isinstance(fitted, Request)
    assert (fitted.priority, fitted.slo) == (1, Slo(target_ttft_ms=9, target_tbt_ms=50))


def test_a_key_s_max_tokens_over_the_default_are_given_to_no_request_without_a_number(
    locked: HttpServer, keys: dict[str, str]
) -> None:
    body = {"messages": TURNS, "stop": ["e"]}
    answer = locked.ask("POST", "/v1/chat/completions", body, **bearer(keys, "roomy"))
    assert (answer.status, answer.json.get("warnings")) == (200, None)
    asked = Request("1", prompt="x")
    for bound, expected in [(4097, None), (4096, None), (4095, 4095)]:
        fitted = ClientAccount("x", Bounds(max_tokens=bound)).fit(asked, has_priority=False, default_max_tokens=4096)
        assert isinstance(fitted, Request)
        assert fitted.sampling.max_tokens == expected


def test_tokens_of_an_answer_that_nothing_reads_to_the_end_count_too(locked: HttpServer, keys: dict[str, str]) -> None:
    with locked.connect() as raw:
        raw.send("POST", "/v1/completions", ENDLESS, **bearer(keys, "leaver"))
        assert raw.head()[0] == 200
        chunks, tokens = raw.chunks(), 0
        while tokens < 60:
            tokens += next(chunks).count(b"data:")
    until(locked.process.metrics, lambda found: found["active_sequences"] == 0)
    refused = locked.ask("POST", "/v1/completions", SMALL, **bearer(keys, "leaver"))
    assert refused.status == 429
    assert "max_tokens_per_minute" in refused.json["error"]["message"]


FOREIGN = ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example"]


@pytest.mark.parametrize("host", [*FOREIGN, "", ":80", "[]", "[", "[::1", "[::1]x", "localhost:x", "localhost:1@a.b"])
def test_a_foreign_host_is_refused(locked: HttpServer, keys: dict[str, str], host: str) -> None:
    assert locked.ask("POST", "/v1/completions", SMALL, host=host, **bearer(keys, "free")).status == 403


def test_a_person_at_a_foreign_name_is_told_in_a_page(locked: HttpServer) -> None:
    told = locked.ask("GET", "/", host="<b>.example", accept="text/html,*/*")
    assert (told.status, told.headers["content-type"]) == (403, "text/html; charset=utf-8")
    assert b"&lt;b&gt;.example" in told.body and b"--http-hosts gives it more" in told.body
    assert locked.ask("GET", "/", host="fox.example").headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "host", ["localhost:1", "a.localhost", "127.0.0.1", "[::1]:80", "192.168.3.4:80", "UMA.example:80"]
)
def test_loopback_addresses_and_configured_names_are_hosts(locked: HttpServer, keys: dict[str, str], host: str) -> None:
    assert locked.ask("POST", "/v1/completions", SMALL, host=host, **bearer(keys, "free")).status == 200


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://127.0.0.1:8080/health", "localhost", 200),
        ("HTTPS://uma.example/health?x", "evil.example", 200),
        ("http://evil.example/health", "localhost", 403),
        ("http://evil.example?/health", "localhost", 403),
        ("http:///health", "localhost", 403),
        ("http://localhost:x@evil.example/health", "localhost", 403),
        ("ftp://localhost/health", "localhost", 404),
        ("http://localhost/v1/models", "localhost", 401),
        ("http://localhost", "localhost", 200),
    ],
)
def test_a_target_that_is_a_whole_address_is_served_and_its_host_checked(
    locked: HttpServer, keys: dict[str, str], target: str, host: str, status: int
) -> None:
    known = bearer(keys, "free") if status == 404 else {}
    assert locked.ask("GET", target, host=host, **known).status == status


def test_a_host_is_not_demanded_where_http_1_0_has_none(locked: HttpServer) -> None:
    with locked.connect() as raw:
        raw.sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert raw.answer().status == 200


@pytest.mark.parametrize("encoding", ["identity", "Identity, identity", ""])
def test_a_body_that_is_said_to_be_as_it_is_is_read(locked: HttpServer, keys: dict[str, str], encoding: str) -> None:
    given = {**bearer(keys, "free"), "content-encoding": encoding}
    assert locked.ask("POST", "/v1/completions", SMALL, **given).status == 200


def test_a_page_of_another_origin_can_neither_read_nor_send(locked: HttpServer, keys: dict[str, str]) -> None:
    before = locked.process.metrics()["requests_total"]
    foreign = ("https://evil.example", "null", "http://localhost:1")
    malformed = ("http://[", "http://[::1", "http://]", "[", "://", "http://", "//localhost", "localhost", "\xb2")
    for origin in (*foreign, *malformed):
        answer = locked.ask("POST", "/v1/completions", SMALL, origin=origin, **bearer(keys, "free"))
        assert answer.status == 403
        assert "access-control-allow-origin" not in answer.headers
    assert locked.process.metrics()["requests_total"] == before


def test_an_allowed_origin_may_send_with_its_key(locked: HttpServer, keys: dict[str, str]) -> None:
    friend = "https://friend.example"
    wish = {
        "origin": friend,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    asked = locked.ask("OPTIONS", "/v1/completions", **wish)
    assert asked.status == 204
    assert asked.headers["access-control-allow-origin"] == friend
    assert "authorization" in asked.headers["access-control-allow-headers"]
    answer = locked.ask("POST", "/v1/completions", SMALL, origin=friend, **bearer(keys, "free"))
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == friend
    assert "access-control-allow-credentials" not in answer.headers


def test_an_allowed_origin_s_page_from_the_internet_can_reach_a_private_network(locked: HttpServer) -> None:
    wish = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    allowed = locked.ask("OPTIONS", "/v1/completions", origin="https://friend.example", **wish)
    assert (allowed.status, allowed.headers["access-control-allow-private-network"]) == (204, "true")
    refused = locked.ask("OPTIONS", "/v1/completions", origin="https://evil.example", **wish)
    assert (refused.status, "access-control-allow-private-network" in refused.headers) == (403, False)
    del wish["access-control-request-private-network"]
    asked = locked.ask("OPTIONS", "/v1/completions", origin="https://friend.example", **wish)
    assert "access-control-allow-private-network" not in asked.headers


def test_any_origin_may_send_where_all_are_allowed(tiny: Path) -> None:
    with hosted_http(config_for(tiny, http="127.0.0.1:0", http_cors="*")) as hosted, hosted.connect() as raw:
        wish = {"origin": "https://any.example", "access-control-request-method": "POST"}
        assert raw.ask("OPTIONS", "/v1/completions", **wish).headers["access-control-allow-origin"] == "*"
        answer = raw.ask("POST", "/v1/completions", SMALL, origin="https://any.example")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")


LOCAL = ["http://localhost", "https://localhost:3000", "http://127.0.0.1:3000", "http://[::1]", "http://[::1]:3000"]
NOT_LOCAL = ["http://notlocalhost", "http://localhost.evil.example", "http://127.0.0.1.example", "null"]
NOT_LOCAL += ["ftp://localhost:21"]


def test_every_origin_of_this_machine_may_send_where_localhost_is_allowed(tiny: Path) -> None:
    with hosted_http(config_for(tiny, http="127.0.0.1:0", http_cors="localhost")) as hosted, hosted.connect() as raw:
        for origin in LOCAL:
            answer = raw.ask("POST", "/v1/completions", SMALL, origin=origin)
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, origin)
        for origin in NOT_LOCAL:
            refused = raw.ask("POST", "/v1/completions", SMALL, origin=origin)
            assert (refused.status, "access-control-allow-origin" in refused.headers) == (403, False)


def test_the_server_s_own_page_may_send(locked: HttpServer, keys: dict[str, str]) -> None:
    own = {"host": "localhost:5", "origin": "http://localhost:5"}
    assert locked.ask("POST", "/v1/completions", SMALL, **own, **bearer(keys, "free")).status == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"content-length: 1000000000\r\n\r\nx", 413),  # it is refused before it is read
        (b"content-length: 4000000\r\n\r\n" + bytes(4_000_000), 413),  # a client that still sends it learns why
        (b"transfer-encoding: chunked\r\n\r\n" + 4 * (b"1000\r\n" + b"x" * 4096 + b"\r\n"), 413),
        (b"content-length: 100\r\n\r\nx", 408),  # it does not come
    ],
    ids=["announced", "sent", "in chunks", "not sent"],
)
def test_a_body_over_the_limit_or_one_that_does_not_come_ends_its_connection_with_an_answer(
    locked: HttpServer, keys: dict[str, str], sent: bytes, status: int
) -> None:
    with locked.connect() as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a.localhost\r\nauthorization: Bearer {keys['free']}\r\n"
        raw.sock.sendall(head.encode() + sent)
        assert raw.answer().status == status
        assert raw.is_closed()


def test_a_client_is_not_asked_for_a_body_that_is_refused(locked: HttpServer, keys: dict[str, str]) -> None:
    for length, status in ((LIMIT + 1, 413), (len(json.dumps(SMALL)), 100)):
        with locked.connect() as raw:
            asking = {**bearer(keys, "free"), "expect": "100-continue", "content-length": str(length)}
            raw.send("POST", "/v1/completions", b"", **asking)
            assert raw.head()[0] == status
            if status == 100:
                raw.sock.sendall(json.dumps(SMALL).encode())
                assert raw.answer().status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing", "/v1/models"])
def test_a_connection_stays_usable_after_an_error_that_comes_before_the_body(locked: HttpServer, path: str) -> None:
    body = json.dumps(SMALL).encode()
    with locked.connect() as raw:
        raw.send("POST", path, b"", **{"content-length": str(len(body)), "expect": "100-continue"})
        assert raw.head()[0] == 100  # the head has been read
        raw.sock.sendall(body)
        assert raw.answer().status == 401
        assert raw.ask("GET", "/health").status == 200
        raw.sock.sendall(f"POST {path} HTTP/1.1\r\nhost: a.localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        raw.sock.sendall(b"5\r\nabcde\r\n0\r\n\r\n")
        assert raw.answer().status == 401
        assert raw.ask("GET", "/health").status == 200


def test_a_body_that_is_not_waited_for_ends_its_connection_and_the_answer_says_so(locked: HttpServer) -> None:
    for length in (100, 1_000_000):  # one that does not come, one that is too long to be read in vain
        with locked.connect() as raw:
            raw.send("POST", "/v1/completions", b"x", **{"content-length": str(length)})
            answer = raw.answer()
            assert (answer.status, answer.headers["connection"]) == (401, "close")
            assert raw.is_closed()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx-pad: " + b"y" * 70_000, 431),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx-pad: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (
            b"POST /health/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
            b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
            400,
        ),
        (
            b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
            403,
        ),
    ],
    ids=["no HTTP", "no host", "endless", "too long", "two ends", "websocket"],
)
def test_what_reaches_no_endpoint_is_answered_with_an_id_too(locked: HttpServer, head: bytes, status: int) -> None:
    with locked.connect() as raw:
        raw.sock.sendall(head)
        answer = raw.answer()
        assert (answer.status, answer.body, raw.is_closed()) == (status, b"", True)
    assert answer.headers["x-uma-server-version"]
    assert parsedate_to_datetime(answer.headers["date"])
    locked.process.log.wait_for(
        f"event=http.malformed request={answer.headers['x-request-id']} status={status} reason=.* client=127.0.0.1"
    )


def test_a_body_that_turns_bad_is_answered_with_the_id_of_its_request(locked: HttpServer, keys: dict[str, str]) -> None:
    with locked.connect() as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {keys['free']}\r\n"
        raw.sock.sendall(f"{head}transfer-encoding: chunked\r\n\r\n1\r\n{{\r\nno length\r\n".encode())
        answer = raw.answer()
        assert (answer.status, raw.is_closed()) == (400, True)
    for event in ("http.malformed", "http.request"):
        locked.process.log.wait_for(f"event={event} request={answer.headers['x-request-id']} ")


@pytest.mark.parametrize("beginning", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: localh"])
def test_a_head_that_does_not_come_is_not_waited_for(locked: HttpServer, beginning: bytes) -> None:
    with locked.connect() as raw:
        raw.sock.sendall(beginning)
        assert raw.is_closed()


def test_connections_are_bounded_and_those_that_are_open_go_on(locked: HttpServer, keys: dict[str, str]) -> None:
    with locked.connect() as first:
        assert first.ask("GET", "/health").status == 200
        more = [RawHttp(locked.port) for _ in range(40)]
        try:
            assert first.ask("POST", "/v1/completions", SMALL, **bearer(keys, "free")).status == 200
            assert sum(each.is_closed() for each in more) == 40  # some at once, the others for saying nothing
        finally:
            for each in more:
                each.close()

    def is_served() -> bool:
        with suppress(ConnectionError), locked.connect() as raw:  # one too many is reset, or closed in silence
            raw.send("GET", "/health")
            return not raw.is_closed()
        return False

    until(is_served, bool)


@pytest.mark.parametrize(
    "path", ["../endpoints.py", "..%2fendpoints.py", "%2e%2e/endpoints.py", "%2e%2e%2fendpoints.py", "%2fetc%2fpasswd"]
)
def test_no_path_leads_out_of_what_is_served(http_server: HttpServer, path: str) -> None:
    # Each names a file that could be read: one folder above those that are served, or on the system.
    assert Path(page.__file__).with_name("endpoints.py").is_file()
    assert http_server.ask("GET", "/ui/main.js").status == 200
    assert http_server.ask("GET", f"/ui/{path}").status == 404


GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1},
    "/v1/completions": SMALL,
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": TURNS, "max_tokens": 1},
    "/api/chat": {"messages": TURNS, "options": {"num_predict": 1}},
    "/completion": {"prompt": "a", "n_predict": 1},
}
"""For each dialect a request."""
CODES = {
    400: None,
    401: "invalid_api_key",
    403: None,
    404: "model_not_found",
    405: None,
    413: "request_too_large",
    415: None,
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
"""OpenAI's."""
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""In all dialects that have types; each has some of its own, and the rest is `invalid_request_error`."""
OPENAI_TYPES = {**TYPES, 503: "server_error"}
ANTHROPIC_TYPES = {**TYPES, 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
LLAMA_TYPES = {**TYPES, 404: "not_found_error", 503: "unavailable_error"}


def check_error(path: str, answer: Answered, status: int) -> None:
    """The status, and a body that has the keys and words of the path's dialect and no others."""
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json"), answer.body
    body: Any = answer.json
    message = body["error"] if path.startswith("/api/") else body["error"].pop("message")
    assert len(message) > 10
    assert status != 415 or message.startswith("Content-Encoding: 'gzip'")
    if path.startswith("/api/"):
        assert body == {"error": message}
    elif path == "/v1/messages":
        error = {"type": ANTHROPIC_TYPES.get(status, "invalid_request_error")}
        assert body == {"type": "error", "error": error, "request_id": answer.headers["request-id"]}
    elif path == "/completion":
        assert body == {"error": {"code": status, "type": LLAMA_TYPES.get(status, "invalid_request_error")}}
    else:
        param = "temperature" if status == 400 else None
        kind = OPENAI_TYPES.get(status, "invalid_request_error")
        assert body == {"error": {"type": kind, "param": param, "code": CODES[status]}}


WRONG: dict[int, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    400: ("POST", "free", {"temperature": 9, "options": {"temperature": 9}}, {}),
    401: ("POST", "unknown", {}, {}),
    403: ("POST", "free", {}, {"host": "evil.example"}),
    404: ("POST", "free", {"model": "llama-4"}, {}),
    405: ("DELETE", "free", {}, {}),
    413: ("POST", "free", {}, {"content-length": "1000000000"}),
    415: ("POST", "free", {}, {"content-encoding": "gzip"}),
    429: ("POST", "hasty", {}, {}),
}
"""What is wrong with a request that has this status: its method, its key, and more fields and headers."""


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("status", WRONG)
def test_an_error_has_the_form_and_the_words_of_its_dialect(
    locked: HttpServer, keys: dict[str, str], path: str, status: int
) -> None:
    method, key, fields, headers = WRONG[status]
    if status == 429:  # a target is broken as soon as it is known how long a prompt takes
        assert locked.ask("POST", "/v1/completions", SMALL, **bearer(keys, "free")).status == 200
    given = {**bearer({**keys, "unknown": "uma-x"}, key), **headers}
    check_error(path, locked.ask(method, path, {**GENERATING[path], **fields}, **given), status)


@pytest.mark.parametrize("flags", [("--model", "tiny"), ("--models", "tiny")], ids=["one", "several"])
def test_a_second_signal_ends_streams_with_an_error_of_their_dialect_and_a_code_in_the_log(
    tiny: Path, flags: tuple[str, str]
) -> None:
    most = ("--n-ctx", "65536", "--max-tokens", "60000", "--drain-timeout-sec", "3600")
    endless = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "stream": True}
    with short_directory() as directory, ExitStack() as stack:
        server = stack.enter_context(running_http(directory, flags[0], str(tiny), *most))
        raws = {path: stack.enter_context(server.connect()) for path in STREAM_ERRORS}
        for path, raw in raws.items():
            raw.send("POST", path, {**endless, "max_tokens": 10_000, "options": {"ignore_eos": True}})
            assert raw.head()[0] == 200
        server.process.signal(signal.SIGTERM)
        server.process.log.wait_for("event=http.draining")
        server.process.signal(signal.SIGTERM)
        for path, raw in raws.items():
            *_, last = raw.chunks()
            assert last.startswith(STREAM_ERRORS[path]), path
            assert b"the server is stopping" in last
        assert server.process.wait() == 0
        ends = [line for line in server.process.log.join().splitlines() if "event=http.request" in line]
    assert len(ends) == len(STREAM_ERRORS)
    assert all("status=200 code=E_RUNTIME_SHUTDOWN" in end for end in ends)


def test_without_a_key_the_server_s_own_user_manages_models_and_root_does_not(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosted_http(config_for(tiny, http="127.0.0.1:0")) as hosted, hosted.connect() as raw:
        managed = raw.ask("DELETE", "/api/delete", {"model": "a"})
        assert (managed.status, "--models" in managed.json["error"]) == (400, True)
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)  # the server becomes another user's
        refused = raw.ask("DELETE", "/api/delete", {"model": "a"})
        assert (refused.status, "only the user that the server runs as" in refused.json["error"]) == (403, True)


def test_a_draining_server_says_so_in_the_form_of_each_dialect(tiny: Path) -> None:
    flags = ("--model", str(tiny), "--drain-timeout-sec", "60", "--n-ctx", "32768", "--max-tokens", "30000")
    with short_directory() as directory, running_http(directory, *flags) as server:
        late = {path: RawHttp(server.port) for path in GENERATING}
        try:
            for path, raw in late.items():  # their bodies come when the server is stopping already
                raw.send("POST", path, b"{", **{"content-length": str(len(json.dumps(GENERATING[path])))})
            with server.connect() as running:
                running.send("POST", "/v1/completions", {**ENDLESS, "max_tokens": 30_000})
                assert running.head()[0] == 200
                server.process.signal(signal.SIGTERM)
                server.process.log.wait_for("event=server.draining")
                for path, raw in late.items():
                    raw.sock.sendall(json.dumps(GENERATING[path]).encode()[1:])
                    check_error(path, raw.answer(), 503)
        finally:
            for raw in late.values():
                raw.close()
        assert server.process.wait() == 0


def test_other_addresses_than_loopback_need_keys(socket_dir: Path, uma_told: RunInProcessText) -> None:
    done = uma_told("run", "--socket", str(socket_dir / "s"), "--http", "0.0.0.0:0")
    assert done.returncode == 2
    assert "uma key new NAME" in done.stderr
    assert "--http-insecure" in done.stderr


def test_without_keys_an_insecure_server_says_so(socket_dir: Path) -> None:
    server: ServerProcess = start_server(socket_dir / "s", "--http", "0.0.0.0:0", "--http-insecure")
    try:
        assert "--http-insecure" in server.log.wait_for("no keys are asked for")
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--http", "nonsense"), "uma: error: --http: expected ADDRESS:PORT"),
        (("--http", "--http-keys", "/nowhere.toml"), "uma: error: --http-keys: /nowhere.toml: cannot be read"),
        (("--http", "--http-tls-cert", "/nowhere.pem"), "uma: error: --http-tls-key: missing"),
        (
            ("--http", "127.0.0.1:0", "--http-tls-cert", "/n.pem", "--http-tls-key", "/k"),
            "--http-tls-cert: /n.pem, with",
        ),
    ],
)
def test_http_that_cannot_start_says_why_in_one_line(
    flags: tuple[str, ...], words: str, socket_dir: Path, uma_told: RunInProcessText
) -> None:
    done = uma_told("run", "--socket", str(socket_dir / "s"), *flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_ipv6_address_has_brackets_before_its_port() -> None:
    assert Address.parse("[::1]:8080") == Address("::1", 8080)
    for wrong in ("127.0.0.1:8080:90", "::1:8080"):
        with pytest.raises(ConfigError, match="expected ADDRESS:PORT"):
            Address.parse(wrong)


def test_where_a_port_is_taken_the_address_is_told_once_with_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            Address("127.0.0.1", port).listen()
    assert str(refused.value).count(str(port)) == 1
    said = str(refused.value)
    assert "Address already in use" in said and "; name another address or port" in said
    assert f", by process {os.getpid()} (" in said or sys.platform != "linux"


def test_a_key_s_name_is_given_once(socket_dir: Path, uma_told: RunInProcessText) -> None:
    command = ("key", "new", "me", "--keys", str(socket_dir / "k"))
    assert uma_told(*command).returncode == 0
    again = uma_told(*command)
    assert again.returncode == 2
    assert "[me] is there already" in again.stderr


def test_tls_serves_and_cancels(certificate: tuple[Path, Path], heavy: Path) -> None:
    cert, key = certificate
    flags: tuple[str, ...] = ("--http-tls-cert", str(cert), "--http-tls-key", str(key))
    flags += ("--model", str(heavy), "--n-ctx", "32768", "--max-tokens", "30000")
    with short_directory() as directory, running_http(directory, *flags) as server:
        trusted = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=server.url, verify=trusted, timeout=PATIENCE_SEC) as client:
            assert client.post("/v1/completions", json=SMALL).status_code == 200
            with suppress(httpx.TransportError):  # what the server says before it hangs up can be lost
                bomb = {f"x-pad-{index}": "y" * 1000 for index in range(200)}
                assert client.get("/health", headers=bomb).status_code in (400, 431)
            assert client.get("/health").status_code == 200
            endless = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=endless) as stream:
                assert next(stream.iter_lines()).startswith("data: ")
        ended = until(server.process.metrics, lambda found: found["active_sequences"] + found["queued_requests"] == 0)
        assert ended["requests_cancelled"] == 1
        with pytest.raises(ConnectionLost, match=r"self-signed .*; the certificate is not trusted: set SSL_CERT"):
            HttpClient(server.url).read_json("GET", "/v1/models")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", str(cert))
            assert HttpClient(server.url).read_json("GET", "/v1/models")


def shown_certificate(server: HttpServer) -> str:
    """The certificate that a new connection is shown, as PEM."""
    return ssl.get_server_certificate(("127.0.0.1", server.port), timeout=PATIENCE_SEC)


def test_a_renewed_certificate_is_shown_at_once_and_half_of_one_is_warned_of(
    certificate: tuple[Path, Path], tiny: Path
) -> None:
    old = certificate[0].read_text()
    with short_directory() as directory:
        cert, key = write_certificate(directory)
        new, new_key = cert.read_text(), key.read_text()
        cert.write_text(old)
        key.write_bytes(certificate[1].read_bytes())
        flags = ("--model", str(tiny), "--http-tls-cert", str(cert), "--http-tls-key", str(key))
        with running_http(directory, *flags) as server:
            log, kept_open = server.process.log, httpx.Client(verify=False, timeout=PATIENCE_SEC)
            with kept_open as client:
                assert client.get(f"{server.url}/health").status_code == 200
                cert.write_text(new)
                assert [shown_certificate(server) for _ in range(2)] == [old] * 2
                assert "key values mismatch" in log.wait_for("warning uma.http event=http.tls_not_reloaded")
                key.write_text(new_key[:90])
                assert shown_certificate(server) == old
                assert "is cut off" in log.wait_for("event=http.tls_not_reloaded .*PEM lib")
                key.write_text(new_key)
                assert [shown_certificate(server) for _ in range(2)] == [new] * 2
                assert client.get(f"{server.url}/health").status_code == 200
            assert [log.text.count(f"event=http.tls_{word}reloaded") for word in ("not_", "")] == [2, 1]


def test_a_server_warns_at_its_start_of_a_key_that_others_can_read(tiny: Path, socket_dir: Path) -> None:
    cert, key = write_certificate(socket_dir, 90)
    key.chmod(0o644)
    flags = ("--model", str(tiny), "--http-tls-cert", str(cert), "--http-tls-key", str(key))
    with running_http(socket_dir, *flags) as server:
        server.process.log.wait_for("warning uma.http event=http.tls_problem .*mode 644 lets other users use")
        assert server.process.log.text.count("http.tls_problem") == 1, "it expires in 90 days"


def test_a_key_with_a_passphrase_is_refused_and_not_asked_for(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate[0], tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(certificate[1]), "-out", str(key), "-aes256", "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="without a passphrase"):
        Certificate.open(config_for(Path(), http="127.0.0.1:0", http_tls_cert=str(cert), http_tls_key=str(key)))


NUMBERS = "".join(f"{number:03} " for number in range(128))
"""What the scripted model says: a token for each number."""


def pieces(answer: Answered) -> list[str]:
    """The text of each token's event in a stream of completions."""
    return [choice["text"] for event in answer.events for choice in event["choices"] if choice["text"]]


def test_half_open_connections_and_slow_readers_cost_others_nothing(tmp_path: Path) -> None:
    model = write_script_model(tmp_path / "script.gguf", NUMBERS, context_length=32_768)
    flags = ["--model", str(model), "--n-ctx=32768", "--kv-unified=off", "--max-sequences=128", "--max-tx-bytes=65536"]
    flags += ["--alias=*", "--http-timeout-sec=600", "--tx-timeout-sec=600"]
    body = {"prompt": "Count.\n", "max_tokens": 300, "stream": True, "temperature": 0}
    # The name is in every event, so that a few tokens fill all buffers of a client that does not read: far fewer than
    # those for which it would be given further credit.
    bulky = {**body, "model": "x" * 20_000}
    with short_directory() as directory, running_http(directory, *flags) as server, ExitStack() as stack:

        def connect(count: int, **options: int) -> list[RawHttp]:
            return [stack.enter_context(server.connect(**options)) for _ in range(count)]

        def generated() -> int:
            return int(server.process.metrics()["tokens_generated_total"])

        alone = pieces(server.ask("POST", "/v1/completions", body))
        assert "".join(alone) == NUMBERS
        half_open = connect(300)
        for raw in half_open:
            raw.sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconte")
        slow = connect(100, receive_buffer=4096, segment_bytes=536)
        for raw in slow:
            raw.send("POST", "/v1/completions", bulky)
        blocked = until(generated, lambda tokens: tokens == len(alone) + len(slow) * CREDITS)
        normal = connect(8)
        for raw in normal:
            raw.send("POST", "/v1/completions", body)
        assert [pieces(raw.answer()) for raw in normal] == len(normal) * [alone]
        # Not one token was computed for the slow readers meanwhile: no stream has waited for them.
        assert generated() == blocked + len(normal) * len(alone)
        for raw in (half_open[0], half_open[-1]):
            data = json.dumps(SMALL).encode()
            raw.sock.sendall(b"nt-length: %d\r\n\r\n" % len(data) + data)
            assert raw.answer().status == 200
        slow[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_000_000)
        assert pieces(slow[0].answer()) == alone
        stack.close()
        settled = until(server.process.metrics, lambda found: found["active_sequences"] + found["queued_requests"] == 0)
        assert settled["requests_error"] == 0
        assert settled["requests_cancelled"] == len(slow) - 1


def test_a_stopping_server_lets_streams_end_and_tells_those_that_last_too_long(tiny: Path) -> None:
    flags = ("--model", str(tiny), "--n-ctx", "65536", "--max-tokens", "60000", "--drain-timeout-sec", "0.5")
    with short_directory() as directory, running_http(directory, *flags) as server, server.connect() as raw:
        raw.send("POST", "/v1/completions", {"prompt": "a", "max_tokens": 60_000, "ignore_eos": True, "stream": True})
        assert raw.head()[0] == 200
        server.process.signal(signal.SIGTERM)
        *_, last = raw.chunks()
        assert b'"code":"service_unavailable"' in last
        assert raw.is_closed()
        assert server.process.wait() == 0

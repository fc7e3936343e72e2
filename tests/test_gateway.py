"""`uma gateway`: the same HTTP, in a process of its own, in front of a server on a socket."""

from __future__ import annotations

import re
import signal
import ssl
import time
from contextlib import ExitStack
from math import hypot
from pathlib import Path

import httpx
import pytest
from gguf import GGUFReader
from http_server import new_key, running_gateway

import uma
from harness import PATIENCE_SEC, RunInProcessText, Serve, ServerProcess, running_server, until

ENDLESS = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True}
FEW_TOKENS = 100
"""Maximum computed for a request after its client has gone."""


def test_a_gateway_answers_as_the_server_itself_does(server: ServerProcess) -> None:
    with running_gateway(server) as gateway:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        whole = gateway.ask("POST", "/v1/completions", body)
        assert whole.status == 200
        streamed = gateway.ask("POST", "/v1/completions", {**body, "stream": True})
        pieces = re.findall(rb'"text":"([^"]*)"', streamed.body)
        assert b"".join(pieces).decode() == whole.json["choices"][0]["text"]
        many = gateway.ask("POST", "/v1/completions", {**body, "max_tokens": 100_000, "stop": ["e"]}).json
        (warning,) = many["warnings"]
        assert warning.startswith("max_tokens: 100,000 do not fit the context")
        assert gateway.ask("GET", "/health").json == {"status": "ok"}
        assert gateway.ask("POST", "/v1/completions", {"prompt": "a " * 9000}).status == 400
        assert gateway.ask("POST", "/tokenize", {"content": "Once"}).json["count"] == 1
        (found,) = gateway.ask("POST", "/v1/embeddings", {"input": "Once", "dimensions": 2}).json["data"]
        assert hypot(*found["embedding"]) == pytest.approx(1)
        assert "load a reranker" in str(gateway.ask("POST", "/rerank", {"query": "x", "documents": ["y"]}).json)


def test_a_client_that_leaves_the_gateway_is_cancelled_at_the_server(socket_dir: Path, heavy: Path) -> None:
    flags = ("--model", str(heavy), "--n-ctx", "32768", "--max-tokens", "30000")
    with running_server(socket_dir / "s", *flags) as server, running_gateway(server) as gateway:
        with gateway.connect() as raw:
            raw.send("POST", "/v1/completions", {**ENDLESS, "stream": True})
            assert raw.head()[0] == 200
        closed = server.metrics()
        ended = until(server.metrics, lambda found: found["active_sequences"] + found["queued_requests"] == 0)
        assert ended["requests_cancelled"] == 1
        assert ended["tokens_generated_total"] - closed["tokens_generated_total"] <= FEW_TOKENS


def test_a_gateway_stays_where_nobody_asks_anything_for_longer_than_a_session_may_be_idle(socket_dir: Path) -> None:
    with running_server(socket_dir / "s", "--idle-timeout-sec", "3") as server, running_gateway(server) as gateway:
        idle = time.monotonic() + 7
        until(server.metrics, lambda _: time.monotonic() > idle)
        assert gateway.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 1}).status == 200


def test_a_gateway_ends_with_its_server_and_says_so(socket_dir: Path) -> None:
    with running_server(socket_dir / "s") as server, running_gateway(server) as gateway:
        server.stop()
        assert gateway.process.wait() == 1
        assert (
            "uma: error: the server is stopping; try again in some seconds, or start it again"
            in gateway.process.log.join()
        )


def test_the_model_s_template_passes_the_socket_and_the_gateway(server: ServerProcess) -> None:
    path = Path(uma.__file__).parent / "data" / "uma-story.gguf"
    template = GGUFReader(path).fields["tokenizer.chat_template"].contents()
    with server.connect() as raw:
        assert raw.hello(versions=["1.1"])["chat_template"] == template
    with server.connect() as raw:
        assert "chat_template" not in raw.hello(versions=["1.0"])
    with running_gateway(server) as gateway:
        assert gateway.ask("GET", "/props").json["chat_template"] == template
        assert gateway.ask("POST", "/api/show", {}).json["template"] == template


@pytest.mark.parametrize(("told", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_a_gateway_stops_when_it_is_told_to(server: ServerProcess, told: signal.Signals, code: int) -> None:
    with running_gateway(server) as gateway:
        gateway.process.signal(told)
        assert gateway.process.wait() == code


def test_a_gateway_that_is_told_twice_ends_its_streams_with_an_error(serve: Serve) -> None:
    server = serve("--n-ctx", "65536", "--max-tokens", "60000")
    with running_gateway(server, "--drain-timeout-sec", "3600") as gateway, gateway.connect() as raw:
        raw.send("POST", "/v1/completions", {"prompt": "a", "max_tokens": 60_000, "ignore_eos": True, "stream": True})
        assert raw.head()[0] == 200
        gateway.process.signal(signal.SIGTERM)
        gateway.process.log.wait_for("event=http.draining")
        gateway.process.signal(signal.SIGTERM)
        *_, last = raw.chunks()
        assert b"the server is stopping" in last
        assert gateway.process.wait() == 0


def test_without_a_server_there_is_no_gateway(socket_dir: Path, uma_told: RunInProcessText) -> None:
    done = uma_told("gateway", "--socket", str(socket_dir / "none"), "--http", "127.0.0.1:0")
    assert done.returncode == 1
    assert "no server listens there" in done.stderr


def test_a_gateway_stays_on_this_machine_without_keys(server: ServerProcess, uma_told: RunInProcessText) -> None:
    done = uma_told("gateway", "--socket", str(server.socket), "--http", "0.0.0.0:0")
    assert done.returncode == 2
    assert "uma key new NAME" in done.stderr
    assert "--http-insecure" in done.stderr


def test_without_keys_an_insecure_gateway_says_so(server: ServerProcess) -> None:
    with running_gateway(server, "--http", "0.0.0.0:0", "--http-insecure") as gateway:
        assert "--http-insecure" in gateway.process.log.wait_for("no keys are asked for")
        assert gateway.ask("GET", "/health").json == {"status": "ok"}


def test_a_gateway_has_keys_and_tls_and_counts_what_a_key_runs_over_all_its_connections(
    server: ServerProcess, socket_dir: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key, keys = *certificate, socket_dir / "keys.toml"
    mine = new_key("me", keys, "max_concurrent = 1\n")
    flags = ("--http-keys", str(keys), "--http-tls-cert", str(cert), "--http-tls-key", str(key))
    with running_gateway(server, *flags) as gateway, ExitStack() as stack:
        trusted = ssl.create_default_context(cafile=str(cert))
        clients = [httpx.Client(base_url=gateway.url, verify=trusted, timeout=PATIENCE_SEC) for _ in range(2)]
        one, other = map(stack.enter_context, clients)
        short = {"prompt": "Once", "max_tokens": 1}
        assert one.post("/v1/completions", json=short).status_code == 401
        for client in (one, other):
            client.headers["x-api-key"] = mine
        with one.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as stream:
            assert stream.status_code == 200
            refused = other.post("/v1/completions", json=short)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        until(lambda: other.post("/v1/completions", json=short).status_code, lambda status: status == 200)

"""A client that goes away takes its request with it, whatever that was doing, and nothing else.

How soon is told in tokens: those that were computed between a look at the counters just behind the close and the end.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from engine_world import config_for
from http_server import HttpServer, RawHttp, hosted_http, running_http

from harness import short_directory, until
from uma.engine import Engine
from uma.http.http1 import MAX_UNREAD_BYTES
from uma.types import Request

LONG = 30_000
"""More tokens than any test waits for: a request that is not cancelled would be seen running."""
PIECE = 256
"""Maximum tokens of a prompt in one batch."""
LONG_PROMPT = [5, 6, 7, 8] * 8000
DECISION = {
    "input": "a fox " * 5_000,
    "questions": [{"type": "choice", "instructions": "Which?", "choices": [{"value": "b"}, {"value": "c"}]}],
    **{"labels": "codes", "orders": "one"},
}
"""Of one row, behind a long state."""
FEW_TOKENS, FEW_PIECES = 100, 4
"""Maximum computed for requests after their clients have gone: of 30,000 tokens, and of a prompt of 125 pieces."""


@pytest.fixture(scope="module")
def server(heavy: Path) -> Iterator[HttpServer]:
    """A server with a long context, so that requests last."""
    flags: tuple[str, ...] = ("--model", str(heavy), "--n-ctx", "65536", "--max-tokens", str(LONG))
    flags += ("--max-prompt-bytes", "10000000")
    flags += ("--n-batch", str(PIECE), "--n-ubatch", str(PIECE))
    with short_directory() as directory, running_http(directory, *flags) as process:
        yield process


def endless(**fields: Any) -> dict[str, Any]:
    body = {"prompt": "Once", "max_tokens": LONG, "ignore_eos": True, **fields}
    return {name: value for name, value in body.items() if value is not None}


def running(server: HttpServer) -> int:
    """Requests that run or wait."""
    metrics = server.process.metrics()
    return int(metrics["active_sequences"]) + int(metrics["queued_requests"])


def cancelled(server: HttpServer) -> int:
    return int(server.process.metrics()["requests_cancelled"])


def cancelled_since(server: HttpServer, before: int, *, left: int = 0) -> int:
    """Wait until no more than `left` requests run; those that were cancelled meanwhile, and did not come to their end.

    The clients have just gone, so from here on hardly anything is computed.
    """
    closed = server.process.metrics()
    until(lambda: running(server), lambda n: n == left)
    ended = server.process.metrics()
    assert ended["tokens_generated_total"] - closed["tokens_generated_total"] <= FEW_TOKENS
    assert ended["prefill_tokens_total"] - closed["prefill_tokens_total"] <= FEW_PIECES * PIECE
    return int(ended["requests_cancelled"]) - before


def test_an_unstreamed_request_is_cancelled_while_others_are_served(server: HttpServer) -> None:
    before = cancelled(server)
    with server.connect() as other:
        other.send("POST", "/v1/completions", endless(stream=True))
        assert other.head()[0] == 200
        with server.connect() as raw:
            raw.send("POST", "/v1/completions", endless())
            until(lambda: running(server), lambda n: n == 2)
        assert cancelled_since(server, before, left=1) == 1
        assert next(other.chunks())
    assert cancelled_since(server, before) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_half_with_its_request_is_gone(server: HttpServer, stream: bool) -> None:
    """Not one of them is answered to its end, or is waited for because its body had not come."""
    for _ in range(20):
        with server.connect() as raw:
            raw.send("POST", "/v1/completions", endless(stream=stream))
            raw.sock.shutdown(socket.SHUT_WR)
            raw.sock.settimeout(10)
            came = b""
            while data := raw.sock.recv(65_536):
                came += data
        assert b"[DONE]" not in came and b" 408 " not in came and came.count(b"\n") < 200
    until(lambda: running(server), lambda n: n == 0)


def test_a_connection_ends_with_an_answer_that_its_client_was_too_late_to_miss(server: HttpServer) -> None:
    """It does not last until its keep-alive ends."""
    for _ in range(20):
        with server.connect() as raw:
            raw.send("POST", "/tokenize", {"content": "a"})
            raw.sock.shutdown(socket.SHUT_WR)
            raw.sock.settimeout(10)
            came = b""
            while data := raw.sock.recv(65_536):
                came += data
        assert not came or came.startswith(b"HTTP/1.1 200 ")


def test_a_client_behind_keep_alive_with_a_second_request_already_sent_is_missed_too(server: HttpServer) -> None:
    before = cancelled(server)
    with server.connect() as raw:
        assert raw.ask("POST", "/v1/completions", endless(max_tokens=2)).status == 200
        raw.send("POST", "/v1/completions", endless())
        raw.send("GET", "/health")
        until(lambda: running(server), lambda n: n == 1)
    assert cancelled_since(server, before) == 1


@pytest.mark.parametrize("closes_half", [False, True])
def test_a_client_with_more_sent_than_is_read_is_missed_too(server: HttpServer, closes_half: bool) -> None:
    before = cancelled(server)
    with server.connect() as raw:
        raw.send("POST", "/v1/completions", endless())
        until(lambda: running(server), lambda n: n == 1)
        # (Linux tells of the end once all before it has reached this side: no more than its buffer surely holds.)
        raw.sock.sendall(bytes(MAX_UNREAD_BYTES + 4_096))
        if closes_half:
            raw.sock.shutdown(socket.SHUT_WR)
            assert cancelled_since(server, before) == 1
    assert cancelled_since(server, before) == 1


@pytest.mark.parametrize("closes_half", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "count"),
    [
        ("/v1/completions", {}, 1),
        ("/v1/completions", {"prompt": LONG_PROMPT}, 1),
        ("/v1/completions", {"prompt": LONG_PROMPT, "stream": True}, 1),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
        ("/v1/chat/completions", {"prompt": None, "messages": [{"role": "user", "content": "x"}], "stream": True}, 1),
        ("/v1/decisions", DECISION, 1),
    ],
    ids=["whole", "long prompt", "streamed long prompt", "several prompts", "streamed chat", "decision"],
)
def test_a_client_that_goes_or_closes_its_sending_half_is_missed_whatever_it_waits_for(
    server: HttpServer, path: str, fields: dict[str, Any], count: int, closes_half: bool
) -> None:
    before = cancelled(server)
    with server.connect() as raw:
        raw.send("POST", path, endless(**fields))
        until(lambda: running(server), lambda n: n == count)
        if closes_half:
            raw.sock.shutdown(socket.SHUT_WR)
            assert cancelled_since(server, before) == count
    assert cancelled_since(server, before) == count


class Waiting:
    """An engine that never has done tokenizing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.running = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def tokenize(self, request: Request, *, pieces: bool = False) -> None:
        self.running += 1
        try:
            await trio.sleep_forever()
        finally:
            self.running -= 1


def test_tokenizing_ends_with_its_client(tiny: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "a"}]}
    asked: dict[str, Any] = {"/tokenize": {"content": "a"}, "/detokenize": {"tokens": [300]}}
    asked |= {"/apply-template": talk, "/v1/messages/count_tokens": talk}
    with hosted_http(config_for(tiny, http="127.0.0.1:0")) as hosted:
        waiting: Any = Waiting(hosted.engine)
        hosted.call(lambda: hosted.gateway.be_ready(waiting))
        for path, body in asked.items():
            with hosted.connect() as raw:
                raw.send("POST", path, body)
                until(lambda: waiting.running, lambda count: count == 1)
            until(lambda: waiting.running, lambda count: count == 0)


def test_a_connection_serves_again_after_a_stream_and_after_an_error(server: HttpServer) -> None:
    with server.connect() as raw:
        for _ in range(2):
            streamed = raw.ask("POST", "/v1/completions", endless(max_tokens=3, stream=True))
            assert streamed.body.endswith(b"data: [DONE]\n\n")
            assert raw.ask("POST", "/v1/completions", b"{").status == 400
            assert raw.ask("POST", "/v1/completions", {"prompt": [10**9]}).status == 400
            assert raw.ask("GET", "/nothing").status == 404


def test_pipelined_requests_are_answered_in_order(server: HttpServer) -> None:
    with server.connect() as raw:
        for count in (1, 2, 3):
            raw.send("POST", "/v1/completions", endless(max_tokens=count))
        told = [raw.answer().json["usage"]["completion_tokens"] for _ in range(3)]
    assert told == [1, 2, 3]


def test_a_slow_reader_pauses_itself_alone(server: HttpServer) -> None:
    slow = RawHttp(server.port, receive_buffer=4096)
    try:
        slow.send("POST", "/v1/completions", endless(stream=True))
        until(lambda: running(server), lambda n: n == 1)
        with server.connect() as quick:
            answer = quick.ask("POST", "/v1/completions", endless(max_tokens=50, stream=True))
            assert answer.body.endswith(b"data: [DONE]\n\n")
    finally:
        slow.close()
    until(lambda: running(server), lambda n: n == 0)

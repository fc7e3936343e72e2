"""Clients that send a byte now and then: a TLS handshake, a head and a body each have a time that no byte prolongs. And
clients that read nothing: what they have asked for ends after a time of its own."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engine_world import config_for
from http_server import HttpServer, RawHttp, hosted_http, running_gateway

from harness import ServerProcess, until

PAUSE_SEC = 0.1
"""Between two bytes: a tenth of the time for all of them."""
PIECES = 600
TIMEOUT = ("--http-timeout-sec", "1")


@pytest.fixture(scope="module")
def hasty(server: ServerProcess) -> Iterator[HttpServer]:
    with running_gateway(server, *TIMEOUT) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def hasty_tls(server: ServerProcess, certificate: tuple[Path, Path]) -> Iterator[HttpServer]:
    cert, key = map(str, certificate)
    with running_gateway(server, *TIMEOUT, "--http-tls-cert", cert, "--http-tls-key", key) as gateway:
        yield gateway


def trickle(port: int, beginning: bytes) -> bytes:
    """Send `beginning`, then one byte after the other. What the server says before it closes."""
    with closing(RawHttp(port)) as raw:
        sock, said = raw.sock, b""
        sock.settimeout(PAUSE_SEC)
        sock.sendall(beginning)
        for _ in range(PIECES):
            try:
                sock.sendall(b"0")
                piece = sock.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                return said  # closed, and a byte came after it
            if not piece:
                return said
            said += piece
    raise AssertionError(f"{PIECES} bytes, one each {PAUSE_SEC} s, were waited for")


@pytest.mark.parametrize("beginning", [b"G", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: "])
def test_a_head_that_trickles_is_not_waited_for(hasty: HttpServer, beginning: bytes) -> None:
    assert trickle(hasty.port, beginning) == b""


def test_a_body_that_trickles_times_out(hasty: HttpServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n"
    assert trickle(hasty.port, head).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_reader_that_takes_nothing_is_let_go_and_its_request_cancelled(
    tiny: Path, certificate: tuple[Path, Path], caplog: pytest.LogCaptureFixture, is_tls: bool
) -> None:
    cert, key = map(str, certificate)
    config: dict[str, Any] = {"n_ctx": 32_768, "alias": "*", "max_tx_bytes": 4_096, "tx_timeout_sec": 0.3}
    config |= {"http_tls_cert": cert, "http_tls_key": key} if is_tls else {}
    # The name is in every event, so that a few tokens fill all buffers.
    body = {"prompt": "a", "model": "x" * 20_000, "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with hosted_http(config_for(tiny, http="127.0.0.1:0", **config)) as hosted:
        raw = RawHttp(hosted.port, receive_buffer=4_096, segment_bytes=536)
        if is_tls:
            raw.sock = ssl.create_default_context(cafile=cert).wrap_socket(raw.sock, server_hostname="localhost")
        raw.send("POST", "/v1/completions", body)
        found = until(lambda: hosted.call(hosted.engine.snapshot), lambda found: found["requests_cancelled"] == 1)
        raw.close()
    assert (found["active_sequences"], "event=http.stalled" in caplog.text) == (0, True)


def test_a_tls_handshake_that_trickles_or_never_comes_is_not_waited_for(hasty_tls: HttpServer) -> None:
    assert trickle(hasty_tls.port, bytes.fromhex("1603010400010003fc0303")) == b""
    with socket.create_connection(("127.0.0.1", hasty_tls.port)) as silent:
        silent.settimeout(PIECES * PAUSE_SEC)
        assert silent.recv(1) == b""

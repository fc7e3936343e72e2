"""Clients that send a byte now and then: a TLS handshake, a head and a body each have a time that no byte prolongs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from http_server import HttpServer, RawHttp, running_gateway

from harness import ServerProcess

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


def test_a_tls_handshake_that_trickles_or_never_comes_is_not_waited_for(hasty_tls: HttpServer) -> None:
    assert trickle(hasty_tls.port, bytes.fromhex("1603010400010003fc0303")) == b""
    with socket.create_connection(("127.0.0.1", hasty_tls.port)) as silent:
        silent.settimeout(PIECES * PAUSE_SEC)
        assert silent.recv(1) == b""

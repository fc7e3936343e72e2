"""The bytes below HTTP, with TLS and without: all that is sent arrives, in order, wherever the network cuts it."""

from __future__ import annotations

import socket
import ssl
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing
from engine_world import config_for
from http_server import hosted_http
from hypothesis import given
from hypothesis import strategies as st

from harness import PATIENCE_SEC
from uma.http.body_budget import BodyBudget
from uma.http.exchange import Exchange
from uma.http.http1 import AsgiCall, Http1
from uma.http.serve import CONNECTIONS_A_SESSION
from uma.http.transport import PLAIN, Transport
from uma.net.client import THIS_MACHINE
from uma.net.link import Link
from uma.net.throttle import ClientLines, Throttle


class Peer:
    """A client whose TLS is driven by hand, so that it decides which bytes go out together."""

    def __init__(self, sock: socket.socket, certificate: Path) -> None:
        self.sock = trio.socket.from_stdlib_socket(sock)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=str(certificate))
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")

    async def shake_hands(self, behind: bytes) -> None:
        """`behind` goes out with the last bytes of the handshake."""
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self.sock.send(self.outgoing.read())
                self.incoming.write(await self.sock.recv(65_536))
        self.tls.write(behind)
        await self.sock.send(self.outgoing.read())

    async def read_all(self) -> bytes:
        """Until the server's end."""
        found = b""
        is_over = False
        while not is_over:
            try:
                found += (part := self.tls.read(65_536))
                is_over = not part
            except ssl.SSLZeroReturnError:
                is_over = True
            except ssl.SSLWantReadError:
                self.incoming.write(await self.sock.recv(1_000))
        return found


def transport_of(sock: socket.socket, certificate: tuple[Path, Path] | None) -> Transport:
    context = None
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)
    sock.setblocking(False)
    return Transport(Link(sock, 65_536, 30.0), context)


async def test_what_comes_with_the_last_bytes_of_a_handshake_is_read(certificate: tuple[Path, Path]) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    transport, peer = transport_of(ours, certificate), Peer(theirs, certificate[0])
    said = bytes(range(256)) * 2_000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transport.write)
        nursery.start_soon(peer.shake_hands, b"at once")
        assert await transport.handshake()
        assert await transport.receive() == b"at once"
        transport.post(said)
        nursery.start_soon(lambda: transport.aclose(lingers=True))
        assert await peer.read_all() == said  # and TLS' own word for the end was among it
        peer.sock.close()


async def test_a_peer_that_speaks_no_tls_is_told_of_it_and_let_go(certificate: tuple[Path, Path]) -> None:
    ours, theirs = socket.socketpair()
    transport = transport_of(ours, certificate)
    theirs.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transport.write)
        assert not await transport.handshake()
        nursery.start_soon(lambda: transport.aclose(lingers=False))
    assert theirs.recv(1_000) == PLAIN
    theirs.close()


def test_another_machine_has_half_of_the_connections(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uma.http.serve.machine_at", lambda host: THIS_MACHINE if host == "127.0.0.1" else host)
    with ExitStack() as stack:
        config = config_for(tiny, http="127.0.0.1:0", max_sessions=1)
        hosted = stack.enter_context(hosted_http(config))

        def answered(source: str) -> bytes:
            raw = socket.create_connection(("127.0.0.1", hosted.port), source_address=(source, 0))
            stack.enter_context(raw).settimeout(PATIENCE_SEC)
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            with suppress(ConnectionResetError):
                return raw.recv(12)
            return b""

        half = CONNECTIONS_A_SESSION // 2
        for machine in ("127.0.0.2", "127.0.0.1"):
            assert [answered(machine) for _ in range(half + 1)] == [*[b"HTTP/1.1 200"] * half, b""]


async def test_a_body_has_a_time_by_its_length(mock_clock: trio.testing.MockClock) -> None:
    host = Sink(None)
    http = http1(host)
    http.feed(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")
    call = host.calls[0]
    slow = Exchange(
        call.scope, call.receive, call.send, "id", 10**6, 10.0, trio.CapacityLimiter(1), BodyBudget.of(10**6)
    )
    async with trio.open_nursery() as nursery:
        read: list[bytes] = []

        async def body() -> None:
            read.append(await slow.body())

        nursery.start_soon(body)
        for _ in range(20):  # 45 s in all, at 22 KB a second
            await trio.testing.wait_all_tasks_blocked()
            http.feed(b"x" * 50_000)
            mock_clock.jump(2.25)
    assert len(read[0]) == 10**6


def http1(host: Sink) -> Http1:
    return Http1(cast(Any, host))


class Sink:
    """A connection that keeps what is said; its application answers with the body that came."""

    def __init__(self, tasks: trio.Nursery | None) -> None:
        """`tasks`: None where nothing is answered."""
        self.scheme, self.client, self.server = "http", ("127.0.0.1", 1), ("127.0.0.1", 2)
        self.lines = ClientLines(Throttle())
        self.is_draining = self.is_full = self.is_closed = False
        self.said = b""
        self.calls: list[AsgiCall] = []
        self._tasks = tasks

    def post(self, data: bytes) -> None:
        self.said += data

    async def room(self) -> None:
        pass

    def start(self, call: AsgiCall) -> None:
        self.calls.append(call)
        if self._tasks is not None:
            self._tasks.start_soon(self._answer, call)

    async def _answer(self, call: AsgiCall) -> None:
        body, more = b"", True
        while more:
            message = await call.receive()
            body, more = body + message["body"], message["more_body"]
        length = str(len(body)).encode()
        await call.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await call.send({"type": "http.response.body", "body": body})

    def rest(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=6), st.lists(st.integers(1, 90), max_size=40))
def test_pipelined_requests_are_answered_in_order_wherever_their_bytes_are_cut(
    bodies: list[bytes], cuts: list[int]
) -> None:
    sent = b"".join(
        b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        + b"0\r\n\r\n"
        for body in bodies
    )

    async def answered() -> bytes:
        async with trio.open_nursery() as nursery:
            host = Sink(nursery)
            http, rest = http1(host), sent
            for cut in cuts:
                http.feed(rest[:cut])
                rest = rest[cut:]
                await trio.testing.wait_all_tasks_blocked()
            if rest:
                http.feed(rest)
        assert not host.is_closed
        return host.said

    said = trio.run(answered)
    for body in bodies:
        head, said = said.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200")
        assert said.startswith(body)
        said = said[len(body) :]
    assert said == b""


@pytest.mark.parametrize("parts", [1, 5_000])
async def test_small_parts_of_a_body_are_kept_together(parts: int) -> None:
    host = Sink(None)
    http = http1(host)
    http.feed(b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * parts)
    http.feed(b"0\r\n\r\n")
    assert host.calls[0].unread_bytes == parts
    taken = []
    while (message := await host.calls[0].receive())["more_body"]:
        taken.append(message["body"])
    assert b"".join([*taken, message["body"]]) == b"x" * parts
    assert len(taken) <= 1 + parts // 4_096

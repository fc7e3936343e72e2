"""The accept loop and reads of a connection: many clients, or much data, take few passes of Trio's loop."""

import socket

import trio

from uma.net.accept import ACCEPTS_AT_ONCE, accept_forever
from uma.net.link import BULK_BYTES, RECEIVE_BYTES, Link


class Passes(trio.abc.Instrument):
    """Counts the passes of Trio's loop."""

    count = 0

    def after_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_clients_that_wait_are_accepted_in_one_pass_of_the_loop() -> None:
    """One in each pass would let a client wait for as many passes as others have connected before it."""
    clients = ACCEPTS_AT_ONCE // 2
    at: list[int] = []
    passes = Passes()
    with socket.create_server(("127.0.0.1", 0), backlog=clients) as listener:
        listener.setblocking(False)
        connected = [socket.create_connection(listener.getsockname()) for _ in range(clients)]

        def admit(sock: socket.socket) -> None:
            sock.close()
            at.append(passes.count)
            if len(at) == clients:
                nursery.cancel_scope.cancel()

        trio.lowlevel.add_instrument(passes)
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept_forever, listener, admit, lambda error: None)
        trio.lowlevel.remove_instrument(passes)
        for client in connected:
            client.close()
    assert len(at) == clients
    assert len(set(at)) == 1


async def test_a_read_after_a_full_one_takes_more() -> None:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * BULK_BYTES)
    with ours, theirs:
        link = Link(ours, 1, 1.0)
        sent = theirs.send(bytes(RECEIVE_BYTES + 20_000 + BULK_BYTES))
        assert sent > RECEIVE_BYTES + 20_000
        with trio.fail_after(10):
            assert len(await link.receive()) == RECEIVE_BYTES
            more = await link.receive()
            assert RECEIVE_BYTES < len(more) <= BULK_BYTES
            while len(more) + RECEIVE_BYTES < sent:
                more += await link.receive()
            theirs.send(bytes(10))
            assert len(await link.receive()) == 10
            theirs.send(bytes(2 * RECEIVE_BYTES))
            assert len(await link.receive()) == RECEIVE_BYTES

"""The link at both ends of a socket: what is gathered, what is bounded, and what a peer that is slow or gone does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import trio
import trio.testing

from harness import Pair
from uma.net.link import FAIR_BYTES, Flusher, Link, ReaderStalledError, turn


async def test_what_many_tasks_post_before_the_writer_runs_goes_out_in_one_piece(pair: Pair) -> None:
    link = Link(pair[0], 1_000_000, stall_timeout_sec=60)
    flushes = []

    async def post(number: int) -> None:
        link.post(b"%d," % number)

    def is_done() -> bool:
        flushes.append(link.unsent_bytes)
        return len(flushes) == 2

    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.write, is_done)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(10):
            nursery.start_soon(post, number)
    assert sorted(pair[1].recv(1000).split(b",")) == sorted([b"", *(b"%d" % number for number in range(10))])
    assert flushes == [0, 0]


class Turns(trio.abc.Instrument):
    """Counts the turns that tasks have, but for the test's own."""

    def __init__(self) -> None:
        self.count = 0
        self._own = trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is not self._own


@contextmanager
def flushed_links(count: int) -> Iterator[tuple[Flusher, list[Link], list[socket.socket]]]:
    """Links that have one flusher, and their peers."""
    flusher, links, peers = Flusher(), [], []
    with ExitStack() as stack:
        for _ in range(count):
            ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
            ours.setblocking(False)
            links.append(Link(ours, 100_000, stall_timeout_sec=60, flusher=flusher))
            peers.append(theirs)
        yield flusher, links, peers


async def test_what_a_turn_posts_on_many_links_is_sent_in_one_turn_of_one_task() -> None:
    with flushed_links(16) as (flusher, links, peers):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flusher.run)
            for link in links:
                nursery.start_soon(link.write, lambda: False)
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.add_instrument(turns := Turns())
            for link in links:
                link.post(b"one, ")
                link.post(b"two")
            await trio.testing.wait_all_tasks_blocked()
            assert turns.count == 1
            assert [peer.recv(100) for peer in peers] == [b"one, two"] * len(peers)
            assert [link.unsent_bytes for link in links] == [0] * len(links)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("has_flusher", [True, False])
async def test_what_a_block_of_one_task_posts_on_many_links_is_sent_at_its_end_without_another_task(
    has_flusher: bool,
) -> None:
    with flushed_links(16) as (flusher, links, peers):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flusher.run)
            for link in links:
                link._flusher = flusher if has_flusher else None
                nursery.start_soon(link.write, lambda: False)
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.add_instrument(turns := Turns())
            with turn():
                for link in links:
                    link.post(b"one, ")
                    link.post(b"two")
                assert [link.unsent_bytes for link in links] == [8] * len(links)
            assert [peer.recv(100) for peer in peers] == [b"one, two"] * len(peers)
            await trio.testing.wait_all_tasks_blocked()
            assert turns.count == 0
            assert [link.unsent_bytes for link in links] == [0] * len(links)
            nursery.cancel_scope.cancel()


async def test_what_a_block_posts_for_a_slow_peer_is_sent_in_order_by_the_links_own_task(pair: Pair) -> None:
    sent = [b"a" * 200_000, b"b" * 1_000_000, b"c" * 5, b"d" * 300_000]
    link, is_over, read = Link(pair[0], 2_000_000, stall_timeout_sec=60), False, b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.write, lambda: is_over)
        link.post(sent[0])  # before there is a writer
        with turn():
            link.post(sent[1])
        await trio.testing.wait_all_tasks_blocked()
        with turn():
            link.post(sent[2])
            link.post(sent[3])
        while len(read) < sum(map(len, sent)):
            await trio.lowlevel.wait_readable(pair[1].fileno())
            read += pair[1].recv(65_536)
        await trio.testing.wait_all_tasks_blocked()
        is_over = True
        with turn():
            link.post(b"")  # the end is seen too
    assert read == b"".join(sent)
    assert link.unsent_bytes == 0


async def test_what_the_system_does_not_take_at_once_is_sent_by_the_links_own_task_and_the_end_is_seen() -> None:
    sent = [b"a" * FAIR_BYTES, b"b" * 1_000_000, b"c"]
    with flushed_links(1) as (flusher, (link,), (peer,)):
        peer.setblocking(False)
        is_over, read = False, b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flusher.run)
            async with trio.open_nursery() as inner:
                inner.start_soon(link.write, lambda: is_over)
                for data in sent:
                    await trio.testing.wait_all_tasks_blocked()
                    link.post(data)
                while len(read) < sum(map(len, sent)):
                    await trio.lowlevel.wait_readable(peer.fileno())
                    read += peer.recv(65_536)
                await trio.testing.wait_all_tasks_blocked()
                is_over = True
                link.post(b"")
            nursery.cancel_scope.cancel()
    assert read == b"".join(sent)
    assert link.unsent_bytes == 0


async def test_a_writer_that_finds_it_full_waits_until_half_is_sent(pair: Pair) -> None:
    link = Link(pair[0], 1_000_000, stall_timeout_sec=60)
    left: list[int] = []

    async def wait() -> None:
        await link.room()
        left.append(link.unsent_bytes)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.write, lambda: False)
        link.post(b"x" * 2_000_000)
        assert link.is_full
        nursery.start_soon(wait)
        received = 0
        while not left:
            await trio.lowlevel.wait_readable(pair[1].fileno())
            received += len(pair[1].recv(100_000))
        assert received > 1_400_000, "it went on before half was sent"
        assert left[0] <= 500_000
        with trio.testing.assert_no_checkpoints():
            await link.room()
        nursery.cancel_scope.cancel()


async def test_a_peer_that_reads_nothing_is_given_up_on_and_no_writer_waits_any_more(pair: Pair) -> None:
    link = Link(pair[0], 1_000, stall_timeout_sec=0.05)

    async def write() -> None:
        with pytest.raises(ReaderStalledError):
            await link.write(lambda: False)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        link.post(b"x" * 10_000_000)
        await link.room()
    link.post(b"dropped")
    await link.room()


async def test_a_peer_that_is_gone_ends_reading_and_writing(pair: Pair) -> None:
    link = Link(pair[0], 1_000, stall_timeout_sec=60)
    assert not link.is_hung_up
    pair[1].close()
    assert await link.receive() == b""
    assert link.is_hung_up
    link.post(b"too late")
    with pytest.raises(BrokenPipeError):
        await link.write(lambda: False)


async def test_a_peer_that_only_says_no_more_has_not_hung_up(pair: Pair) -> None:
    link = Link(pair[0], 1_000, stall_timeout_sec=60)
    pair[1].shutdown(socket.SHUT_WR)
    assert await link.receive() == b""
    assert not link.is_hung_up


async def test_closing_wakes_the_reader(pair: Pair) -> None:
    link = Link(pair[0], 1_000, stall_timeout_sec=60)

    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await link.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        link.close()

"""The link at both ends of a socket: what is gathered, what is bounded, and what a peer that is slow or gone does."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from harness import Pair
from uma.net.link import Link, ReaderStalledError


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

"""How slowly a peer may read: at any fair pace for as long as it likes, but not a few bytes now and then.

The sockets are real. Time is not: it goes on when the test says so.
"""

from __future__ import annotations

import trio
import trio.testing

from harness import Pair
from uma.net.link import FAIR_BYTES, Link, ReaderStalledError

TIMEOUT_SEC = 30.0


class Writing:
    """A link whose `write` runs, and whether it has given its peer up."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.has_given_up = False

    async def run(self) -> None:
        try:
            await self.link.write(lambda: self.link.unsent_bytes == 0)
        except ReaderStalledError:
            self.has_given_up = True


async def read_at_pace(
    pair: Pair, clock: trio.testing.MockClock, *, piece: int, interval_sec: float, waiting_bytes: int, n_pieces: int
) -> bool:
    """Read so many pieces, one after each interval; whether the peer's link gave up meanwhile."""
    link = Link(pair[0], 1_000_000, stall_timeout_sec=TIMEOUT_SEC)
    writing = Writing(link)
    async with trio.open_nursery() as nursery:
        link.post(b"x" * waiting_bytes)
        nursery.start_soon(writing.run)
        for _ in range(n_pieces):
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(interval_sec)
            await trio.testing.wait_all_tasks_blocked()
            if writing.has_given_up or link.unsent_bytes == 0:
                break
            assert len(pair[1].recv(piece)) == piece
        nursery.cancel_scope.cancel()
    return writing.has_given_up


async def test_a_peer_that_takes_a_few_bytes_now_and_then_is_given_up_on(
    pair: Pair, mock_clock: trio.testing.MockClock
) -> None:
    assert await read_at_pace(
        pair, mock_clock, piece=100, interval_sec=TIMEOUT_SEC / 10, waiting_bytes=1_000_000, n_pieces=1_000
    )


async def test_a_slow_peer_with_a_fair_pace_may_read_for_as_long_as_it_likes(
    pair: Pair, mock_clock: trio.testing.MockClock
) -> None:
    # The system takes nothing more for a socket until most of what it holds was read: at this pace, for minutes.
    piece = FAIR_BYTES // 5
    assert not await read_at_pace(
        pair, mock_clock, piece=piece, interval_sec=TIMEOUT_SEC / 15, waiting_bytes=1_000_000, n_pieces=1_000
    )


async def test_a_peer_that_reads_fairly_and_then_no_more_is_given_up_on(
    pair: Pair, mock_clock: trio.testing.MockClock
) -> None:
    link = Link(pair[0], 1_000_000, stall_timeout_sec=TIMEOUT_SEC)
    writing = Writing(link)
    link.post(b"x" * 1_000_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writing.run)
        await trio.testing.wait_all_tasks_blocked()
        read = 0
        while read < 500_000:
            read += len(pair[1].recv(65_536))
            await trio.testing.wait_all_tasks_blocked()
        assert not writing.has_given_up
        for _ in range(2):
            mock_clock.jump(TIMEOUT_SEC)
            await trio.testing.wait_all_tasks_blocked()
        assert writing.has_given_up

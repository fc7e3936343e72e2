"""The bell that delivery sleeps on: a ring from another thread, a time that is set, and no ring that is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from random import Random

import pytest
import trio
import trio.testing

from harness import PATIENCE_SEC
from uma.engine.clock import now_ms
from uma.engine.delivery.bell import Bell
from uma.engine.delivery.mailbox import Mailbox, Reply
from uma.engine.delivery.stream import RequestStream
from uma.types import Token


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    made.close()


async def test_a_ring_from_another_thread_wakes_the_task_whether_it_came_before_or_after_it_slept(bell: Bell) -> None:
    with trio.fail_after(PATIENCE_SEC):
        for _ in range(20):
            ringing = threading.Thread(target=bell.ring)
            ringing.start()
            await bell.wait()
            ringing.join()


async def test_it_wakes_at_its_time_and_not_before(bell: Bell) -> None:
    with trio.fail_after(PATIENCE_SEC):
        for later_ms in (10.0, 5.0, 0.0, -1e9):
            began = now_ms()
            await bell.wait(began + later_ms)
            assert now_ms() >= began + later_ms


async def test_without_a_time_only_a_ring_wakes(bell: Bell) -> None:
    woken: list[float] = []

    async def sleep() -> None:
        await bell.wait()
        woken.append(now_ms())

    with trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleep)
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert not woken
            bell.ring()
    assert len(woken) == 1


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox()
    yield made
    made.close()


class Control:
    """A sequence that nothing is asked of."""

    def cancel(self) -> None: ...

    def end_thinking(self) -> None: ...

    def credit(self, events: int) -> None: ...


async def test_no_event_is_left_behind_however_posts_and_times_meet(mailbox: Mailbox) -> None:
    given: list[list[int]] = [[] for _ in range(4)]
    streams = [RequestStream(Control(), lambda: None, lambda _: None) for _ in given]
    has_all = trio.Event()
    count = 500

    def give(tokens: list[int], token: Token) -> bool:
        tokens.append(token.token_id)
        if sum(map(len, given)) == count * len(given):
            has_all.set()
        return True

    for stream, tokens in zip(streams, given, strict=True):
        stream.tap = lambda token, tokens=tokens: give(tokens, token)

    def post() -> None:
        rng, due_ms = Random(1), [0.0] * len(streams)
        for number in range(count):
            for index, stream in enumerate(streams):
                due_ms[index] = max(due_ms[index], now_ms() + rng.choice((-1.0, 0.0, 0.05, 0.3, 1.0)))
                mailbox.post([(stream, Token("r", "", number), due_ms[index])], None)

    with trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mailbox.run)
            nursery.start_soon(trio.to_thread.run_sync, post)
            await has_all.wait()
            nursery.cancel_scope.cancel()
    assert given == [list(range(count))] * len(given)


async def test_an_event_that_is_due_is_not_put_off_by_one_that_is_early(mailbox: Mailbox) -> None:
    stream = RequestStream(Control(), lambda: None, lambda _: None)
    given: list[int] = []
    has_first = trio.Event()

    def give(token: Token) -> bool:
        given.append(token.token_id)
        has_first.set()
        return True

    stream.tap = give
    with trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mailbox.run)
            await trio.testing.wait_all_tasks_blocked()
            mailbox.post([(stream, Token("r", "", 0), now_ms())], None)
            mailbox.post([(stream, Token("r", "", 1), now_ms() + 1e6)], None)
            await has_first.wait()
            nursery.cancel_scope.cancel()
    assert given == [0]


async def test_what_is_posted_while_the_task_is_awake_is_seen(mailbox: Mailbox) -> None:
    stream = RequestStream(Control(), lambda: None, lambda _: None)
    given: list[int] = []
    has_last = trio.Event()

    def give(token: Token) -> bool:
        given.append(token.token_id)
        if token.token_id == 0:
            # As the decode thread can while tokens that were early are given out.
            mailbox.post([(stream, Token("r", "", 1), 0.0)], None)
        else:
            has_last.set()
        return True

    stream.tap = give
    with trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mailbox.run)
            mailbox.post([(stream, Token("r", "", 0), now_ms() + 5)], None)
            await has_last.wait()
            nursery.cancel_scope.cancel()
    assert given == [0, 1]


async def test_a_function_is_called_behind_the_events_that_were_posted_before_it(mailbox: Mailbox) -> None:
    stream = RequestStream(Control(), lambda: None, lambda _: None)
    given: list[int] = []

    def take(token: Token) -> bool:
        given.append(token.token_id)
        return True

    stream.tap = take
    found = Reply[list[int]](mailbox, [])

    def post() -> None:
        mailbox.post([(stream, Token("r", "", 0), 0.0)], None)
        mailbox.call(lambda: given.append(-1))
        found.give(given)
        mailbox.post([(stream, Token("r", "", 1), now_ms() + 1e6)], None)

    with trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mailbox.run)
            await trio.testing.wait_all_tasks_blocked()
            await trio.to_thread.run_sync(post)
            assert await found.wait() == [0, -1]
            nursery.cancel_scope.cancel()

"""The way into the engine: what is prepared in other threads, and who leaves before that is done.

Where all worker threads are taken, whatever needs one waits, and a test can look at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from engine_world import PATIENCE_SEC, config_for

from uma import Message, Request, open_engine


@contextmanager
def no_thread_free() -> Iterator[trio.CapacityLimiter]:
    """A block in which all of Trio's worker threads are taken."""
    limiter = trio.to_thread.current_default_thread_limiter()
    borrowers = [object() for _ in range(int(limiter.available_tokens))]
    for each in borrowers:
        limiter.acquire_on_behalf_of_nowait(each)
    try:
        yield limiter
    finally:
        for each in borrowers:
            limiter.release_on_behalf_of(each)


@pytest.mark.parametrize("content", ["", "a"])
async def test_a_chat_of_very_many_tiny_messages_is_not_rendered_on_the_trio_thread(tiny: Path, content: str) -> None:
    many = Request("a", messages=(Message("user", content),) * 1_000)
    async with open_engine(config_for(tiny)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery:
                with no_thread_free() as limiter:
                    nursery.start_soon(engine.tokenize, many)
                    await trio.testing.wait_all_tasks_blocked()
                    assert limiter.statistics().tasks_waiting == 1
                    # What is short goes no such way.
                    await engine.tokenize(Request("b", messages=(Message("user", content),) * 10))

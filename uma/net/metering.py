"""A request's tokens on its holder's account, also where the reader leaves before the last event.

A bound on tokens that only ended requests count against would not bind a client that hangs up on each of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio

from uma.errors import UmaError
from uma.net.quota import Account
from uma.types import EventStream, Finished, Usage

SETTLE_SEC = 5.0
"""Maximum time that a cancelled request's last event is waited for. It comes within a tick."""


@attrs.define(eq=False)
class Meter:
    """What one request has used."""

    usage: Usage | None = None
    """Set from the request's last event; None while it runs."""


@asynccontextmanager
async def metered(stream: EventStream, account: Account | None) -> AsyncIterator[Meter]:
    """A block that reads `stream` and gives its usage to the meter; the account is charged when the block ends.

    Where the block ends without a usage, the request is cancelled and its last event awaited. A request that failed
    costs nothing.
    """
    meter = Meter()
    if account is None or account.bounds.max_tokens_per_minute is None:
        yield meter
        return
    try:
        yield meter
    finally:
        with trio.move_on_after(SETTLE_SEC, shield=True):
            usage = meter.usage or await _last_usage(stream)
            if usage is not None:
                account.charge(usage.prompt_tokens + usage.completion_tokens, trio.current_time())


async def _last_usage(stream: EventStream) -> Usage | None:
    stream.tap = None
    stream.cancel()
    try:
        async for event in stream:
            if isinstance(event, Finished):
                return event.usage
    except UmaError:
        pass  # the failure is told where the block ends
    return None

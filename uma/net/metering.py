"""Charges a request's tokens to its account, also where the reader leaves before the last event.

If only finished requests counted, a bound on tokens would not bind a client that hangs up on each of its requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import attrs
import trio

from uma.errors import UmaError
from uma.net.quota import ClientAccount
from uma.types import DecisionRequest, EmbedRequest, EventStream, Finished, RerankRequest, Usage

SETTLE_SEC = 5.0
"""Maximum wait for the last event of a cancelled request. It normally comes within a tick."""
BYTES_PER_TOKEN = 4
"""Estimated bytes of a token (as in English), for texts whose request was left before its tokens were counted."""


@attrs.define(eq=False)
class Meter:
    """Tokens that one request has used."""

    usage: Usage | None = None
    """Set from the request's last event; None while it runs."""


@asynccontextmanager
async def metered(stream: EventStream, account: ClientAccount | None) -> AsyncIterator[Meter]:
    """A block that reads `stream` and sets the meter's usage. At its end the account is charged.

    If the block ends without a usage, the request is cancelled, and its last event is awaited. A failed request costs
    nothing.
    """
    meter = Meter()
    if account is None:
        yield meter
        return
    try:
        yield meter
    finally:
        with trio.move_on_after(SETTLE_SEC, shield=True):
            usage = meter.usage or await _last_usage(stream)
            if usage is not None:
                account.charge(usage, trio.current_time())


@contextmanager
def metered_whole(
    request: EmbedRequest | RerankRequest | DecisionRequest, account: ClientAccount | None
) -> Iterator[Meter]:
    """Meter a request that is answered in one piece. One that is left before its answer counts the number of its token
    ids, or a token for every `BYTES_PER_TOKEN` of its texts, because the engine does not report what it has computed.
    """
    meter = Meter(Usage(_size_tokens(request), 0, 0))
    try:
        yield meter
    except UmaError:
        meter.usage = None
        raise
    finally:
        if account is not None and meter.usage is not None:
            account.charge(meter.usage, trio.current_time())


def _size_tokens(request: EmbedRequest | RerankRequest | DecisionRequest) -> int:
    if isinstance(request, DecisionRequest):
        texts: Sequence[str] = request.texts
    elif isinstance(request, RerankRequest):
        texts = [request.query + document for document in request.documents]
    elif request.token_ids is not None:
        return sum(map(len, request.token_ids))
    else:
        texts = request.texts or ()
    return sum(len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN + 1 for text in texts)


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

"""The history over HTTP, where `--history` keeps one: `GET /v1/history` lists and searches it, and
`GET /v1/history/{number}` is one request whole.

With keys each sees what came with it. Without keys the user that the server runs as sees all, from this machine, as
with `uma history`: others of this machine, and of the network, can reach the server too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs

from uma import posix
from uma.errors import BadRequest
from uma.history import MAX_SEARCHED, Head, History, default_path, parting
from uma.http.dialect import Body, dumps
from uma.http.exchange import Exchange
from uma.http.files import limit_of
from uma.http.gateway import Gateway
from uma.http.local_user import user_of
from uma.http.problem import Forbidden, NotFound

MAX_LISTED = 1_000
"""Maximum requests of one list."""


async def listing(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/history`: the newest requests first, those before the number `before`, with `search` in their texts."""
    limit, before, text = limit_of(http.query, MAX_LISTED), _number(http, "before"), http.query.get("search", "")
    owner = await _owner(gateway, http)

    def listed(history: History) -> Body:
        heads = history.heads(limit, before=before, owner=owner, search=text)
        more = {"searched_at_most": MAX_SEARCHED} if text else {}
        data = [_listed(*each) for each in reversed(heads)]
        return {"object": "list", "data": data, "has_more": len(heads) == limit, **more}

    await _answer(http, listed)


async def show(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/history/{number}`: one request; with `against` also where the two prompts differ."""
    number, against = http.scope["path_params"]["number"], _number(http, "against")
    owner = await _owner(gateway, http)

    def shown(history: History) -> Body:
        entry = history.entry(number, owner)
        told = _listed(number, entry.head) | {name: getattr(entry, name) for name in ("request", "prompt", "answer")}
        if against is not None:
            parted = parting(history.entry(against, owner), entry)
            told |= {"against": against, "parting": parted and attrs.asdict(parted)}
        return told

    await _answer(http, shown)


async def _answer(http: Exchange, told: Callable[[History], Body]) -> None:
    """Answer with what is told of the history, read in a thread. Raises `KeptFault`, `NotFound`."""

    def read() -> bytes:
        with History(default_path(), only_reads=True) as history:
            return dumps(told(history))

    try:
        await http.answer(await http.in_thread(read))
    except BadRequest as error:
        raise NotFound(error.message) from None


async def _owner(gateway: Gateway, http: Exchange) -> str | None:
    """Whose entries are shown; None: everyone's. Raises `NotFound` and `Forbidden`."""
    if not gateway.config.history:
        raise NotFound("no such history: this server keeps none; uma run --history does")
    if http.account is not None:
        return str(http.owner)
    if await user_of(http) != posix.user_id():
        raise Forbidden(
            "without keys only the user that the server runs as sees the history, from this machine and not through a "
            "proxy; `uma history` reads its file"
        )
    return None


async def sees_history(gateway: Gateway, http: Exchange) -> bool:
    """Whether there is a history that this client can see."""
    with suppress(NotFound, Forbidden):
        await _owner(gateway, http)
        return True
    return False


def _number(http: Exchange, name: str) -> int | None:
    if (text := http.query.get(name)) is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise BadRequest.at(name, f"expected the number of a request, not {text[:50]!r}")
    return int(text)


def _listed(number: int, head: Head) -> dict[str, Any]:
    return {"object": "history.request", "number": number, **attrs.asdict(head)}

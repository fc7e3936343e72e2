"""OpenAI's stored responses: `GET` and `DELETE /v1/responses/{id}`, and conversations that go on from one of them.

They lie beside files and batches, where `--store-responses` says for how many days, each with its own input and output
as the row's `body`, and a link to the response that it goes on from. With keys each reaches its own. Without keys there
is nobody to bind one to but the program that was told its id, 96 random bits that no list shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from uma import json_bytes
from uma.http.dialect import Body, dumps
from uma.http.exchange import Exchange
from uma.http.files import limit_of, owner_of, page_of
from uma.http.gateway import Gateway
from uma.http.problem import BodyTooLarge, NotFound, Unsupported
from uma.kept import Kept, KeptRow

MAX_LISTED = 100
"""Maximum items of one page of a response's input."""
DAY_SEC = 86_400
T = TypeVar("T")


def days_kept(gateway: Gateway) -> float:
    """How long responses are stored; 0: not at all."""
    return gateway.config.store_responses if gateway.jobs is not None else 0.0


async def before(gateway: Gateway, http: Exchange, fields: Mapping[str, Any]) -> list[Any]:
    """What comes before a body's own input: that of `previous_response_id` and its answer. Raises `NotFound` where the
    key has no such response, `Unsupported` where none are stored, and `BodyTooLarge` or `BodiesFull` where a body that
    brought all of it would be refused so.
    """
    if (id := fields.get("previous_response_id")) is None:
        return []
    if not days_kept(gateway):
        raise Unsupported.at(
            "previous_response_id",
            "responses are not stored here (--store-responses DAYS does); send the whole conversation as input",
        )
    items = partial(_items, http.max_body_bytes - http.held_bytes)
    found, size_bytes = await _of(gateway, http, items, str(id), "previous_response_id")
    http.hold(size_bytes)
    return found


async def keep(gateway: Gateway, http: Exchange, before: list[Any], own: list[Any], response: Body) -> None:
    """Store a response with its `own` input, before its end is told. The input `before` that is kept with the response
    that it goes on from, unless that was deleted meanwhile.
    """
    link = response["previous_response_id"]

    def add(kept: Kept, id: str, owner: str) -> bool:
        is_linked = link is not None and kept.more(link, owner) is not None
        turn = json_bytes.dumps([own if is_linked else [*before, *own], response["output"]])
        row = KeptRow(owner=owner, body=turn, more=dumps(response), id=id, before=link if is_linked else None)
        kept.add([row], max_age_sec=days_kept(gateway) * DAY_SEC)
        return True

    await _of(gateway, http, add, response["id"])


async def show(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/responses/{id}`."""
    await http.answer(await _of(gateway, http, Kept.more, _id(http)))


async def remove(gateway: Gateway, http: Exchange) -> None:
    """`DELETE /v1/responses/{id}`."""
    await _of(gateway, http, Kept.forget, _id(http))
    await http.answer_json({"id": _id(http), "object": "response.deleted", "deleted": True})


async def input_items(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/responses/{id}/input_items`, the newest first unless `order` is `asc`."""
    limit, after = limit_of(http.query, MAX_LISTED), http.query.get("after")

    def listed(kept: Kept, id: str, owner: str) -> bytes | None:
        if (found := _items(http.max_body_bytes, kept, id, owner, with_answer=False)) is None:
            return None
        items = [{"type": "message", **item, "id": item.get("id") or f"item_{at}"} for at, item in enumerate(found[0])]
        if http.query.get("order") != "asc":
            items.reverse()
        begin = next((at for at, item in enumerate(items, 1) if item["id"] == after), 0)
        return dumps(page_of(items[begin : begin + limit], has_more=begin + limit < len(items)))

    await http.answer(await _of(gateway, http, listed, _id(http)))


def _id(http: Exchange) -> str:
    return f"resp_{http.scope['path_params']['id']}"


def _items(
    most_bytes: int, kept: Kept, id: str, owner: str, *, with_answer: bool = True
) -> tuple[list[Any], int] | None:
    """Input and output of a response, or its input alone, behind those that it goes on from, and the length of all as
    JSON; None without it. Raises `BodyTooLarge` where that is over `most_bytes`.
    """
    parts, size_bytes = list[list[Any]](), 0
    for turn in kept.chain(id, owner):
        size_bytes += len(turn)
        if size_bytes > most_bytes:
            raise BodyTooLarge.at(
                "previous_response_id",
                "the conversation is over max_frame_bytes, with what came before; begin another, with a summary of it",
            )
        parts += json_bytes.loads(turn)
    return (list(chain.from_iterable(parts if with_answer else parts[:-1])), size_bytes) if parts else None


async def _of(
    gateway: Gateway, http: Exchange, work: Callable[[Kept, str, str], T | None], id: str, field: str = ""
) -> T:
    """What `work` makes of an owner's response, in the store's thread. Raises `NotFound` where that is nothing."""
    owner = owner_of(http)
    found = None if gateway.jobs is None else await gateway.jobs.do(lambda store: work(store.responses, id, owner))
    if not found:
        why = f"no such response: {id[:100]!r} was not found; not stored, deleted, too old, or another key's"
        raise NotFound.at(field, why) if field else NotFound(why)
    return found

"""OpenAI's stored responses: `GET` and `DELETE /v1/responses/{id}`, and conversations that go on from one of them.

They lie in the store of files and batches (`uma/jobs/store.py`), where `--store-responses` says for how many days, each
with its own input and a link to the response that it goes on from. One that was deleted is shown no more, and stays as
long as another goes on from it. With keys each reaches its own. Without keys there is nobody to bind one to but the
program that was told its id, 96 random bits that no list shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from uma import json_bytes
from uma.http.dialect import Body, dumps
from uma.http.exchange import Exchange
from uma.http.files import check_space, jobs_of, limit_of, owner_of, page_of
from uma.http.gateway import Gateway
from uma.http.problem import NotFound, Unsupported
from uma.jobs.store import Store

MAX_LISTED = 100
"""Maximum items of one page of a response's input."""
DAY_SEC = 86_400
T = TypeVar("T")


def days_kept(gateway: Gateway) -> float:
    """How long responses are stored; 0: not at all."""
    return gateway.config.store_responses if gateway.jobs is not None else 0.0


async def before(gateway: Gateway, http: Exchange, fields: Mapping[str, Any]) -> list[Any]:
    """What comes before a body's own input: that of `previous_response_id` and its answer. Raises `NotFound` where the
    key has no such response, and `Unsupported` where none are stored.
    """
    if (id := fields.get("previous_response_id")) is None:
        return []
    if not days_kept(gateway):
        raise Unsupported.at(
            "previous_response_id",
            "responses are not stored here (--store-responses DAYS does); send the whole conversation as input",
        )
    said: list[Any] = await _found(
        gateway,
        http,
        str(id),
        lambda turns: _items(turns, with_last=True),
        field="previous_response_id",
    )
    return said


async def check_kept(gateway: Gateway, http: Exchange) -> None:
    """Raise, before anything is generated, where no response of this key could be stored: `StoreTaken`, `Forbidden`."""
    await jobs_of(gateway).do(partial(check_space, owner=owner_of(http)))


async def keep(gateway: Gateway, http: Exchange, before: list[Any], own: list[Any], response: Body) -> None:
    """Store a response with its `own` input, before its end is told. The input `before` that is kept with the response
    that it goes on from, unless that was deleted meanwhile.
    """
    owner, age_sec, link = owner_of(http), days_kept(gateway) * DAY_SEC, response["previous_response_id"]

    def kept(store: Store) -> None:  # (packing takes long where the input is, too)
        is_linked = link is not None and bool(store.responses(link, owner))
        asked = own if is_linked else [*before, *own]
        data = zlib.compress(json_bytes.dumps({"input": asked, "response": response}), 1)
        store.keep_response(str(response["id"]), owner, data, age_sec, link if is_linked else None)

    await jobs_of(gateway).do(kept)


async def show(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/responses/{id}`."""
    await http.answer(await _found(gateway, http, _id(http), lambda turns: dumps(turns[-1]["response"])))


async def remove(gateway: Gateway, http: Exchange) -> None:
    """`DELETE /v1/responses/{id}`."""
    id = _id(http)
    if gateway.jobs is None or not await gateway.jobs.do(lambda store: store.forget_response(id, owner_of(http))):
        raise _not_found(id)
    await http.answer_json({"id": id, "object": "response.deleted", "deleted": True})


async def input_items(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/responses/{id}/input_items`, the newest first unless `order` is `asc`."""
    limit, after = limit_of(http.query, MAX_LISTED), http.query.get("after")

    def listed(turns: list[dict[str, Any]]) -> bytes:
        every = enumerate(_items(turns, with_last=False))
        items = [{"type": "message", **item, "id": item.get("id") or f"item_{at}"} for at, item in every]
        if http.query.get("order") != "asc":
            items.reverse()
        begin = next((at for at, item in enumerate(items, 1) if item["id"] == after), 0)
        return dumps(page_of(items[begin : begin + limit], has_more=begin + limit < len(items)))

    await http.answer(await _found(gateway, http, _id(http), listed))


def _id(http: Exchange) -> str:
    return f"resp_{http.scope['path_params']['id']}"


def _items(turns: list[dict[str, Any]], *, with_last: bool) -> list[Any]:
    """Input and output of each response, in order, with or without the last one's output."""
    items = [item for turn in turns[:-1] for item in (*turn["input"], *turn["response"]["output"])]
    return [*items, *turns[-1]["input"], *(turns[-1]["response"]["output"] if with_last else ())]


async def _found(
    gateway: Gateway, http: Exchange, id: str, told: Callable[[list[dict[str, Any]]], T], field: str = ""
) -> T:
    """What is `told` of a stored response and those that it goes on from, all in the store's thread: a conversation can
    be long.
    """
    owner = owner_of(http)

    def unpacked(store: Store) -> T | None:
        turns = [json_bytes.loads(zlib.decompress(data)) for data in store.responses(id, owner)]
        return told(turns) if turns else None

    found = None if gateway.jobs is None else await gateway.jobs.do(unpacked)
    if found is None:
        raise _not_found(id, field)
    return found


def _not_found(id: str, field: str = "") -> NotFound:
    why = f"no such response: {id[:100]!r} was not found; it was not stored, was deleted, is too old, or another key's"
    return NotFound.at(field, why) if field else NotFound(why)

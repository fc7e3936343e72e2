"""Requests that run: `GET /v1/requests` lists them, `GET /v1/requests/{id}` explains one, also one of the last that
have ended, `DELETE /v1/requests/{id}` ends one, and the end of its thinking is `POST /v1/requests/{id}/answer` or, as
llama-server has it, `POST /v1/chat/completions/control`.

A request belongs to the key that it came with, without keys to the machine that it came from, and only its owner
reaches it. Without keys a user of this machine reaches their own requests on the Unix socket, too; what has ended of
those the server's user alone. An id is one that an
answer carries, or one of the list: what is not streamed tells its own id too late.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import attrs

from uma.errors import BadRequest, Ended
from uma.http.exchange import Exchange
from uma.http.gateway import ENDED, Gateway
from uma.http.local_user import is_manager, user_of
from uma.http.problem import NotFound, Unsupported
from uma.http.reader import read
from uma.net.client import asker
from uma.net.logfmt import log
from uma.protocol.converter import unstructure
from uma.types import Explained

logger = logging.getLogger("uma.http")

_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)?(((?:page-)?[0-9a-f]{24})(?:-\d+)?)")
"""An answer's id in each dialect, the one in its `X-Request-Id`, or one of the list."""


@attrs.frozen(kw_only=True)
class ControlBody:
    """Body by which llama-server's page ends a request's thinking."""

    id: str
    action: Literal["reasoning_end"]


async def list_requests(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/requests`: the owner's requests that run or wait, each with what the engine tells of it."""
    own = [*gateway.requests_of(http.owner), *gateway.on_socket(await user_of(http))]
    activity = await gateway.source.activity()
    known = {each.id: each for each in (*activity.running, *activity.waiting)}.values()
    entries = []
    for id in own:
        parts = [each for each in known if id in (each.id, _key_of(each.id))]
        entries += [_entry(each.id, unstructure(each)) for each in parts] or [_entry(id, {})]
    await http.answer_json({"object": "list", "data": entries})


async def explain(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/requests/{id}`: where a request's time went (`types.Explained`)."""
    id = http.scope["path_params"]["id"]
    await http.answer_json(_entry(id, unstructure(await explained(gateway, http, id))))


async def explained(gateway: Gateway, http: Exchange, id: str) -> Explained:
    """Where the time of the owner's request went. Raises `NotFound`."""
    found = _ID.fullmatch(id)
    with suppress(BadRequest):  # it was no generation, or the source no longer knows it
        if gateway.is_of(_key_of(id), http.owner) or await is_manager(http):
            return await gateway.source.explain(id if found is None else found[1])
    raise NotFound("request not found: none of yours that runs, or is one of the last, has this id")


async def end(gateway: Gateway, http: Exchange) -> None:
    """`DELETE /v1/requests/{id}`: end a request. Its client gets an error; the page's answers keep what is written."""
    id = http.scope["path_params"]["id"]
    _, stop = await _find(gateway, http, id)
    stop()
    log(logger, logging.INFO, "request.ended", request=id, by=asker())
    await http.answer_json({"id": id, "object": "request.deleted", "deleted": True})


async def answer_now(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/requests/{id}/answer`: have a model that thinks begin its answer."""
    id = http.scope["path_params"]["id"]
    await _end_thinking(gateway, http, id)
    await http.answer_json({"id": id, "object": "request.answer"})


async def control(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/chat/completions/control`."""
    body = await http.built(lambda fields: read(fields, ControlBody, http.ignored))
    await _end_thinking(gateway, http, body.id)
    await http.answer_json({"success": True})


async def _end_thinking(gateway: Gateway, http: Exchange, id: str) -> None:
    """Raises `NotFound` as `_find`, and `Unsupported` where the model does not think."""
    end_thinking, _ = await _find(gateway, http, id)
    if not gateway.info.capabilities.reasoning:
        raise Unsupported.at("id", "this model's chat template has no marks of thinking, so there is none to be ended")
    end_thinking()


async def _find(gateway: Gateway, http: Exchange, id: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """What ends a request's thinking, and what ends the request. Raises `NotFound` for one that does not run, or is
    another's.
    """
    running = gateway.answering.get(_key_of(id))
    if running is None and (stream := gateway.on_socket(await user_of(http)).get(id)) is not None:
        return stream.end_thinking, partial(stream.fail, Ended(ENDED))
    if running is None or running.owner != http.owner:
        raise NotFound("request not found: it has ended, or no request of this key has this id")
    return running.end_thinking, running.stop


def _key_of(id: str) -> str:
    """The key in `Gateway.answering` of a request's id; of several prompts each has a number behind it."""
    found = _ID.fullmatch(id)
    return found[2] if found is not None else ""


def _entry(id: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {**figures, "id": id, "object": "request"}

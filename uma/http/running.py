"""Requests that run, by the ids that their answers carry: `POST /v1/requests/{id}/answer`, and llama-server's form,
`POST /v1/chat/completions/control`. Only the key that a request came with reaches it.
"""

from __future__ import annotations

import re
from typing import Literal

import attrs

from uma.http.exchange import Exchange
from uma.http.fields import read
from uma.http.gateway import Gateway
from uma.http.problem import NotFound, Unsupported

_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)?([0-9a-f]{24})(?:-\d+)?")
"""An answer's id in each dialect, or the one in its `X-Request-Id`."""


@attrs.frozen(kw_only=True)
class ControlBody:
    """What llama-server's page sends."""

    id: str
    action: Literal["reasoning_end"]


async def answer_now(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/requests/{id}/answer`: have a model that thinks begin its answer."""
    id = http.scope["path_params"]["id"]
    _end_thinking(gateway, http, id)
    await http.answer_json({"id": id, "object": "request.answer"})


async def control(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/chat/completions/control`."""
    body = await http.built(lambda fields: read(fields, ControlBody, http))
    _end_thinking(gateway, http, body.id)
    await http.answer_json({"success": True})


def _end_thinking(gateway: Gateway, http: Exchange, id: str) -> None:
    """Raises `NotFound` for a request that does not run, or came with another key, and `Unsupported` where the model
    does not think.
    """
    found = _ID.fullmatch(id)
    running = gateway.answering.get(found[1]) if found is not None else None
    if running is None or running.account is not http.account:
        raise NotFound("no such request runs: it has ended, or its id is none that an answer of this key had")
    if not gateway.source.info.capabilities.reasoning:
        raise Unsupported("id: this model's chat template has no marks of thinking, so there is none to be ended")
    running.end_thinking()

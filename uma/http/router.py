"""llama-server's router: `/models/load` and `/models/unload`. Neither waits; `GET /models` tells how far that is."""

from __future__ import annotations

from contextlib import suppress

import attrs

from uma.errors import BadRequest, ModelUnusable, UmaError
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.local_user import check_manager
from uma.http.many import own_model
from uma.http.problem import Unsupported
from uma.http.reader import read
from uma.types import ListedModel, Models


@attrs.frozen(kw_only=True)
class RouterBody:
    """The model that is meant."""

    model: str


async def load(gateway: Gateway, http: Exchange) -> None:
    """`POST /models/load`."""
    models, model = await _found(gateway, http)
    if model.state in ("loading", "loaded"):
        raise BadRequest.at("model", f"{model.name} is already running")
    if not model.fits:
        raise ModelUnusable(model.failure)
    assert gateway.tasks is not None  # the service runs, or there would be no connection
    gateway.tasks.start_soon(_load, models, model.name)
    await http.answer_json({"success": True})


async def _load(models: Models, name: str) -> None:
    with suppress(UmaError):  # which the list of models tells
        await models.load(name)


async def unload(gateway: Gateway, http: Exchange) -> None:
    """`POST /models/unload`. Requests that run with it come to their end."""
    models, model = await _found(gateway, http)
    if model.state in ("unloaded", "leaving"):
        raise BadRequest.at("model", f"{model.name} is not running")
    await check_manager(http, "unload models")
    await models.unload(model.name)
    await http.answer_json({"success": True})


async def _found(gateway: Gateway, http: Exchange) -> tuple[Models, ListedModel]:
    body = await http.built(lambda fields: read(fields, RouterBody, http.ignored))
    if gateway.models is None:
        raise Unsupported.at("model", "this server has one model for as long as it runs; start it with --models")
    name = own_model(gateway.models, http, body.model)
    return gateway.models, gateway.models.find(name or body.model)

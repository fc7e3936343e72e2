"""llama-server's router: `/models/load` and `/models/unload`. `GET /models` tells how far a load is."""

from __future__ import annotations

import attrs
import trio

from uma.errors import BadRequest, UmaError
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.local_user import check_manager
from uma.http.many import own_model
from uma.http.problem import Unsupported
from uma.http.reader import read
from uma.types import ListedModel, Models

REFUSED_SEC = 1.0
"""Maximum wait for the reason why a load does not begin, such as models that stay and leave no memory for it."""


@attrs.frozen(kw_only=True)
class RouterBody:
    """The model that is meant."""

    model: str


async def load(gateway: Gateway, http: Exchange) -> None:
    """`POST /models/load`. A load that is refused at once has the answer that a request to the model would have."""
    models, model = await _found(gateway, http)
    if model.state in ("loading", "loaded"):
        raise BadRequest.at("model", f"{model.name} is already running")
    assert gateway.tasks is not None  # the service runs, or there would be no connection
    failures, tried = list[UmaError](), trio.Event()

    async def attempt() -> None:
        try:
            await models.load(model.name)
        except UmaError as error:  # what comes later than the answer is told by the list of models
            failures.append(error)
        tried.set()

    gateway.tasks.start_soon(attempt)
    with trio.move_on_after(REFUSED_SEC):
        await tried.wait()
    if failures:
        raise failures[0]
    await http.answer_json({"success": True})


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

"""The lists of models under OpenAI's paths, in OpenAI's form or in Anthropic's: both have the same paths."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import attrs

from uma.http import openai
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.ignored import header_value
from uma.http.many import named_models, own_model
from uma.models.names import with_adapter
from uma.types import ListedModel


def is_anthropic(http: Exchange) -> bool:
    """Whether an Anthropic client asks for models: each of its requests names a version."""
    path = http.path.removeprefix("/v1")
    return (path == "/models" or path.startswith("/models/")) and http.header(b"anthropic-version") is not None


async def list_models(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/models`. All are on the first page."""
    if gateway.models is None:
        data = [_model(gateway, name, http) for name in gateway.model_names]
    else:
        if http.query.get("reload"):
            await gateway.models.look_again()
        data = [_listed(gateway, each, http) for each in named_models(gateway.models, http)]
    if not is_anthropic(http):
        await http.answer_json({"object": "list", "data": data, "models": list(map(_typesafe_model, data))})
        return
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    await http.answer_json({"data": data, "has_more": False, "first_id": first, "last_id": last})


async def show_model(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/models/{id}`."""
    asked = str(http.scope["path_params"]["id"])
    if not asked:  # a slash behind the list's path: as every other such path is redirected
        place = http.path[:-1] + "?" + http.scope["query_string"].decode("latin-1")
        await http.answer(b"", status=307, headers=[(b"location", header_value(place.removesuffix("?")))])
        return
    if gateway.models is None:
        found = _model(gateway, gateway.names.check(asked), http)
    else:
        model = gateway.models.find(own_model(gateway.models, http, asked) or asked)
        named = attrs.evolve(model, name=with_adapter(model.name, asked, model.adapters))
        found = _listed(gateway, named, http)
    await http.answer_json(found)


def _model(gateway: Gateway, name: str, http: Exchange) -> dict[str, Any]:
    """The only model, under one of its names."""
    if not is_anthropic(http):
        return openai.model(gateway, name)
    limits = gateway.info.limits
    sizes = {"max_input_tokens": limits.n_ctx, "max_tokens": limits.max_tokens}
    return _anthropic_model(gateway, name, gateway.names.name) | sizes


def _listed(gateway: Gateway, model: ListedModel, http: Exchange) -> dict[str, Any]:
    """One of several models."""
    return _anthropic_model(gateway, model.name, model.name) if is_anthropic(http) else openai.listed(gateway, model)


def _anthropic_model(gateway: Gateway, id: str, name: str) -> dict[str, Any]:
    created = gateway.names.loaded_time
    return {"type": "model", "id": id, "display_name": name, "created_at": created, "lifecycle": "active"}


def _typesafe_model(model: dict[str, Any]) -> dict[str, str]:
    """A model as TypeSafe's list has it, of OpenAI's: no date of its release is known but that of the list."""
    day = datetime.fromtimestamp(model["created"], UTC).date().isoformat()
    return {"name": model["id"], "description": "", "release_date": day}

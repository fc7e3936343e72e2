"""The lists of models under OpenAI's paths, in OpenAI's form or in Anthropic's: both have the same paths."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from uma.http import openai
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.ignored import header_value
from uma.http.many import own_model, own_models
from uma.types import ListedModel


def is_anthropic(http: Exchange) -> bool:
    """Whether an Anthropic client asks for models: each of its requests names a version."""
    path = http.path.removeprefix("/v1")
    return (path == "/models" or path.startswith("/models/")) and http.header(b"anthropic-version") is not None


async def list_models(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/models`. All are on the first page."""
    if gateway.models is not None:
        if http.query.get("reload"):
            await gateway.models.look_again()
        await _list_several(gateway, own_models(gateway.models, http), http)
        return
    names = gateway.model_names
    if not is_anthropic(http):
        await http.answer_json({"object": "list", "data": [openai.model(gateway, name) for name in names]})
        return
    data = [_anthropic_model(gateway, name) for name in names]
    await http.answer_json({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})


async def show_model(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/models/{id}`."""
    asked = str(http.scope["path_params"]["id"])
    if not asked:  # a slash behind the list's path: as every other such path is redirected
        place = http.path[:-1] + "?" + http.scope["query_string"].decode("latin-1")
        await http.answer(b"", status=307, headers=[(b"location", header_value(place.removesuffix("?")))])
        return
    if gateway.models is not None:
        await _show_one(gateway, gateway.models.find(own_model(gateway.models, http, asked) or asked), http)
        return
    name = gateway.names.check(asked)
    form = _anthropic_model if is_anthropic(http) else openai.model
    await http.answer_json(form(gateway, name))


def _anthropic_model(gateway: Gateway, name: str) -> dict[str, Any]:
    limits = gateway.source.info.limits
    return {
        "type": "model",
        "id": name,
        "display_name": gateway.names.name,
        "created_at": datetime.fromtimestamp(gateway.names.loaded_at, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": limits.n_ctx,
        "max_tokens": limits.max_tokens,
    }


async def _list_several(gateway: Gateway, models: Sequence[ListedModel], http: Exchange) -> None:
    form = _anthropic_listed if is_anthropic(http) else openai.listed
    data = [form(gateway, each) for each in models]
    first, last = (models[0].name, models[-1].name) if models else (None, None)
    more = {"has_more": False, "first_id": first, "last_id": last}
    await http.answer_json({"data": data, **(more if is_anthropic(http) else {"object": "list"})})


async def _show_one(gateway: Gateway, model: ListedModel, http: Exchange) -> None:
    form = _anthropic_listed if is_anthropic(http) else openai.listed
    await http.answer_json(form(gateway, model))


def _anthropic_listed(gateway: Gateway, model: ListedModel) -> dict[str, Any]:
    created = datetime.fromtimestamp(gateway.names.loaded_at, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": model.name, "display_name": model.name, "created_at": created, "lifecycle": "active"}

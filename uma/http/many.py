"""Several models behind HTTP: which one a request is for, and the wait until it is loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from uma.errors import UnknownModel
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.generation import unless_gone
from uma.http.models import FOREIGN, MODEL_HEADER, ModelNames
from uma.types import Source


@asynccontextmanager
async def of_model(gateway: Gateway, http: Exchange) -> AsyncIterator[Gateway]:
    """A block with the gateway to the model that a request names, which stays loaded; with one model, `gateway`.

    Raises `UnknownModel`, and why the model cannot be loaded.
    """
    if (models := gateway.models) is None:
        yield gateway
        return
    asked = await _asked(http)
    async with AsyncExitStack() as stack:
        try:
            source = await _entered(stack, http, models.using(asked))
        except UnknownModel:
            config = gateway.config
            if not config.http_any_model and not (config.http_foreign_models and (asked or "").startswith(FOREIGN)):
                raise
            source = await _entered(stack, http, models.using(None))
            http.extra_headers.append((MODEL_HEADER, source.info.model.called.encode("ascii", "backslashreplace")))
        yield gateway.to_model(source, ModelNames(asked or source.info.model.called, takes_any=True))


async def _entered(stack: AsyncExitStack, http: Exchange, model: AbstractAsyncContextManager[Source]) -> Source:
    """The model, once it is loaded. A client that goes away ends the wait."""
    return await unless_gone(http, partial(stack.enter_async_context, model))


async def _asked(http: Exchange) -> str | None:
    """The model that a request names, in its body or, without one, in its query."""
    if http.scope["method"] == "GET":
        values: Mapping[str, Any] = {
            name: each[0] for name, each in parse_qs(http.scope["query_string"].decode("latin-1")).items()
        }
    else:
        values = await http.fields()
    asked = values.get("model") or values.get("name")
    return asked if isinstance(asked, str) else None

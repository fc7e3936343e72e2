"""Where an `LLM`'s model is: in this process, or on a server's socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from os import PathLike, fspath
from typing import Any

import attrs

from uma.client import connect
from uma.engine import open_engine
from uma.errors import ConfigError, WrongKind
from uma.llm.arguments import HINTS, config_of, shown
from uma.models.names import check_alone
from uma.types import Source


@attrs.frozen
class ModelPlace:
    """The model's name or file, or the server's socket, and how the source there is opened."""

    name: str
    opened: Callable[[], AbstractAsyncContextManager[Source]]


def place_of(model: Any, socket: Any, settings: Mapping[str, Any]) -> ModelPlace:
    """The place that these arguments of `LLM` name. Raises `WrongKind` and `ConfigError` for what does not fit."""
    if not isinstance(model, str | PathLike | None):
        raise WrongKind(f"model: expected a path or a name, not {shown(model)}")
    if not isinstance(socket, str | PathLike | None):
        raise WrongKind(f"socket: expected the path of a server's Unix socket, not {shown(socket)}")
    if socket is None:
        if model is not None and fspath(model).startswith(("http://", "https://")):
            raise ConfigError.at(
                "model",
                f"expected a file or a name, not a URL: {fspath(model)}; {HINTS['base_url']}; `uma pull` gets models",
            )
        config = config_of("builtin" if model is None else fspath(model), dict(settings))
        return ModelPlace(config.model, partial(open_engine, config))
    if "://" in fspath(socket):
        raise ConfigError.at(
            "socket", f"expected a Unix socket's path, not a URL: {fspath(socket)}; `uma ps` lists sockets"
        )
    if settings:
        raise ConfigError(
            f"{', '.join(settings)}: the server on the socket has its own; leave it out, or leave socket out to load a "
            "model in this process"
        )
    return ModelPlace(fspath(socket), partial(_served, fspath(socket), None if model is None else fspath(model)))


@asynccontextmanager
async def _served(socket: str, model: str | None) -> AsyncIterator[Source]:
    """A session with the server's model of this name. Raises `UnknownModel`."""
    async with connect(socket, model=model) as client:
        card = client.info.model
        if model is not None and not client.info.models:
            check_alone(model, card.name, [card.title], client.info.capabilities.adapters)
        yield client

"""The source of `uma chat` and `uma generate`: the server that listens on the socket, or an engine in this process.

A server is preferred, since its model is loaded already and shared; but never one with another model than was asked
for, and never where an option says how to load a model.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import attrs

from uma.cli import words
from uma.cli.options import SAMPLING
from uma.cli.trio_run import Interrupts
from uma.client import Client, connect
from uma.config import LOG, SERVER_ONLY, Loaded, RuntimeConfig, settings
from uma.errors import ConfigError, ConnectionLost, UmaError
from uma.types import ListedModel, ModelInfo, ServerInfo, Source

NOT_LISTENING = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK, errno.ENOTDIR)
SLOW_TO_LOAD_BYTES = 300_000_000
ABOUT_LOADING = frozenset(settings()) - SERVER_ONLY - SAMPLING - LOG - {"model", "socket"}
"""Settings that a running server has already decided: given as an option, they ask for an engine of one's own."""


@attrs.frozen
class Opened:
    """A source, and whether it is a server's."""

    source: Source
    is_server: bool


@attrs.frozen
class Bond:
    """What a conversation that began on a server is bound to: a server, and the model that it had."""

    model: ModelInfo | None
    """None: whatever the server has now."""


@asynccontextmanager
async def open_source(
    loaded: Loaded,
    interrupts: Interrupts,
    *,
    local: bool,
    say: Callable[[str], None],
    bond: Bond | None = None,
    fills_file: bool = False,
) -> AsyncIterator[Opened]:
    """A source for `loaded`; `say` gets a line where a choice was made that the caller does not expect.

    With `local` no server is looked for; with a `bond` nothing but a server with that model will do. A socket that was
    named must have a server; only the usual place falls back to loading the model here, which for anything but a
    terminal must have been named (`fills_file`: answers go to a file). A server that is loading its model is waited
    for. While a model is being loaded here, a signal ends the process at once. Raises `ConnectionLost` where a server
    is missing or cannot be used, `OtherModel` where the bond's model is gone from it, `ModelError` where loading fails,
    `ConfigError` where a model must be named.
    """
    async with AsyncExitStack() as stack:
        server = await _server(stack, loaded, say, local=local, bond=bond, fills_file=fills_file)
        if server is not None:
            yield Opened(server, is_server=True)
            return
        with interrupts.abruptly():
            engine = await _engine(stack, loaded.config, say)
        yield Opened(engine, is_server=False)


class OtherModel(UmaError):
    """The server has another model now than the conversation began with."""

    code = "E_OTHER_MODEL"


async def _server(
    stack: AsyncExitStack,
    loaded: Loaded,
    say: Callable[[str], None],
    *,
    local: bool,
    bond: Bond | None,
    fills_file: bool,
) -> Source | None:
    socket = loaded.config.socket
    if bond is None and (local or _asks_for_its_own(loaded)):
        own = ["--local"] if local else _asks_for_its_own(loaded)
        _check_named(loaded, f"of {', '.join(own)}", own, fills_file=fills_file)
        if not local:
            _say_why(loaded, say)
        return None
    async with AsyncExitStack() as attempt:
        try:
            client, is_meant = await _session(attempt, loaded, bond, say)
        except ConnectionLost as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in NOT_LISTENING):
                raise
            if bond is not None:
                raise ConnectionLost(f"{socket}: no server listens there; {_how_to_start(loaded, bond)}") from error
            if loaded.origins["socket"] != "default":
                start = _how_to_start(loaded, bond)
                raise ConnectionLost(
                    f"{socket}: no server listens there; {start}, or load the model here with --local"
                ) from error
            _check_named(loaded, f"none listens on {socket}", fills_file=fills_file)
            say(f"no server listens on {socket}: loading {_model_words(loaded)} here")
            return None
        if bond is not None and bond.model not in (None, client.info.model):
            assert bond.model is not None
            raise OtherModel(
                f"{socket}: the server has {_has(client.info)} now, and this conversation began with "
                f"{bond.model.name}; /switch goes on with what it has"
            )
        if bond is not None or is_meant:
            await stack.enter_async_context(attempt.pop_all())
            return client
        say(f"the server has {_has(client.info)}, not {loaded.config.model}: loading that here")
    return None


async def _session(
    stack: AsyncExitStack, loaded: Loaded, bond: Bond | None, say: Callable[[str], None]
) -> tuple[Client, bool]:
    """A session with the server, and whether it is with the model that is meant. Where the server has several and that
    is not among them, none has been loaded.
    """
    socket = loaded.config.socket
    bound_to = None if bond is None else bond.model
    if bound_to is None and (bond is not None or loaded.origins["model"] == "default"):
        return await connected(stack, socket, say), True
    async with AsyncExitStack() as first:
        client = await connected(first, socket, say, loads=False)
        name = _meant_of(await client.models(), loaded, bound_to) if client.info.models else None
        if name is None:
            await stack.enter_async_context(first.pop_all())
            is_meant = client.info.model == bound_to if bound_to else _has_the_model(client.info, loaded)
            return client, is_meant and not client.info.models
    return await connected(stack, socket, say, model=name), True


def _meant_of(models: Sequence[ListedModel], loaded: Loaded, bound_to: ModelInfo | None) -> str | None:
    """What the server calls the model that is meant; None where it has not got it."""
    from uma.models import catalog  # noqa: PLC0415  (slow to import, and seldom needed with a server)
    from uma.models.names import meant  # noqa: PLC0415

    if bound_to is not None:
        return next((each.name for each in models if each.path == bound_to.path), None)
    asked = loaded.config.model
    if not Path(asked).expanduser().exists():
        called = meant(asked, {each.name: (each.name, *each.aliases) for each in models})
        if len(called) == 1:
            return called[0]
    names = [name for each in models for name in (each.name, *each.aliases)]
    path = catalog.resolve(asked, os.environ, names).path
    return next((each.name for each in models if _is_same(Path(each.path), path)), None)


def _is_same(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def _has(info: ServerInfo) -> str:
    return words.names(info.models) or info.model.name


async def connected(
    stack: AsyncExitStack, socket: str, say: Callable[[str], None], *, model: str | None = None, loads: bool = True
) -> Client:
    """A session, once the server has loaded its model; `say` gets a line where that has to be waited for. `model` and
    `loads`: see `connect`.
    """
    has_said = False

    def tell(percent: int) -> None:
        nonlocal has_said
        if not has_said:
            say(f"waiting for the server to load the model ({percent} %)")
            has_said = True

    return await stack.enter_async_context(connect(socket, model=model, loads=loads, on_loading=tell))


def _asks_for_its_own(loaded: Loaded) -> list[str]:
    """The options given that say how to load a model."""
    return sorted(loaded.origins[name] for name in ABOUT_LOADING if loaded.origins[name].startswith("--"))


def _say_why(loaded: Loaded, say: Callable[[str], None]) -> None:
    if loaded.origins["socket"] != "default" or Path(loaded.config.socket).exists():
        why = ", ".join(_asks_for_its_own(loaded))
        say(f"loading {_model_words(loaded)} here, not asking the server, because of {why}")


def _check_named(loaded: Loaded, why: str, own: Sequence[str] = (), *, fills_file: bool) -> None:
    """Raise `ConfigError` where the demonstration model would answer a program or fill a file, and was not named.

    `why` no server is used; because of `own` options, where there are any.
    """
    if loaded.origins["model"] == "default" and (fills_file or not sys.stdout.isatty()):
        server = f"leave {', '.join(own)} out, so that a server answers" if own else "start a server with `uma run`"
        raise ConfigError(
            f"no model was named, and no server is used, because {why}: name one with --model (`uma models` tells "
            f"which are here; builtin is the small demonstration, shown unasked on a terminal alone), or {server}"
        )


def _how_to_start(loaded: Loaded, bond: Bond | None) -> str:
    where = "" if loaded.origins["socket"] == "default" else f" --socket {shlex.quote(loaded.config.socket)}"
    had = None if bond is None else bond.model
    model = "" if had is None or had.is_builtin else f" --model {shlex.quote(had.path)}"
    return f"start {'one' if bond is None else 'it again'} with `uma run{where}{model}`"


def _model_words(loaded: Loaded) -> str:
    return "the built-in model" if loaded.config.model == "builtin" else loaded.config.model


def _has_the_model(info: ServerInfo, loaded: Loaded) -> bool:
    from uma.models import catalog  # noqa: PLC0415  (slow to import, and seldom needed with a server)

    wanted = catalog.resolve(loaded.config.model, os.environ)
    if wanted.is_builtin or info.model.is_builtin:
        return wanted.is_builtin == info.model.is_builtin
    return _is_same(Path(info.model.path), wanted.path)


async def _engine(stack: AsyncExitStack, config: RuntimeConfig, say: Callable[[str], None]) -> Source:
    # All three are slow to import, and a server has them already.
    from uma.engine import open_engine  # noqa: PLC0415
    from uma.models import catalog  # noqa: PLC0415
    from uma.server.logs import logging_to  # noqa: PLC0415

    wanted = catalog.resolve(config.model, os.environ)
    if wanted.path.is_file() and (n_bytes := wanted.path.stat().st_size) > SLOW_TO_LOAD_BYTES:
        say(f"loading {wanted.path.name} ({words.size(n_bytes)})")
    stack.enter_context(logging_to(config))
    return await stack.enter_async_context(open_engine(config))

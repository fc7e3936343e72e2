"""Who answers `uma chat` and `uma generate`: the server that listens on the socket, or an engine in this process.

A server is preferred, since its model is loaded already and shared; but never one with another model than was asked
for, and never where an option says how a model is to be loaded.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import attrs

from uma.cli import words
from uma.cli.options import SAMPLING, SERVER_ONLY
from uma.cli.trio_run import Interrupts
from uma.client import connect
from uma.config import Loaded, RuntimeConfig, settings
from uma.errors import ConnectionLost
from uma.types import ServerInfo, Source

NOBODY_LISTENS = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK, errno.ENOTDIR)
SLOW_TO_LOAD_BYTES = 300_000_000
ABOUT_LOADING = frozenset(settings()) - SERVER_ONLY - SAMPLING - {"model", "socket", "log_level", "log_file"}
"""Settings that a running server has already decided: given as an option, they ask for an engine of one's own."""


@attrs.frozen
class Opened:
    """A source, and whether it is a server's."""

    source: Source
    is_server: bool


@asynccontextmanager
async def open_source(
    loaded: Loaded, interrupts: Interrupts, *, local: bool, say: Callable[[str], None], again: bool = False
) -> AsyncIterator[Opened]:
    """A source for `loaded`; `say` gets a line where a choice was made that the caller may not expect.

    With `local` no server is looked for; with `again` nothing but a server will do (`ConnectionLost`). While a model is
    being loaded, which nothing can interrupt, a signal ends the process at once. Raises `ConnectionLost` where a server
    is there but cannot be used, `ModelError` where the model cannot be loaded.
    """
    async with AsyncExitStack() as stack:
        server = None if local or _asks_for_its_own(loaded, say) else await _server(stack, loaded, say)
        if server is None and again:
            raise ConnectionLost(f"{loaded.config.socket}: the server went away; start it with `uma run`")
        if server is not None:
            yield Opened(server, is_server=True)
            return
        with interrupts.abruptly():
            engine = await _engine(stack, loaded.config, say)
        yield Opened(engine, is_server=False)


def _asks_for_its_own(loaded: Loaded, say: Callable[[str], None]) -> bool:
    given = sorted(loaded.origins[name] for name in ABOUT_LOADING if loaded.origins[name].startswith("--"))
    if given and Path(loaded.config.socket).exists():
        say(f"loading the model here, because of {', '.join(given)}")
    return bool(given)


async def _server(stack: AsyncExitStack, loaded: Loaded, say: Callable[[str], None]) -> Source | None:
    async with AsyncExitStack() as attempt:
        try:
            client = await attempt.enter_async_context(connect(loaded.config.socket))
        except ConnectionLost as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in NOBODY_LISTENS:
                return None
            raise
        if _has_the_model(client.info, loaded):
            await stack.enter_async_context(attempt.pop_all())
            return client
        say(f"the server has {client.info.model.name}, not {loaded.config.model}: loading that here")
    return None


def _has_the_model(info: ServerInfo, loaded: Loaded) -> bool:
    if loaded.origins["model"] == "default":
        return True
    from uma.llama import catalog  # noqa: PLC0415  (slow to import, and seldom needed with a server)

    wanted = catalog.resolve(loaded.config.model, os.environ)
    if wanted.is_builtin or info.model.is_builtin:
        return wanted.is_builtin == info.model.is_builtin
    path = Path(info.model.path)
    return path.exists() and wanted.path.exists() and path.samefile(wanted.path)


async def _engine(stack: AsyncExitStack, config: RuntimeConfig, say: Callable[[str], None]) -> Source:
    # All three are slow to import, and a server has them already.
    from uma.engine import open_engine  # noqa: PLC0415
    from uma.llama import catalog  # noqa: PLC0415
    from uma.server.logs import logging_to  # noqa: PLC0415

    wanted = catalog.resolve(config.model, os.environ)
    if wanted.path.is_file() and (n_bytes := wanted.path.stat().st_size) > SLOW_TO_LOAD_BYTES:
        say(f"loading {wanted.path.name} ({words.size(n_bytes)})")
    stack.enter_context(logging_to(config))
    return await stack.enter_async_context(open_engine(config))

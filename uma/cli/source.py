"""The source of `uma chat` and `uma generate`: the server that listens on the socket, or an engine in this process.

A server is preferred, since its model is loaded already and shared; but never one with another model than was asked
for, and never where an option says how to load a model. Where none is named, an engine here has the model that the
server has, or would have.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import attrs
import outcome
import trio

from uma import figures
from uma.cli import words
from uma.cli.default_model import check_folder, default_model
from uma.cli.listening import listening_sockets
from uma.cli.options import SAMPLING
from uma.cli.say import note, passing, passing_columns
from uma.cli.table import cell_len, cut
from uma.cli.trio_run import Interrupts
from uma.client import Client, connect
from uma.config import BUILTIN, LOG, SERVER_ONLY, Loaded, RuntimeConfig, settings
from uma.contracts.explaining import WAITS_FOR
from uma.errors import ConnectionLost, ModelError, UmaError, UnknownModel
from uma.models.names import meant, one_meant, with_adapter, without_adapter
from uma.types import PAUSED, ListedModel, LoadProgress, LoadState, ModelInfo, ServerInfo, Source

T = TypeVar("T")

LOOK_SEC = 0.5
"""Interval between two looks at how far a request is."""
MAX_BAR_CELLS = 20
"""Maximum length of the bar of a load."""
PAUSED_SEC = 1.0
"""Maximum time in which a server says whether it is paused."""
LISTED_SEC = 2.0
"""Maximum time in which a server says which of its models fit, or why one is not loaded."""
NOT_LISTENING = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK, errno.ENOTDIR)
SLOW_TO_LOAD_BYTES = 300_000_000
ABOUT_LOADING = frozenset(settings()) - SERVER_ONLY - SAMPLING - LOG - {"model", "socket"}
"""Settings that a running server has already decided: given as an option, they ask for an engine of one's own."""


@attrs.frozen
class Opened:
    """A source, and whether it is a server's."""

    source: Source
    is_server: bool
    model: str | None = None
    """Name of the model with one of its LoRA adapters, where that was asked for: requests name it."""


@attrs.frozen
class Bond:
    """What a conversation that began on a server is bound to: a server, and the model that it had."""

    model: ModelInfo | None
    """None: whatever the server has now."""
    is_one_of_several: bool = False
    """The server had others, too."""
    name: str | None = None
    """Name of the one of several that the conversation goes on with, where `model` is None."""


@asynccontextmanager
async def open_source(
    loaded: Loaded,
    interrupts: Interrupts,
    *,
    local: bool,
    say: Callable[[str], None],
    bond: Bond | None = None,
) -> AsyncIterator[Opened]:
    """A source for `loaded`; `say` gets a line where a choice was made that the caller does not expect.

    With `local` no server answers; with a `bond` nothing but a server with that model will do. A socket that was
    named must have a server with the model; only the usual place falls back to loading it here. Where none is named
    that is the one that the server has, or without a server the one that `uma run` would have. A server that is loading
    its model is waited for. While a model is being loaded here, a signal ends the process at once, unless the caller
    stops the load by it. Raises `ConnectionLost` where a server is missing or cannot be used, `OtherModel` where the
    bond's model is gone from it, `ModelError` where loading fails.
    """
    asked = loaded.config.model
    base = without_adapter(asked, [adapter.name for adapter in loaded.config.adapters])
    loaded = attrs.evolve(loaded, config=attrs.evolve(loaded.config, model=base))
    async with AsyncExitStack() as stack:
        found = await _found(stack, loaded, say, local=local, bond=bond)
        is_server = not isinstance(found, RuntimeConfig)
        if isinstance(found, RuntimeConfig):
            with interrupts.abruptly():
                found = await _engine(stack, found, say)
        else:
            if bond is None and found.info.models and loaded.origins["model"] == "default":
                say(f"{found.info.model.name} answers, of {len(found.info.models)} models; -m NAME asks another")
            if paused := await told_paused(found):
                say(paused)
        if bond is None and (line := words.demonstration(found.info.model, loaded)):
            say(line)
        name = found.info.model.name
        named = with_adapter(name, asked, found.info.capabilities.adapters)
        yield Opened(found, is_server, None if named == name else named)


async def told_paused(source: Source) -> str:
    """That a source computes nothing until it is told to, and how that ends; empty where it does not tell so."""
    with suppress(UmaError), trio.move_on_after(PAUSED_SEC):
        return PAUSED if (await source.health(probe=False)).paused_sec else ""
    return ""


async def listed(source: Source) -> Mapping[str, ListedModel]:
    """What a server of several models tells of them, by their names; nothing where it tells nothing."""
    with suppress(UmaError), trio.move_on_after(LISTED_SEC):
        if isinstance(source, Client):
            return {model.name: model for model in await source.models()}
    return {}


async def begin_load(source: Source, name: str) -> ListedModel | None:
    """Have a server of several models begin to load one, which is told where that is soon done. Raises why it does not,
    where that is soon known.
    """
    with trio.move_on_after(LISTED_SEC):
        return await source.load(name) if isinstance(source, Client) else None
    return None


async def told_progress(source: Source, id: str) -> str:
    """What a request of this id waits for, or how much of its prompt is read, in words, or that the server is paused;
    empty once its answer has begun, or where that is not known.
    """
    if paused := await told_paused(source):
        return paused
    found = await source.activity(id)
    request = next((request for request in (*found.running, *found.waiting) if request.id == id), None)
    if request is None or request.generated_tokens:
        return ""
    if request.waits_for == "loading":
        return f"{request.model}: {request.behind}"
    if request.waits_for:
        return f"waits: {WAITS_FOR.get(request.waits_for, request.waits_for)}"
    percent = 100 * request.computed_tokens // max(1, request.prompt_tokens)
    return f"reads {words.tokens(request.prompt_tokens)}" + (f": {percent} %" if percent else "")


async def watched(source: Source, id: str, work: Callable[[], Awaitable[T]], lead: str = "") -> T:
    """What `work` returns. Behind `lead`, a terminal is told meanwhile how far the request is."""

    async def tell() -> None:
        while True:
            await trio.sleep(LOOK_SEC)
            with suppress(UmaError):  # `work` tells of it
                passing(": ".join(filter(None, [lead, await told_progress(source, id)])))

    async with trio.open_nursery() as nursery:
        if sys.stderr.isatty():
            passing(lead)
            nursery.start_soon(tell)
        ended = await outcome.acapture(work)
        nursery.cancel_scope.cancel()
    passing()
    return ended.unwrap()


class OtherModel(UmaError):
    """The server has another model now than the conversation began with."""

    code = "E_OTHER_MODEL"


async def _found(
    stack: AsyncExitStack, loaded: Loaded, say: Callable[[str], None], *, local: bool, bond: Bond | None
) -> Source | RuntimeConfig:
    """The server's session, or what is to be loaded here."""
    socket = loaded.config.socket
    own = ["--local"] if local else _asks_for_its_own(loaded)
    if bond is None and own:
        return await _beside_server(loaded, say, own)
    async with AsyncExitStack() as attempt:
        try:
            client, is_meant = await _session(attempt, loaded, bond, say)
        except ConnectionLost as error:
            if not _is_none_there(error):
                raise
            if bond is not None:
                raise ConnectionLost(f"{socket}: no server listens there; {_how_to_start(loaded, bond)}") from error
            if loaded.origins["socket"] != "default":
                start = _how_to_start(loaded, bond)
                raise ConnectionLost(
                    f"{socket}: no server listens there; {start}, or load the model here with --local"
                ) from error
            return await _without_server(loaded, say)
        if bond is not None and bond.model not in (None, client.info.model):
            assert bond.model is not None
            raise OtherModel(
                f"{socket}: the server has {_has(client.info)} now, and this conversation began with "
                f"{bond.model.name}; /switch goes on with what it has"
            )
        if bond is not None or is_meant:
            await stack.enter_async_context(attempt.pop_all())
            return client
        if loaded.origins["socket"] != "default":
            raise ModelError(
                f"{socket}: the server has {_has(client.info)}, not {loaded.config.model}; --local loads it here"
            )
        say(f"the server has {_has(client.info)}, not {loaded.config.model}: loading that here")
    return loaded.config


@asynccontextmanager
async def asking(path: str) -> AsyncIterator[Client]:
    """A session with the server on a socket for what no model is needed for; see `advising`."""
    async with AsyncExitStack() as stack:
        with advising(path):
            client = await connected(stack, path, note, loads=False)
        yield client


@contextmanager
def advising(path: str) -> Iterator[None]:
    """Where no server listens on the socket, the block's error tells of those elsewhere, or how to start one."""
    try:
        yield
    except ConnectionLost as error:
        if not _is_none_there(error):
            raise
        has_others = any(str(other) != path for other in listening_sockets())
        advice = "`uma ps` lists those that run" if has_others else "start one with `uma run`"
        raise ConnectionLost(f"{path}: no server listens there; {advice}") from error


def _is_none_there(error: ConnectionLost) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in NOT_LISTENING


async def _without_server(loaded: Loaded, say: Callable[[str], None]) -> RuntimeConfig:
    """What is loaded where no server listens."""
    none = f"no server listens on {loaded.config.socket}"
    if loaded.origins["model"] != "default":
        say(f"{none}: loading {_named(loaded)} here")
        return loaded.config
    check_folder()
    taken = await trio.to_thread.run_sync(default_model, loaded)
    say(f"{none}: loading {_words(taken.name)} here, as `uma run` would")
    return attrs.evolve(loaded.config, model=taken.setting)


async def _beside_server(loaded: Loaded, say: Callable[[str], None], own: Sequence[str]) -> RuntimeConfig:
    """What is loaded because of `own` options, whether a server listens or not."""
    because = f"because of {', '.join(own)}"
    if loaded.origins["model"] != "default":
        if own != ["--local"] and _can_be_there(loaded):
            say(f"loading {_named(loaded)} here, not asking the server, {because}")
        return loaded.config
    try:
        name, model = await _servers_default(loaded.config.socket, say)
    except ConnectionLost as error:
        if not _is_none_there(error):
            raise ConnectionLost(f"{error.message}; to load a model beside it, name one with --model") from error
        return await _without_server(loaded, say)
    say(f"loading {_words(name)} here, as the server has it, {because}")
    return attrs.evolve(loaded.config, model=model)


def _can_be_there(loaded: Loaded) -> bool:
    """Whether a server was named, or has made its socket."""
    return loaded.origins["socket"] != "default" or os.path.exists(loaded.config.socket)


async def _servers_default(socket: str, say: Callable[[str], None]) -> tuple[str, str]:
    """The name of the model that answers where none is named, and what the setting `model` is for it."""
    async with AsyncExitStack() as stack:
        client = await connected(stack, socket, say, loads=False)
        if client.info.models:
            first = (await client.models())[0]
            return first.name, first.name if first.name == BUILTIN else first.path
        model = client.info.model
        return model.name, BUILTIN if model.is_builtin else model.path


async def _session(
    stack: AsyncExitStack, loaded: Loaded, bond: Bond | None, say: Callable[[str], None]
) -> tuple[Client, bool]:
    """A session with the server, and whether it is with the model that is meant. Where the server has several and that
    is not among them, none has been loaded.
    """
    socket = loaded.config.socket
    bound_to = None if bond is None else bond.model
    if bound_to is None and (bond is not None or loaded.origins["model"] == "default"):
        return await connected(stack, socket, say, model=None if bond is None else bond.name), True
    async with AsyncExitStack() as first:
        client = await connected(first, socket, say, loads=False)
        name = _meant_of(await client.models(reload=True), loaded, bound_to) if client.info.models else None
        if name is None:
            if client.info.models and bound_to is None and not _is_there(loaded.config.model):
                with suppress(UnknownModel):
                    return await connected(stack, socket, say, model=loaded.config.model), True
            await stack.enter_async_context(first.pop_all())
            is_meant = client.info.model == bound_to if bound_to else _has_the_model(client.info, loaded)
            return client, is_meant and not client.info.models
    return await connected(stack, socket, say, model=name), True


def _meant_of(models: Sequence[ListedModel], loaded: Loaded, bound_to: ModelInfo | None) -> str | None:
    """What the server calls the model that is meant; None where it has not got it."""
    from uma.models import catalog  # noqa: PLC0415  (slow to import, and seldom needed with a server)

    asked = loaded.config.model
    if bound_to is not None:
        found = (model for model in models if model.path == bound_to.path)
        return next((with_adapter(model.name, asked, model.adapters) for model in found), None)
    if not _is_there(asked):
        adapters = {model.name: model.adapters for model in models}
        with suppress(UnknownModel):
            called = one_meant(asked, {model.name: (model.name, *model.aliases) for model in models}, adapters)
            return with_adapter(called, asked, adapters[called])
    names = [name for model in models for name in (model.name, *model.aliases)]
    path = catalog.resolve(asked, os.environ, names).path
    return next((model.name for model in models if _is_same(Path(model.path), path)), None)


def _is_there(path: str) -> bool:
    return os.path.exists(Path(path).expanduser())


def _is_same(path: Path, other: Path) -> bool:
    return os.path.exists(path) and os.path.exists(other) and path.samefile(other)


def _has(info: ServerInfo) -> str:
    return words.names(info.models) or info.model.name


async def connected(
    stack: AsyncExitStack, socket: str, say: Callable[[str], None], *, model: str | None = None, loads: bool = True
) -> Client:
    """A session, once the server has loaded its model; `say` gets a line where that has to be waited for. `model` and
    `loads`: see `connect`.
    """
    has_said = was_told = False

    def tell(load: LoadState) -> None:
        nonlocal has_said, was_told
        if sys.stderr.isatty():
            show_load(model or "the server", load)
        elif not has_said and (load.percent or was_told):  # a model that is refused is at 0 % for a moment
            say(f"waiting for the server to load the model ({load.step})")
            has_said = True
        was_told = True

    try:
        return await stack.enter_async_context(connect(socket, model=model, loads=loads, on_loading=tell))
    finally:
        if was_told:
            passing()


def shown_progress(model: str) -> LoadProgress:
    """The progress of loading, which a terminal shows in one line."""
    name = Path(model).name
    return LoadProgress(lambda percent: show_load(name, LoadState(percent)))


def show_load(name: str, load: LoadState) -> None:
    """`alpha: ███░░░░░░░ loading, 17 %` in a passing line, or what the load waits for: a narrow one has less of the
    bar, and then of the name.
    """
    space = (passing_columns() or 80) - cell_len(load.words) - len(":  ")
    called = cut(name, max(space, 1))
    cells = 0 if load.waits_for else min(MAX_BAR_CELLS, max(0, space - cell_len(called) - 1))
    passing(" ".join(filter(None, [f"{called}:", words.blocks(load.percent, cells), load.words])))


def _asks_for_its_own(loaded: Loaded) -> list[str]:
    """The options given that say how to load a model."""
    return sorted(loaded.origins[name] for name in ABOUT_LOADING if loaded.origins[name].startswith("--"))


def _how_to_start(loaded: Loaded, bond: Bond | None) -> str:
    where = "" if loaded.origins["socket"] == "default" else f" --socket {shlex.quote(loaded.config.socket)}"
    had = None if bond is None or bond.is_one_of_several else bond.model
    model = "" if had is None or had.is_builtin else f" --model {shlex.quote(had.path)}"
    return f"start {'one' if bond is None else 'it again'} with `uma run{where}{model}`"


def _named(loaded: Loaded) -> str:
    """The model that is named, in words. Raises `ModelError` where there is none of that name, or its file's header is
    cut short or damaged, before it is said that it is loaded.
    """
    # Both are slow to import, and seldom needed with a server.
    from uma.llama import header  # noqa: PLC0415
    from uma.models import catalog  # noqa: PLC0415

    model = catalog.resolve(loaded.config.model, os.environ)
    if not model.is_builtin:
        header.read_parts(model.path)
    return _words(loaded.config.model)


def _words(model: str) -> str:
    return "the built-in model" if model == BUILTIN else model


def _has_the_model(info: ServerInfo, loaded: Loaded) -> bool:
    from uma.models import catalog  # noqa: PLC0415  (slow to import, and seldom needed with a server)

    asked = without_adapter(loaded.config.model, info.capabilities.adapters)
    if not _is_there(asked) and meant(asked, {info.model: (info.model.name, info.model.title)}):
        return True
    wanted = catalog.resolve(asked, os.environ)
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
        say(f"loading {wanted.path.name} ({figures.size(n_bytes)})")
    stack.enter_context(logging_to(config))
    try:
        engine = await stack.enter_async_context(open_engine(config, progress=shown_progress(_words(config.model))))
    finally:
        passing()
    plan = engine.info.capabilities.memory
    if config.n_ctx and plan is not None and plan.cells != config.n_ctx:
        say(f"the context has {plan.cells:,} tokens, and not {config.n_ctx:,} (n_ctx): it takes multiples of 256")
    return engine

"""Several models behind HTTP: which one a request is for, whose key can use it, and the wait until it is loaded."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import attrs
import trio

from uma.errors import BadRequest, Loading, ModelUnusable, UmaError, UnknownModel
from uma.http.ask import Generates
from uma.http.decisions import Decides
from uma.http.dialect import Dialect, Writer
from uma.http.embedding import Computes
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.generation import HEARTBEAT_SEC, MAX_AT_ONCE, NO_BUFFERING
from uma.http.keep_alive import keep_sec
from uma.http.local_user import is_manager
from uma.http.models import FOREIGN, ModelNames, answered_by
from uma.http.problem import Forbidden, NotFound
from uma.models.names import with_each, without_adapter
from uma.net.client import QUEUED
from uma.net.quota import Excess
from uma.types import MAX_KEEP_SEC, FillIn, ListedModel, Models


@asynccontextmanager
async def of_model(gateway: Gateway, http: Exchange, endpoint: object) -> AsyncIterator[Gateway]:
    """A block with the gateway to the model that a request names, which stays loaded; with one model, `gateway`.

    An `endpoint` that streams has a `dialect`. Raises `UnknownModel`, `Forbidden` where the key is bound to others, and
    why the model cannot be loaded; where the query says that it is not to be (`autoload=false`), `BadRequest`, or
    `Loading` while it is being loaded. What the endpoint and the key's bounds refuse whatever the model is, they refuse
    before it is loaded. A GET loads nothing, so that no page elsewhere can do so by the address of a picture: it raises
    `NotFound` where the model is not loaded.
    """
    if (models := gateway.models) is None:
        check_only_model(gateway, http)
        yield gateway
        return
    is_get = http.scope["method"] == "GET"
    fields = http.query if is_get else await http.fields()
    found = fields.get("model") or fields.get("name")
    asked = found if isinstance(found, str) else None
    name = await meant_model(gateway, models, http, asked)
    http.model = name or models.listed()[0].name
    _check_autoload(models, http, name)
    if is_get:
        if (loaded := models.loaded(name)) is None:
            raise NotFound(f"model: {http.model} is not loaded, and a GET loads none: POST /models/load does")
        yield gateway.to_model(loaded, ModelNames(asked or name or "", takes_any=True))
        return
    kept = None
    if http.path.startswith("/api/"):  # elsewhere it is a field that is ignored by name
        kept = keep_sec(fields)
        fields.pop("keep_alive", None)  # it has had its effect
    if kept is not None and kept > MAX_KEEP_SEC and not await is_manager(http):
        # (Some clients always say so: it is a wish beside their request.)
        kept = None
        http.ignored.add("keep_alive")
    queued: tuple[int, Sequence[int]] = 0, (1,)
    began = trio.current_time() if models.loaded(name) is None else None
    if isinstance(endpoint, Generates | Computes | Decides) and began is not None:
        card = await models.card(http.model, loads=False)
        names = ModelNames(asked or card.model.name, takes_any=True)
        if not card.model.path:  # of its vocabulary a header tells the size alone
            able = attrs.evolve(card.capabilities, fill_in=FillIn(0, 0, 0))
            card = attrs.evolve(card, capabilities=able)
        queued = await _judged(gateway.to_model(models, names, card), http, endpoint)
    QUEUED.set(queued)
    dialect = getattr(endpoint, "dialect", None)
    found = models.find(http.model)
    async with AsyncExitStack() as stack:
        async with trio.open_nursery() as telling:
            if dialect is not None and dialect.is_streamed(fields):
                telling.start_soon(_tell_of_load, models, http, dialect, found, partial(models.find, http.model))
            with gateway.waiting(http):
                try:
                    entering = partial(stack.enter_async_context, models.using(name, kept, http.id))
                    source = await http.unless_gone(entering)
                except ModelUnusable as error:
                    why = _without_others(models, http, error.message)
                    raise ModelUnusable(why, retry_after_ms=error.retry_after_ms) from error
            telling.cancel_scope.cancel()
        http.load_ms = 0.0 if began is None else 1000 * (trio.current_time() - began)
        http.model = source.info.model.name
        yield gateway.to_model(source, ModelNames(asked or source.info.model.name, takes_any=True))


async def _judged(
    gateway: Gateway, http: Exchange, endpoint: Generates | Computes | Decides
) -> tuple[int, Sequence[int]]:
    """See `QUEUED`. Raises what a body is refused for by the card of its model that `gateway` has."""
    _, asked = await http.built(partial(endpoint.begin, gateway, http, gateway.reader(http)), keeps=True)
    if isinstance(asked, Writer):
        requests = gateway.admitted(http, asked.requests)
        return requests[0].priority, [each.sampling.drawn_answers for each in requests[:MAX_AT_ONCE]]
    return 0 if asked is None else gateway.admitted_whole(http, asked).priority, (1,)


def _without_others(models: Models, http: Exchange, text: str) -> str:
    """A text about a load for a client whose key is bound to single models: it does not learn the names of others."""
    usable = None if http.account is None else http.account.usable(models)
    if usable is None:
        return text
    names = sorted((model.name for model in models.listed()), key=len, reverse=True)  # one can begin another
    told = re.compile("|".join(map(re.escape, names)))
    return told.sub(lambda found: found[0] if found[0] in usable else "another model", text)


async def _tell_of_load(
    models: Models, http: Exchange, dialect: Dialect, model: ListedModel, look: Callable[[], ListedModel]
) -> None:
    """Begin a stream after a while, and tell how far its model is; to be cancelled once it is loaded.

    An error then has no status of its own any more.
    """
    await trio.sleep(HEARTBEAT_SEC)
    http.streamed = dialect
    await http.start(200, dialect.media_type, NO_BUFFERING)
    while True:
        with suppress(UmaError):  # its file is gone, which the load tells
            model = look()
        await http.write(dialect.alive(f"{model.name}: {_without_others(models, http, model.load.words)}"))
        await trio.sleep(HEARTBEAT_SEC)


async def meant_model(gateway: Gateway, models: Models, http: Exchange, asked: str | None) -> str | None:
    """The name of the model that a request is for; None: the default one."""
    try:
        name = await known_model(models, http, asked)
    except (UnknownModel, Forbidden):
        if not gateway.config.takes_any_model and not (asked or "").startswith(FOREIGN):
            raise
        name = await known_model(models, http, None)
    shown = models.listed()[0].name if name is None else models.find(name).name
    if asked is not None and without_adapter(asked, models.find(shown).adapters) != shown:
        http.extra_headers.append(answered_by(shown))
    return name


async def known_model(models: Models, http: Exchange, asked: str | None) -> str | None:
    """The whole name of `own_model`. The folders are looked at again where it is not known, or the default one gone."""
    if asked is None:
        await models.card(None, loads=False)
    else:
        try:
            models.find(asked)
        except (UnknownModel, ModelUnusable):
            await models.look_again()
    name = own_model(models, http, asked)
    return None if name is None else models.find(name).name


def check_only_model(gateway: Gateway, http: Exchange) -> None:
    """Raise `Forbidden` where the key is bound to other models than the only one."""
    bound = None if http.account is None else http.account.bounds.models
    if http.account is not None and bound is not None and not any(map(gateway.names.knows, bound)):
        raise Forbidden(http.account.other_model(gateway.info.model.name).message)


def own_model(models: Models, http: Exchange, asked: str | None) -> str | None:
    """The model for a request that asks for this one; None: the default one. Raises `Forbidden` where its key is bound
    to others, and `UnknownModel`.
    """
    if http.account is None:
        return asked
    found = http.account.model(asked, models)
    if isinstance(found, Excess):
        raise Forbidden(found.message)
    return found


def own_models(models: Models, http: Exchange) -> Sequence[ListedModel]:
    """All that the key of a request can use, the default one first."""
    usable = None if http.account is None else http.account.usable(models)
    return [each for each in models.listed() if usable is None or each.name in usable]


def named_models(models: Models, http: Exchange) -> Sequence[ListedModel]:
    """`own_models`, and behind each the same with each of its LoRA adapters, as a model of its own."""
    return [
        attrs.evolve(each, name=name, aliases=each.aliases if name == each.name else ())
        for each in own_models(models, http)
        for name in (each.name, *with_each(each.name, each.adapters))
    ]


def _check_autoload(models: Models, http: Exchange, name: str | None) -> None:
    """llama-server's `autoload=false`: raise where the model would have to be loaded, or waited for."""
    if http.query.get("autoload") not in ("false", "0"):
        return
    shown = name or models.listed()[0].name
    model = models.find(shown)
    if model.state == "loaded":
        return
    if model.state != "loading":
        raise BadRequest.at("model", f"{shown} is not loaded, and autoload is false: POST /models/load loads it")
    http.tell_load(model.load)
    raise Loading(f"{shown} is still being loaded ({model.load.step}); try again")

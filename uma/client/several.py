"""The models of a server that has several, for another process: a session with each that is asked, and one for the
rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import attrs
import trio

from uma.client.client import Client
from uma.client.dial import connect
from uma.errors import BadRequest, UmaError, UnknownModel
from uma.models.names import one_meant
from uma.types import (
    Activity,
    Explained,
    Health,
    ListedModel,
    Models,
    ServerInfo,
    Source,
)

LOOK_SEC = 0.5
"""Between two looks at what the server's models do."""
LEAVE_SEC = 2.0
"""Within it a server is told that a model leaves behind a request that has ended, or failed; it answers at once."""


@attrs.define(eq=False)
class ModelsThere(Models):
    """See `types.Models`; made by `models_there`. All methods belong to the Trio thread."""

    _path: str | Path
    _client: Client
    """Client for all that is no one model's."""
    _nursery: trio.Nursery
    """The models' sessions run here."""
    _listed: Sequence[ListedModel] = attrs.field(factory=list, init=False)
    _sessions: dict[str, Client] = attrs.field(factory=dict, init=False)
    """Sessions by the name of the model that each has."""
    _opening: defaultdict[str, trio.Lock] = attrs.field(factory=lambda: defaultdict(trio.Lock), init=False)

    async def follow(self) -> None:
        """Keep up with the server, until it is gone."""
        while not self._client.is_lost:
            with suppress(UmaError):  # it stops, or is gone
                await self._look()
            await trio.sleep(LOOK_SEC)

    async def _look(self, *, reload: bool = False) -> None:
        listed = await self._client.models(reload=reload)
        for model in listed:
            if model.state == "loaded" and model.name not in self._sessions:
                self._nursery.start_soon(self._know, model.name)
        self._listed = listed

    async def _know(self, name: str) -> None:
        """Have the card of a model that is loaded."""
        with suppress(UmaError):  # it has gone meanwhile
            await self._session(name, loads=False)

    async def _session(self, name: str, *, loads: bool = True) -> Client:
        """A session with a model, which knows what that is where it `loads`."""
        async with self._opening[name]:
            session = self._sessions.get(name)
            if session is None or session.is_lost or (loads and not session.info.model.path):
                session = await self._nursery.start(self._hold, name, loads)
        return session

    async def _hold(self, name: str, loads: bool, *, task_status: trio.TaskStatus[Client]) -> None:
        async with connect(self._path, model=name, loads=loads) as session:
            replaced = self._sessions.get(name)
            self._sessions[name] = session
            task_status.started(session)
            if replaced is not None:  # opened before the model was known: nothing asks it any more
                replaced.close()
            await session.lost()  # the server closes what is not used
            if self._sessions.get(name) is session:
                del self._sessions[name]

    @property
    def info(self) -> ServerInfo:
        return self._card(self._listed[0].name) if self._listed else self._client.info

    def _card(self, name: str) -> ServerInfo:
        known = self._sessions.get(name, self._client).info
        return attrs.evolve(known, models=tuple(offered.name for offered in self._listed))

    def listed(self) -> Sequence[ListedModel]:
        return [self._with_card(offered) for offered in self._listed]

    def find(self, model: str) -> ListedModel:
        every = {offered.name: offered for offered in self._listed}
        name = one_meant(
            model,
            {offered.name: (offered.name, *offered.also, *offered.aliases) for offered in self._listed},
            {offered.name: offered.adapters for offered in self._listed},
        )
        return self._with_card(every[name])

    def _with_card(self, model: ListedModel) -> ListedModel:
        session = self._sessions.get(model.name)
        is_known = model.state == "loaded" and session is not None and bool(session.info.model.path)
        return attrs.evolve(model, info=self._card(model.name)) if is_known else model

    def _name(self, model: str | None) -> str:
        if model is not None:
            return self.find(model).name
        if not self._listed:
            raise UnknownModel("model: the server has none that this user can use")
        return self._listed[0].name

    async def card(self, model: str | None, *, loads: bool = True) -> ServerInfo:
        name = self._name(model)
        await self._session(name, loads=loads)
        return self._card(name)

    @asynccontextmanager
    async def using(self, model: str | None, keep_sec: float | None = None, id: str = "") -> AsyncIterator[Source]:
        name = self._name(model)
        session = await self._session(name)
        await self.load(name, keep_sec or None)
        try:
            yield session
        finally:
            if keep_sec == 0:
                with trio.move_on_after(LEAVE_SEC, shield=True), suppress(UmaError):
                    await self._let_leave(name)

    def loaded(self, model: str | None) -> Source | None:
        name = self._name(model)
        session = self._sessions.get(name)
        return session if session is not None and self.find(name).info is not None else None

    async def _let_leave(self, name: str) -> None:
        """Have a model leave with its last request; one that has left is not loaded for that."""
        await self._look()
        if self.find(name).state == "loaded":
            await self.load(name, 0)

    async def load(self, model: str | None, keep_sec: float | None = None) -> ListedModel:
        """See `types.Models`. What is told of its load comes with the next look."""
        return self._noted(await self._client.load(self._name(model), keep_sec))

    async def unload(self, model: str | None) -> ListedModel:
        return self._noted(await self._client.unload(self._name(model)))

    async def pin(self, model: str | None, *, is_pinned: bool = True) -> ListedModel:
        return self._noted(await self._client.pin(self._name(model), is_pinned=is_pinned))

    def _noted(self, model: ListedModel) -> ListedModel:
        self._listed = [model if offered.name == model.name else offered for offered in self._listed]
        return self._with_card(model)

    def download(self, name: str) -> NoReturn:
        """See `types.Models`; refused here."""
        raise BadRequest.at("model", f"a gateway fetches nothing; `uma pull {name}` does, for the server's user")

    async def remove(self, model: str) -> NoReturn:
        """See `types.Models`; refused here."""
        raise BadRequest.at("model", f"a gateway removes nothing; `uma rm {model}` does, for the server's user")

    async def look_again(self, *, is_changed: bool = False) -> None:
        await self._look(reload=True)

    async def trace(self, seconds: float) -> str:
        return await self._client.trace(seconds)

    async def health(self, *, probe: bool = True) -> Health:
        return await self._client.health(probe=probe)

    async def metrics(self) -> Mapping[str, Any]:
        return await self._client.metrics()

    async def activity(self, id: str = "") -> Activity:
        return await self._client.activity(id)

    async def explain(self, id: str = "") -> Explained:
        return await self._client.explain(id)


@asynccontextmanager
async def models_there(path: str | Path, client: Client) -> AsyncIterator[ModelsThere]:
    """The models of the server that `client`, a session without a model of its own, is connected to, for as long as the
    block; `path` is that server's socket.
    """
    async with trio.open_nursery() as nursery:
        models = ModelsThere(path, client, nursery)
        await models.look_again()
        nursery.start_soon(models.follow)
        yield models
        nursery.cancel_scope.cancel()

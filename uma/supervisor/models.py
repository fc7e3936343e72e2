"""All models by their names as one source: each is loaded in a process of its own once a request needs it."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import attrs
import trio

from uma.client import Client
from uma.config import RuntimeConfig
from uma.engine.sizing import free_memory_bytes
from uma.errors import BadRequest, ConnectionLost, InternalError, ShuttingDown, UmaError, UnknownModel
from uma.models.catalog import BUILTIN, ModelFile
from uma.models.shelf import Shelf
from uma.net.client import OWNER
from uma.net.logfmt import log
from uma.supervisor.child import child_config, running, taken_bytes
from uma.supervisor.residency import Resident, plan
from uma.types import (
    DEFAULT_MAX_TOKENS,
    Activity,
    Capabilities,
    Embeddings,
    EmbedRequest,
    EventStream,
    Explained,
    Health,
    Limits,
    ListedModel,
    LoadProgress,
    ModelInfo,
    Models,
    Ranking,
    Request,
    RerankRequest,
    ServerInfo,
    Source,
    Tokenized,
)
from uma.version import __version__

_log = logging.getLogger("uma.supervisor")

FREE_SHARE = 0.7
"""Part of the memory that is free at the start that all models together can take, without `--memory`."""
PROCESS_BYTES = 96 * 2**20
"""What a process takes beside its model, before it was ever measured."""
AT_ONCE = 64
"""Requests at once by which a client of a model that has not been loaded yet is told when to come again."""
STANDSTILL_SEC = 300.0
"""How long a load can tell of no progress. Then its process is ended, so that the models behind it have their turn."""

A = TypeVar("A", Request, EmbedRequest, RerankRequest)


@attrs.define(eq=False)
class Load:
    """One load of a model, for all that wait for it."""

    ended: trio.Event = attrs.field(factory=trio.Event)
    percent: int = 0
    failure: str | None = None
    """Why the model cannot be loaded; None while it can."""
    patience: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Ends a load that stands still."""

    def note(self, percent: int) -> None:
        """So much is loaded. Said again, it is no progress."""
        if percent != self.percent or self.patience.deadline == math.inf:
            self.patience.deadline = trio.current_time() + STANDSTILL_SEC
        self.percent = percent


@attrs.define(eq=False)
class Model:
    """One model by its name, which whatever needs it has loaded. Belongs to the Trio thread."""

    file: ModelFile
    models: LoadedModels
    card: ServerInfo | None = None
    """Known from its first load on."""
    client: Client | None = None
    """The session with its process, while it is loaded."""
    pid: int | None = None
    load: Load | None = None
    """The load that is asked for, or that runs."""
    running: int = 0
    """Requests that have it loaded."""
    size_bytes: int = 0
    """What it took when it was loaded last; 0: never."""
    used_at: float = 0.0
    stays_until: float = 0.0
    is_leaving: bool = False
    """It takes no more requests, and its process ends once nothing runs."""
    stay: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Cancelled, the process leaves, in order."""

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[Held]:
        """A block in which it is loaded, and stays so. Raises `InternalError` where that is not possible, or where its
        process ends meanwhile.
        """
        while self.client is None or self.client.is_lost or self.is_leaving:
            load = self.models.ask_for(self)
            await load.ended.wait()
            if load.failure is not None:
                raise InternalError(load.failure)
        self.running += 1
        held = Held(self, self.client)
        try:
            with held.tells_crash():
                yield held
        finally:
            self.running -= 1
            self.used_at = trio.current_time()
            self.leave_if_idle()
            self.models.changed()

    def leave_if_idle(self) -> None:
        """Have its process end where it is to leave and nothing runs."""
        if self.is_leaving and not self.running:
            self.stay.cancel()

    @property
    def needs_bytes(self) -> int:
        """What it takes; before it was ever loaded the weights and a quarter more, and a process."""
        return self.size_bytes or self.file.size_bytes * 5 // 4 + PROCESS_BYTES

    def as_resident(self) -> Resident:
        """Its place in memory, as the plan sees it."""
        is_running, is_leaving = self.running > 0, self.is_leaving
        return Resident(self.file.name, self.needs_bytes, self.used_at, self.stays_until, is_running, is_leaving)


@attrs.frozen
class Held:
    """A model that is loaded, as a `Source` that waits for nothing, also where it is to leave."""

    model: Model
    client: Client

    @contextmanager
    def tells_crash(self) -> Iterator[None]:
        """A block in which the end of the process is an `InternalError`."""
        try:
            yield
        except ConnectionLost as error:
            name = self.model.file.name
            raise InternalError(
                f"the process of {name} has ended, and this request with it; the next one loads it again"
            ) from error

    @property
    def info(self) -> ServerInfo:
        """See `Source`."""
        assert self.model.card is not None  # since its first load
        return self.model.card

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[EventStream]:
        """See `Source`."""
        with self.tells_crash():
            async with self.client.generate(_own(request)) as stream:
                yield stream

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """See `Source`."""
        with self.tells_crash():
            return await self.client.embed(_own(request))

    async def rerank(self, request: RerankRequest) -> Ranking:
        """See `Source`."""
        with self.tells_crash():
            return await self.client.rerank(_own(request))

    async def tokenize(self, request: Request) -> Tokenized:
        """See `Source`."""
        with self.tells_crash():
            return await self.client.tokenize(_own(request))

    async def health(self, *, probe: bool = True) -> Health:
        """See `Source`."""
        with self.tells_crash():
            return await self.client.health(probe=probe)

    async def metrics(self) -> Mapping[str, Any]:
        """See `Source`."""
        with self.tells_crash():
            return await self.client.metrics()

    async def activity(self) -> Activity:
        """See `Source`."""
        with self.tells_crash():
            return await self.client.activity()

    async def explain(self, id: str = "") -> Explained:
        """See `Source`. What it knew ends with its process."""
        with self.tells_crash():
            return await self.client.explain(id)


@attrs.define(eq=False)
class LoadedModels(Models):
    """See `types.Models`; made by `open_models`. All methods belong to the Trio thread."""

    config: RuntimeConfig
    shelf: Shelf
    budget_bytes: int
    """What all processes together can take."""
    _known: dict[str, Model] = attrs.field(factory=dict, init=False)
    _asked: deque[Model] = attrs.field(factory=deque, init=False)
    """Models that are to be loaded, in the order in which they were asked for."""
    _work: trio.Event = attrs.field(factory=trio.Event, init=False)
    _is_draining: bool = attrs.field(default=False, init=False)
    _loading: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    @property
    def info(self) -> ServerInfo:
        """The default model's card, with the names of all; before its first load what is so of any."""
        card = self._model(None).card
        return attrs.evolve(self._blank() if card is None else card, models=self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all models, the default one's first."""
        return tuple(each.name for each in self.shelf.files)

    def listed(self) -> Sequence[ListedModel]:
        """See `types.Models`."""
        return [self._listed(each) for each in self.shelf.files]

    def find(self, model: str) -> ListedModel:
        """See `types.Models`."""
        return self._listed(self.shelf.named(model))

    def _listed(self, file: ModelFile) -> ListedModel:
        model = self._known.get(file.name)
        shared = {each.name: getattr(file, each.name) for each in attrs.fields(ModelFile) if each.name in _LISTED}
        if model is None:
            return ListedModel(**shared | {"path": str(file.path)})
        percent = None if model.load is None else model.load.percent
        info = None if model.client is None or model.is_leaving else model.card
        return ListedModel(**shared | {"path": str(file.path), "info": info, "loading_percent": percent})

    async def card(self, model: str | None) -> ServerInfo:
        """See `types.Models`."""
        found = await self._find(model)
        if found.card is None:
            async with found.in_use():
                pass
        assert found.card is not None
        return attrs.evolve(found.card, models=self.names)

    @asynccontextmanager
    async def using(self, model: str | None) -> AsyncIterator[Source]:
        """See `types.Models`."""
        found = await self._find(model)
        async with found.in_use() as held:
            yield held

    def loading_percent(self, model: str | None) -> int | None:
        """See `types.Models`."""
        try:
            found = self._model(model)
        except UnknownModel:
            return None
        return None if found.client else found.load.percent if found.load else 0

    async def _find(self, name: str | None) -> Model:
        """The model of a name. One that is not known can have come since: then the folders are read again."""
        try:
            return self._model(name)
        except UnknownModel:
            await trio.to_thread.run_sync(self.shelf.read)
            return self._model(name)

    def _model(self, name: str | None) -> Model:
        file = self.shelf.files[0] if name is None else self.shelf.named(name)
        return self._known.setdefault(file.name, Model(file, self))

    # As a source of its own.

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[EventStream]:
        """See `Source`."""
        async with self.using(request.model) as held, held.generate(request) as stream:
            yield stream

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """See `Source`."""
        async with self.using(request.model) as held:
            return await held.embed(request)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """See `Source`."""
        async with self.using(request.model) as held:
            return await held.rerank(request)

    async def tokenize(self, request: Request) -> Tokenized:
        """See `Source`."""
        async with self.using(request.model) as held:
            return await held.tokenize(request)

    async def health(self, *, probe: bool = True) -> Health:
        """Whether requests are taken; with a probe, whether the models that are loaded generate."""
        if self._is_draining:
            return Health("draining", 0.0, 0)
        every = [await each.health(probe=probe) for each in self._loaded()]
        return next((each for each in every if each.status != "ok"), Health("ok", 0.0, 0) if not every else every[0])

    async def activity(self) -> Activity:
        """That of all models together."""
        every = [await each.activity() for each in self._loaded()]
        return Activity(
            tuple(request for each in every for request in each.running),
            sum(each.waiting_interactive for each in every),
            sum(each.waiting_normal for each in every),
            sum(each.waiting_background for each in every),
            tuple(request for each in every for request in each.waiting),
        )

    async def explain(self, id: str = "") -> Explained:
        """Of the first model that knows the id. The models know of one user alone, so only that one can ask."""
        if OWNER.get() is not None:
            raise BadRequest("type: where several models are served, only the user that the server runs as can ask")
        for held in self._loaded():
            with suppress(BadRequest):
                return await held.explain(id)
        raise BadRequest(f"id: no model that is loaded knows the request {id[:128]!r}")

    async def metrics(self) -> Mapping[str, Any]:
        """The sums over the models that are loaded."""
        total = dict(self.snapshot())
        for held in self._loaded():
            for name, value in (await held.metrics()).items():
                if isinstance(value, int | float) and isinstance(total.get(name, 0), int | float):
                    total[name] = total.get(name, 0) + value
        return total

    def snapshot(self) -> Mapping[str, Any]:
        """See `server.connection.Served`."""
        zero = ("requests_total", "requests_rejected", "requests_overloaded", "active_sequences", "queued_requests")
        return dict.fromkeys((*zero, "service_ms_ewma"), 0)

    def _loaded(self) -> list[Held]:
        """Those that can be asked just now. None of them is kept by that."""
        known = self._known.values()
        return [Held(each, each.client) for each in known if each.client is not None and not each.client.is_lost]

    def _blank(self) -> ServerInfo:
        config = self.config
        return ServerInfo(
            f"uma/{__version__}",
            ModelInfo("models", "", "", 0, 0, "", 0, 0, has_chat_template=True),
            Capabilities(True, True, True, True, True, "none: no model is loaded", True, 0, ()),
            Limits(
                n_ctx=config.n_ctx,
                max_tokens=config.max_tokens or DEFAULT_MAX_TOKENS,
                max_prompt_bytes=config.max_prompt_bytes,
                max_frame_bytes=config.max_frame_bytes,
                max_sessions=config.max_sessions,
                max_queue=config.max_queue,
                max_sequences=config.max_sequences or AT_ONCE,
                has_max_tokens=config.max_tokens > 0,
            ),
        )

    # Loading and leaving.

    def begin_drain(self) -> None:
        """See `server.connection.Served`."""
        self._is_draining = True

    def end_request(self, number: int) -> bool:
        """See `server.connection.Served`: refused, since each model has numbers of its own."""
        raise BadRequest(
            "number: several models are served, each with numbers of its own; a request's own client ends it"
        )

    def ask_for(self, model: Model) -> Load:
        """The load of a model that is not loaded; it begins once those before it have ended."""
        if self._is_draining:
            raise ShuttingDown("the server is stopping; start it again with `uma run`")
        if model.load is None:
            model.load = Load()
            self._asked.append(model)
            self._work.set()
        return model.load

    async def run(self) -> None:
        """Load what is asked for, one model at a time, until `close`; return once all models have left."""
        async with trio.open_nursery() as nursery:
            with self._loading:
                while True:
                    self._work = trio.Event()
                    due = self._let_idle_go()
                    while self._asked and (again_at := await self._step(nursery)) is None:
                        pass
                    due = min(due, again_at if self._asked and again_at is not None else math.inf)
                    with trio.move_on_at(due):
                        await self._work.wait()

    async def _step(self, nursery: trio.Nursery) -> float | None:
        """Load the first of the models that wait, or have others leave for it. None: the next one's turn; else when to
        look again, where nothing changes before.
        """
        model = self._asked[0]
        if model.needs_bytes > self.budget_bytes:
            self._asked.popleft()
            assert model.load is not None
            need, most = model.needs_bytes / 2**30, self.budget_bytes / 2**30
            model.load.failure = (
                f"{model.file.name} takes about {need:.2f} GiB, and all models together can have {most:.2f} (--memory)"
            )
            model.load.ended.set()
            model.load = None
            return None
        residents = [each.as_resident() for each in self._known.values() if each.pid is not None]
        step = plan(model.file.name, model.needs_bytes, self.budget_bytes, residents, trio.current_time())
        if step.loads:
            await nursery.start(self._serve, self._asked.popleft())
            return None
        for name in step.leave:
            self._known[name].is_leaving = True
            self._known[name].leave_if_idle()
        return math.inf if step.again_at is None else step.again_at

    def _let_idle_go(self) -> float:
        """End what was not used for `idle_unload_sec`, and what is idle where a model has taken more than was planned.
        When the next one's time comes.
        """
        now, rest = trio.current_time(), self.config.idle_unload_sec or math.inf
        over = sum(each.needs_bytes for each in self._known.values() if each.pid is not None) - self.budget_bytes
        known = self._known.values()
        idle = [each for each in known if each.client is not None and not each.running and not each.is_leaving]
        for model in sorted(idle, key=lambda each: each.used_at):
            if model.used_at + rest <= now or (over > 0 and model.stays_until <= now):
                model.is_leaving = True
                model.leave_if_idle()
                over -= model.needs_bytes
        return min((each.used_at + rest for each in idle if not each.is_leaving), default=math.inf)

    def changed(self) -> None:
        """Look again at what has to be loaded, and what has to leave."""
        self._work.set()

    def close(self) -> None:
        """Let all models go, in order, and load no more."""
        self._is_draining = True
        self._loading.cancel()
        for model in self._known.values():
            model.stay.cancel()

    async def _serve(self, model: Model, *, task_status: trio.TaskStatus[None]) -> None:
        """The life of one process, from its start to its end. `started` once it has loaded its model, or has not."""
        load, began = model.load, trio.current_time()
        assert load is not None

        def started(pid: int) -> None:
            model.pid = pid
            log(_log, logging.INFO, "model.loading", model=model.file.name, pid=pid)

        why: UmaError | None = None
        try:
            is_builtin = model.file.name == BUILTIN
            config = child_config(self.config, BUILTIN if is_builtin else str(model.file.path), self.budget_bytes)
            load.note(0)
            with load.patience:
                async with running(model.file.name, config, started, load.note) as client:
                    load.patience.deadline = math.inf
                    model.size_bytes = await trio.to_thread.run_sync(taken_bytes, model.pid, model.needs_bytes)
                    model.size_bytes += config.cache_ram_mb * 2**20  # which fills later
                    model.used_at = trio.current_time()
                    model.stays_until = 2 * model.used_at - began
                    model.card, model.client, model.load = self._told(client.info), client, None
                    load.ended.set()
                    log(
                        _log,
                        logging.INFO,
                        "model.loaded",
                        model=model.file.name,
                        ms=_ms_since(began),
                        bytes=model.size_bytes,
                    )
                    task_status.started()
                    with model.stay:
                        why = await client.lost()
            if load.patience.cancelled_caught:
                why = InternalError(f"it was not loaded: no progress for {STANDSTILL_SEC:g} s")
        except (UmaError, OSError) as error:
            why = error if isinstance(error, UmaError) else InternalError(str(error))
        finally:
            model.client, model.pid, model.stay, model.is_leaving = None, None, trio.CancelScope(), False
            self.changed()
            if not load.ended.is_set():
                model.load, load.failure = None, f"{model.file.name}: {why.message if why else 'it was not loaded'}"
                load.ended.set()
                task_status.started()
            log(_log, logging.WARNING if why else logging.INFO, "model.ended", model=model.file.name, why=why)

    def _told(self, info: ServerInfo) -> ServerInfo:
        """A process's card, with the bounds that clients meet here."""
        ours = {name: getattr(self.config, name) for name in ("max_frame_bytes", "max_sessions")}
        return attrs.evolve(info, limits=attrs.evolve(info.limits, **ours))


_LISTED = frozenset(each.name for each in attrs.fields(ListedModel))


@asynccontextmanager
async def open_models(config: RuntimeConfig, progress: LoadProgress) -> AsyncIterator[LoadedModels]:
    """The models of `config.models`, until the block is left. None is loaded before a request needs it.

    Raises `ModelError` where one of them is not here.
    """
    shelf = Shelf(config.models, os.environ, config.model)
    await trio.to_thread.run_sync(shelf.read)
    budget = config.memory * 2**20 or int(FREE_SHARE * free_memory_bytes())
    models = LoadedModels(config, shelf, budget)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(models.run)
        yield models
        models.close()


def _own(request: A) -> A:
    """A request as the process of its model gets it."""
    return request if request.model is None else attrs.evolve(request, model=None)


def _ms_since(began: float) -> int:
    return round(1000 * (trio.current_time() - began))

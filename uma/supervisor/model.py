"""One model of several: its process while it is loaded, and all that needs it or waits for it."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, get_args

import attrs
import trio

from uma.client import Client
from uma.errors import InternalError, ModelUnusable, UmaError, UnknownModel
from uma.llama.context import ROUNDED_TOKENS
from uma.models.catalog import ModelFile
from uma.models.names import with_adapter
from uma.net.client import CLIENT, ORIGIN, OWNER, QUEUED, asker
from uma.net.file_watch import FileState, state_of
from uma.supervisor.backoff import Failures
from uma.supervisor.estimate import rough_bytes
from uma.supervisor.residency import Resident, UnloadReason
from uma.types import (
    Activity,
    CacheUse,
    DecisionRequest,
    Decisions,
    Embeddings,
    EmbedRequest,
    EventStream,
    Explained,
    Health,
    LoadState,
    MemoryPlan,
    ModelState,
    Ranking,
    Request,
    RequestMetrics,
    RerankRequest,
    RunningRequest,
    ServerInfo,
    Source,
    Tokenized,
)

MAX_MODELS = 65_536
"""Factor by which the numbers of requests are multiplied, to tell those of several models apart."""
MAX_WAITS = 1_000
"""Maximum number of requests of which it is known how long they have waited for a load: those that can be explained."""
MIN_WAIT_MS = 1.0
"""Minimum time for which a model was waited for to be told: what is loaded is found sooner."""
LOOK_SEC = 1.0
"""Maximum time of a question about what a process does, or how a file is; then what was known last is taken."""
NO_STATE: FileState = (0, 0, 0)
"""State of a file that has yet to be looked at."""
CROWDED_MS = 10_000
"""Time after which a request is to come again for which there was no memory beside models that stay."""
AGAIN_SEC = 2.0
"""Time within which a client that works through requests asks again: so long a model stays for the next."""
MIN_TOKENS = 8_192
"""Minimum context of a model that gets a shorter one than if it were alone, so that it fits beside others. Where one
request can have more, it is that: a prompt is never refused for what else is loaded.
"""
STANDSTILL_SEC = 300.0
"""How long a load can tell of no progress. Then its process is ended, so that the models behind it have their turn."""

A = TypeVar("A", Request, EmbedRequest, RerankRequest, DecisionRequest)


class ModelLoader(Protocol):
    """All models together, as one of them needs it."""

    def ask_for(self, model: ServedModel) -> ModelLoad:
        """The load of a model that is not loaded; it begins once those before it have ended."""

    def check_queue(self, model: ServedModel) -> None:
        """Raise `Overloaded` where a request finds the queue of its load full, as it would once it is loaded."""

    def succeed(self, model: ServedModel) -> ServedModel:
        """The model in the place of one whose file is another by now, while requests still run with the old."""

    def changed(self) -> None:
        """Look again at what has to be loaded, and what has to leave."""

    async def look_again(self, *, is_changed: bool = False) -> None:
        """See `types.Models`."""


@attrs.define(eq=False)
class ModelLoad:
    """One load of a model, for all that wait for it."""

    ended: trio.Event = attrs.field(factory=trio.Event)
    percent: int = 0
    failure: str = ""
    """Why the model cannot be loaded; empty while it can."""
    is_refused: bool = False
    """Whether that is the memory of others that stay, and no fault of this one."""
    by: str | None = attrs.field(factory=asker)
    """Whose request asked for it first."""
    patience: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Ends a load that stands still."""

    def note(self, percent: int) -> None:
        """So much is loaded. Said again, it is no progress."""
        if percent != self.percent or self.patience.deadline == math.inf:
            self.patience.deadline = trio.current_time() + STANDSTILL_SEC
        self.percent = percent


@attrs.define(eq=False)
class LoadWait:
    """A request that waits until its model is loaded, or what else does, without an id."""

    id: str
    model: str
    owner: Hashable = attrs.field(factory=OWNER.get)
    origin: str = attrs.field(factory=ORIGIN.get)
    client: Hashable = attrs.field(factory=CLIENT.get)
    queued: tuple[int, Sequence[int]] = attrs.field(factory=QUEUED.get)
    """See `QUEUED`."""
    began: float = attrs.field(factory=trio.current_time)

    def as_request(self, load: LoadState) -> RunningRequest:
        """The request as lists have it."""
        ms = round(1000 * (trio.current_time() - self.began), 3)
        told = RunningRequest(self.id, self.queued[0], 0, 0, 0, 0, ms, waits_for="loading", behind=load.words)
        return attrs.evolve(told, origin=self.origin, model=self.model)

    def explained(self, load: LoadState) -> Explained:
        """Where its time went until now."""
        now, figures, lane = self.as_request(load), RequestMetrics(0, 0, 0, 0, 0, 0, 0), self.queued[0]
        came_at, spent_ms = round(time.time() - now.age_ms / 1000, 3), {"loading": now.age_ms}
        return Explained(
            self.id, lane, self.origin, came_at, now.age_ms, spent_ms, 0, 0, 0, CacheUse(), figures, now=now
        )


@attrs.define(eq=False)
class ServedModel:
    """One model of several: its process, which is started when a request needs it. Belongs to the Trio thread."""

    file: ModelFile
    loader: ModelLoader
    index: int
    """Tells it from the others, in the numbers of its requests."""
    default_keep_sec: float
    """How long it stays without a request where none has said (`Models.using`)."""
    keep_sec: float | None = None
    """What the last one said; None: none has, since it is loaded."""
    is_pinned: bool = False
    card: ServerInfo | None = None
    """Known from its first load on."""
    header: tuple[FileState | None, ServerInfo] | None = None
    """State of its file when its header was read for a card, and that card; None: it was not asked for."""
    client: Client | None = None
    """The session with its process, while it is loaded."""
    has_process: bool = False
    """Whether it has a process, or is about to."""
    pid: int | None = None
    metrics: Mapping[str, Any] = attrs.field(factory=dict)
    """What its process said last."""
    activity: Activity = Activity((), 0, 0, 0, ())
    """Last known activity of its requests."""
    load: ModelLoad | None = None
    """The load that is asked for, or that runs."""
    file_state: FileState | None = None
    """State of its file when it was planned or loaded last; None: it was neither, or its file is another one now."""
    seen: FileState | None = NO_STATE
    """State of its file as it was looked at last; None: it was gone."""
    missed: FileState | bool | None = False
    """State of its file when the folders were looked at because it was another one; False: never."""
    failures: Failures = attrs.field(factory=Failures)
    lost: deque[tuple[str, Hashable, str]] = attrs.field(factory=partial(deque, maxlen=MAX_WAITS))
    """The last requests that ended with their process: id, owner, and the error."""
    waits_ms: dict[str, float] = attrs.field(factory=dict)
    """Time for which requests have waited until it was loaded, by their ids: of the last `MAX_WAITS`."""
    running: int = 0
    """Requests that have it loaded."""
    waits: list[LoadWait] = attrs.field(factory=list)
    """What waits until it is."""
    size_bytes: int = 0
    """Maximum that its file took so far, with what its prefixes can come to take; 0: it was never loaded."""
    taken_bytes: int = 0
    """What its process took when it was measured last; 0: it has none, or that is not known."""
    measured_at: float = 0.0
    planned_bytes: int = 0
    """What it will take by its header; 0: that was not read, or no memory holds it."""
    context: MemoryPlan | None = None
    """What its context takes of that, where it is known."""
    n_ctx: int = 0
    """Tokens of its context where that is shorter than if the model were alone; 0: it is not."""
    objection: str = ""
    """Why it cannot be loaded, by its header or by its last load, for which nothing leaves again; empty: it can."""
    used_at: float = 0.0
    repaid_at: float = 0.0
    """When it has been loaded as long as its load took."""
    not_pinned: str = ""
    """Why it is not pinned as its settings ask; empty: it is, or they do not ask."""
    yielded: str = ""
    """Why it has left for another program; empty: it has not, or was loaded again."""
    successor: ServedModel | None = None
    """What has its place; this one ends once nothing runs."""
    left_for: tuple[UnloadReason, str] = "stopped", ""
    """Why its process is to end, and in words."""
    is_leaving: bool = False
    """Whether it takes no more requests; its process ends once nothing runs."""
    stay: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Cancelled, the process leaves, in order."""
    _looks: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1), init=False)
    """Limiter of the thread that looks at its file: one that was given up waits for its disk, and no second one."""

    @asynccontextmanager
    async def in_use(self, keep_sec: float | None = None, id: str = "") -> AsyncIterator[LoadedModel]:
        """A block in which it is loaded, and stays so; see `Models.using`. Raises `InternalError` where that is not
        possible, or where its process ends meanwhile, and `UnknownModel` where its file is gone.
        """
        began = trio.current_time()
        client = await self._loaded(id)
        if client is None:
            assert self.successor is not None
            async with self.successor.in_use(keep_sec, id) as held:
                yield held
            return
        waited_ms = 1000 * (trio.current_time() - began)
        self.keep_sec = self.keep_sec if keep_sec is None else keep_sec
        self.running += 1
        try:
            yield LoadedModel(self, client, waited_ms)
        finally:
            self.running -= 1
            self.used_at = trio.current_time()
            self._end_if_idle()
            self.loader.changed()

    async def _loaded(self, id: str) -> Client | None:
        """The session with its process, once it is loaded; None where another has its place."""
        if id and self.client is None:  # else the queue of its process is the one that counts
            self.loader.check_queue(self)
        wait = LoadWait(id, self.file.name)
        self.waits.append(wait)
        try:
            while self.successor is None:
                await self.follow_file()
                if self.successor is not None:
                    break
                if self.client is not None and not self.client.is_lost and not self.is_leaving:
                    return self.client
                load = self.loader.ask_for(self)
                await load.ended.wait()
                if load.failure:
                    refused = ModelUnusable(load.failure, retry_after_ms=CROWDED_MS)
                    raise refused if load.is_refused else self.failure(load.failure)
            return None
        finally:
            self.waits.remove(wait)
            if self.load is not None and not self.waits:
                self.loader.changed()  # nobody waits for it any longer

    def failure(self, why: str) -> UmaError:
        """The error that a load ends with."""
        return ModelUnusable(why) if self.objection else InternalError(why, retry_after_ms=self.retry_after_ms)

    async def look(self) -> FileState | None:
        """State of its file; what was seen last where its disk does not answer."""
        with trio.move_on_after(LOOK_SEC):
            path = self.file.path
            self.seen = await trio.to_thread.run_sync(state_of, path, limiter=self._looks, abandon_on_cancel=True)
        return self.seen

    async def follow_file(self) -> None:
        """Have it leave where its file is another by now, so that this one is loaded. Raises `UnknownModel` where it is
        gone.
        """
        state = await self.look()
        if state is not None and self.file_state in (None, state):
            return
        if not self.has_process or self.client is not None:  # what is being loaded leaves once it is
            if state is not None and self.running and self.successor is None:
                self.successor = self.loader.succeed(self)
            self.file_state, self.failures, self.objection = None, Failures(), ""
            self.leave("replaced", "its file was deleted" if state is None else "its file was replaced")
        is_changed, self.missed = state != self.missed, state
        await self.loader.look_again(is_changed=is_changed)
        if state is None:
            raise UnknownModel(
                f"model: the file of {self.file.name} is gone: {self.file.path}; put it back, or name another model"
            )

    def note_wait(self, id: str, ms: float) -> None:
        """A request has waited so long for the load."""
        self.waits_ms.pop(id, None)
        if ms >= MIN_WAIT_MS:
            self.waits_ms[id] = ms
        if len(self.waits_ms) > MAX_WAITS:
            del self.waits_ms[next(iter(self.waits_ms))]

    def forget_process(self) -> None:
        """Forget the process, which has ended."""
        self.client, self.pid, self.has_process, self.is_leaving = None, None, False, False
        self.stay, self.taken_bytes, self.left_for, self.n_ctx = trio.CancelScope(), 0, ("stopped", ""), 0
        self.metrics, self.activity = {}, Activity((), 0, 0, 0, ())

    def leave(self, reason: UnloadReason, why: str) -> None:
        """Have it take no more requests, and end once nothing runs, where it is loaded. The first reason counts, but
        for another's need of memory, which can be gone before it has ended.
        """
        if self.client is not None:
            if not self.is_leaving or self.left_for[0] == "memory":
                self.left_for = reason, why
            self.is_leaving = True
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.is_leaving and not self.running:
            self.stay.cancel()

    @property
    def has_plan(self) -> bool:
        """Whether it is known what it takes."""
        return bool(self.size_bytes or self.planned_bytes)

    @property
    def needs_bytes(self) -> int:
        """What it can come to take, by its header or by what its process took, whichever is more."""
        return (max(self.size_bytes, self.planned_bytes) or rough_bytes(self.file.size_bytes)) - self.spared_bytes

    @property
    def spared_bytes(self) -> int:
        """What it takes less than if it were alone, as its context is shorter."""
        plan = self.context
        return (plan.cells - self.n_ctx) * plan.kv_bytes // plan.cells if self.n_ctx and plan is not None else 0

    def shorter_n_ctx(self, free_bytes: int) -> int:
        """The longest context with which it fits into so many bytes; 0 where that is shorter than it can be."""
        plan = self.context
        if plan is None or not plan.kv_bytes or plan.window_cells not in (0, plan.cells):
            return 0  # small windows do not become smaller
        left_bytes = plan.kv_bytes - (self.needs_bytes - free_bytes)
        tokens = plan.cells * left_bytes // plan.kv_bytes // ROUNDED_TOKENS * ROUNDED_TOKENS
        return tokens if tokens >= max(MIN_TOKENS, self.file.context_length) else 0

    @property
    def stays(self) -> bool:
        """Whether nothing but its user's word has it leave."""
        return self.is_pinned or self.keep_sec == math.inf

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, and no request needs it."""
        return self.client is not None and not self.running and not self.waits and not self.is_leaving

    @property
    def leaves_at(self) -> float:
        """When it leaves, where it is idle and no request comes."""
        keep_sec = self.default_keep_sec if self.keep_sec is None else self.keep_sec
        return math.inf if self.stays else self.used_at + keep_sec

    @property
    def state(self) -> ModelState:
        """See `ListedModel`."""
        if self.client is not None:
            return "leaving" if self.is_leaving else "loaded"
        return "unloaded" if self.load is None else "loading"

    @property
    def gauges(self) -> Mapping[str, Any]:
        """Figures of it as one of several, as they are now."""
        return {
            "model_state": {state: int(state == self.state) for state in get_args(ModelState)},
            "model_memory_bytes": self.needs_bytes if self.has_process else 0,
            "model_taken_bytes": self.taken_bytes,
            "model_waiting_requests": len(self.waits),
        }

    @property
    def retry_after_ms(self) -> int | None:
        """How long no load of it is tried, after a failure; None: it can be tried now."""
        return math.ceil(1000 * self.failures.left_sec(trio.current_time())) or None

    def as_resident(self) -> Resident:
        """The model's place in memory, as the plan sees it."""
        # What has waited for it is about to run.
        begins = self.client is None or (self.waits and not self.is_leaving)
        used_until = math.inf if self.running else self.used_at + AGAIN_SEC
        return Resident(
            self.file.name if self.successor is None else f"{self.file.name} of before",
            self.needs_bytes,
            self.used_at,
            math.inf if begins else min(self.repaid_at, used_until),
            is_running=self.running > 0,
            is_leaving=self.is_leaving,
            is_pinned=self.stays,
        )


@attrs.frozen
class LoadedModel(Source):
    """A model that is loaded, as a `Source`: it answers without a wait, also while it is to leave."""

    model: ServedModel
    client: Client
    waited_ms: float = 0.0
    """How long it was waited for to be loaded."""

    @property
    def info(self) -> ServerInfo:
        assert self.model.card is not None  # since its first load
        return self.model.card

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[EventStream]:
        self.model.note_wait(request.id, self.waited_ms)
        entering, id = self.client.generate(_own(request, self.info)), request.id
        del request  # its files are large, and once they are sent nobody needs them
        try:
            async with entering as stream:
                yield stream
        except UmaError as error:
            if self.client.is_lost:
                self.model.lost.append((id, OWNER.get(), error.message))
            raise

    async def embed(self, request: EmbedRequest) -> Embeddings:
        return await self.client.embed(_own(request, self.info))

    async def rerank(self, request: RerankRequest) -> Ranking:
        return await self.client.rerank(_own(request, self.info))

    async def decide(self, request: DecisionRequest) -> Decisions:
        return await self.client.decide(_own(request, self.info))

    async def tokenize(self, request: Request, *, pieces: bool = False) -> Tokenized:
        return await self.client.tokenize(_own(request, self.info), pieces=pieces)

    async def health(self, *, probe: bool = True) -> Health:
        return await self.client.health(probe=probe)

    async def metrics(self) -> Mapping[str, Any]:
        """See `Source`. Of a process that does not answer what it said last."""
        with trio.move_on_after(LOOK_SEC):
            self.model.metrics = await self.client.metrics()
        return self.model.metrics

    async def gpu_free_bytes(self) -> int:
        """Free bytes of the fullest GPU; 0 where its process has none, which is not asked then."""
        return int((await self.metrics())["gpu_free_bytes"]) if self.model.metrics.get("gpu_free_bytes") else 0

    async def activity(self, id: str = "") -> Activity:
        """See `Source`. The numbers are the supervisor's. Of a process that does not answer what it said last, of all
        requests.
        """
        shown = self.model.activity
        with trio.move_on_after(LOOK_SEC):
            activity = await self.client.activity(id)
            running, waiting = (
                tuple(map(self._numbered, requests)) for requests in (activity.running, activity.waiting)
            )
            shown = attrs.evolve(activity, running=running, waiting=waiting)
            if not id:
                self.model.activity = shown
        return shown

    def _numbered(self, request: RunningRequest) -> RunningRequest:
        number = request.number * MAX_MODELS + self.model.index
        return attrs.evolve(request, number=number, model=self.model.file.name)

    async def end_request(self, number: int) -> bool:
        """End the request of this number, as `activity` tells it; whether it still ran."""
        return await self.client.end_request(number // MAX_MODELS)

    async def trace(self, seconds: float) -> dict[str, Any]:
        """What its threads do within so many seconds, as `Models.trace`."""
        text = await self.client.trace(seconds)

        def read() -> dict[str, Any]:
            trace: dict[str, Any] = json.loads(text)
            for event in trace["traceEvents"]:
                event["pid"] = self.model.pid
                if event["name"] == "process_name":
                    event["args"] = {"name": self.model.file.name}
            return trace

        return await trio.to_thread.run_sync(read, abandon_on_cancel=True)

    async def explain(self, id: str = "") -> Explained:
        """See `Source`. What it knew ends with its process. The time of its load is the request's, too."""
        found = await self.client.explain(id)
        if not (ms := round(self.model.waits_ms.get(found.id, 0.0), 3)):
            return found
        spent = {"loading": ms, **found.spent_ms}
        return attrs.evolve(found, came_at=found.came_at - ms / 1000, age_ms=found.age_ms + ms, spent_ms=spent)


def _own(request: A, info: ServerInfo) -> A:
    """A request as the process with this card gets it: it names no model but one with an adapter."""
    name = with_adapter(info.model.name, request.model, info.capabilities.adapters)
    return attrs.evolve(request, model=None if name == info.model.name else name)

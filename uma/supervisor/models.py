"""All models by their names as one source: each is loaded in a process of its own once a request needs it."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import attrs
import trio

from uma import posix
from uma.client import Client
from uma.config import ALL_MODELS, BUILTIN, ModelSettings, RuntimeConfig
from uma.engine.activity import MAX_LISTED
from uma.engine.intake.overload import full_queue_retry_ms, is_full
from uma.engine.kv.disk import made_folder
from uma.engine.sizing import enough_mb, free_kv_bytes, free_memory_bytes, machine_memory_bytes
from uma.errors import (
    STOPPING,
    BadRequest,
    ConfigError,
    Ended,
    InternalError,
    ModelError,
    ModelUnusable,
    Overloaded,
    ShuttingDown,
    UmaError,
    UnknownModel,
)
from uma.figures import MB, size
from uma.llama.context import ROUNDED_TOKENS
from uma.metrics import EngineMetrics, kind_of, summed
from uma.models.catalog import ModelFile
from uma.models.shelf import Shelf
from uma.net.client import CLIENT, OWNER, QUEUED, asker
from uma.net.logfmt import log
from uma.supervisor.backoff import Failures
from uma.supervisor.child import child_config, running, taken_bytes
from uma.supervisor.estimate import header_card, most_weights_bytes, planned_memory, rough_bytes
from uma.supervisor.files import HubDownload, removal_of, remove
from uma.supervisor.model import (
    LOOK_SEC,
    MAX_MODELS,
    STANDSTILL_SEC,
    LoadedModel,
    LoadWait,
    ModelLoad,
    ServedModel,
)
from uma.supervisor.pressure import Pressure
from uma.supervisor.residency import UnloadReason, passes, plan
from uma.types import (
    DEFAULT_MAX_TOKENS,
    Activity,
    Capabilities,
    Explained,
    Health,
    Limits,
    ListedModel,
    LoadProgress,
    LoadState,
    ModelInfo,
    Models,
    ServerInfo,
    Source,
)
from uma.version import __version__

_log = logging.getLogger("uma.supervisor")

T = TypeVar("T")

_UNCOUNTED: Mapping[str, Any] = {
    **dict.fromkeys(("model_loads_total", "model_load_ms_total", "model_load_failures_total"), 0),
    "model_unloads_total": dict.fromkeys(get_args(UnloadReason), 0),
}

FREE_SHARE = 0.7
"""Part of the memory that is free at the start that all models together can take, without `--memory`."""
IDLE_UNLOAD = 30.0
"""Minutes without a request after which a model leaves, where the settings do not say."""
YIELD_SEC = 1.0
"""Time between two looks at whether other programs need the memory."""
MEASURE_SEC = 5.0
"""Between two looks at what the processes of models that are used take."""
SILENT_LOOKS = 10
"""Looks of `LOOK_SEC` in a row that a process can leave without an answer before it is ended."""
EVERY_SEC = 2.0
"""Time between two looks that are answered."""
MAX_LOADS = 2
"""Models that are loaded at once: a small one does not wait behind a large one, and the disk is not shared by many."""
MAX_PLANNED = 64
"""Maximum models whose headers are read before they are asked for."""
FOLDERS_SEC = 30.0
"""Maximum time of a look at the folders; then what was known last is taken."""
RESCAN_SEC = 2.0
"""Minimum time between two looks at the folders, unless they are known to have changed."""
RESCAN_SHARE = 20
"""Divisor of the time that looks at the folders take without a request."""
ENDS = tuple(f"requests_{end}" for end in ("stop", "length", "cancelled", "error", "rejected"))
"""Figures that count each request once it has ended."""
MIN_ADVISED = 2_048
"""Shortest context that a refusal for memory advises: a conversation hardly fits into less."""
AT_ONCE = 64
"""Requests at once by which a client of a model that has not been loaded yet is told when to come again."""


@attrs.define(eq=False)
class LoadedModels(Models):
    """See `types.Models`; made by `open_models`. All methods belong to the Trio thread."""

    config: RuntimeConfig
    shelf: Shelf
    budget_bytes: int
    """What all processes together can take."""
    pressure: Pressure = attrs.field(factory=Pressure, init=False)
    """What tells whether other programs need the memory."""
    _known: dict[str, ServedModel] = attrs.field(factory=dict, init=False)
    _replaced: dict[int, ServedModel] = attrs.field(factory=dict, init=False)
    """Models whose file is another one now, by their indices, until their processes have ended."""
    _asked: list[ServedModel] = attrs.field(factory=list, init=False)
    """Models that are to be loaded, in the order in which they were asked for."""
    _changes: dict[trio.Event, None] = attrs.field(factory=dict, init=False)
    """Events of the tasks that look at what changes."""
    _counted: dict[str, Mapping[str, Any]] = attrs.field(factory=dict, init=False)
    """Counters of models that were asked for, by their names: of their loads, and of processes that have ended."""
    _looking: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _look: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1), init=False)
    """Limiter of the thread that looks: one that was given up still has the shelf."""
    _looked_at: float = attrs.field(default=-math.inf, init=False)
    """When the last look at the folders ended."""
    _stuck: list[tuple[subprocess.Popen[bytes], int]] = attrs.field(factory=list, init=False)
    """Processes that not even SIGKILL has ended, as they wait for a disk or a driver, and the bytes that they have."""
    _paused_until: float = attrs.field(default=-math.inf, init=False)
    _is_draining: bool = attrs.field(default=False, init=False)
    _loading: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    @property
    def info(self) -> ServerInfo:
        """The default model's card, with the names of all; before its first load what is so of any."""
        return self._card_of(self._model(None))

    def _card_of(self, model: ServedModel) -> ServerInfo:
        card = self._with_own_limits(model.card) if model.card else self._blank(self._config_of(model.file))
        return attrs.evolve(card, models=self.names)  # what there is changes

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all models, the default one's first."""
        return tuple(file.name for file in self.shelf.files)

    def listed(self) -> Sequence[ListedModel]:
        return [self._listed(file) for file in self.shelf.files]

    def gone(self) -> Sequence[ListedModel]:
        names = self.names
        return [
            self._listed(model.file)
            for name, model in self._known.items()
            if model.client is not None and name not in names
        ]

    def find(self, model: str) -> ListedModel:
        return self._listed(self.shelf.named(model))

    def _listed(self, file: ModelFile) -> ListedModel:
        shared = {field.name: getattr(file, field.name) for field in attrs.fields(ModelFile) if field.name in _LISTED}
        own = self.shelf.settings_of(file)
        listed = ListedModel(**shared | {"path": str(file.path), "aliases": own.alias, "adapters": own.adapters})
        model = self._model_of(file)
        is_blind = self._config_of(file).mmproj == "off"
        failure = model.failures.why
        if failure and model.file_state not in (None, model.seen):
            failure = ""  # that was of another file
        if model.client is not None and model.seen is None:
            failure = "its file is gone, so it takes no more requests"
        now = trio.current_time()
        if model.card is not None:
            able = model.card.capabilities
            is_base = able.generate and not able.chat
            listed = attrs.evolve(listed, vision=able.vision, thinks=able.reasoning, is_base=is_base)
        elif is_blind:
            listed = attrs.evolve(listed, vision=False)
        return attrs.evolve(
            listed,
            info=model.card if model.state == "loaded" else None,
            loading_percent=None if model.load is None else model.load.percent,
            state=model.state,
            memory_bytes=model.needs_bytes if model.has_plan or model.has_process else 0,
            taken_bytes=model.taken_bytes,
            fits=not (objection := self._objection(model)),
            running=model.running,
            waiting=len(model.waits),
            is_pinned=model.stays,
            leaves_in_sec=max(0.0, model.leaves_at - now) if model.is_idle and model.leaves_at < math.inf else None,
            failure=failure or objection,
            retry_in_sec=model.failures.left_sec(now),
            not_pinned=model.not_pinned,
            yielded=model.yielded,
            waits_for="" if model.load is None or model.has_process else self._waits_for(model),
        )

    def _waits_for(self, model: ServedModel) -> str:
        """What a load that has not begun waits for: other loads, or the models that run, or are leaving."""
        there = [other for other in self._every if other.has_process]
        if any(other.successor is model for other in there):
            return "waits for the old file's requests"
        loading = [other.file.name for other in there if other.client is None]
        if len(loading) >= MAX_LOADS:
            return f"waits for the load of {' and '.join(loading)}"
        if not model.has_plan or model.needs_bytes <= self._most_bytes() - sum(other.needs_bytes for other in there):
            return ""  # it is about to begin
        there = [other for other in there if other.is_leaving] or [other for other in there if not other.stays] or there
        return f"waits for memory, which {' and '.join(map(_kept, there))}"

    async def card(self, model: str | None, *, loads: bool = True) -> ServerInfo:
        found = await self._find(model)
        if found.card is None and loads:
            async with found.in_use():
                pass
        if model is None:
            return self._card_of(found)
        if (state := await found.look()) is None:
            await found.follow_file()
        if found.card is not None and found.file_state == state:
            return self._card_of(found)
        if found.header is None or found.header[0] != state:
            if not found.has_plan:
                await self._plan(found)
            listed, n_ctx = self._listed(found.file), 0 if found.context is None else found.context.cells
            look = partial(header_card, listed, self._card_of(found), self._config_of(found.file), n_ctx)
            try:
                found.header = state, await trio.to_thread.run_sync(look, abandon_on_cancel=True)
            except ModelError as error:  # the file is another one than at the last look at the folders
                raise ModelUnusable(f"model: {error.message}") from error
        return attrs.evolve(found.header[1], models=self.names)

    @asynccontextmanager
    async def using(self, model: str | None, keep_sec: float | None = None, id: str = "") -> AsyncIterator[Source]:
        found = await self._find(model)
        async with found.in_use(keep_sec, id) as held:
            yield held

    def loaded(self, model: str | None) -> Source | None:
        found = self._model(model)
        return next((held for held in self._loaded() if held.model is found and not found.is_leaving), None)

    async def load(self, model: str | None, keep_sec: float | None = None) -> ListedModel:
        found = await self._find(model)
        if found.client is None:  # else it does nothing, and any client can ask for it again and again
            log(_log, logging.INFO, "model.asked", model=found.file.name, to="load", by=asker())
        async with found.in_use(keep_sec):
            pass
        return self._listed(found.file)

    async def unload(self, model: str | None) -> ListedModel:
        found = await self._find(model)
        if found.is_pinned:
            name = found.file.name
            raise BadRequest.at("model", f"{name} is pinned, so it does not leave; `uma unpin {name}` undoes that")
        log(_log, logging.INFO, "model.asked", model=found.file.name, to="unload", by=asker())
        found.keep_sec = 0.0 if found.client is None and found.load is not None else None
        found.leave("asked", "asked to (unload)")
        return self._listed(found.file)

    async def pin(self, model: str | None, *, is_pinned: bool = True) -> ListedModel:
        found = await self._find(model)
        to = "pin" if is_pinned else "unpin"
        log(_log, logging.INFO, "model.asked", model=found.file.name, to=to, by=asker())
        found.is_pinned, found.not_pinned = is_pinned, ""
        found.keep_sec = None if found.stays and not is_pinned else found.keep_sec
        if is_pinned:
            try:
                async with found.in_use():
                    pass
            except BaseException:
                found.is_pinned = False
                if not found.failures.why:  # it was refused for memory that others have
                    found.failures = Failures()
                raise
        self.changed()
        return self._listed(found.file)

    def download(self, name: str) -> HubDownload:
        if self.config.models != ALL_MODELS:
            raise BadRequest.at("model", f"this server has {self.config.models} alone; --models all serves what comes")
        return HubDownload.of(name)

    async def remove(self, model: str) -> None:
        found = await self._find(model)
        path = str(found.file.path)
        log(_log, logging.INFO, "model.asked", model=found.file.name, to="remove", by=asker())
        if found.file.name == BUILTIN:
            raise BadRequest.at("model", "the built-in model cannot be removed")
        await trio.to_thread.run_sync(removal_of, path, abandon_on_cancel=True)  # before it is unloaded in vain
        await self.unload(found.file.name)
        await trio.to_thread.run_sync(remove, path, abandon_on_cancel=True)
        await self.look_again(is_changed=True)

    async def look_again(self, *, is_changed: bool = False) -> None:
        """See `types.Models`. One look serves all that wait meanwhile."""
        async with self._looking:
            is_recent = trio.current_time() < self._looked_at + RESCAN_SEC
            before = self.shelf.files[0].name
            # Where all of those that `--models` names have gone, they stay as they were known.
            with suppress(ModelError), trio.move_on_after(FOLDERS_SEC):
                if not is_changed and is_recent and not await self._off_thread(self.shelf.is_outdated):
                    return
                await self._off_thread(self.shelf.read)
            self._looked_at = trio.current_time()
            if (default := self.shelf.files[0].name) != before:
                log(_log, logging.WARNING, "model.default_changed", model=default, before=before)
            files = {file.name: file for file in self.shelf.files}
            for name, model in self._known.items():
                model.file = files.get(name, model.file)
                is_deleted = model.client is not None and await model.look() is None
                if is_deleted or name not in files:
                    why = "its file was deleted" if is_deleted else "no sound file has its name any more"
                    model.leave("replaced", why)

    async def _off_thread(self, look: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(look, limiter=self._look, abandon_on_cancel=True)

    async def _find(self, name: str | None) -> ServedModel:
        """The model of a name. The folders are read again where it is not known, broken, or as the default one gone."""
        try:
            if name is None:
                await self._model(None).follow_file()
            return self._model(name)
        except (UnknownModel, ModelUnusable):
            await self.look_again()
            return self._model(name)

    def _model(self, name: str | None) -> ServedModel:
        return self._model_of(self.shelf.files[0] if name is None else self.shelf.named(name))

    def _model_of(self, file: ModelFile) -> ServedModel:
        if (model := self._known.get(file.name)) is None:
            minutes = self._config_of(file).idle_unload
            keep_sec = 60 * (IDLE_UNLOAD if minutes < 0 else minutes) or math.inf
            taken = {known.index for known in self._every}
            index = next(index for index in range(len(taken) + 1) if index not in taken)
            model = self._known[file.name] = ServedModel(file, self, index, keep_sec)
        return model

    @property
    def _every(self) -> list[ServedModel]:
        """All that can have a process, those that are asked by their names last."""
        return [*self._replaced.values(), *self._known.values()]

    def succeed(self, model: ServedModel) -> ServedModel:
        """See `model.ModelLoader`."""
        self._replaced[model.index] = self._known.pop(model.file.name)
        new = self._model_of(model.file)
        new.is_pinned, new.keep_sec = model.is_pinned, model.keep_sec
        model.is_pinned, model.keep_sec = False, None
        return new

    # As a source of its own.

    async def health(self, *, probe: bool = True) -> Health:
        """Whether requests are taken; with a probe, whether the models that are loaded generate."""
        if self._is_draining:
            return Health("draining", 0.0, 0)
        every = await self._of_each(LoadedModel.health) if probe else []
        found = next((health for health in every if health.status != "ok"), every[0] if every else Health("ok", 0.0, 0))
        return attrs.evolve(found, paused_sec=self._paused_sec)

    async def activity(self, id: str = "") -> Activity:
        """That of all models together, and what waits for a model's load."""
        every = await self._of_each(lambda held: held.activity(id))
        waits = tuple(wait.as_request(load) for wait, load in self._waits(id))
        lanes = [wait.priority for wait in waits]
        return Activity(
            tuple(request for activity in every for request in activity.running),
            sum(activity.waiting_interactive for activity in every) + lanes.count(1),
            sum(activity.waiting_normal for activity in every) + lanes.count(0),
            sum(activity.waiting_background for activity in every) + lanes.count(-1),
            (*(request for activity in every for request in activity.waiting), *waits[:MAX_LISTED]),
        )

    def _waits(self, id: str = "") -> list[tuple[LoadWait, LoadState]]:
        """Requests, all or with this id, that wait for a load, each with how far that is."""
        return [
            (wait, self._listed(model.file).load)
            for model in self._every
            for wait in model.waits
            if wait.id and id in ("", wait.id)
        ]

    async def explain(self, id: str = "") -> Explained:
        """Account of the newest request with this id, of all models that are loaded. Raises `Ended` for one that its
        process has taken along.
        """

        async def explained(held: LoadedModel) -> Explained:
            with trio.fail_after(LOOK_SEC):
                return await held.explain(id)

        found = await self._of_each(explained)
        owner = OWNER.get()
        found += [wait.explained(load) for wait, load in self._waits(id) if owner in (None, wait.owner)]
        lost = [why for of in self._every for lost, whose, why in of.lost if lost == id and owner in (None, whose)]
        if lost and not found:
            raise Ended(f"{lost[-1]}. What it had spent its time on is lost; model.ended in the log says why it ended")
        if not found:
            which = f"no request of yours with the id {id[:128]!r} is known" if id else "no request of yours is known"
            raise BadRequest.at("request", f"{which}; what a model knew ends when it is unloaded")
        return max(found, key=lambda request: request.came_at)

    async def metrics(self) -> Mapping[str, Any]:
        """The sums over all models, and in `models` each one's own figures by its name, once it was asked for. Counters
        have those of processes that have ended too.
        """
        await self._of_each(LoadedModel.metrics)
        models = {}
        for name, counted in self._counted.items():
            now = [{**model.metrics, **model.gauges} for model in self._every if model.file.name == name]
            # (A file in the place of another has its name's state; what both take together is the name's.)
            models[name] = {**now[-1], **summed([counted, *now]), "model_state": now[-1]["model_state"]}
        return {
            **summed([self.snapshot(), *models.values()]),
            "paused_sec": round(self._paused_sec, 3),
            "memory_budget_bytes": self.budget_bytes,
            "models": {name: models[name] for name in self.names if name in models},
        }

    def snapshot(self) -> Mapping[str, Any]:
        return EngineMetrics().snapshot()

    def _loaded(self) -> list[LoadedModel]:
        """Models that can be asked just now. None of them is kept by that."""
        known = self._every
        return [
            LoadedModel(model, model.client) for model in known if model.client is not None and not model.client.is_lost
        ]

    async def _of_each(self, ask: Callable[[LoadedModel], Awaitable[T]]) -> list[T]:
        """What those answer that can be asked just now, all at once. One that cannot is left out."""
        found: list[T] = []

        async def answer(held: LoadedModel) -> None:
            with suppress(UmaError, trio.TooSlowError):
                found.append(await ask(held))

        async with trio.open_nursery() as nursery:
            for held in self._loaded():
                nursery.start_soon(answer, held)
        return found

    def _blank(self, config: RuntimeConfig) -> ServerInfo:
        return ServerInfo(
            f"uma/{__version__}",
            ModelInfo("models", "", "", 0, 0, "", 0, 0, has_chat_template=True),
            Capabilities(True, True, True, True, True, "none: no model is loaded", True, 0, ()),
            Limits(
                n_ctx=config.n_ctx,
                max_tokens=config.max_tokens or DEFAULT_MAX_TOKENS,
                max_prompt_bytes=config.max_prompt_bytes,
                max_frame_bytes=self.config.frame_bytes(takes_media=any(map(self._takes_media, self.shelf.files))),
                max_sessions=self.config.max_sessions,
                max_queue=config.max_queue,
                max_sequences=config.max_sequences or AT_ONCE,
                has_max_tokens=config.max_tokens > 0,
            ),
        )

    def _takes_media(self, file: ModelFile) -> bool:
        """Whether a model sees or hears, as a session that can ask any of them can have it."""
        named = self._config_of(file).mmproj
        return named != "off" and bool(named or file.projector)

    # Loading and leaving.

    def begin_drain(self) -> None:
        """See `server.connection.ServedEngine`. Models leave with their last request: they save prefixes meanwhile."""
        self._is_draining = True
        for model in self._every:
            model.leave("stopped", "the server stops")

    async def end_request(self, number: int) -> bool:
        of_model = [model for model in self._loaded() if model.model.index == number % MAX_MODELS]
        return bool(of_model) and await of_model[0].end_request(number)

    async def pause(self, seconds: float) -> None:
        """See `server.connection.ServedEngine`. What is loaded meanwhile is paused, too."""
        self._paused_until = trio.current_time() + seconds
        await self._of_each(lambda held: held.client.pause(seconds))

    async def _pause_too(self, client: Client) -> None:
        if self._paused_sec:
            await client.pause(self._paused_sec)

    @property
    def _paused_sec(self) -> float:
        return max(0.0, self._paused_until - trio.current_time())

    async def trace(self, seconds: float) -> str:
        traces: list[dict[str, Any]] = []
        failures: list[UmaError] = [BadRequest("no model is loaded, so there is nothing to trace")]

        async def trace(held: LoadedModel) -> None:
            try:
                traces.append(await held.trace(seconds))
            except UmaError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            for held in self._loaded():
                nursery.start_soon(trace, held)
        if not traces:
            raise failures[-1]
        events = [event for child_trace in traces for event in child_trace["traceEvents"]]
        return await trio.to_thread.run_sync(
            partial(json.dumps, traces[0] | {"traceEvents": events}), abandon_on_cancel=True
        )

    def ask_for(self, model: ServedModel) -> ModelLoad:
        """See `model.ModelLoader`. Raises what it has failed by, a moment ago."""
        if self._is_draining:
            raise ShuttingDown(STOPPING)
        if model.load is None:
            if model.failures.why and (retry_ms := model.retry_after_ms) is not None:
                raise model.failure(
                    f"{model.failures.why}; it is tried again in {retry_ms / 1000:.0f} s at the earliest"
                )
            self._count(model, {})
            model.load = ModelLoad()
            self._asked.append(model)
            self.changed()
        return model.load

    def _count(self, model: ServedModel, more: Mapping[str, Any]) -> None:
        """Add the counters and histograms among some figures to those of a model's name, which begin at 0."""
        counted = summed([self._counted.get(model.file.name) or {**self.snapshot(), **_UNCOUNTED}, more])
        grows = {name: value for name, value in counted.items() if kind_of(name) in ("counter", "histogram")}
        self._counted[model.file.name] = grows

    def check_queue(self, model: ServedModel) -> None:
        """See `model.ModelLoader`; as `engine.intake.gate.Gate` does."""
        waits, config, (lane, _) = [wait for wait in model.waits if wait.id], self._config_of(model.file), QUEUED.get()
        at_once = config.max_sequences or self._card_of(model).limits.max_sequences
        # More answers than run at once are refused later.
        queued = [
            (own, sum(min(drawn, at_once) for drawn in counts)) for own, counts in (wait.queued for wait in waits)
        ]
        waiting, ahead = (sum(answers for own, answers in queued if own >= least) - at_once for least in (-1, lane))
        is_first = not any(wait.client == CLIENT.get() for wait in waits)
        if is_full(lane, waiting, ahead, config.max_queue, is_first=is_first):
            raise Overloaded(
                f"the queue is full: {waiting + at_once:,} requests wait for the load of {model.file.name} "
                f"(max_queue is {config.max_queue:,})",
                retry_after_ms=full_queue_retry_ms(waiting, config.max_queue, 0.0, at_once),
            )

    async def run(self) -> None:
        """Load what is asked for, until `close`; return once all models have left."""
        async with trio.open_nursery() as nursery:
            with self._loading:
                async with trio.open_nursery() as both:
                    both.start_soon(self._at_changes, self._let_idle_go)
                    both.start_soon(self._measure_used)
                    both.start_soon(self._follow_files)
                    both.start_soon(self._load_pinned)
                    both.start_soon(self._tell_unusable)
                    if self.config.yield_memory:
                        both.start_soon(self._yield_memory)
                    both.start_soon(self._at_changes, self._bring_back)
                    await self._at_changes(partial(self._load_asked, nursery))

    async def _at_changes(self, look: Callable[[], Awaitable[float]]) -> None:
        """Look at all whenever something changes, and at the time that `look` says."""
        while True:
            change = trio.Event()
            self._changes[change] = None
            due = await look()
            with trio.move_on_at(due):
                await change.wait()
            del self._changes[change]

    def changed(self) -> None:
        for change in self._changes:
            change.set()

    async def _load_asked(self, nursery: trio.Nursery) -> float:
        """Begin to load what can be loaded. When to look again, where nothing changes before."""
        while True:
            for asked in list(self._asked):
                is_planned = asked.has_plan and asked.file_state == await asked.look()
                if not is_planned and not asked.has_process:
                    await self._plan(asked)
            if not self._asked:  # each end of a request comes here
                return math.inf
            unused_bytes = await trio.to_thread.run_sync(free_kv_bytes, self.config, abandon_on_cancel=True)
            self._drop_unwanted()
            if sum(candidate.has_process and candidate.client is None for candidate in self._every) >= MAX_LOADS:
                return math.inf
            model, again_at = await self._next_load(unused_bytes)
            if model is None:
                return again_at
            self._asked.remove(model)
            model.has_process = True
            nursery.start_soon(self._serve, model)

    def _drop_unwanted(self) -> None:
        """Drop loads that have not begun and that nobody waits for any longer. What was to leave for one of them, and
        still runs, stays, unless another load needs its memory.
        """
        unwanted = [asked for asked in self._asked if not asked.waits and not asked.stays]
        if not unwanted:
            return
        for model in self._every:
            if model.is_leaving and model.left_for[0] == "memory" and not model.stay.cancel_called:
                model.is_leaving = False
                if model.load is not None:
                    unwanted.append(model)  # what waits for it is let in
        for model in dict.fromkeys(unwanted):
            assert model.load is not None
            self._asked.remove(model)
            model.load.ended.set()
            model.load = None

    async def check_room(self) -> None:
        """Raise `ConfigError` where not one model fits into what all can have. `run` tells of those that do not."""
        smallest = ""
        for file in sorted(self.shelf.files, key=lambda candidate: candidate.size_bytes):
            model = self._model_of(file)
            await self._plan(model)
            if not (objection := self._objection(model)):
                return
            smallest = smallest or objection
        raise ConfigError.at("memory", f"{smallest}; it is the smallest")

    async def _plan(self, model: ServedModel) -> None:
        """Note what a model will take, or that no memory holds it: as its process would find, which is not begun."""
        config, state = self._child_config(model), await model.look()
        if model.file_state != state:  # what another file was and took says nothing of this one
            model.file_state, model.size_bytes, model.card = state, 0, None
        try:
            planned, model.context = await trio.to_thread.run_sync(
                planned_memory, model.file.path, config, abandon_on_cancel=True
            )
        except ConfigError as error:
            model.planned_bytes = 0
            least_bytes = max(rough_bytes(model.file.size_bytes), self.budget_bytes)
            enough = await trio.to_thread.run_sync(self._enough, [model], least_bytes, abandon_on_cancel=True)
            why = error.message.removeprefix("n_ctx: ")
            if enough:  # else no --memory is: what bounds it is the memory that is free
                enough, why = f", {enough} is enough", f"{self._has()}, and {why.partition('; ')[0]}"
            model.objection = f"{model.file.name} does not fit{enough}: {why}"
        else:
            model.planned_bytes, model.objection = planned + config.cache_ram_mb * MB, ""  # which fills later
            if model.needs_bytes > self.budget_bytes:
                model.objection = await self._too_large(model, self._has(), self.budget_bytes)

    def _enough(self, models: Sequence[ServedModel], least_bytes: int) -> str:
        """The `--memory`, of at least so many bytes, that is enough for these models together; empty: not found. Any
        thread.
        """
        enough = enough_mb(-(-least_bytes // MB), partial(self._check_fit, models))
        return f"--memory {enough}" if enough else ""

    def _check_fit(self, models: Sequence[ServedModel], memory_mb: int, n_ctx: int = 0) -> None:
        """Raise `ConfigError` where these models would not fit together with this `--memory` and, unless it is 0, this
        `--n-ctx`: with more memory each has a longer context, too. Any thread.
        """
        needs_bytes = 0
        for model in models:
            config = self._child_config(model, memory_mb * MB, n_ctx)
            planned, _ = planned_memory(model.file.path, config)
            beyond_plan = max(0, model.size_bytes - model.planned_bytes) if model.size_bytes else 0
            needs_bytes += planned + config.cache_ram_mb * MB + beyond_plan
        if needs_bytes > memory_mb * MB:
            raise ConfigError.at("memory", f"these models take {size(needs_bytes)}")

    async def too_large(self) -> AsyncIterator[str]:
        """Plan models that no request has asked for: lists say which of them never fit. The reasons of these."""
        for file in self.shelf.files[:MAX_PLANNED]:
            if not (model := self._model_of(file)).has_plan:
                await self._plan(model)
            if objection := self._objection(model):
                yield objection

    async def _tell_unusable(self) -> None:
        for reason in self.shelf.broken:
            log(_log, logging.WARNING, "model.broken", reason=reason)
        async for reason in self.too_large():
            log(_log, logging.WARNING, "model.too_large", reason=reason)

    def _objection(self, model: ServedModel) -> str:
        """Why no memory holds a model; empty where all models together can have as much."""
        if model.has_plan and model.needs_bytes <= self.budget_bytes:
            return ""
        takes = f"{model.file.name} takes about {size(model.needs_bytes)}"
        return model.objection or (f"{takes}, and {self._has()}" if model.has_plan else "")

    def _has(self) -> str:
        own = "" if self.config.memory else f", which is {100 * FREE_SHARE:g} % of what is free"
        return f"all models together can have {size(self.budget_bytes)} (--memory){own}"

    async def _too_large(
        self, model: ServedModel, there: str, most_bytes: int, beside: Sequence[ServedModel] = ()
    ) -> str:
        """That a model takes more than `most_bytes`, the memory that is `there`, and which settings are enough for it
        and those that stay `beside` it.
        """
        needs_bytes, context, models = model.needs_bytes, model.context, [model, *beside]
        takes = f"{model.file.name} takes about {size(needs_bytes)}"
        helps = []
        if context is not None and context.kv_bytes:
            left_bytes = most_bytes - needs_bytes + context.kv_bytes
            n_ctx = context.cells * left_bytes // context.kv_bytes // ROUNDED_TOKENS * ROUNDED_TOKENS
            if n_ctx > 0:
                takes += f", {size(context.kv_bytes)} of it for a context of {context.cells:,} tokens"
            if n_ctx >= MIN_ADVISED:
                with suppress(ConfigError):
                    check = partial(self._check_fit, models, self.budget_bytes // MB, n_ctx)
                    await trio.to_thread.run_sync(check, abandon_on_cancel=True)
                    helps.append(f"--n-ctx {n_ctx}")
        least_bytes = sum(planned.needs_bytes for planned in models)
        enough = await trio.to_thread.run_sync(self._enough, models, least_bytes, abandon_on_cancel=True)
        helps += [enough] if enough else []
        advice = f"; {' or '.join(helps)} is enough" if helps else ""
        return f"{takes}, and {there}{advice}"

    def _child_config(self, model: ServedModel, budget_bytes: int = 0, n_ctx: int = 0) -> RuntimeConfig:
        """The settings of a model's process, by those of this server or with this budget and `--n-ctx`."""
        path = BUILTIN if model.file.name == BUILTIN else str(model.file.path)
        server = attrs.evolve(self.config, n_ctx=n_ctx) if n_ctx else self.config
        config = attrs.evolve(server, **self.shelf.settings_of(model.file).values)
        return child_config(config, path, budget_bytes or self.budget_bytes)

    def _config_of(self, file: ModelFile) -> RuntimeConfig:
        """The settings that a model has."""
        values = self.shelf.settings_of(file).values
        return attrs.evolve(self.config, **values) if values else self.config

    def _note_stuck(self, model: ServedModel, process: subprocess.Popen[bytes]) -> None:
        self._stuck.append((process, model.taken_bytes or model.needs_bytes))

    def _most_bytes(self) -> int:
        """What models can have together now."""
        self._stuck = [(process, n_bytes) for process, n_bytes in self._stuck if process.poll() is None]
        return self.budget_bytes - sum(n_bytes for _, n_bytes in self._stuck)

    async def _next_load(self, unused_bytes: int) -> tuple[ServedModel | None, float]:
        """The model to load now, with a shorter context where it fits by that beside others, and into what is free on
        the machine; or None, and when to look again. For the first that waits for memory others leave; those behind it
        are loaded where it does not wait any longer for that.
        """
        again_at, ahead_bytes, most_bytes = math.inf, 0, self._most_bytes()
        for model in list(self._asked):
            name, needs_bytes = model.file.name, model.needs_bytes
            if objection := self._objection(model):
                model.objection = objection
                self._refuse(model, objection)
                continue
            if needs_bytes > most_bytes:
                there = f"beside a process of another, which does not end, there are {size(max(0, most_bytes))}"
                self._refuse(model, f"{name} takes about {size(needs_bytes)}, and {there}", is_crowded_out=True)
                continue
            residents = [candidate.as_resident() for candidate in self._every if candidate.has_process]
            if ahead_bytes:
                if passes(name, needs_bytes, ahead_bytes, most_bytes, residents):
                    return model, math.inf
            else:
                step = plan(name, needs_bytes, most_bytes, residents, trio.current_time())
                left_bytes = most_bytes - sum(resident.size_bytes for resident in residents)
                crowds = bool(step.leave or step.pinned or step.again_at) and not self._config_of(model.file).n_ctx
                if crowds:
                    model.n_ctx = model.shorter_n_ctx(min(left_bytes, unused_bytes))
                if step.loads or model.n_ctx:
                    return model, math.inf
                if step.pinned:
                    stay = [self._known[pinned_model] for pinned_model in step.pinned]
                    left = most_bytes - sum(staying.needs_bytes for staying in stay)
                    names = ", ".join(step.pinned)
                    they_stay, which = ("stays", "it") if len(stay) == 1 else ("stay", "one")
                    there = f"beside {names}, which {they_stay}, there are {size(max(0, left))}; unpin {which}"
                    self._refuse(model, await self._too_large(model, there, left, stay), is_crowded_out=True)
                    continue
                if step.leave and model.objection:
                    self._refuse(model, f"{model.objection}; nothing leaves for it again")
                    continue
                for leaving in step.leave:
                    self._known[leaving].leave("memory", f"memory for {name}")
                again_at = math.inf if step.again_at is None else step.again_at
            ahead_bytes += needs_bytes
        return None, again_at

    def _refuse(self, model: ServedModel, why: str, *, is_crowded_out: bool = False) -> None:
        """Tell all that wait for a model that it cannot be loaded; or not as long as others stay."""
        assert model.load is not None
        self._asked.remove(model)
        model.load.failure, model.load.is_refused = why, is_crowded_out
        self._count(model, {"model_load_failures_total": 1})
        model.load.ended.set()
        if model.stays:  # it is tried again by itself, and not at once
            of_its_own = model.failures.why if is_crowded_out else why
            model.failures.note(of_its_own, trio.current_time(), None)
        model.load = None
        self.changed()

    async def _follow_files(self) -> None:
        """Read the folders again once files have come or gone, so that every list has what is there. Looks at large
        folders and slow disks are rarer: they take a twentieth of a thread at most.
        """
        took_sec = 0.0
        while True:
            await trio.sleep(max(RESCAN_SEC, RESCAN_SHARE * took_sec))
            began = trio.current_time()
            with trio.move_on_after(FOLDERS_SEC):
                if await self._off_thread(self.shelf.has_changed):
                    await self.look_again(is_changed=True)
            took_sec = trio.current_time() - began

    async def _measure_used(self) -> None:
        """Measure again what is used: a process takes more as it computes larger batches and its file's pages come."""
        while True:
            await trio.sleep(MEASURE_SEC)
            await self._of_each(self._measure_if_used)

    async def _measure_if_used(self, held: LoadedModel) -> None:
        await held.model.look()
        if held.model.running or held.model.used_at > held.model.measured_at:
            await self._measure(held)

    async def _measure(self, held: LoadedModel) -> None:
        """Take note of what a model's process takes, and of the prefixes that it can still come to keep."""
        model = held.model
        model.measured_at = trio.current_time()
        metrics, config = await held.metrics(), self._child_config(model)
        taken = await trio.to_thread.run_sync(taken_bytes, model.pid, abandon_on_cancel=True)
        if taken is not None and metrics:
            model.taken_bytes = taken
            most_bytes = config.cache_ram_mb * MB
            more_bytes = max(0, most_bytes - metrics["cache_ram_bytes"]) + model.spared_bytes
            model.size_bytes = max(model.size_bytes, taken + more_bytes)
            self.changed()

    async def _load_pinned(self) -> None:
        """Load what the configuration pins, in its order or the smallest first; what cannot be is not pinned."""
        has_order = self.config.models != ALL_MODELS
        for file in sorted(self.shelf.files, key=lambda candidate: 0 if has_order else candidate.size_bytes):
            if self.shelf.settings_of(file).pin:
                try:
                    await self.pin(file.name)
                except UmaError as error:
                    log(_log, logging.WARNING, "model.not_pinned", model=file.name, reason=error.message)
                    self._model_of(file).not_pinned = f"{file.name} is not pinned, as its settings ask: {error.message}"

    async def _bring_back(self) -> float:
        """Load again what is to stay and whose process has ended, unless its file or name is gone. When one can be
        tried.
        """
        if self._is_draining:
            return math.inf
        ended = [
            candidate
            for candidate in self._every
            if candidate.stays and candidate.client is None and candidate.load is None
        ]
        names = self.names
        missing = [model for model in ended if model.file.name in names and await model.look() is not None]
        for model in missing:
            if model.retry_after_ms is None:
                self.ask_for(model)
        return min((model.failures.retry_at for model in missing if model.load is None), default=math.inf)

    async def _let_idle_go(self) -> float:
        """End what nothing has used for as long as it is kept, and what is idle where a model has taken more than was
        planned. When the next one's time comes.
        """
        now = trio.current_time()
        over = sum(candidate.needs_bytes for candidate in self._every if candidate.has_process) - self._most_bytes()
        idle = [candidate for candidate in self._every if candidate.is_idle]
        for model in sorted(idle, key=lambda candidate: candidate.used_at):
            is_over = over > 0 and model.as_resident().stays_until <= now and not model.stays
            if is_over or model.leaves_at <= now:
                kept = f"{now - model.used_at:.0f} s ({'idle_unload' if model.keep_sec is None else 'keep_alive'})"
                why = "all together are over --memory" if is_over else f"idle for {kept}"
                model.leave("memory" if is_over else "idle", why)
                over -= model.needs_bytes
        return min((model.leaves_at for model in idle if not model.is_leaving), default=math.inf)

    async def _yield_memory(self) -> None:
        """Have idle models leave, the largest first and one after another, while other programs need the memory; then
        prefixes of those that are left.
        """
        while True:
            await trio.sleep(YIELD_SEC)
            of_gpus = await self._of_each(LoadedModel.gpu_free_bytes)
            look = partial(self.pressure.reason, trio.current_time(), min(filter(None, of_gpus), default=0))
            why = await trio.to_thread.run_sync(look, abandon_on_cancel=True)
            known = self._every
            idle = [model for model in known if model.is_idle and not model.stays]
            for model in known:
                model.yielded = model.yielded if why or model.client is None else ""
            if not why or any(model.is_leaving for model in known):
                continue
            if idle:
                model = max(idle, key=lambda candidate: candidate.taken_bytes or candidate.needs_bytes)
                model.yielded = f"left, as {why}"
                log(_log, logging.INFO, "model.yielded", model=model.file.name, bytes=model.taken_bytes, reason=why)
                model.leave("yielded", f"memory for other programs: {why}")
            else:
                await self._of_each(LoadedModel.metrics)
                self.yield_memory(why)

    def yield_memory(self, why: str = "a signal asks for it") -> None:
        """See `server.connection.ServedEngine`: of the model that keeps most."""
        keeping = [held.model for held in self._loaded() if held.model.metrics.get("cache_ram_snapshots")]
        if keeping and sys.platform == "linux":
            model = max(keeping, key=lambda candidate: candidate.metrics["cache_ram_bytes"])
            assert model.pid is not None
            os.kill(model.pid, signal.SIGRTMIN)
            model.yielded = f"dropped prefixes, as {why}"
            log(_log, logging.INFO, "prefixes.yielded", model=model.file.name, reason=why)

    def close(self) -> None:
        """Let all models go, in order, and load no more."""
        self.begin_drain()
        self._loading.cancel()
        for model in self._every:
            model.stay.cancel()

    async def _serve(self, model: ServedModel) -> None:
        """The life of one process, from its start to its end."""
        load, began = model.load, trio.current_time()
        assert load is not None
        loaded_at: float | None = None
        model.file_state = await model.look()

        def started(pid: int) -> None:
            model.pid = pid
            log(_log, logging.INFO, "model.loading", model=model.file.name, pid=pid, by=load.by)

        why: UmaError | None = None
        try:
            config = self._child_config(model)
            config = attrs.evolve(config, n_ctx=model.n_ctx or config.n_ctx)
            load.note(0)
            with load.patience:
                async with running(
                    model.file.name, config, started, load.note, partial(self._note_stuck, model)
                ) as client:
                    held = LoadedModel(model, client)
                    await self._measure(held)
                    load.patience.deadline = math.inf
                    await self._pause_too(client)
                    loaded_at = model.used_at = trio.current_time()
                    model.repaid_at = 2 * loaded_at - began
                    model.card, model.client, model.load = self._with_own_limits(client.info), client, None
                    model.failures.why = model.objection = ""
                    load.ended.set()
                    self._note_loaded(model, loaded_at - began)
                    self.changed()
                    with model.stay:
                        raise await _why_lost(client)
                    with suppress(UmaError):
                        await held.metrics()  # the last of its counters
            if load.patience.cancelled_caught:
                why = InternalError(f"it was not loaded: no progress for {STANDSTILL_SEC:g} s")
        except (UmaError, OSError) as error:
            why = error if isinstance(error, UmaError) else InternalError(str(error))
        finally:
            name, reason = model.file.name, model.left_for[1] if why is None else why.message
            unloads = {"model_unloads_total": {"crashed" if why else model.left_for[0]: 1}}
            self._count(model, {"model_load_failures_total": 1} if loaded_at is None else unloads)
            self._forget_process(model)
            if why is not None:
                model.failures.note(f"{name}: {why.message}", trio.current_time(), loaded_at)
                model.objection = model.failures.why if isinstance(why, ModelUnusable) else ""
            elif loaded_at is not None:
                model.failures, model.keep_sec = Failures(), None
            if not load.ended.is_set():
                model.load, load.failure = None, model.failures.why or f"{name}: it was not loaded"
                load.ended.set()
            self.changed()
            log(_log, logging.WARNING if why else logging.INFO, "model.ended", model=name, reason=reason or None)

    def _note_loaded(self, model: ServedModel, took_sec: float) -> None:
        ms, model.yielded = round(1000 * took_sec), ""
        self._count(model, {"model_loads_total": 1, "model_load_ms_total": ms})
        n_ctx, n_bytes = model.card.limits.n_ctx if model.card else 0, model.size_bytes - model.spared_bytes
        log(_log, logging.INFO, "model.loaded", model=model.file.name, ms=ms, bytes=n_bytes, n_ctx=n_ctx)

    def _forget_process(self, model: ServedModel) -> None:
        """Keep the counters of a process that has ended, with the requests that failed by its end, and no more."""
        lost = 0 if model.client is None else model.client.lost_requests
        figures = {**self.snapshot(), **model.metrics}
        figures["requests_error"] += lost
        # Of those that were lost it had told some, where it was asked after they had come.
        figures["requests_total"] = max(figures["requests_total"], sum(figures[end] for end in ENDS))
        self._count(model, figures)
        model.forget_process()
        if model.successor is not None:
            del self._replaced[model.index]

    def _with_own_limits(self, info: ServerInfo) -> ServerInfo:
        """A process's card, with the bounds that clients meet here."""
        ours = self._blank(self.config).limits
        limits = attrs.evolve(info.limits, max_frame_bytes=ours.max_frame_bytes, max_sessions=ours.max_sessions)
        return attrs.evolve(info, limits=limits)


def _kept(model: ServedModel) -> str:
    """That a model has memory, and why it keeps that for now."""
    kept = "it leaves" if model.is_leaving else "it is pinned" if model.stays else "it was used just now"
    idle = "it loads" if model.client is None else kept
    running = f"{model.running} request{'s' * (model.running > 1)}"
    return f"{model.file.name} has ({running if model.running else idle})"


async def _why_lost(client: Client) -> UmaError:
    """Wait until a process has ended, or does not answer and so is to be ended; the reason."""
    silence: list[UmaError] = []

    async def watch() -> None:
        silent = 0
        while silent < SILENT_LOOKS:
            with trio.move_on_after(LOOK_SEC) as look:
                await client.health(probe=False)
            # While it waits for a reader of its own, an answer can have come unread.
            silent = silent + 1 if look.cancelled_caught and client.is_reading else 0
            await trio.sleep(0 if silent else EVERY_SEC)
        silence.append(InternalError(f"timeout: it did not answer for {SILENT_LOOKS * LOOK_SEC:g} s, and was ended"))
        client.close()  # which ends all its requests

    async def watch_until_lost() -> None:
        with suppress(UmaError):  # it has ended
            await watch()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_until_lost)
        error = await client.lost()
        nursery.cancel_scope.cancel()
    return silence[0] if silence else error


_LISTED = frozenset(field.name for field in attrs.fields(ListedModel))


@asynccontextmanager
async def open_models(
    config: RuntimeConfig, progress: LoadProgress, tables: Mapping[str, ModelSettings] | None = None
) -> AsyncIterator[LoadedModels]:
    """The models of `config.models`, with what the configuration's `tables` have for single ones, until the block is
    left. None is loaded before a request needs it.

    Raises `ModelError` where one of them is not here, and `ConfigError` where `--cache-dir` cannot be written, or none
    of them fits into `--memory`.
    """
    if not posix.HAS_UNIX_SOCKETS:
        raise ConfigError("unsupported on Windows: several models in one server; name one with --model")
    config = await trio.to_thread.run_sync(_with_prefixes, config)
    models = await _read(config, tables or {})
    await models.check_room()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(models.run)
        yield models
        models.close()


async def check_models(config: RuntimeConfig, tables: Mapping[str, ModelSettings]) -> None:
    """Raise as `open_models`, but for its folder, before anything is opened."""
    await (await _read(config, tables)).check_room()


async def too_large(config: RuntimeConfig, tables: Mapping[str, ModelSettings]) -> Sequence[str]:
    """Why a server with these settings could never load some of its models. Raises `ModelError` as `open_models`."""
    return [reason async for reason in (await _read(config, tables)).too_large()]


async def _read(config: RuntimeConfig, tables: Mapping[str, ModelSettings]) -> LoadedModels:
    models = LoadedModels(config, shelf_of(config, tables), budget_of(config))
    await trio.to_thread.run_sync(models.shelf.read)
    return models


def shelf_of(config: RuntimeConfig, tables: Mapping[str, ModelSettings]) -> Shelf:
    """The models of these settings, which are yet to be read. Any thread."""
    return Shelf(config.models, os.environ, config.model, tables, most_weights_bytes(budget_of(config)))


def budget_of(config: RuntimeConfig) -> int:
    """Bytes that the models of a server that started now could take together; of a `--memory` beyond what the machine
    has, that. Any thread.
    """
    return min(config.memory * MB, machine_memory_bytes()) or int(FREE_SHARE * free_memory_bytes())


def _with_prefixes(config: RuntimeConfig) -> RuntimeConfig:
    """The settings with a folder for prefixes that can be written, where there is to be one."""
    if not config.prefix_folder:
        return config
    try:
        folder = made_folder(Path(config.prefix_folder))
    except ConfigError as error:
        if config.cache_dir == config.prefix_folder:  # somebody has named it
            raise
        log(_log, logging.WARNING, "cache.disk_disabled", reason=error.message)
        return attrs.evolve(config, cache_dir="")
    log(_log, logging.INFO, "cache.disk_enabled", folder=folder, most_mb=config.cache_disk_mb)
    return config

"""What the page asks its server for: its files, answers as they are written, and the live view."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import pairwise
from typing import Annotated, Any

import attrs
import trio

from uma.constraints import Length, Range, hints_of
from uma.contracts.explaining import seconds, sentences
from uma.errors import BadRequest, UmaError, UnknownModel
from uma.http.access import host_parts
from uma.http.exchange import Exchange
from uma.http.fields import MAX_MESSAGES, Common, allowed_tokens, urgency
from uma.http.gateway import Gateway
from uma.http.local_user import user_of
from uma.http.many import check_only_model, known_model, named_models
from uma.http.models import ModelNames
from uma.http.page.answers import NOTHING, UPDATE_INTERVAL_SEC, Answers, Extent, Make, PageAnswer, event, given
from uma.http.page.assets import Asset, load
from uma.http.page.live import LiveFeed
from uma.http.page.processes import Processes
from uma.http.problem import Forbidden, NotFound, Problem
from uma.http.reader import read
from uma.http.request_history import sees_history
from uma.http.running import explained
from uma.http.thinking import Wish, thinking
from uma.models.names import with_adapter, with_each
from uma.net.client import QUEUED
from uma.protocol.converter import unstructure
from uma.types import (
    CAUSES,
    CHAT_SAMPLING,
    EMBEDDINGS,
    RERANKER,
    Activity,
    Explained,
    ListedModel,
    Message,
    ModelInfo,
    Models,
    ReasoningMode,
    Request,
    RunningRequest,
    SamplerSettings,
    SamplingParams,
    ServerInfo,
)

PROGRESS_SEC = 0.25
"""Interval between two reports of a prompt's progress to its reader."""
HEARTBEAT_SEC = 10.0
"""Maximum silence of a stream: a proxy would hang up."""
TOLD_SHARE = 0.05
"""Share of an answer's time from which the page tells what it went to."""
TOLD_MS = 100
"""Least time of a model's loading that the page tells."""
NO_CACHE = (b"cache-control", b"no-store")
EVENT_STREAM = b"text/event-stream; charset=utf-8"

Handler = Callable[[Gateway, Exchange], Awaitable[None]]


@attrs.frozen(kw_only=True)
class AnswerBody(Common):
    """An answer asked for."""

    model: str | None = None
    """The name of one of several; None: the default one."""
    messages: Annotated[tuple[Message, ...], Length(1, MAX_MESSAGES, "messages")]
    sampling: SamplingParams = SamplingParams()
    reasoning: ReasoningMode = "auto"
    """`off` asks a model that thinks for an answer without it. Thinking comes apart from the answer either way."""
    token: Annotated[str, Length(16, 64)] | None = None
    """Token of the page's making, random and secret: with it the answer outlives its reader and can be picked up again.
    """


PICKED = (
    *("name", "size_bytes", "quantization", "parameters", "context_length"),
    *("state", "fits", "vision", "thinks", "is_base"),
)
"""What the page's picker shows of each of several models."""
PRINTED = "127.0.0.1:"
"""How the address of a server on this machine begins."""


@attrs.define(eq=False)
class Page:
    """The page of one gateway's source. All methods belong to the Trio thread."""

    gateway: Gateway
    answers: Answers = attrs.field(init=False)
    _assets: dict[str, Asset] = attrs.field(factory=load, init=False)

    def __attrs_post_init__(self) -> None:
        self.answers = Answers(self.gateway)

    @cached_property
    def live(self) -> LiveFeed:
        """The live view's frames."""
        return LiveFeed(self.gateway.source, Processes(self.gateway))

    def endpoints(self) -> Sequence[tuple[str, str, Handler, type[Any] | None]]:
        """Method, path, handler, body. Those under `/ui/api/` speak of the source, the others are files."""
        return [(method, path, partial(_handle, self, do), body) for method, path, do, body in ENDPOINTS]

    async def show(self, http: Exchange) -> None:
        """The page. `localhost` leads to the address that the server prints, where that is 127.0.0.1: a browser keeps
        what belongs to a page by its address, and conversations of the one would be missing at the other. (Without a
        port it is not this server that the browser speaks to.)
        """
        name, port = host_parts(http.header(b"host") or "")
        is_printed = self.gateway.config.http.startswith(PRINTED) and http.scope["scheme"] == "http"
        if name == "localhost" and port and is_printed and http.header(b"x-forwarded-proto") is None:
            place = f"http://{PRINTED}{port}/".encode()
            await http.answer(b"", status=307, media_type=b"text/plain", headers=[(b"location", place), NO_CACHE])
            return
        await self._send_file(http, "index.html")

    async def show_file(self, http: Exchange) -> None:
        """One of the page's files."""
        await self._send_file(http, http.path.removeprefix("/ui/"))

    async def tell(self, http: Exchange) -> None:
        """Model, limits and the sampling parameters' ranges, for a page that has been opened; of several models all
        that can be chosen, and these of the one that the query names, which is not loaded for that. A model with LoRA
        adapters is several here, too.
        """
        more: dict[str, Any] = {}
        source_info, called = self.gateway.info, self.gateway.info.model.name
        if (models := self.gateway.models) is not None:
            every = choices(named_models(models, http))
            chosen = await _chosen(models, http, every)
            called = chosen.name
            try:
                source_info = await models.card(called, loads=False)
            except UmaError:  # loading it says what is wrong
                source_info = models.info
            more["models"] = [_model_entry(each) for each in every]
        elif adapters := source_info.capabilities.adapters:
            names = [called, *with_each(called, adapters)]
            more["models"] = [_model_entry(attrs.evolve(_only(source_info), name=name)) for name in names]
            called = with_adapter(called, http.query.get("model"), adapters)
        info = unstructure(source_info)
        info["model"]["called"] = called
        del info["model"]["path"]
        more["history"] = await sees_history(self.gateway, http)
        more["sampling"] = sampling_ranges(source_info)
        await http.answer_json(info | more, headers=[NO_CACHE])

    async def ask(self, http: Exchange) -> None:
        """Begin an answer, and stream it. Of several models the answer's own is loaded meanwhile."""
        body = await http.built(lambda fields: read(fields, AnswerBody, http.ignored))
        if body.sampling.n != 1 or body.sampling.best_of not in (None, 1):
            raise BadRequest.at("sampling", "n and best_of must be 1; the page asks for one answer at a time")
        _check_media(body.messages)
        name, models = None, self.gateway.models
        if models is None:
            check_only_model(self.gateway, http)
            (request,) = self.gateway.admitted(http, [self._request(self.gateway, http, body)])
            make: Make = given(request)
        else:
            name = await known_model(models, http, body.model)
            name = None if name is None else with_adapter(name, body.model, models.find(name).adapters)
            card = await models.card(name, loads=False)
            any_model = self.gateway.to_model(models, ModelNames(card.model.name, takes_any=True), card)
            (request,) = self.gateway.admitted(http, [self._request(any_model, http, body)])
            make = partial(self._request_of, models, name, http, body, request.priority)
        token = body.token or secrets.token_hex(16)
        last = body.messages[-1]
        begun = last.content if last.role == "assistant" else ""
        is_kept = body.token is not None
        answer = self.answers.start(
            _id(http), make, token, http.account, http.owner, model=name, text=begun, is_kept=is_kept
        )
        http.has_computed = True
        await self._stream(http, answer, NOTHING)

    async def _request_of(
        self, models: Models, name: str | None, http: Exchange, body: AnswerBody, lane: int
    ) -> Request:
        """The request for one of several models, once that is loaded."""
        QUEUED.set((lane, (1,)))
        async with models.using(name, id=_id(http)) as source:
            gateway = self.gateway.to_model(source, ModelNames(name or source.info.model.name, takes_any=True))
            (request,) = gateway.fitted(http, [self._request(gateway, http, body)])
            return attrs.evolve(request, model=name)

    def _request(self, gateway: Gateway, http: Exchange, body: AnswerBody) -> Request:
        """What the model of `gateway` is asked."""
        allowed_tokens(gateway, body.sampling.max_tokens, "sampling.max_tokens")
        thinks, info = False if body.reasoning == "off" else None, gateway.info
        wish = urgency(body, http)
        if not http.has_priority:  # a person waits for it: as interactive as the bounds of key and gateway let it be
            wish["priority"] = info.limits.max_priority
        name = info.model.name
        model = with_adapter(name, body.model, info.capabilities.adapters)
        return Request(
            id=_id(http),
            model=None if model == name else model,
            lora=body.lora,
            sampling=body.sampling.with_suggested(default_sampling(info)),
            **_prompt(body.messages, has_template=info.capabilities.chat),
            **thinking(Wish(wanted=thinks, field="reasoning"), info.capabilities, http.ignored),
            **wish,
        )

    async def resume(self, http: Exchange) -> None:
        """Stream an answer from where its reader was, or from its beginning."""
        answer = self._answer(http)
        await self._stream(http, answer, answer.seen_extent(http.header(b"last-event-id")))

    async def stop(self, http: Exchange) -> None:
        """End an answer. Its readers get its last event."""
        self._answer(http).stop()
        await http.answer(b"", status=204)

    async def answer_now(self, http: Exchange) -> None:
        """Have the model end its thinking and begin the answer itself."""
        self._answer(http).end_thinking()
        await http.answer(b"", status=204)

    async def explain(self, http: Exchange) -> None:
        """Why an answer took its time. Nothing tells of the requests of others, but how many there were."""
        found = await explained(self.gateway, http, http.scope["path_params"]["id"])
        await http.answer_json({"lines": _lines(found), "reason": found.reason}, headers=[NO_CACHE])

    def _answer(self, http: Exchange) -> PageAnswer:
        return self.answers.find(http.scope["path_params"]["token"], http.account)

    async def watch(self, http: Exchange) -> None:
        """The live view's frames, until the viewer goes; before a frame the viewer's own requests, where they are not
        those that were sent last.
        """
        await http.start(200, EVENT_STREAM, [NO_CACHE])
        async with http.connected():
            sent: list[str] = []
            user = await user_of(http)
            frame = await self.live.frame(http)
            while True:
                own = [*self.gateway.requests_of(http.owner), *self.gateway.on_socket(user)]
                if own != sent:
                    sent = own
                    await http.write(event("own", {"ids": own}))
                await http.write(frame)
                frame = await self.live.next_frame(http)

    async def _send_file(self, http: Exchange, name: str) -> None:
        asset = self._assets.get(name)
        if asset is None:
            raise NotFound(f"no such file of the page: {name[:100]}")
        if http.header(b"if-none-match") == asset.etag.decode():
            await http.answer(b"", status=304, media_type=asset.media_type, headers=asset.headers)
        else:
            await http.answer(asset.data, media_type=asset.media_type, headers=asset.headers)

    async def _stream(self, http: Exchange, answer: PageAnswer, seen: Extent) -> None:
        with answer.reader():
            await http.start(200, EVENT_STREAM, [NO_CACHE, (b"x-uma-request", answer.id.encode())])
            async with http.connected():
                await self._write_answer(http, answer, seen)

    async def _write_answer(self, http: Exchange, answer: PageAnswer, seen: Extent) -> None:
        while not (answer.ended.is_set() and seen == answer.extent):
            patience = HEARTBEAT_SEC if answer.has_begun else PROGRESS_SEC
            with trio.move_on_after(patience) as waiting:
                await answer.wait(seen)
            if waiting.cancelled_caught:
                await http.write(await self._progress(answer))
                continue
            changes, seen = answer.changes(seen), answer.extent
            await http.write(event("update", changes, id=".".join(map(str, seen))))
            with trio.move_on_after(UPDATE_INTERVAL_SEC):
                await answer.ended.wait()
        await http.write(_last_event(answer), is_last=True)

    async def _progress(self, answer: PageAnswer) -> bytes:
        if answer.has_begun:
            return b": still here\n\n"
        models = self.gateway.models
        if models is not None and (load := models.load_of(answer.model)) is not None:
            return event("progress", {"loading_percent": load.percent, "load": load.words})
        await self.live.look()
        return event("progress", progress_of(answer.id, self.live.activity))


ENDPOINTS: Sequence[tuple[str, str, Callable[[Page, Exchange], Awaitable[None]], type[Any] | None]] = (
    ("GET", "/", Page.show, None),
    ("GET", "/ui/{name}", Page.show_file, None),
    ("GET", "/ui/vendor/{name}", Page.show_file, None),
    ("GET", "/ui/vendor/cmaps/{name}", Page.show_file, None),
    ("GET", "/ui/api/info", Page.tell, None),
    ("POST", "/ui/api/answers", Page.ask, AnswerBody),
    ("GET", "/ui/api/answers/{token}", Page.resume, None),
    ("DELETE", "/ui/api/answers/{token}", Page.stop, None),
    ("POST", "/ui/api/answers/{token}/answer", Page.answer_now, None),
    ("GET", "/ui/api/why/{id}", Page.explain, None),
    ("GET", "/ui/api/live", Page.watch, None),
)


def is_file(path: str) -> bool:
    """Whether this is one of the page's own files, which no model is needed for."""
    return path == "/" or (path.startswith("/ui/") and not path.startswith("/ui/api/"))


async def _handle(
    page: Page, do: Callable[[Page, Exchange], Awaitable[None]], gateway: Gateway, http: Exchange
) -> None:
    await do(page, http)


def _id(http: Exchange) -> str:
    return f"page-{http.id}"


def choices(models: Sequence[ListedModel]) -> Sequence[ListedModel]:
    """Models that can write an answer; all where none can."""
    return [each for each in models if each.kind not in (EMBEDDINGS, RERANKER)] or models


async def _chosen(models: Models, http: Exchange, every: Sequence[ListedModel]) -> ListedModel:
    """The model that the query names. One that is not here, or no longer, is answered with the first of `every`."""
    asked = http.query.get("model")
    with suppress(UnknownModel, Forbidden):
        if asked is not None and (name := await known_model(models, http, asked)) is not None:
            found = models.find(name)
            return attrs.evolve(found, name=with_adapter(found.name, asked, found.adapters))
    if not every:
        raise NotFound("no model is here that this key can use")
    return every[0]


def _only(info: ServerInfo) -> ListedModel:
    """The only model of a server as one of several."""
    shared = {field.name for field in attrs.fields(ListedModel)} & {field.name for field in attrs.fields(ModelInfo)}
    told = {name: getattr(info.model, name) for name in shared}
    return ListedModel(**told, info=info, state="loaded", vision=info.capabilities.vision)


def _model_entry(model: ListedModel) -> dict[str, Any]:
    """What the page's picker shows of a model."""
    return {name: getattr(model, name) for name in PICKED} | {"load": model.load.words}


def _check_media(messages: Sequence[Message]) -> None:
    """Raise `BadRequest` for a file that is named: behind this server stands one that would read its own user's."""
    for index, message in enumerate(messages):
        for at, each in enumerate(message.media):
            if each.path is not None:
                raise BadRequest.at(f"messages[{index}].media[{at}].path", "files are not read over HTTP; send data")


def _prompt(messages: Sequence[Message], *, has_template: bool) -> dict[str, Any]:
    """The prompt of a `Request`. A model without a chat template is given the messages' texts alone, and goes on with
    them: it knows of no turns. An answer follows on its question at once, all else as a paragraph of its own.
    """
    if has_template or any(each.media for each in messages):
        return {"messages": messages}
    text = messages[0].content
    for before, message in pairwise(messages):
        is_answer = (before.role, message.role) == ("user", "assistant")
        text += message.content if is_answer else f"\n\n{message.content}"
    return {"prompt": text}


def progress_of(id: str, activity: Activity) -> dict[str, Any]:
    """How far a request is that has given no text yet, or what it waits for and how many go before it."""
    for each in activity.running:
        if each.id == id:
            read = {"prompt_tokens": each.prompt_tokens, "computed_tokens": each.computed_tokens}
            return read | _waits(each, activity)
    for ahead, each in enumerate(activity.waiting):
        if each.id == id:
            return {"ahead": ahead} | _waits(each, activity)
    waiting = activity.waiting_interactive + activity.waiting_normal + activity.waiting_background
    # It is on its way to the queue, or further back in it than is told one by one.
    return {"ahead": waiting} if waiting > len(activity.waiting) else {}


def _waits(request: RunningRequest, activity: Activity) -> dict[str, Any]:
    first = next((each for each in activity.running if each.id == request.behind), None)
    unread = {} if first is None else {"unread_before": first.prompt_tokens - first.computed_tokens}
    return {"waits_for": request.waits_for} | unread if request.waits_for else {}


def _lines(found: Explained) -> list[list[str]]:
    """How long an answer took, before where that time went, in order; what of its prompt was known; what helps."""
    known, whole, first = found.cached_tokens, found.prompt_tokens, found.metrics.ttft_ms
    extent = {"read": f", {whole - known:,} tokens", "slot": f", behind {found.started_before:,} others"}
    told = [(cause, ms) for cause, ms in found.spent_ms.items() if ms >= TOLD_SHARE * found.age_ms]
    parts = [f"{seconds(ms)} {CAUSES.get(cause, cause)}{extent.get(cause, '')}" for cause, ms in told]
    begun = f"First word after {seconds(first)}, all" if first else "All"
    return [
        [f"{begun} of the answer after {seconds(found.age_ms)}{'. Of that:' if parts else '.'}", *parts],
        [f"{known:,} of {whole:,} prompt tokens were cached." if known else f"All {whole:,} prompt tokens were read."],
        *([each] for each in sentences(found) if each.startswith("The most time: ")),  # others need words of engines
    ]


def default_sampling(info: ServerInfo) -> dict[str, float]:
    """What a question of the page is drawn with where the person set nothing: as in `uma chat`."""
    return {**CHAT_SAMPLING, **info.capabilities.suggested_sampling}


def sampling_ranges(info: ServerInfo) -> dict[str, dict[str, float]]:
    """Default, minimum and maximum of each number among the sampling parameters, as their classes have them; the
    default is this server's and its model's.
    """
    neutral = attrs.asdict(SamplerSettings()) | default_sampling(info) | {"max_tokens": info.limits.default_max_tokens}
    found = {}
    for field in attrs.fields(SamplingParams):
        ranges = _ranges(hints_of(SamplingParams)[field.name])
        if ranges:
            low = ranges[0].ge if ranges[0].ge is not None else ranges[0].gt
            bounds = {"default": neutral.get(field.name, field.default), "minimum": low, "maximum": ranges[0].le}
            found[field.name] = {name: value for name, value in bounds.items() if value is not None}
    return found


def _ranges(hint: Any) -> list[Range]:
    own = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Range)]
    return own + [each for inner in getattr(hint, "__args__", ()) for each in _ranges(inner)]


def _last_event(answer: PageAnswer) -> bytes:
    if answer.error is not None:
        problem = Problem.of(answer.error)
        failure = {"code": answer.error.code, "message": problem.message, "retry_after_ms": problem.retry_after_ms}
        return event("failed", failure)
    assert answer.finished is not None
    finished = answer.finished
    return event(
        "done",
        {
            "reason": finished.reason,
            "usage": unstructure(finished.usage),
            "metrics": unstructure(finished.metrics),
            "loading_ms": round(answer.made_ms) if answer.made_ms >= TOLD_MS else 0,
            "seed": finished.seed,
            "warnings": list(finished.warnings),
            "summary": finished.summary,
        },
    )

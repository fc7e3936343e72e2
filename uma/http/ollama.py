"""Ollama's API: chat, generate, and what it tells of its models. Streams are lines of JSON, and the default."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import attrs
import trio

from uma import json_bytes, json_text
from uma.constraints import Json, Length, Range, Text
from uma.errors import BadRequest
from uma.http import abilities, fill_in, waiting
from uma.http.content import question_start, stand_in
from uma.http.dialect import NDJSON, BaseJob, Body, dumps
from uma.http.exchange import Exchange
from uma.http.fields import (
    MAX_MESSAGES,
    MAX_WINDOW,
    SYNONYMS,
    Common,
    Stop,
    all_tokens,
    allowed_tokens,
    as_own,
    context_window,
    first,
    read,
    read_generating,
    sampling,
    urgency,
)
from uma.http.gateway import Gateway
from uma.http.ignored import Ignored
from uma.http.keep_alive import keep_sec
from uma.http.logprobs import PendingLogprobs, entries, spelling
from uma.http.many import known_model, of_model, own_models
from uma.http.media import MediaReader
from uma.http.problem import Problem, Unsupported
from uma.http.rights import check_manager
from uma.http.structured_outputs import StructuredFields, grammar_of
from uma.http.thinking import Wish, thinking
from uma.http.tools import Name, Tools, check_calls, distinct, name_schemas, tool_fields, with_names
from uma.http.usage import decoded_ms, warnings
from uma.models.digest import digest, warm
from uma.types import (
    Finished,
    ListedModel,
    Logprobs,
    Media,
    Message,
    ModelInfo,
    Penalty,
    ReasoningDelta,
    RepetitionPenalty,
    Request,
    SamplingParams,
    ServerInfo,
    Temperature,
    Token,
    ToolCall,
    ToolCallDelta,
    joined,
)

DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
"""Sampling as Ollama's documents have it."""
VERSION = "0.12.0"
"""The version of Ollama's API that this is written after; clients ask for it to know what they can use."""
_NS_PER_MS = 1_000_000


class _Piece(Protocol):
    """How an answer's text, thinking and calls stand in a line."""

    def __call__(self, text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]: ...


class OllamaErrors:
    """`{"error": "text"}`."""

    def error(self, problem: Problem, request_id: str) -> Body:
        """See `Dialect`."""
        return {"error": problem.message}


ERRORS = OllamaErrors()


@attrs.frozen(kw_only=True)
class Options(Common):
    """`options`: how to sample. UMA's own names are taken too."""

    temperature: Temperature | None = None
    num_predict: Annotated[int, Range(-2)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Annotated[int, Range(-1, MAX_WINDOW)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop: Stop = None


@attrs.frozen(kw_only=True)
class OllamaFunction:
    """What was called, and with what."""

    name: Name
    arguments: Annotated[dict[str, Any], Json(le=65_536)] | None = None


@attrs.frozen(kw_only=True)
class OllamaCall:
    """An entry of a message's `tool_calls`; Ollama's have no id."""

    function: OllamaFunction


@attrs.frozen(kw_only=True)
class ChatMessage:
    """A message."""

    role: Literal["system", "user", "assistant", "tool", "control"]
    """Granite's models have the last: it switches their thinking on."""
    content: Annotated[str, Text()] | None = None
    images: Any = None
    tool_calls: Annotated[tuple[OllamaCall, ...], Length(0, 128, "calls")] | None = None
    tool_name: Name | None = None
    name: Name | None = None
    thinking: Annotated[str, Text()] | None = None


@attrs.frozen(kw_only=True)
class _Body(StructuredFields):
    model: str | None = None
    stream: bool | None = None
    options: Options | None = None
    format: Any = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: Any = None
    top_logprobs: Any = None
    priority: Any = None
    slo: Any = None
    pace: Any = None


@attrs.frozen(kw_only=True)
class ChatBody(_Body):
    """`POST /api/chat`."""

    messages: Annotated[tuple[ChatMessage, ...], Length(0, MAX_MESSAGES, "messages")] = ()
    tools: Tools | None = None


@attrs.frozen(kw_only=True)
class GenerateBody(_Body):
    """`POST /api/generate`."""

    prompt: Annotated[str, Text()] | None = None
    suffix: Annotated[str, Text()] | None = None
    system: Annotated[str, Text()] | None = None
    raw: bool | None = None
    template: Any = None
    context: Any = None
    images: Any = None


async def chat(gateway: Gateway, http: Exchange) -> None:
    """`POST /api/chat`. Without messages it has the model loaded, or with a `keep_alive` of 0 leave."""
    nothing = {"message": {"role": "assistant", "content": ""}}
    if await _unloaded(gateway, http, nothing):
        return
    async with of_model(gateway, http, waiting.OLLAMA) as one:
        job = await http.built(partial(_chat_job, one, http))
        if isinstance(job, str):
            await _say(http, job, nothing, "load")
        else:
            await one.generate(http, job)


def _chat_job(gateway: Gateway, http: Exchange, fields: dict[str, Any]) -> OllamaJob | str:
    """The job, or the model's name where there is nothing to generate."""
    body = read_generating(_with_options(fields, http), ChatBody, http)
    model = gateway.names.check(body.model, http)
    able = gateway.source.info.capabilities
    for index, message in enumerate(body.messages):
        if message.tool_calls:
            check_calls(able, f"messages[{index}].tool_calls")
    if not body.messages:
        return model
    tools = [each.function.tool for each in body.tools or ()]
    places = distinct(tools)
    name_schemas(http.names, places, "function.parameters")
    offered = tool_fields([tools[at] for at in places], "auto", able, is_parallel=None)
    media = MediaReader(able)
    messages = list(_messages(body.messages, http.ignored, media))
    media.name(http.names, messages)
    prompt = {"messages": with_names(messages), **offered}
    return _job(gateway, body, http, model, prompt, _chat_piece)


def _messages(bodies: Sequence[ChatMessage], ignored: Ignored, media: MediaReader) -> Iterator[Message]:
    """The conversation, with ids for calls by their order: a result is that of the first call that has none yet."""
    count, waiting, question = 0, _Unanswered(), question_start([body.role for body in bodies])
    for index, body in enumerate(bodies):
        text, shown = body.content or "", tuple[Media, ...]()
        if body.images and media.takes_any:
            text, shown = joined([*_images(body.images, f"messages[{index}].images", media), text])
        elif body.images:
            seen = stand_in("image", f"messages[{index}].images", ignored, is_question=index >= question)
            text = f"{text}\n{seen}" if text else seen
        calls = []
        for call in body.tool_calls or ():
            arguments = json_text.dumps(call.function.arguments or {})
            calls.append(ToolCall(f"{count:09}", call.function.name, arguments))
            waiting.add(calls[-1])
            count += 1
        of = waiting.take(body.tool_name or body.name) if body.role == "tool" else None
        id, name = None if of is None else of.id, body.tool_name or body.name
        yield Message(body.role, text, tuple(calls), id, name, body.thinking or None, shown)


def _images(given: Any, path: str, media: MediaReader) -> list[Media]:
    """Files as base64, which stand before a message's text. Raises `BadRequest` for what is none."""
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise BadRequest(f"{path}: expected a list of base64 strings")
    return [media.take(each, f"{path}[{at}]") for at, each in enumerate(given)]


class _Unanswered:
    """Calls without a result. Each step takes the same time, however many there are."""

    def __init__(self) -> None:
        self._queues: defaultdict[str | None, deque[ToolCall]] = defaultdict(deque)
        """Calls by name; under None all of them."""
        self._answered: set[str] = set()

    def add(self, call: ToolCall) -> None:
        """A call was made."""
        self._queues[call.name].append(call)
        self._queues[None].append(call)

    def take(self, name: str | None) -> ToolCall | None:
        """The first call of this name (None: of any) that has no result yet, which it has from now on."""
        queue = self._queues[name]
        while queue:
            call = queue.popleft()
            if call.id not in self._answered:
                self._answered.add(call.id)
                return call
        return None


async def generate(gateway: Gateway, http: Exchange) -> None:
    """`POST /api/generate`. Without a prompt it has the model loaded, or with a `keep_alive` of 0 leave."""
    if await _unloaded(gateway, http, {"response": ""}):
        return
    async with of_model(gateway, http, waiting.OLLAMA) as one:
        job = await http.built(partial(_generate_job, one, http))
        if isinstance(job, str):
            await _say(http, job, {"response": ""}, "load")
            return
        if job.suffix:
            (request,) = job.requests
            gap = fill_in.Gap(fill_in.text_before(request), job.suffix)
            job.requests = [(await fill_in.filled(one, http, request, gap, "suffix"))[0]]
        await one.generate(http, job)


async def _unloaded(gateway: Gateway, http: Exchange, nothing: dict[str, Any]) -> bool:
    """Whether the body asks for nothing but that the model leaves, which this answers. Raises `Unsupported` where it is
    the only one.
    """
    fields = await http.fields()
    if fields.get("messages") or fields.get("prompt") or keep_sec(fields) != 0:
        return False
    if gateway.models is None:
        raise Unsupported(
            "keep_alive: this server keeps its one model loaded as long as it runs; end the server instead"
        )
    await check_manager(http, "unload models")
    asked = fields.get("model")
    name = await known_model(gateway.models, http, asked if isinstance(asked, str) else None)
    left = await gateway.models.unload(name)
    await _say(http, left.name, nothing, "unload")
    return True


def _generate_job(gateway: Gateway, http: Exchange, fields: dict[str, Any]) -> OllamaJob | str:
    """Job of a generation; see `_chat_job`."""
    body = read_generating(_with_options(fields, http), GenerateBody, http)
    model = gateway.names.check(body.model, http)
    able, is_plain = gateway.source.info.capabilities, bool(body.raw or body.suffix)
    if body.images and not (able.vision or able.audio):
        abilities.media("images", "images")
    if body.images and is_plain:
        raise Unsupported("images: cannot stand beside raw or suffix, which have no place for them; leave either out")
    if body.template or body.context:
        raise BadRequest("template, context: are not supported; the model's own template is used, or none with raw")
    if not body.prompt:
        return model
    if body.suffix:
        fill_in.check(able, "suffix")
    if is_plain:
        prompt: dict[str, Any] = {"prompt": body.prompt, "parse_special": True}
        http.ignored.add_all(["system"] if body.system else [])
    else:
        system = [Message("system", body.system)] if body.system else []
        media = MediaReader(able)
        text, shown = joined([*_images(body.images or [], "images", media), body.prompt])
        messages = (*system, Message("user", text, media=shown))
        media.name(http.names, messages)
        prompt = {"messages": messages}
    job = _job(gateway, body, http, model, prompt, _generate_piece)
    job.suffix = body.suffix or ""
    return job


def _with_options(fields: dict[str, Any], http: Exchange) -> dict[str, Any]:
    """The body, whose options have UMA's own fields and the bounds of other dialects from beside them."""
    options = fields.get("options")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        return fields
    moved = {
        name: fields[name] for name in ("priority", "slo", "pace", "cache_prompt", "reproducible") if name in fields
    }
    bounds: dict[str, Any] = {name: fields[name] for names in SYNONYMS for name in names if name in fields}
    own = as_own(bounds | options | moved, Options, http, "options.")
    return {**{name: each for name, each in fields.items() if name not in bounds}, "options": own}


def _job(gateway: Gateway, body: _Body, http: Exchange, model: str, prompt: dict[str, Any], piece: _Piece) -> OllamaJob:
    options = body.options or Options()
    how = urgency(options, http)
    stream = body.stream is not False
    able, is_chat = gateway.source.info.capabilities, "messages" in prompt
    if body.think is not None and not is_chat:
        http.ignored.add("think")  # without a template it thinks if it will
    effort = body.think if isinstance(body.think, str) else None
    wish = Wish(
        wanted=None if body.think is None else bool(body.think), field="think", effort=effort, effort_field="think"
    )
    request = Request(
        http.id,
        sampling=_sampling(gateway, body, options, http),
        stream=stream,
        **how,
        **(thinking(wish, able, http.ignored) if is_chat else {}),
        **prompt,
    )
    return OllamaJob([request], stream, model, piece, is_unbounded=(options.num_predict or -1) < 0)


def _sampling(gateway: Gateway, body: _Body, options: Options, http: Exchange) -> SamplingParams:
    able = gateway.source.info.capabilities
    if options.num_predict == 0:
        raise BadRequest(
            "options.num_predict: 0 generates nothing; give a number from 1, or -1 for no bound of its own"
        )
    asked, seed = options.num_predict, options.seed
    penalties = ("repeat_penalty", options.repeat_penalty), ("repetition_penalty", options.repetition_penalty)
    windows = ("repeat_last_n", options.repeat_last_n), ("penalty_window", options.penalty_window)
    window = first(http, *windows)
    form = abilities.json_format(body.format, "format", able, http.names)
    return sampling(
        gateway,
        options,
        DEFAULTS,
        temperature=options.temperature,
        max_tokens=allowed_tokens(gateway, asked, "options.num_predict")
        if asked is not None and asked > 0
        else all_tokens(gateway, http),
        repetition_penalty=first(http, *penalties),
        penalty_window=context_window(gateway) if window == -1 else window,
        seed=None if seed is None or seed < 0 else seed,
        grammar=grammar_of(body, able, http, ("format", form)),
        logprobs=abilities.chat_logprobs(body.logprobs, body.top_logprobs, able),
    )


def _now() -> str:
    return _as_time(datetime.now(UTC))


def _loaded_at(gateway: Gateway) -> str:
    return _as_time(datetime.fromtimestamp(gateway.names.loaded_at, UTC))


def _as_time(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


async def _say(http: Exchange, model: str, more: dict[str, Any], what: str) -> None:
    await http.answer_json({"model": model, "created_at": _now(), **more, "done_reason": what, "done": True})


def _chat_piece(text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [
            {"function": {"name": each.name, "arguments": json_bytes.verbatim(each.arguments)}} for each in calls
        ]
    return {"message": message}


def _generate_piece(text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    return {"response": text, **({"thinking": thinking} if thinking else {})}


def _logprobs(positions: Sequence[Logprobs]) -> dict[str, Any]:
    return {"logprobs": entries(positions)} if positions else {}


@attrs.define
class OllamaJob(BaseJob):
    """A line for each token, and one at the end with counts and durations in nanoseconds."""

    model: str
    piece: _Piece
    is_unbounded: bool
    """See `warnings`."""
    suffix: str = attrs.field(default="", init=False)
    """What comes behind the answer, where it fills in the middle."""
    _pending: PendingLogprobs = attrs.field(factory=PendingLogprobs, init=False)

    @property
    def media_type(self) -> bytes:
        """See `Job`."""
        return NDJSON

    def token(self, index: int, token: Token) -> bytes:
        """See `Job`."""
        positions = self._pending.take(token)
        return self._line({**self.piece(token.text), **_logprobs(positions)}) if token.text else b""

    def part(self, index: int, part: ReasoningDelta | ToolCallDelta) -> bytes:
        """See `Job`. Ollama tells a call when it is whole, and one that never is as text."""
        self._pending.aside()
        return self._line(self.piece("", part.text)) if isinstance(part, ReasoningDelta) else b""

    def finished(self, index: int, finished: Finished) -> bytes:
        """See `Job`."""
        calls = self._line(self.piece("", "", finished.tool_calls)) if finished.tool_calls else b""
        cut = self._line(self.piece(finished.cut_call.text)) if finished.cut_call is not None else b""
        return calls + cut + dumps(self._last(finished, self.piece(""))) + b"\n"

    def _line(self, piece: dict[str, Any]) -> bytes:
        return dumps({"model": self.model, "created_at": _now(), **piece, "done": False}) + b"\n"

    def failed(self, problem: Problem) -> bytes:
        """See `Job`."""
        return dumps(ERRORS.error(problem, "")) + b"\n"

    def heartbeat(self, progress: str) -> bytes:
        """See `Job`. White space in front of the next line's JSON: a line of its own would be read as JSON."""
        return b" "

    def whole(self, results: Sequence[Finished]) -> Body:
        """See `Job`."""
        result = results[0]
        text, thinking = result.text or "", result.reasoning or ""
        logprobs = _logprobs(spelling(result.logprobs or (), text, thinking))
        if result.cut_call is not None:
            text += result.cut_call.text
        return self._last(result, {**self.piece(text, thinking, result.tool_calls), **logprobs})

    def _last(self, result: Finished, piece: dict[str, Any]) -> dict[str, Any]:
        usage, metrics = result.usage, result.metrics
        total_ms = metrics.queue_ms + metrics.prefill_ms + metrics.decode_ms
        return {
            "model": self.model,
            "created_at": _now(),
            **piece,
            "done": True,
            "done_reason": "length" if result.reason == "length" else "stop",
            "total_duration": round(total_ms * _NS_PER_MS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round(metrics.prefill_ms * _NS_PER_MS),
            "eval_count": usage.completion_tokens,
            "eval_duration": round(decoded_ms(result) * _NS_PER_MS),
            "cached_tokens": usage.cached_tokens,
            **warnings([result], is_unbounded=self.is_unbounded),
        }


async def version(gateway: Gateway, http: Exchange) -> None:
    """`GET /api/version`."""
    await http.answer_json({"version": VERSION, "server": gateway.source.info.server})


async def tags(gateway: Gateway, http: Exchange) -> None:
    """`GET /api/tags`: the loaded model under each of its names, or all of several models."""
    if gateway.models is not None:
        listed = own_models(gateway.models, http)
        await _read_digests(listed)
        await http.answer_json({"models": [_listed(gateway, each) for each in listed]})
        return
    await _read_digests([gateway.source.info.model])
    await http.answer_json({"models": [_entry(gateway, name) for name in gateway.model_names]})


async def running(gateway: Gateway, http: Exchange) -> None:
    """`GET /api/ps`."""
    if gateway.models is not None:
        loaded = [each for each in own_models(gateway.models, http) if each.info is not None]
        await _read_digests(loaded)
        await http.answer_json({"models": [_listed(gateway, each) | _resident(each) for each in loaded]})
        return
    await _read_digests([gateway.source.info.model])
    more = _running(gateway.source.info)
    await http.answer_json({"models": [{**_entry(gateway, gateway.names.name), **more}]})


async def _read_digests(models: Sequence[ModelInfo | ListedModel]) -> None:
    await trio.to_thread.run_sync(warm, [(each.path, each.size_bytes) for each in models])


def _running(info: ServerInfo | None) -> dict[str, Any]:
    return {
        "expires_at": "9999-12-31T23:59:59Z",
        "size_vram": 0,
        "context_length": 0 if info is None else info.limits.n_ctx,
    }


def _resident(model: ListedModel) -> dict[str, Any]:
    """What is told of one of several models beside `_listed`: what it takes, and when it leaves if no request comes."""
    entry = _running(model.info) | {"size": model.taken_bytes or model.memory_bytes}
    if model.leaves_in_sec is not None:
        entry["expires_at"] = _as_time(datetime.now(UTC) + timedelta(seconds=model.leaves_in_sec))
    return entry


def _listed(gateway: Gateway, model: ListedModel) -> dict[str, Any]:
    """One of several models, as `_entry` has the only one."""
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _loaded_at(gateway),
        "size": model.size_bytes,
        "digest": digest(model.path, model.size_bytes),
        "details": _described(model),
    }


def _entry(gateway: Gateway, name: str) -> dict[str, Any]:
    model = gateway.source.info.model
    return {
        "name": name,
        "model": name,
        "modified_at": _loaded_at(gateway),
        "size": model.size_bytes,
        "digest": digest(model.path, model.size_bytes),
        "details": _details(gateway),
    }


def _details(gateway: Gateway) -> dict[str, Any]:
    return _described(gateway.source.info.model)


def _described(model: ModelInfo | ListedModel) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": model.architecture,
        "families": [model.architecture],
        "parameter_size": f"{model.parameters / 1e9:.3g}B",
        "quantization_level": model.quantization,
    }


@attrs.frozen(kw_only=True)
class ShowBody:
    """`POST /api/show`; old clients say `name`."""

    model: str | None = None
    name: str | None = None


def _parameters(gateway: Gateway) -> dict[str, Any]:
    """The context, and how an answer is drawn that nothing is said of, in Ollama's words."""
    info = gateway.source.info
    found: dict[str, Any] = {"num_ctx": info.limits.n_ctx}
    if info.capabilities.generate:
        figures = sampling(gateway, Options(), DEFAULTS).settled
        found |= {
            "temperature": figures.temperature,
            "top_k": figures.top_k,
            "top_p": figures.top_p,
            "min_p": figures.min_p,
            "repeat_penalty": figures.repetition_penalty,
        }
    return found


def _modelfile(gateway: Gateway, parameters: Mapping[str, Any]) -> str:
    """What is loaded, as a Modelfile of Ollama's. The template is Jinja's, as the model's file has it."""
    info = gateway.source.info
    texts = (("TEMPLATE", info.chat_template), ("LICENSE", info.model.license))
    lines = [
        f"FROM {info.model.called}",
        *(f'{word} """{text}"""' for word, text in texts if text),
        *(f"PARAMETER {name} {value}" for name, value in parameters.items()),
    ]
    return "\n".join(lines) + "\n"


async def show(gateway: Gateway, http: Exchange) -> None:
    """`POST /api/show`."""
    body = await http.built(lambda fields: read(fields, ShowBody, http))
    gateway.names.check(first(http, ("model", body.model or None), ("name", body.name or None)))
    model, able = gateway.source.info.model, gateway.source.info.capabilities
    parameters = _parameters(gateway)
    await http.answer_json(
        {
            "modified_at": _loaded_at(gateway),
            "license": model.license or "",
            "modelfile": _modelfile(gateway, parameters),
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
            "template": gateway.source.info.chat_template,
            "details": _details(gateway),
            "model_info": {
                "general.architecture": model.architecture,
                "general.parameter_count": model.parameters,
                "general.basename": model.called,
                f"{model.architecture}.context_length": gateway.source.info.limits.n_ctx,
            },
            "capabilities": [
                "completion" if able.generate else "embedding",
                *(["tools"] if able.tools else []),
                *(["thinking"] if able.reasoning else []),
                *(["vision"] if able.vision else []),
                *(["audio"] if able.audio else []),
            ],
        }
    )

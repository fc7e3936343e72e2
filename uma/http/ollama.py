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
from uma.http import abilities, fill_in
from uma.http.ask import ChatAsk, Generates, Said, TextAsk
from uma.http.content import question_start, stand_in
from uma.http.dialect import NDJSON, Body, Dialect, Writer, dumps
from uma.http.exchange import Exchange
from uma.http.fields import MAX_MESSAGES, MAX_WINDOW, Common, Stop, sampling
from uma.http.gateway import Gateway
from uma.http.keep_alive import keep_sec
from uma.http.local_user import check_manager
from uma.http.logprobs import PendingLogprobs, entries, spelling
from uma.http.many import check_only_model, known_model, meant_model, named_models, of_model, own_models
from uma.http.media import MediaReader
from uma.http.models import iso_time
from uma.http.ollama_models import NameBody
from uma.http.problem import Unsupported
from uma.http.reader import SYNONYMS, Reader, read
from uma.http.structured_outputs import StructuredFields, grammar_of
from uma.http.thinking import Wish
from uma.http.tools import Name, Tools, check_calls, distinct, name_schemas
from uma.http.usage import decoded_ms
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


OLLAMA = Dialect(
    lambda problem, request_id: {"error": problem.message},
    NDJSON,
    # White space in front of the next line's JSON: a line of its own would be read as JSON.
    alive=lambda text: b" ",
    event=lambda body: dumps(body) + b"\n",
)


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
class OllamaMessage:
    """A message as `/api/chat` has it."""

    role: Literal["system", "user", "assistant", "tool", "control"]
    """Granite's models have the last: it switches their thinking on."""
    content: Annotated[str, Text()] | None = None
    images: Any = None
    tool_calls: Annotated[tuple[OllamaCall, ...], Length(0, 128, "calls")] | None = None
    tool_name: Name | None = None
    name: Name | None = None
    thinking: Annotated[str, Text()] | None = None


@attrs.frozen(kw_only=True)
class OllamaBody(StructuredFields):
    """Fields that both of Ollama's ways to generate have."""

    model: str | None = None
    stream: bool | None = None
    options: Options | None = None
    format: Any = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: abilities.TopLogprobs = None
    priority: Any = None
    slo: Any = None
    pace: Any = None


@attrs.frozen(kw_only=True)
class OllamaChatBody(OllamaBody):
    """`POST /api/chat`."""

    messages: Annotated[tuple[OllamaMessage, ...], Length(0, MAX_MESSAGES, "messages")] = ()
    truncate: bool | None = None
    """False: a conversation that does not fit is refused. Otherwise its oldest turns go, as Ollama's clients expect."""
    tools: Tools | None = None


@attrs.frozen(kw_only=True)
class GenerateBody(OllamaBody):
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
    await _answer(gateway, http, _CHAT, "messages", _chat_piece(""))


async def generate(gateway: Gateway, http: Exchange) -> None:
    """`POST /api/generate`. Without a prompt it has the model loaded, or with a `keep_alive` of 0 leave."""
    await _answer(gateway, http, _GENERATE, "prompt", _generate_piece(""))


async def _answer(gateway: Gateway, http: Exchange, endpoint: Generates, asks: str, nothing: dict[str, Any]) -> None:
    if (await http.fields()).get(asks) or not await _unloaded(gateway, http, nothing):
        async with of_model(gateway, http, endpoint) as one:
            await endpoint(one, http)


def _read_chat(fields: Mapping[str, Any], reader: Reader) -> ChatAsk | Said:
    body = reader.generating(_with_options(fields, reader), OllamaChatBody)
    for index, message in enumerate(body.messages):
        if message.tool_calls:
            check_calls(reader.able, f"messages[{index}].tool_calls")
    if not body.messages:
        return _said(reader.model, _chat_piece(""), "load")
    tools = [each.function.tool for each in body.tools or ()]
    places = distinct(tools)
    name_schemas(reader.names, places, "function.parameters")
    asked = _asked(body, reader, _chat_piece)
    kept = asked["body"].truncation or ("off" if body.truncate is False else "auto")
    return ChatAsk(
        messages=list(_messages(body.messages, reader)),
        tools=[tools[at] for at in places],
        wish=_wish(body),
        **(asked | {"body": attrs.evolve(asked["body"], truncation=kept)}),
    )


def _messages(bodies: Sequence[OllamaMessage], reader: Reader) -> Iterator[Message]:
    """The conversation, with ids for calls by their order: a result is that of the first call that has none yet."""
    count, waiting, question = 0, _Unanswered(), question_start([body.role for body in bodies])
    for index, body in enumerate(bodies):
        text, shown = body.content or "", tuple[Media, ...]()
        if body.images and reader.media.takes_any:
            text, shown = joined([*_images(body.images, f"messages[{index}].images", reader.media), text])
        elif body.images:
            seen = stand_in("image", f"messages[{index}].images", reader, is_question=index >= question)
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
        raise BadRequest.at(path, "expected a list of base64 strings")
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


async def _unloaded(gateway: Gateway, http: Exchange, nothing: dict[str, Any]) -> bool:
    """Whether a body that has nothing generated asks that the model leaves, which this answers. Raises `Unsupported`
    where it is the only one.
    """
    fields = await http.fields()
    if keep_sec(fields) != 0:
        return False
    if gateway.models is None:
        raise Unsupported.at(
            "keep_alive", "this server keeps its one model loaded as long as it runs; end the server instead"
        )
    await check_manager(http, "unload models")
    asked = fields.get("model")
    name = await known_model(gateway.models, http, asked if isinstance(asked, str) else None)
    left = await gateway.models.unload(name)
    await http.answer_json(_said(left.name, nothing, "unload").body)
    return True


def _read_generate(fields: Mapping[str, Any], reader: Reader) -> ChatAsk | TextAsk | Said:
    body = reader.generating(_with_options(fields, reader), GenerateBody)
    if body.images and not reader.media.takes_any:
        abilities.media("images", "images")
    if body.images and (body.raw or body.suffix):
        raise Unsupported.at(
            "images", "cannot stand beside raw or suffix, which have no place for them; leave either out"
        )
    if body.template or body.context:
        raise BadRequest("template, context: are not supported; the model's own template is used, or none with raw")
    if not body.prompt:
        return _said(reader.model, _generate_piece(""), "load")
    gap = fill_in.Gap("suffix", body.suffix) if body.suffix else None
    if gap is not None:
        fill_in.check(reader.able, "suffix")
    asked = _asked(body, reader, _generate_piece)
    if body.raw or gap is not None:
        reader.ignored.add_all(["system"] if body.system else [])
        reader.ignored.add_all(["think"] if body.think is not None else [])  # without a template it thinks if it will
        return TextAsk(prompt=body.prompt, gap=gap, **asked)
    text, shown = joined([*_images(body.images or [], "images", reader.media), body.prompt])
    system = [Message("system", body.system)] if body.system else []
    return ChatAsk(messages=[*system, Message("user", text, media=shown)], wish=_wish(body), **asked)


def _with_options(fields: Mapping[str, Any], reader: Reader) -> Mapping[str, Any]:
    """The body, whose options have UMA's own fields and the bounds of other dialects from beside them."""
    options = fields.get("options")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        return fields
    moved = {
        name: fields[name]
        for name in ("priority", "slo", "pace", "cache_prompt", "truncation", "reproducible")
        if name in fields
    }
    bounds: dict[str, Any] = {name: fields[name] for names in SYNONYMS for name in names if name in fields}
    own = reader.as_own(bounds | options | moved, Options, "options.")
    return {**{name: each for name, each in fields.items() if name not in bounds}, "options": own}


def _wish(body: OllamaBody) -> Wish:
    effort = body.think if isinstance(body.think, str) else None
    wanted = None if body.think is None else bool(body.think)
    return Wish(wanted=wanted, field="think", effort=effort, effort_field="think")


def _asked(body: OllamaBody, reader: Reader, piece: _Piece) -> dict[str, Any]:
    """The fields of an `Ask` that both endpoints have."""
    options = body.options or Options()
    if options.num_predict == 0:
        raise BadRequest.at(
            "options.num_predict", "0 generates nothing; give a number from 1, or -1 for no limit of its own"
        )
    is_unbounded = (options.num_predict or -1) < 0
    penalties = ("repeat_penalty", options.repeat_penalty), ("repetition_penalty", options.repetition_penalty)
    windows = ("repeat_last_n", options.repeat_last_n), ("penalty_window", options.penalty_window)
    form = abilities.json_format(body.format, "format", reader)
    return {
        "body": options,
        "writer": partial(OllamaWriter, piece=piece, load_ms=reader.load_ms),
        "stream": body.stream is not False,
        "max_tokens": None if is_unbounded else options.num_predict,
        "tokens_field": "options.num_predict",
        "logprobs": abilities.chat_logprobs(body.logprobs, body.top_logprobs, reader.able),
        "grammar": grammar_of(body, reader, ("format", form)),
        "sampling": {
            "temperature": options.temperature,
            "repetition_penalty": reader.first(*penalties),
            "penalty_window": reader.first(*windows),
            "seed": None if options.seed is None or options.seed < 0 else options.seed,
        },
        "defaults": DEFAULTS,
        "penalizes_output": False,
    }


def _now() -> str:
    return iso_time(datetime.now(UTC))


def _said(model: str, nothing: dict[str, Any], what: str) -> Said:
    return Said({"model": model, "created_at": _now(), **nothing, "done_reason": what, "done": True})


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
class OllamaWriter(Writer):
    """A line for each token, and one at the end with counts and durations in nanoseconds."""

    piece: _Piece
    load_ms: float
    _pending: PendingLogprobs = attrs.field(factory=PendingLogprobs, init=False)

    def token(self, index: int, token: Token) -> bytes:
        positions = self._pending.take(token)
        return self._line({**self.piece(token.text), **_logprobs(positions)}) if token.text else b""

    def part(self, index: int, part: ReasoningDelta | ToolCallDelta) -> bytes:
        """Ollama tells a call when it is whole, and one that never is as text."""
        self._pending.aside()
        return self._line(self.piece("", part.text)) if isinstance(part, ReasoningDelta) else b""

    def finished(self, index: int, finished: Finished) -> bytes:
        calls = self._line(self.piece("", "", finished.tool_calls)) if finished.tool_calls else b""
        cut = self._line(self.piece(finished.cut_call.text)) if finished.cut_call is not None else b""
        return calls + cut + dumps(self._last(finished, self.piece(""))) + b"\n"

    def _line(self, piece: dict[str, Any]) -> bytes:
        return dumps({"model": self.model, "created_at": _now(), **piece, "done": False}) + b"\n"

    def whole(self, results: Sequence[Finished]) -> Body:
        result = results[0]
        text, thinking = result.text or "", result.reasoning or ""
        logprobs = _logprobs(spelling(result.logprobs or (), text, thinking))
        if result.cut_call is not None:
            text += result.cut_call.text
        return self._last(result, {**self.piece(text, thinking, result.tool_calls), **logprobs})

    def _last(self, result: Finished, piece: dict[str, Any]) -> dict[str, Any]:
        usage, metrics = result.usage, result.metrics
        total_ms = self.load_ms + metrics.queue_ms + metrics.prefill_ms + metrics.decode_ms
        return {
            "model": self.model,
            "created_at": _now(),
            **piece,
            "done": True,
            "done_reason": "length" if result.reason == "length" else "stop",
            "total_duration": round(total_ms * _NS_PER_MS),
            "load_duration": round(self.load_ms * _NS_PER_MS),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round(metrics.prefill_ms * _NS_PER_MS),
            "eval_count": usage.completion_tokens,
            "eval_duration": round(decoded_ms(result) * _NS_PER_MS),
            "cached_tokens": usage.cached_tokens,
            **self.warnings([result]),
        }


def _streaming(asks: str) -> Dialect:
    """Dialect of an endpoint that has something generated where its field `asks` is not empty."""
    return attrs.evolve(OLLAMA, is_streamed=lambda fields: fields.get("stream") is not False and bool(fields.get(asks)))


_CHAT = Generates(_streaming("messages"), _read_chat)
_GENERATE = Generates(_streaming("prompt"), _read_generate)


async def version(gateway: Gateway, http: Exchange) -> None:
    """`GET /api/version`."""
    await http.answer_json({"version": VERSION, "server": gateway.info.server})


async def tags(gateway: Gateway, http: Exchange) -> None:
    """`GET /api/tags`: the loaded model under each of its names, or all of several models."""
    if gateway.models is not None:
        listed = named_models(gateway.models, http)
        await _read_digests(listed)
        await http.answer_json({"models": [_listed(gateway, each, each.name) for each in listed]})
        return
    model = gateway.info.model
    await _read_digests([model])
    await http.answer_json({"models": [_listed(gateway, model, name) for name in gateway.model_names]})


async def running(gateway: Gateway, http: Exchange) -> None:
    """`GET /api/ps`."""
    if gateway.models is not None:
        loaded = [each for each in own_models(gateway.models, http) if each.info is not None]
        await _read_digests(loaded)
        await http.answer_json({"models": [_listed(gateway, each, each.name) | _resident(each) for each in loaded]})
        return
    info = gateway.info
    await _read_digests([info.model])
    await http.answer_json({"models": [_listed(gateway, info.model, gateway.names.name) | _running(info)]})


async def _read_digests(models: Sequence[ModelInfo | ListedModel]) -> None:
    await trio.to_thread.run_sync(warm, [(each.path, each.size_bytes) for each in models], abandon_on_cancel=True)


def _running(info: ServerInfo | None) -> dict[str, Any]:
    return {
        "expires_at": "9999-12-31T23:59:59Z",
        "size_vram": 0 if info is None else info.model.gpu_bytes,
        "context_length": 0 if info is None else info.limits.n_ctx,
    }


def _resident(model: ListedModel) -> dict[str, Any]:
    """What is told of one of several models beside `_listed`: what it takes, and when it leaves if no request comes."""
    entry = _running(model.info) | {"size": model.taken_bytes or model.memory_bytes}
    if model.leaves_in_sec is not None:
        entry["expires_at"] = iso_time(datetime.now(UTC) + timedelta(seconds=model.leaves_in_sec))
    return entry


def _listed(gateway: Gateway, model: ModelInfo | ListedModel, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": gateway.names.loaded_time,
        "size": model.size_bytes,
        "digest": digest(model.path, model.size_bytes),
        "details": _described(model),
    }


def _described(model: ModelInfo | ListedModel) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": model.architecture,
        "families": [model.architecture],
        "parameter_size": f"{model.parameters / 1e9:.3g}B",
        "quantization_level": model.quantization,
    }


def _parameters(gateway: Gateway) -> dict[str, Any]:
    """The context, and how an answer is drawn that nothing is said of, in Ollama's words."""
    info = gateway.info
    found: dict[str, Any] = {"num_ctx": info.limits.n_ctx}
    if info.capabilities.generate:
        figures = sampling(gateway, Options(), DEFAULTS, {}).settled
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
    info = gateway.info
    texts = (("TEMPLATE", info.chat_template), ("LICENSE", info.model.license))
    lines = [
        f"FROM {info.model.name}",
        *(f'{word} """{text}"""' for word, text in texts if text),
        *(f"PARAMETER {name} {value}" for name, value in parameters.items()),
    ]
    return "\n".join(lines) + "\n"


async def show(gateway: Gateway, http: Exchange) -> None:
    """`POST /api/show`: what a model's file says of it. No model is loaded."""
    reader, models = gateway.reader(http), gateway.models
    body = await http.built(lambda fields: read(fields, NameBody, http.ignored))
    asked = reader.first(("model", body.model or None), ("name", body.name or None))
    if models is None:
        check_only_model(gateway, http)
        gateway.names.check(asked)
    else:
        name = await meant_model(gateway, models, http, asked) or models.listed()[0].name
        gateway = gateway.to_model(models, gateway.names, await models.card(name, loads=False))
    model, able = gateway.info.model, gateway.info.capabilities
    parameters = _parameters(gateway)
    await http.answer_json(
        {
            "modified_at": gateway.names.loaded_time,
            "license": model.license or "",
            "modelfile": _modelfile(gateway, parameters),
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
            "template": gateway.info.chat_template,
            "details": _described(model),
            "model_info": {
                "general.architecture": model.architecture,
                "general.parameter_count": model.parameters,
                "general.basename": model.name,
                f"{model.architecture}.context_length": gateway.info.limits.n_ctx,
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

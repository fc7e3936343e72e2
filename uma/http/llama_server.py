"""llama-server's errors, and its endpoints for tokens, templates and operators. `llama_server_completion` generates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import attrs
import trio

from uma.constraints import Range
from uma.errors import BadRequest
from uma.http import openai_chat
from uma.http.ask import Tokenizes
from uma.http.dialect import Body, Dialect, dumps
from uma.http.exchange import Exchange
from uma.http.fields import DRAWN, Common, sampling
from uma.http.gateway import Gateway
from uma.http.generation import small_work
from uma.http.many import known_model
from uma.http.problem import Problem, Unimplemented
from uma.http.prometheus import exposition
from uma.http.prompts import MEDIA_MARKER
from uma.http.reader import checked_text
from uma.types import MAX_SEED, PAUSED, Request, SamplingParams

_TYPES = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "model_not_found": "not_found_error",
    "context_length": "exceed_context_size_error",
    "unsupported": "not_supported_error",
    "rate": "rate_limit_error",
    "overloaded": "rate_limit_error",
    "busy": "unavailable_error",
    "crowded": "unavailable_error",
    "loading": "unavailable_error",
    "stopping": "unavailable_error",
    "fault": "server_error",
}


LOADING = "Loading model"
"""Programs know a load by llama-server's words for it."""


OVERFLOW = "the request exceeds the available context size, try increasing it: "
"""And an overflow by these."""


def _error(problem: Problem, request_id: str) -> Body:
    """`{"error": {"code", "message", "type"}}`, `code` being the status."""
    kind = _TYPES.get(problem.kind, "invalid_request_error")
    message = LOADING if problem.kind == "loading" else problem.message
    if problem.kind == "context_length":
        message = OVERFLOW + message
    return {"error": {"code": problem.status, "message": message, "type": kind, **problem.size}}


LLAMA_SERVER = Dialect(_error)

MAX_INLINE_TOKENS = 2_000
"""Maximum tokens that are written in Trio's thread; more would keep streams waiting."""
UNBOUNDED = -1
"""A number of tokens: as many as there may be."""


@attrs.frozen(kw_only=True)
class TokenizeBody:
    """`POST /tokenize`. `content` for the text alone; vLLM's `prompt` is taken too."""

    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


async def tokenize(gateway: Gateway, http: Exchange) -> None:
    """`POST /tokenize`: the ids of a text, without the beginning of text unless `add_special` asks for it."""
    reader = gateway.reader(http)
    body = await http.built(lambda fields: reader.body(fields, TokenizeBody))
    text = reader.first(("content", body.content), ("prompt", body.prompt))
    if text is None:
        raise BadRequest.at("content", "is required (a string)")
    answer = await small_work(http, partial(_tokenized, gateway, http, text, body))
    await http.answer(answer)


async def _tokenized(gateway: Gateway, http: Exchange, text: str, body: TokenizeBody) -> bytes:
    tokens: Sequence[int] = ()
    pieces: Sequence[bytes] | None = None
    if text or body.add_special:
        request = Request(http.id, prompt=checked_text(text, "content"), parse_special=body.parse_special is not False)
        found = await gateway.source.tokenize(request, pieces=bool(body.with_pieces))
        first = 0 if body.add_special else found.added_tokens
        tokens, pieces = found.token_ids[first:], found.pieces and found.pieces[first:]
    written = partial(_written_tokens, tokens, pieces, gateway.info.limits.n_ctx)
    return written() if len(tokens) <= MAX_INLINE_TOKENS else await trio.to_thread.run_sync(written)


def _written_tokens(tokens: Sequence[int], pieces: Sequence[bytes] | None, limit: int) -> bytes:
    entries: Sequence[Any] = tokens
    if pieces is not None:
        shown = {token: _piece(piece) for token, piece in zip(tokens, pieces, strict=True)}
        entries = [{"id": token, "piece": shown[token]} for token in tokens]
    return dumps({"tokens": entries, "count": len(tokens), "max_model_len": limit})


def _piece(piece: bytes) -> str | list[int]:
    """A token's text, and its bytes where these are a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


@attrs.frozen(kw_only=True)
class DetokenizeBody:
    """`POST /detokenize`."""

    tokens: tuple[Annotated[int, Range(0)], ...]
    model: str | None = None


async def detokenize(gateway: Gateway, http: Exchange) -> None:
    """`POST /detokenize`: the text of token ids, special tokens by their spelling."""

    def request(fields: dict[str, Any]) -> Request | None:
        body = gateway.reader(http).body(fields, DetokenizeBody)
        http.names["token_ids"] = "tokens"
        return Request(http.id, token_ids=body.tokens) if body.tokens else None

    asked = await http.built(request)
    found = None if asked is None else await small_work(http, partial(gateway.source.tokenize, asked, pieces=True))
    await http.answer_json({"content": "" if found is None else found.text or ""})


apply_template = Tokenizes(openai_chat.read_conversation, lambda found: {"prompt": found.text})
"""The prompt that a chat completion of this conversation has, tools included."""


async def health(gateway: Gateway, http: Exchange) -> None:
    """`GET /health`: 200 while the source takes requests, also where it is paused, 503 otherwise. Computes nothing."""
    found = await gateway.source.health(probe=False)
    hint = {"hint": PAUSED} if found.paused_sec else {}
    await http.answer_json({"status": found.status, **hint}, status=200 if found.status == "ok" else 503)


def settings(params: SamplingParams, n_predict: int, seed: int, *, stream: bool) -> dict[str, Any]:
    """llama-server's `generation_settings`: how a request is sampled, by its names."""
    figures = params.settled
    return {
        "seed": seed,
        "temperature": figures.temperature,
        "dynatemp_range": params.dynatemp_range,
        "dynatemp_exponent": params.dynatemp_exponent,
        "top_k": figures.top_k,
        "top_p": figures.top_p,
        "min_p": figures.min_p,
        "top_n_sigma": -1.0 if params.top_n_sigma is None else params.top_n_sigma,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "typical_p": params.typical_p,
        "repeat_last_n": params.penalty_window,
        "repeat_penalty": figures.repetition_penalty,
        "presence_penalty": figures.presence_penalty,
        "frequency_penalty": figures.frequency_penalty,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": params.dry_window,
        "dry_sequence_breakers": params.dry_sequence_breakers,
        "mirostat": params.mirostat,
        "mirostat_tau": params.mirostat_tau,
        "mirostat_eta": params.mirostat_eta,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "stop": params.stop,
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "ignore_eos": params.ignore_eos,
        "stream": stream,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in (params.logit_bias or {}).items()],
        "n_probs": params.logprobs or 0,
        "grammar": "" if params.grammar is None else params.grammar.gbnf or "",
    }


async def lora_adapters(gateway: Gateway, http: Exchange) -> None:
    """`GET /lora-adapters`: what `lora` of a request can name; one that names none has a scale of 0 of each. Of several
    models those of the one that the query names.
    """
    names = gateway.info.capabilities.adapters
    if (models := gateway.models) is not None:
        named = await known_model(models, http, http.query.get("model"))
        names = (models.listed()[0] if named is None else models.find(named)).adapters
    paths = {adapter.name: adapter.path for adapter in gateway.config.adapters}
    found = [
        {"id": id, "path": paths.get(name, ""), "scale": 0.0, "task_name": name, "prompt_prefix": ""}
        for id, name in enumerate(names)
    ]
    await http.answer_json(found)


async def set_lora_adapters(gateway: Gateway, http: Exchange) -> None:
    """`POST /lora-adapters`: refused, because requests of other programs would have another model all at once."""
    raise Unimplemented("scales of LoRA adapters are not set for all requests: give lora in each, or name model+NAME")


async def props(gateway: Gateway, http: Exchange) -> None:
    """`GET /props`: the model, what can be asked of it, and the bounds. Of several models, as llama-server's router has
    it, unless one is named.
    """
    info = gateway.info
    if gateway.models is not None:
        general = {"model_alias": "models", "model_path": "none", "build_info": info.server}
        settings_of_none = {"default_generation_settings": {"n_ctx": 0, "params": {}}}
        await http.answer_json({"role": "router", "models_autoload": True, **general, **settings_of_none})
        return
    await http.answer_json(
        {
            "model_path": info.model.path,
            "model_alias": gateway.names.name,
            "chat_template": info.chat_template,
            "build_info": info.server,
            "total_slots": gateway.info.limits.max_sequences,
            "default_generation_settings": {"n_ctx": info.limits.n_ctx, "params": _default_settings(gateway)},
            "is_sleeping": False,
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "modalities": {"vision": info.capabilities.vision, "audio": info.capabilities.audio},
            "media_marker": MEDIA_MARKER,
            "model": attrs.asdict(info.model),
            "capabilities": attrs.asdict(info.capabilities),
            "limits": attrs.asdict(info.limits),
        }
    )


def _default_settings(gateway: Gateway) -> dict[str, Any]:
    """How a native completion is sampled whose body says nothing; nothing where the model does not generate."""
    info = gateway.info
    if not info.capabilities.generate:
        return {}
    return settings(sampling(gateway, Common(), DRAWN, {}), UNBOUNDED, MAX_SEED, stream=False)


async def slots(gateway: Gateway, http: Exchange) -> None:
    """`GET /slots`: the requests that run, one object each, then an idle one for each that could run beside them."""
    running = gateway.shown(await gateway.source.activity(), http).running
    busy = [
        {
            "id": index,
            "is_processing": True,
            "n_ctx": gateway.info.limits.n_ctx,
            "request": each.id,
            "priority": each.priority,
            "n_prompt_tokens": each.prompt_tokens,
            "n_prompt_tokens_cache": each.cached_tokens,
            "n_prompt_tokens_processed": each.computed_tokens,
            "n_decoded": each.generated_tokens,
            "is_preempted": each.is_preempted,
        }
        for index, each in enumerate(running)
    ]
    idle = range(len(busy), gateway.info.limits.max_sequences)
    n_ctx = gateway.info.limits.n_ctx
    await http.answer_json([*busy, *({"id": index, "is_processing": False, "n_ctx": n_ctx} for index in idle)])


async def metrics(gateway: Gateway, http: Exchange) -> None:
    """`GET /metrics`, as Prometheus reads it."""
    text = exposition(await gateway.source.metrics(), gateway, http.account)
    began = [(b"process-start-time-unix", str(gateway.names.loaded_at).encode())]
    await http.answer(text.encode(), media_type=b"text/plain; version=0.0.4; charset=utf-8", headers=began)

"""llama-server's own endpoints: its native completion, tokens and templates, and what an operator looks at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import attrs
import orjson
import trio

from uma.constraints import Range, show
from uma.errors import BadRequest
from uma.http import abilities, openai_chat
from uma.http.content import checked_text
from uma.http.dialect import Body, SseJob, sse
from uma.http.exchange import Exchange
from uma.http.fields import (
    MAX_WINDOW,
    Common,
    all_tokens,
    allowed_tokens,
    context_window,
    first,
    read,
    sampling,
    urgency,
)
from uma.http.gateway import Gateway
from uma.http.generation import unless_gone
from uma.http.logprobs import Unshown, shown
from uma.http.openai_completions import is_one_prompt, prompts
from uma.http.problem import Problem
from uma.http.prometheus import exposition
from uma.http.usage import timings, warnings
from uma.types import MAX_SEED, Finished, Logprobs, Request, SamplerSettings, Temperature, Token

DEFAULTS = SamplerSettings(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
"""llama-server's own."""

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
    "loading": "unavailable_error",
    "stopping": "unavailable_error",
    "fault": "server_error",
}


LOADING = "Loading model"
"""Programs know a load by llama-server's words for it."""


class LlamaServerErrors:
    """`{"error": {"code", "message", "type"}}`, `code` being the status."""

    def error(self, problem: Problem, request_id: str) -> Body:
        """See `Dialect`."""
        kind = _TYPES.get(problem.kind, "invalid_request_error")
        message = LOADING if problem.kind == "loading" else problem.message
        return {"error": {"code": problem.status, "message": message, "type": kind}}


ERRORS = LlamaServerErrors()

_Window = Annotated[int, Range(-1, MAX_WINDOW)]
_DRAWN = (-1, MAX_SEED)
"""Seeds that have one drawn: the latter is llama-server's own default, which clients send along."""


@attrs.frozen(kw_only=True)
class CompletionBody(Common):
    """The fields that do something; the rest is named in `X-UMA-Ignored`."""

    prompt: Annotated[Any, "a string or a list of token ids"]
    model: str | None = None
    stream: bool | None = None
    n_predict: Annotated[int, Range(-1)] | None = None
    temperature: Temperature | None = None
    seed: Annotated[int, Range(-1, MAX_SEED)] | None = None
    repeat_penalty: Annotated[float, Range(gt=0, le=2)] | None = None
    repeat_last_n: _Window | None = None
    dry_penalty_last_n: _Window | None = None
    return_tokens: bool | None = None
    n_probs: Any = None
    logit_bias: Any = None
    grammar: Any = None
    json_schema: Any = None
    image_data: Any = None


async def completion(gateway: Gateway, http: Exchange) -> None:
    """`POST /completion`: one prompt, a string or a list of token ids."""
    await gateway.generate(http, await http.built(partial(_job, gateway, http)))


def _job(gateway: Gateway, http: Exchange, fields: dict[str, Any]) -> CompletionJob:
    body = read(fields, CompletionBody, http)
    model = gateway.names.check(body.model)
    if body.image_data:
        abilities.media("image_data", "image_data")
    prompt = _prompt(gateway, body.prompt)
    if body.grammar and body.json_schema is not None:
        raise BadRequest("grammar: give either grammar or json_schema, not both")
    able = gateway.source.info.capabilities
    params = sampling(
        gateway,
        body,
        DEFAULTS,
        max_tokens=_tokens(gateway, http, body.n_predict),
        temperature=body.temperature,
        seed=None if body.seed in _DRAWN else body.seed,
        repetition_penalty=first(
            http, ("repeat_penalty", body.repeat_penalty), ("repetition_penalty", body.repetition_penalty)
        ),
        penalty_window=_window(
            gateway, first(http, ("repeat_last_n", body.repeat_last_n), ("penalty_window", body.penalty_window))
        ),
        dry_window=_window(
            gateway, first(http, ("dry_penalty_last_n", body.dry_penalty_last_n), ("dry_window", body.dry_window))
        ),
        logprobs=abilities.logprobs(body.n_probs or None, "n_probs", able),
        logit_bias=abilities.logit_bias(body.logit_bias, able, bans_by_false=True),
        grammar=abilities.gbnf(body.grammar, "grammar", able, http.names)
        or abilities.json_schema(body.json_schema, "json_schema", able, http.names),
    )
    how = urgency(body, http)
    request = Request(http.id, sampling=params, stream=bool(body.stream), parse_special=True, **how, **prompt)
    is_unbounded, returns_tokens = body.n_predict == -1, bool(body.return_tokens)
    return CompletionJob([request], bool(body.stream), model, is_unbounded, returns_tokens=returns_tokens)


def _prompt(gateway: Gateway, value: Any) -> dict[str, Any]:
    """The one prompt, which can be in a list of its own. Raises `BadRequest` for what is none."""
    one = value[0] if isinstance(value, list) and len(value) == 1 and not is_one_prompt(value) else value
    if not is_one_prompt(one):
        raise BadRequest(
            f"prompt: expected one string or one list of token ids, not {show(value)}; "
            "/v1/completions takes several prompts, and a text among token ids is nowhere a prompt"
        )
    (prompt,) = prompts(gateway, value, "prompt")
    return prompt


def _tokens(gateway: Gateway, http: Exchange, n_predict: int | None) -> int | None:
    return all_tokens(gateway, http) if n_predict == -1 else allowed_tokens(gateway, n_predict, "n_predict")


def _window(gateway: Gateway, asked: int | None) -> int | None:
    """-1 is the whole context."""
    return context_window(gateway) if asked == -1 else asked


@attrs.define
class CompletionJob(SseJob):
    """A native completion: an object for each token, and one at the end with `stop: true`."""

    model: str
    is_unbounded: bool
    """See `warnings`."""
    returns_tokens: bool
    _n: int = attrs.field(default=0, init=False)
    _unshown: Unshown = attrs.field(factory=Unshown, init=False)

    def token(self, index: int, token: Token) -> bytes:
        """See `Job`."""
        self._n += 1
        if self.requests[0].sampling.logprobs is not None:
            return sse({**self._piece(token), **_probabilities(self._unshown.take(token))})
        return (
            b'data: {"index":0,"content":'
            + orjson.dumps(token.text)
            + (b',"tokens":[%d],"stop":false,"tokens_predicted":%d}\n\n' % (token.token_id, self._n))
        )

    def _piece(self, token: Token) -> dict[str, Any]:
        return {
            "index": 0,
            "content": token.text,
            "tokens": [token.token_id],
            "stop": False,
            "tokens_predicted": self._n,
        }

    def finished(self, index: int, finished: Finished) -> bytes:
        """See `Job`."""
        rest = self._unshown.rest(finished)
        return sse({**self._last(finished, ""), **(_probabilities(rest) if rest else {})})

    def end(self, results: Sequence[Finished]) -> bytes:
        """See `Job`. The last object says `stop` itself."""
        return b""

    def failed(self, problem: Problem) -> bytes:
        """See `Job`."""
        return sse(ERRORS.error(problem, ""))

    def whole(self, results: Sequence[Finished]) -> Body:
        """See `Job`."""
        result = results[0]
        body = self._last(result, result.text or "")
        if self.returns_tokens:
            body["tokens"] = list(result.token_ids or ())
        return body if result.logprobs is None else {**body, **_probabilities(shown(result))}

    def _last(self, result: Finished, text: str) -> dict[str, Any]:
        word = result.stop_string
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "stop": True,
            "model": self.model,
            "tokens_predicted": result.usage.completion_tokens,
            "tokens_evaluated": result.usage.prompt_tokens,
            "tokens_cached": result.usage.cached_tokens,
            "truncated": False,
            "stop_type": "limit" if result.reason == "length" else "word" if word is not None else "eos",
            "stopping_word": word or "",
            "timings": timings(result),
            "seed": result.seed,
            **warnings([result], is_unbounded=self.is_unbounded),
        }


def _probabilities(positions: Sequence[Logprobs]) -> dict[str, Any]:
    return {"completion_probabilities": [_probability(each) for each in positions]}


def _probability(position: Any) -> dict[str, Any]:
    def one(token: Any) -> dict[str, Any]:
        return {"id": token.token_id, "token": token.text, "bytes": list(token.bytes), "logprob": token.logprob}

    return {**one(position.chosen), "top_logprobs": [one(each) for each in position.top]}


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
    body = await http.built(lambda fields: read(fields, TokenizeBody, http))
    gateway.names.check(body.model)
    text = first(http, ("content", body.content), ("prompt", body.prompt))
    if text is None:
        raise BadRequest("content: is required (a string)")
    tokens = await unless_gone(http, partial(_tokenized, gateway, http, text, body))
    limit = gateway.source.info.limits.n_ctx
    await http.answer_json({"tokens": tokens, "count": len(tokens), "max_model_len": limit})


async def _tokenized(gateway: Gateway, http: Exchange, text: str, body: TokenizeBody) -> list[Any]:
    if not text and not body.add_special:
        return []
    request = Request(http.id, prompt=checked_text(text, "content"), parse_special=body.parse_special is not False)
    found = await gateway.source.tokenize(request)
    tokens = found.token_ids if body.add_special else found.token_ids[found.added_tokens :]
    if body.with_pieces:
        return [{"id": token, "piece": await _piece(gateway, http, token)} for token in tokens]
    return list(tokens)


async def _piece(gateway: Gateway, http: Exchange, token: int) -> str:
    await trio.lowlevel.checkpoint()  # a text of a million tokens leaves others their turn
    return (await gateway.source.tokenize(Request(http.id, token_ids=(token,)))).text or ""


@attrs.frozen(kw_only=True)
class DetokenizeBody:
    """`POST /detokenize`."""

    tokens: tuple[Annotated[int, Range(0)], ...]
    model: str | None = None


async def detokenize(gateway: Gateway, http: Exchange) -> None:
    """`POST /detokenize`: the text of token ids. Special tokens have none."""

    def request(fields: dict[str, Any]) -> Request | None:
        body = read(fields, DetokenizeBody, http)
        gateway.names.check(body.model)
        http.names["token_ids"] = "tokens"
        return Request(http.id, token_ids=body.tokens) if body.tokens else None

    asked = await http.built(request)
    found = None if asked is None else await unless_gone(http, partial(gateway.source.tokenize, asked))
    await http.answer_json({"content": "" if found is None else found.text or ""})


async def apply_template(gateway: Gateway, http: Exchange) -> None:
    """`POST /apply-template`: the prompt that a chat completion of this conversation has, tools included."""

    def request(fields: dict[str, Any]) -> Request:
        body = read(fields, openai_chat.Conversation, http)
        gateway.names.check(body.model)
        return Request(http.id, **openai_chat.prompt(gateway, body, http))

    found = await unless_gone(http, partial(gateway.source.tokenize, await http.built(request)))
    await http.answer_json({"prompt": found.text})


async def health(gateway: Gateway, http: Exchange) -> None:
    """`GET /health`: 200 while the source takes requests, 503 otherwise. Computes nothing."""
    found = await gateway.source.health(probe=False)
    await http.answer_json({"status": found.status}, status=200 if found.status == "ok" else 503)


async def props(gateway: Gateway, http: Exchange) -> None:
    """`GET /props`: the model, what can be asked of it, and the bounds."""
    info = gateway.source.info
    await http.answer_json(
        {
            "model_path": info.model.path,
            "model_alias": gateway.names.name,
            "build_info": info.server,
            "total_slots": gateway.source.info.limits.max_sequences,
            "default_generation_settings": {"n_ctx": info.limits.n_ctx},
            "modalities": {"vision": False, "audio": False},
            "model": attrs.asdict(info.model),
            "capabilities": attrs.asdict(info.capabilities),
            "limits": attrs.asdict(info.limits),
        }
    )


async def slots(gateway: Gateway, http: Exchange) -> None:
    """`GET /slots`: the requests that run, one object each, then an idle one for each that could run beside them."""
    running = (await gateway.source.activity()).running
    busy = [
        {
            "id": index,
            "is_processing": True,
            "n_ctx": gateway.source.info.limits.n_ctx,
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
    idle = range(len(busy), gateway.source.info.limits.max_sequences)
    n_ctx = gateway.source.info.limits.n_ctx
    await http.answer_json([*busy, *({"id": index, "is_processing": False, "n_ctx": n_ctx} for index in idle)])


async def metrics(gateway: Gateway, http: Exchange) -> None:
    """`GET /metrics`, as Prometheus reads it."""
    text = exposition(await gateway.source.metrics(), gateway)
    await http.answer(text.encode(), media_type=b"text/plain; version=0.0.4; charset=utf-8")

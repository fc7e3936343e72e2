"""llama-server's native completion, `POST /completion`, and the same in the middle of a text, `POST /infill`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import attrs
import orjson

from uma.constraints import Length, Range, Text
from uma.http import abilities, fill_in
from uma.http.dialect import BaseJob, Body, sse
from uma.http.exchange import Exchange
from uma.http.fields import (
    DRAWN,
    MAX_WINDOW,
    Common,
    context_window,
    first,
    read_generating,
    sampling,
    tokens_wanted,
    urgency,
)
from uma.http.gateway import Gateway
from uma.http.llama_server import ERRORS, UNBOUNDED, settings
from uma.http.logprobs import Unshown, shown
from uma.http.problem import Problem, Unsupported
from uma.http.prompts import PROMPTS, built_with_ids, is_one_prompt, requests_for
from uma.http.structured_outputs import StructuredFields, grammar_of
from uma.http.telemetry import Telemetry, TelemetryFields
from uma.http.usage import timings, warnings
from uma.types import MAX_SEED, Finished, Logprobs, Request, SamplingParams, Temperature, Token

_Window = Annotated[int, Range(-1, MAX_WINDOW)]
_DRAWN = (-1, MAX_SEED)
"""Seeds that have one drawn: the latter is llama-server's own default, which clients send along."""


@attrs.frozen(kw_only=True)
class CompletionBody(Common, StructuredFields, TelemetryFields):
    """The fields that do something; the rest is named in `X-UMA-Ignored`."""

    prompt: Annotated[Any, PROMPTS]
    model: str | None = None
    stream: bool | None = None
    n_predict: Annotated[int, Range(UNBOUNDED)] | None = None
    max_tokens: Annotated[int, Range(UNBOUNDED)] | None = None
    max_completion_tokens: Annotated[int, Range(UNBOUNDED)] | None = None
    temperature: Temperature | None = None
    seed: Annotated[int, Range(-1, MAX_SEED)] | None = None
    repeat_penalty: Annotated[float, Range(gt=0, le=2)] | None = None
    repeat_last_n: _Window | None = None
    dry_penalty_last_n: _Window | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[tuple[str, ...], Length(0, 64, "names")] | None = None
    n_probs: Any = None
    post_sampling_probs: bool | None = None
    logit_bias: Any = None
    image_data: Any = None


async def completion(gateway: Gateway, http: Exchange) -> None:
    """`POST /completion`: one prompt or several; several answers are a list, or told apart by `index`."""
    build = partial(_completion, gateway, http)
    await gateway.generate(http, await built_with_ids(gateway, http, ("prompt",), build))


@attrs.frozen(kw_only=True)
class FileBody:
    """What another file holds."""

    text: Annotated[str, Text()]
    filename: Annotated[str, Text()] = "tmp"


@attrs.frozen(kw_only=True)
class InfillBody(CompletionBody):
    """`POST /infill`. `prompt` is what stands in the gap already."""

    prompt: Annotated[str, Text()] = ""
    input_prefix: Annotated[str, Text()]
    input_suffix: Annotated[str, Text()]
    input_extra: Annotated[tuple[FileBody, ...], Length(0, 1024, "files")] = ()


async def infill(gateway: Gateway, http: Exchange) -> None:
    """`POST /infill`: what comes between two texts, of a model that has tokens for that."""

    def build(fields: dict[str, Any]) -> tuple[CompletionJob, fill_in.Gap]:
        body = read_generating(fields, InfillBody, http)
        gateway.names.check(body.model, http)
        fill_in.check(gateway.source.info.capabilities, "input_prefix")
        files = [(each.filename, each.text) for each in body.input_extra]
        gap = fill_in.Gap(body.input_prefix, body.input_suffix, body.prompt, files)
        return _job(gateway, http, attrs.evolve(body, prompt=body.input_prefix + body.prompt)), gap

    job, gap = await http.built(build)
    filled, left_out = await fill_in.filled(gateway, http, job.requests[0], gap, "input_prefix")
    job.requests = [filled]
    if left_out:
        job.notes.append(f"input_extra: the first {left_out} of {len(gap.files or ())} do not fit the context")
    await gateway.generate(http, job)


def _completion(gateway: Gateway, http: Exchange, fields: dict[str, Any]) -> CompletionJob:
    return _job(gateway, http, read_generating(fields, CompletionBody, http))


def _job(gateway: Gateway, http: Exchange, body: CompletionBody) -> CompletionJob:
    model = gateway.names.check(body.model, http)
    if body.image_data:
        raise Unsupported(
            "image_data: is not read; give prompt_string and multimodal_data in prompt to a model that sees"
        )
    asked = first(
        http,
        ("n_predict", body.n_predict),
        ("max_completion_tokens", body.max_completion_tokens),
        ("max_tokens", body.max_tokens),
    )
    n_predict = UNBOUNDED if asked is None else asked
    params = _sampling(gateway, http, body, n_predict)
    requests = requests_for(gateway, http, body.prompt, params, stream=bool(body.stream), **urgency(body, http))
    job = CompletionJob(
        requests,
        bool(body.stream),
        model,
        n_predict=n_predict,
        n_ctx=gateway.source.info.limits.n_ctx,
        returns_tokens=bool(body.return_tokens),
        fields=body.response_fields or (),
        is_list=len(requests) > 1 and not is_one_prompt(body.prompt),
    )
    job.telemetry = Telemetry.of(body, stream=bool(body.stream))
    return job


def _sampling(gateway: Gateway, http: Exchange, body: CompletionBody, n_predict: int) -> SamplingParams:
    able = gateway.source.info.capabilities
    abilities.post_sampling_probs(body.post_sampling_probs)
    params = sampling(
        gateway,
        body,
        DRAWN,
        max_tokens=tokens_wanted(gateway, http, n_predict, "n_predict"),
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
        grammar=grammar_of(body, able, http),
    )
    return params.over(gateway.config.sampler)


def _window(gateway: Gateway, asked: int | None) -> int | None:
    """-1 is the whole context."""
    return context_window(gateway) if asked == -1 else asked


@attrs.define(kw_only=True)
class CompletionJob(BaseJob):
    """Native completions: of each prompt an object for each token, and one at the end with `stop: true`."""

    requests: Sequence[Request] = attrs.field(kw_only=False)
    stream: bool = attrs.field(kw_only=False)
    model: str = attrs.field(kw_only=False)
    n_predict: int
    """Tokens to generate as the body has them."""
    n_ctx: int
    """Maximum tokens of a prompt and its answer."""
    returns_tokens: bool
    fields: Sequence[str]
    """Members of the last object that are wanted (`a/b`: the member `b` of `a`); none: all."""
    is_list: bool
    """Whether a whole answer is a list."""
    notes: list[str] = attrs.field(factory=list, init=False)
    """Further warnings."""
    _n: Counter[int] = attrs.field(factory=Counter, init=False)
    _unshown: defaultdict[int, Unshown] = attrs.field(factory=lambda: defaultdict(Unshown), init=False)
    _lines: set[int] = attrs.field(factory=set, init=False)
    """Answers with a line break."""

    def token(self, index: int, token: Token) -> bytes:
        """See `Job`."""
        self._n[index] += 1
        if "\n" in token.text:
            self._lines.add(index)
        more = self.timed(index)
        if self.requests[0].sampling.logprobs is not None:
            more |= _probabilities(self._unshown[index].take(token))
        if more:
            return sse({**self._piece(index, token), **more})
        return (
            b'data: {"index":%d,"content":' % index
            + orjson.dumps(token.text)
            + (b',"tokens":[%d],"stop":false,"tokens_predicted":%d}\n\n' % (token.token_id, self._n[index]))
        )

    def progress(self, index: int, fields: Mapping[str, Any]) -> bytes:
        """See `Job`."""
        return sse({"index": index, "content": "", "tokens": [], "stop": False, "tokens_predicted": 0, **fields})

    def _piece(self, index: int, token: Token) -> dict[str, Any]:
        return {
            "index": index,
            "content": token.text,
            "tokens": [token.token_id],
            "stop": False,
            "tokens_predicted": self._n[index],
        }

    def finished(self, index: int, finished: Finished) -> bytes:
        """See `Job`."""
        rest = self._unshown[index].rest(finished)
        last = self._last(index, finished, "", has_new_line=index in self._lines)
        return sse(self._wanted({**last, **(_probabilities(rest) if rest else {})}))

    def end(self, results: Sequence[Finished]) -> bytes:
        """See `Job`. The last object says `stop` itself."""
        return b""

    def failed(self, problem: Problem) -> bytes:
        """See `Job`."""
        return sse(ERRORS.error(problem, ""))

    def whole(self, results: Sequence[Finished]) -> Body | list[Body]:
        """See `Job`."""
        bodies = [self._whole(index, result) for index, result in enumerate(results)]
        return bodies if self.is_list else bodies[0]

    def _whole(self, index: int, result: Finished) -> Body:
        text = result.text or ""
        body = self._last(index, result, text, has_new_line="\n" in text)
        if self.returns_tokens:
            body["tokens"] = list(result.token_ids or ())
        return self._wanted(body if result.logprobs is None else {**body, **_probabilities(shown(result))})

    def _last(self, index: int, result: Finished, text: str, *, has_new_line: bool) -> dict[str, Any]:
        word, request = result.stop_string, self.requests[index]
        return {
            "index": index,
            "content": text,
            "tokens": [],
            "stop": True,
            "model": self.model,
            "tokens_predicted": result.usage.completion_tokens,
            "tokens_evaluated": result.usage.prompt_tokens,
            "tokens_cached": result.usage.cached_tokens,
            "generation_settings": settings(request.sampling, self.n_predict, result.seed, stream=request.stream),
            "prompt": request.prompt,
            "has_new_line": has_new_line,
            "truncated": self._fills_context(result),
            "stop_type": "limit" if result.reason == "length" else "word" if word is not None else "eos",
            "stopping_word": word or "",
            "timings": timings(result),
            "seed": result.seed,
            **warnings([result], is_unbounded=self.n_predict == UNBOUNDED, before=self.notes),
        }

    def _fills_context(self, result: Finished) -> bool:
        """Whether an answer ended where the context was full."""
        longest = max(answer.completion_tokens for answer in result.every_answer)
        return result.reason == "length" and result.usage.prompt_tokens + longest >= self.n_ctx

    def _wanted(self, body: dict[str, Any]) -> dict[str, Any]:
        """The members of the last object that were asked for; one that is not there is left out."""
        found = {path: _member(body, path) for path in self.fields}
        return {path: value for path, value in found.items() if value is not _NOTHING} if self.fields else body


_NOTHING = object()


def _member(body: Mapping[str, Any], path: str) -> Any:
    found: Any = body
    for name in path.split("/"):
        found = found.get(name, _NOTHING) if isinstance(found, Mapping) else _NOTHING
    return found


def _probabilities(positions: Sequence[Logprobs]) -> dict[str, Any]:
    return {"completion_probabilities": [_probability(each) for each in positions]}


def _probability(position: Any) -> dict[str, Any]:
    def one(token: Any) -> dict[str, Any]:
        return {"id": token.token_id, "token": token.text, "bytes": list(token.bytes), "logprob": token.logprob}

    return {**one(position.chosen), "top_logprobs": [one(each) for each in position.top]}

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
from uma.http.ask import Generates, TextAsk
from uma.http.dialect import Body, Writer, sse
from uma.http.fields import MAX_WINDOW, Common
from uma.http.llama_server import LLAMA_SERVER, UNBOUNDED, settings
from uma.http.logprobs import Unshown, shown
from uma.http.problem import Unsupported
from uma.http.prompts import PROMPTS, is_one_prompt
from uma.http.reader import Reader
from uma.http.structured_outputs import StructuredFields, grammar_of
from uma.http.telemetry import TelemetryFields
from uma.http.usage import timings
from uma.types import MAX_SEED, Finished, Logprobs, Temperature, Token

_Window = Annotated[int, Range(-1, MAX_WINDOW)]
_DRAWN = (-1, MAX_SEED)
"""Seeds that have one drawn: the latter is llama-server's own default, which clients send along."""


@attrs.frozen(kw_only=True)
class LlamaServerBody(Common, StructuredFields, TelemetryFields):
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
    n_probs: abilities.TopLogprobs = None
    post_sampling_probs: bool | None = None
    logit_bias: Any = None
    image_data: Any = None


@attrs.frozen(kw_only=True)
class FileBody:
    """What another file holds."""

    text: Annotated[str, Text()]
    filename: Annotated[str, Text()] = "tmp"


@attrs.frozen(kw_only=True)
class InfillBody(LlamaServerBody):
    """`POST /infill`. `prompt` is what stands in the gap already."""

    prompt: Annotated[str, Text()] = ""
    input_prefix: Annotated[str, Text()]
    input_suffix: Annotated[str, Text()]
    input_extra: Annotated[tuple[FileBody, ...], Length(0, 1024, "files")] = ()


def _read(fields: Mapping[str, Any], reader: Reader) -> TextAsk:
    body = reader.generating(fields, LlamaServerBody)
    return _ask(body, body.prompt, reader)


def _read_infill(fields: Mapping[str, Any], reader: Reader) -> TextAsk:
    body = reader.generating(fields, InfillBody)
    fill_in.check(reader.able, "input_prefix")
    files = [(each.filename, each.text) for each in body.input_extra]
    gap = fill_in.Gap("input_prefix", body.input_suffix, body.input_prefix, body.prompt, files)
    return _ask(body, body.input_prefix + body.prompt, reader, gap)


def _ask(body: LlamaServerBody, prompt: Any, reader: Reader, gap: fill_in.Gap | None = None) -> TextAsk:
    if body.image_data:
        raise Unsupported.at(
            "image_data", "is not read; give prompt_string and multimodal_data in prompt to a model that sees"
        )
    asked = reader.first(
        ("n_predict", body.n_predict),
        ("max_completion_tokens", body.max_completion_tokens),
        ("max_tokens", body.max_tokens),
    )
    n_predict = UNBOUNDED if asked is None else asked
    abilities.post_sampling_probs(body.post_sampling_probs)
    penalties = ("repeat_penalty", body.repeat_penalty), ("repetition_penalty", body.repetition_penalty)
    windows = ("repeat_last_n", body.repeat_last_n), ("penalty_window", body.penalty_window)
    dry_windows = ("dry_penalty_last_n", body.dry_penalty_last_n), ("dry_window", body.dry_window)
    writer = partial(
        LlamaServerWriter,
        n_predict=n_predict,
        n_ctx=reader.info.limits.n_ctx,
        returns_tokens=bool(body.return_tokens),
        fields=body.response_fields or (),
        is_one=is_one_prompt(prompt),
    )
    return TextAsk(
        body=body,
        writer=writer,
        prompt=prompt,
        gap=gap,
        stream=body.stream,
        max_tokens=n_predict,
        tokens_field="n_predict",
        logprobs=abilities.logprobs(body.n_probs or None, "n_probs", reader.able),
        logit_bias=abilities.logit_bias(body.logit_bias, reader.able, bans_by_false=True),
        grammar=grammar_of(body, reader),
        sampling={
            "temperature": body.temperature,
            "seed": None if body.seed in _DRAWN else body.seed,
            "repetition_penalty": reader.first(*penalties),
            "penalty_window": reader.first(*windows),
            "dry_window": reader.first(*dry_windows),
        },
        penalizes_output=False,
    )


@attrs.define
class LlamaServerWriter(Writer):
    """Native completions: of each prompt an object for each token, and one at the end with `stop: true`."""

    n_predict: int
    """Tokens to generate as the body has them."""
    n_ctx: int
    """Maximum tokens of a prompt and its answer."""
    returns_tokens: bool
    fields: Sequence[str]
    """Members of the last object that are wanted (`a/b`: the member `b` of `a`); none: all."""
    is_one: bool
    """Whether the body has one prompt by itself, and no list of them."""
    _n: Counter[int] = attrs.field(factory=Counter, init=False)
    _unshown: defaultdict[int, Unshown] = attrs.field(factory=lambda: defaultdict(Unshown), init=False)
    _lines: set[int] = attrs.field(factory=set, init=False)
    """Answers with a line break."""

    def token(self, index: int, token: Token) -> bytes:
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
        rest = self._unshown[index].rest(finished)
        last = self._last(index, finished, "", has_new_line=index in self._lines)
        return sse(self._wanted({**last, **(_probabilities(rest) if rest else {})}))

    def whole(self, results: Sequence[Finished]) -> Body | list[Body]:
        bodies = [self._whole(index, result) for index, result in enumerate(results)]
        return bodies if len(bodies) > 1 and not self.is_one else bodies[0]

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
            **self.warnings([result]),
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


completion = Generates(LLAMA_SERVER, _read)
"""One prompt or several; several answers are a list, or told apart by `index`."""
infill = Generates(LLAMA_SERVER, _read_infill)
"""What comes between two texts, of a model that has tokens for that."""

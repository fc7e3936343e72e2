"""OpenAI's completions: `POST /v1/completions`. A prompt is a string, a list of token ids, or a list of either."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import attrs

from uma.constraints import Range, Text
from uma.errors import BadRequest
from uma.http import abilities, fill_in
from uma.http.ask import Generates, TextAsk
from uma.http.dialect import Body
from uma.http.fields import Common
from uma.http.logprobs import Place, Unshown, completion_form, shown
from uma.http.openai import OPENAI, StreamOptions
from uma.http.openai_choices import Choice, ChoicesWriter
from uma.http.prompts import PROMPTS
from uma.http.reader import Reader
from uma.http.structured_outputs import StructuredFields, grammar_of
from uma.http.telemetry import TelemetryFields
from uma.http.usage import finish_reason, numbered, stop_reason
from uma.types import MAX_ANSWERS, Answer, Finished, Logprobs, Prompt, Temperature, Token

DEFAULT_MAX_TOKENS = 16
"""Default length, as OpenAI's documents have it for this endpoint."""


@attrs.frozen(kw_only=True)
class CompletionBody(Common, StructuredFields, TelemetryFields):
    """The fields that do something; the rest is named in `X-UMA-Ignored`."""

    prompt: Annotated[Any, PROMPTS]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Range(1, MAX_ANSWERS)] | None = None
    best_of: Annotated[int, Range(1, MAX_ANSWERS)] | None = None
    max_tokens: Annotated[int, Range(-1)] | None = None
    temperature: Temperature | None = None
    echo: bool | None = None
    suffix: Annotated[str, Text()] | None = None
    logprobs: abilities.TopLogprobs = None
    logit_bias: Any = None
    response_format: Any = None


def _read(fields: Mapping[str, Any], reader: Reader) -> TextAsk:
    body = reader.generating(fields, CompletionBody)
    gap = fill_in.Gap("suffix", body.suffix) if body.suffix else None
    if gap is not None:
        fill_in.check(reader.able, "suffix")
        if body.echo:
            raise BadRequest.at("echo", "a text that is filled in is not repeated; leave echo or suffix out")
    top = abilities.logprobs(body.logprobs, "logprobs", reader.able)
    echo = abilities.echo(body.echo, reader.able)
    form = abilities.response_format(body.response_format, "response_format", reader)
    includes_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return TextAsk(
        body=body,
        writer=partial(CompletionWriter, include_usage=includes_usage),
        prompt=body.prompt,
        gap=gap,
        stream=body.stream,
        max_tokens=body.max_tokens,
        default_tokens=DEFAULT_MAX_TOKENS,
        n=body.n,
        best_of=body.best_of,
        logprobs=top,
        logit_bias=abilities.logit_bias(body.logit_bias, reader.able),
        grammar=grammar_of(body, reader, ("response_format", form)),
        sampling={
            "temperature": body.temperature,
            "echo": echo or None,
            "prompt_logprobs": top if echo else None,
        },
    )


@attrs.define
class CompletionWriter(ChoicesWriter):
    """Completions of one or more prompts."""

    kind = "text_completion"
    text_key = b'"text":'
    prefix = "cmpl-"
    _places: defaultdict[int, Place] = attrs.field(factory=lambda: defaultdict(Place), init=False)
    """Where each choice's next text begins."""
    _unshown: defaultdict[int, Unshown] = attrs.field(factory=lambda: defaultdict(Unshown), init=False)
    """Text that is not shown yet, by choice."""

    def prompt(self, index: int, prompt: Prompt) -> bytes:
        """Each choice opens with the prompt."""
        chunks = []
        for answer in range(self.requests[0].sampling.n):
            place = self.place(index, answer)
            positions = None
            if prompt.logprobs is not None:
                positions = completion_form(_texts(prompt.logprobs, prompt), self._places[place])
            chunks.append(self.chunk([_choice(place, prompt.text, logprobs=positions)]))
        return b"".join(chunks)

    def token(self, index: int, token: Token) -> bytes:
        place, more = self.place(index, token.index), self.timed(index)
        if self.requests[0].sampling.logprobs is None:
            return self.piece(place, token.text, more) if token.text else b""
        return self._chunk(place, token.text, self._unshown[place].take(token), more)

    def _chunk(self, place: int, text: str, positions: Sequence[Logprobs], more: Mapping[str, Any]) -> bytes:
        if not (text or positions):
            return b""
        form = completion_form(((each.chosen.text, each) for each in positions), self._places[place])
        return self.chunk([_choice(place, text, logprobs=form)], **more)

    def finished(self, index: int, finished: Finished) -> bytes:
        places = ((self.place(index, each.index), each) for each in finished.every_answer)
        rest = [self._chunk(place, "", self._unshown[place].rest(each), {}) for place, each in places]
        return b"".join(rest) + super().finished(index, finished)

    def delta(self, place: int, text: str = "", reason: str | None = None) -> Choice:
        return _choice(place, text, reason)

    def whole(self, results: Sequence[Finished]) -> Body:
        choices = [_whole_choice(place, result, answer) for place, result, answer in numbered(results)]
        return {**self.head(self.kind), "choices": choices, **self.account(results)}


def _choice(index: int, text: str, reason: str | None = None, logprobs: Mapping[str, Any] | None = None) -> Choice:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _whole_choice(place: int, result: Finished, answer: Answer) -> Choice:
    prompt = result.prompt
    text = answer.text or ""
    form = None
    if answer.logprobs is not None:
        before = [] if prompt is None or prompt.logprobs is None else _texts(prompt.logprobs, prompt)
        form = completion_form([*before, *((each.chosen.text, each) for each in shown(answer))], Place())
    whole = text if prompt is None else prompt.text + text
    return {**_choice(place, whole, finish_reason(answer), form), **stop_reason(answer)}


def _texts(positions: Sequence[Logprobs | None], prompt: Prompt) -> list[tuple[str, Logprobs | None]]:
    """The prompt's tokens with their texts. The first has no log probability, so its text is what the others leave."""
    rest = "".join(each.chosen.text for each in positions if each is not None)
    first = prompt.text.removesuffix(rest) if prompt.text.endswith(rest) else ""
    return [(first if each is None else each.chosen.text, each) for each in positions]


completions = Generates(OPENAI, _read)

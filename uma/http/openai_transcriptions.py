"""OpenAI's transcriptions: `POST /v1/audio/transcriptions`. A model that hears is asked to write down what it hears."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import attrs

from uma import json_text
from uma.constraints import Text
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.dialect import BaseJob, Body, sse
from uma.http.exchange import Exchange
from uma.http.fields import DRAWN, Common, MaxTokens, all_tokens, of_output, read, sampling, tokens_wanted, urgency
from uma.http.gateway import Gateway
from uma.http.media import MediaReader
from uma.http.openai import ERRORS
from uma.http.problem import Problem, Unsupported
from uma.http.usage import Total
from uma.types import Capabilities, Finished, Media, Message, Request, Temperature, Token, joined

ASKED = "Transcribe audio to text"
"""What the model is asked, where the form has no prompt: llama-server's words."""
_WORDS = ("model", "file_url", "prompt", "language", "response_format")
"""Fields that are texts. A form has nothing else; of the others it means JSON's numbers and words."""

_TIMED = ("srt", "vtt", "verbose_json", "diarized_json")
"""OpenAI's other forms of a transcript."""


@attrs.frozen(kw_only=True)
class TranscriptionBody(Common):
    """The fields that do something; the rest is named in `X-UMA-Ignored`."""

    file: Any = None
    file_url: Annotated[str, Text()] | None = None
    """File in JSON, in place of a form's, as vLLM's batches have it: a data URL, or where to fetch it."""
    model: str | None = None
    prompt: Annotated[str, Text()] | None = None
    """What to ask the model instead, as at llama-server."""
    language: Annotated[str, Text()] | None = None
    response_format: str | None = None
    temperature: Temperature | None = None
    """Without it the likeliest text, as OpenAI's documents have it."""
    max_tokens: MaxTokens = None
    stream: bool | None = None


async def transcriptions(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/audio/transcriptions`."""
    job = await http.built(partial(_job, gateway, http))
    if job.stream or job.form == "json":
        await gateway.generate(http, job)
        return
    finished = await gateway.finish(http, job.requests[0])
    await http.answer((finished.text or "").encode(), media_type=b"text/plain; charset=utf-8")


def _job(gateway: Gateway, http: Exchange, fields: dict[str, Any]) -> TranscriptionJob:
    body = read({name: _value(name, value) for name, value in fields.items()}, TranscriptionBody, http)
    gateway.names.check(body.model, http)
    able = gateway.source.info.capabilities
    abilities.hearing(able)
    sound, place = _sound(body, able)
    form = body.response_format or "json"
    if form in _TIMED:
        raise Unsupported(f"response_format: {form!r} has times, which this model does not tell; ask for json or text")
    if form not in ("json", "text"):
        raise BadRequest(f"response_format: expected json or text, not {form[:50]!r}")
    asked = body.prompt or ASKED
    if body.language:
        asked += f" (language: {body.language})"
    text, media = joined([asked, sound])
    http.names["messages[0].media[0].data"] = http.names["messages[0].media[0].url"] = place
    params = sampling(
        gateway,
        body,
        DRAWN,
        **of_output(gateway, body),
        max_tokens=tokens_wanted(gateway, http, body.max_tokens, "max_tokens") or all_tokens(gateway, http),
        temperature=0.0 if body.temperature is None else body.temperature,
    )
    request = Request(
        http.id,
        messages=(Message("user", text, media=media),),
        sampling=params,
        stream=bool(body.stream),
        reasoning="off" if able.reasoning_switch else "auto",
        **urgency(body, http),
    )
    return TranscriptionJob([request], bool(body.stream), form, http.id)


def _sound(body: TranscriptionBody, able: Capabilities) -> tuple[Media, str]:
    """What is to be heard, and where the body has it."""
    if body.file_url is not None and body.file is None:
        return MediaReader(able).of_url(body.file_url, "file_url"), "file_url"
    if not isinstance(body.file, bytes) or not body.file or body.file_url is not None:
        raise BadRequest("file: expected a sound's file in a form, or file_url in JSON, which is its data URL")
    return Media(base64.b64encode(body.file).decode()), "file"


def _value(name: str, value: Any) -> Any:
    if name not in _WORDS and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json_text.loads(value)
    return value


@attrs.define
class TranscriptionJob(BaseJob):
    """One transcript."""

    form: str
    id: str
    _texts: list[str] = attrs.field(factory=list, init=False)

    def token(self, index: int, token: Token) -> bytes:
        """See `Job`."""
        if not token.text:
            return b""
        self._texts.append(token.text)
        return sse({"type": "transcript.text.delta", "delta": token.text})

    def finished(self, index: int, finished: Finished) -> bytes:
        """See `Job`."""
        return b""

    def end(self, results: Sequence[Finished]) -> bytes:
        """See `Job`."""
        return sse({"type": "transcript.text.done", "text": "".join(self._texts), "usage": _usage(results)})

    def failed(self, problem: Problem) -> bytes:
        """See `Job`."""
        return sse(ERRORS.error(problem, self.id))

    def whole(self, results: Sequence[Finished]) -> Body:
        """See `Job`."""
        return {"text": results[0].text or "", "usage": _usage(results)}


def _usage(results: Sequence[Finished]) -> Mapping[str, Any]:
    total = Total.of(results)
    return {
        "type": "tokens",
        "input_tokens": total.prompt_tokens,
        "output_tokens": total.completion_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
    }

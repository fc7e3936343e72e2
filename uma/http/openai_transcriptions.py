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
from uma.http.ask import ChatAsk, Generates
from uma.http.dialect import Body, Dialect, Writer, sse
from uma.http.fields import Common, MaxTokens
from uma.http.media import MediaReader
from uma.http.openai import error
from uma.http.problem import Unsupported
from uma.http.reader import Reader
from uma.http.thinking import Wish
from uma.types import Finished, Media, Message, Temperature, Token, joined

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


def _read(fields: Mapping[str, Any], reader: Reader) -> ChatAsk:
    body = reader.body({name: _value(name, value) for name, value in fields.items()}, TranscriptionBody)
    abilities.hearing(reader.able)
    sound = _sound(body, reader.media)
    form = body.response_format or "json"
    if form in _TIMED:
        raise Unsupported.at(
            "response_format", f"{form!r} has times, which this model does not tell; ask for json or text"
        )
    if form not in ("json", "text"):
        raise BadRequest.at("response_format", f"expected json or text, not {form[:50]!r}")
    asked = body.prompt or ASKED
    if body.language:
        asked += f" (language: {body.language})"
    text, media = joined([asked, sound])
    return ChatAsk(
        body=body,
        writer=partial(TranscriptWriter, form=form),
        messages=[Message("user", text, media=media)],
        wish=Wish(wanted=False if reader.able.reasoning_switch else None),
        stream=body.stream,
        max_tokens=body.max_tokens,
        sampling={"temperature": 0.0 if body.temperature is None else body.temperature},
    )


def _sound(body: TranscriptionBody, media: MediaReader) -> Media:
    """What is to be heard."""
    if body.file_url is not None and body.file is None:
        return media.of_url(body.file_url, "file_url")
    if not isinstance(body.file, bytes) or not body.file or body.file_url is not None:
        raise BadRequest.at("file", "expected a sound's file in a form, or file_url in JSON, which is its data URL")
    return media.take(base64.b64encode(body.file).decode(), "file")


def _value(name: str, value: Any) -> Any:
    if name not in _WORDS and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json_text.loads(value)
    return value


@attrs.define
class TranscriptWriter(Writer):
    """One transcript."""

    form: str
    _texts: list[str] = attrs.field(factory=list, init=False)

    def token(self, index: int, token: Token) -> bytes:
        if not token.text:
            return b""
        self._texts.append(token.text)
        return sse({"type": "transcript.text.delta", "delta": token.text})

    def finished(self, index: int, finished: Finished) -> bytes:
        return b""

    def end(self, results: Sequence[Finished]) -> bytes:
        return sse({"type": "transcript.text.done", "text": "".join(self._texts), "usage": _usage(results)})

    def whole(self, results: Sequence[Finished]) -> Body | str:
        text = results[0].text or ""
        return {"text": text, "usage": _usage(results)} if self.form == "json" else text


def _usage(results: Sequence[Finished]) -> Mapping[str, Any]:
    (usage,) = (result.usage for result in results)
    total = usage.prompt_tokens + usage.completion_tokens
    counts = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens, "total_tokens": total}
    return {"type": "tokens", **counts}


TRANSCRIPTIONS = Dialect(error, is_streamed=lambda fields: _value("stream", fields.get("stream")) is True)
transcriptions = Generates(TRANSCRIPTIONS, _read)

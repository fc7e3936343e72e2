"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import attrs
import orjson

from uma.constraints import Length, Range
from uma.http import abilities
from uma.http.dialect import Body, SseJob, dumps, sse
from uma.http.exchange import Exchange
from uma.http.fields import Common, read, sampling, urgency
from uma.http.gateway import Gateway
from uma.http.logprobs import chat_form
from uma.http.openai import DEFAULTS, ERRORS, StreamOptions, text_of
from uma.http.problem import Problem
from uma.http.usage import Total, answers_of, finish_reason, numbered, timings, warnings
from uma.types import MAX_ANSWERS, Finished, Message, Request, Temperature, Token


@attrs.frozen(kw_only=True)
class ChatMessage:
    """A message as the body has it; its content is read by `text_of`."""

    role: Annotated[str, Length(1, 64)]
    content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None


@attrs.frozen(kw_only=True)
class ChatBody(Common):
    """The fields that do something; the rest is named in `X-UMA-Ignored`."""

    messages: Annotated[tuple[ChatMessage, ...], Length(1, None, "messages")]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Range(1, MAX_ANSWERS)] | None = None
    max_tokens: Annotated[int, Range(1)] | None = None
    max_completion_tokens: Annotated[int, Range(1)] | None = None
    temperature: Temperature | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    logit_bias: Any = None
    modalities: tuple[str, ...] | None = None
    audio: Any = None


async def chat_completions(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/chat/completions`."""
    body = read(await http.fields(), ChatBody, http)
    model = gateway.names.check(body.model)
    _refuse(body)
    request = _request(gateway, body, http)
    usage_wanted = body.stream_options is not None and bool(body.stream_options.include_usage)
    await gateway.generate(
        http, ChatJob([request], bool(body.stream), f"chatcmpl-{http.id}", model, include_usage=usage_wanted)
    )


def _refuse(body: ChatBody) -> None:
    abilities.tools(body.tools)
    abilities.tools(body.tool_choice, "tool_choice")
    abilities.tools(body.functions, "functions")
    abilities.tools(body.function_call, "function_call")
    if body.audio is not None or (body.modalities and set(body.modalities) != {"text"}):
        abilities.media("audio", "modalities")


def _request(gateway: Gateway, body: ChatBody, http: Exchange) -> Request:
    able = gateway.source.info.capabilities
    params = sampling(
        gateway,
        body,
        DEFAULTS,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=body.temperature,
        n=None if body.n == 1 else abilities.answers(body.n, "n", able),
        grammar=abilities.response_format(body.response_format, "response_format", able),
        logprobs=abilities.chat_logprobs(body.logprobs, body.top_logprobs, able),
        logit_bias=abilities.logit_bias(body.logit_bias, able),
    )
    how = urgency(body, http)
    return Request(
        http.id,
        messages=tuple(_message(each, f"messages[{index}]") for index, each in enumerate(body.messages)),
        sampling=params,
        stream=bool(body.stream),
        priority=how.priority,
        slo=how.slo,
    )


def _message(message: ChatMessage, path: str) -> Message:
    abilities.tools(message.tool_calls, f"{path}.tool_calls")
    abilities.tools(message.function_call, f"{path}.function_call")
    # Models know `system`; OpenAI has renamed it.
    role = "system" if message.role == "developer" else message.role
    return Message(role, text_of(message.content, f"{path}.content"))


@attrs.define
class ChatJob(SseJob):
    """A chat completion: one request, with as many choices as it has answers."""

    id: str
    model: str
    include_usage: bool
    created: int = attrs.field(factory=lambda: int(time.time()), init=False)
    _openings: list[bytes] = attrs.field(factory=list, init=False)

    @property
    def _n(self) -> int:
        return self.requests[0].sampling.n

    def begin(self) -> bytes:
        """See `Job`. Each choice opens with its role."""
        return b"".join(self._chunk([_choice(index, {"role": "assistant", "content": ""})]) for index in range(self._n))

    def token(self, index: int, token: Token) -> bytes:
        """See `Job`."""
        if token.logprobs is not None:
            return self._chunk([_choice(token.index, {"content": token.text}, logprobs=chat_form([token.logprobs]))])
        if not token.text:
            return b""
        if not self._openings:
            self._openings = [self._opening(place) for place in range(self._n)]
        return self._openings[token.index] + orjson.dumps(token.text) + _CLOSING

    def _opening(self, index: int) -> bytes:
        """An event up to the token's text: everything else of it stays the same."""
        before, _, _ = self._chunk([_choice(index, {"content": ""})]).partition(b'"content":')
        return before + b'"content":'

    def finished(self, index: int, finished: Finished) -> bytes:
        """See `Job`."""
        last = [_choice(answer.index, {}, finish_reason(answer)) for answer in answers_of(finished)]
        ends = [self._chunk([each]) for each in last[:-1]]
        return b"".join([*ends, self._chunk([last[-1]], timings=timings(finished))])

    def end(self, results: Sequence[Finished]) -> bytes:
        """See `Job`."""
        usage = b""
        if self.include_usage:
            usage = self._chunk([], usage=Total.of(results).openai(), **warnings(results))
        return usage + b"data: [DONE]\n\n"

    def failed(self, problem: Problem) -> bytes:
        """See `Job`."""
        return sse(ERRORS.error(problem, self.id))

    def whole(self, results: Sequence[Finished]) -> Body:
        """See `Job`."""
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": place,
                    "message": {"role": "assistant", "content": answer.text or "", "refusal": None},
                    "logprobs": chat_form(answer.logprobs),
                    "finish_reason": finish_reason(answer),
                }
                for place, _, answer in numbered(results)
            ],
            "usage": Total.of(results).openai(),
            "timings": timings(results[0]),
            **warnings(results),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self.include_usage and "usage" not in more else {}
        body = dumps({**self._head("chat.completion.chunk"), **usage, **more, "choices": choices})
        return b"data: " + body + b"\n\n"


_CLOSING = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def _choice(
    index: int, delta: Mapping[str, Any], reason: str | None = None, logprobs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

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
from uma.http.openai import ERRORS, StreamOptions, text_of
from uma.http.problem import Problem
from uma.http.usage import Total, finish_reason, timings
from uma.types import MAX_SEED, Finished, Message, Request, Token

MAX_CHOICES = 128
"""OpenAI's own bound of `n`."""


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
    n: Annotated[int, Range(1, MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Range(1)] | None = None
    max_completion_tokens: Annotated[int, Range(1)] | None = None
    temperature: Annotated[float, Range(0, 2)] | None = None
    top_p: Annotated[float, Range(0, 1)] | None = None
    top_k: Annotated[int, Range(-1)] | None = None
    min_p: Annotated[float, Range(0, 1)] | None = None
    repetition_penalty: Annotated[float, Range(gt=0, le=2)] | None = None
    frequency_penalty: Annotated[float, Range(-2, 2)] | None = None
    presence_penalty: Annotated[float, Range(-2, 2)] | None = None
    seed: Annotated[int, Range(0, MAX_SEED)] | None = None
    stop: str | tuple[str, ...] | None = None
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
    requests = _requests(body, http)
    usage_wanted = body.stream_options is not None and bool(body.stream_options.include_usage)
    await gateway.generate(
        http, ChatJob(requests, bool(body.stream), f"chatcmpl-{http.id}", model, include_usage=usage_wanted)
    )


def _refuse(body: ChatBody) -> None:
    abilities.structured_output(body.response_format, "response_format")
    abilities.tools(body.tools)
    abilities.tools(body.tool_choice, "tool_choice")
    abilities.tools(body.functions, "functions")
    abilities.tools(body.function_call, "function_call")
    abilities.logprobs(body.logprobs)
    abilities.logprobs(body.top_logprobs, "top_logprobs")
    abilities.logit_bias(body.logit_bias)
    if body.audio is not None or (body.modalities and set(body.modalities) != {"text"}):
        abilities.media("audio", "modalities")


def _requests(body: ChatBody, http: Exchange) -> list[Request]:
    messages = tuple(_message(each, f"messages[{index}]") for index, each in enumerate(body.messages))
    params = sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        min_tokens=body.min_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        seed=body.seed,
        stop=body.stop,
        ignore_eos=body.ignore_eos,
    )
    how = urgency(body, http)
    return [
        Request(
            http.id if index == 0 else f"{http.id}-{index}",
            messages=messages,
            sampling=params if body.seed is None else attrs.evolve(params, seed=(body.seed + index) % (MAX_SEED + 1)),
            stream=bool(body.stream),
            priority=how.priority,
            slo=how.slo,
        )
        for index in range(body.n or 1)
    ]


def _message(message: ChatMessage, path: str) -> Message:
    abilities.tools(message.tool_calls, f"{path}.tool_calls")
    abilities.tools(message.function_call, f"{path}.function_call")
    # Models know `system`; OpenAI has renamed it.
    role = "system" if message.role == "developer" else message.role
    return Message(role, text_of(message.content, f"{path}.content"))


@attrs.define
class ChatJob(SseJob):
    """A chat completion with `len(requests)` choices."""

    id: str
    model: str
    include_usage: bool
    created: int = attrs.field(factory=lambda: int(time.time()), init=False)
    _openings: list[bytes] = attrs.field(factory=list, init=False)

    def begin(self) -> bytes:
        """See `Job`. Each choice opens with its role."""
        self._openings = [self._opening(index) for index in range(len(self.requests))]
        return b"".join(
            self._chunk([_choice(index, {"role": "assistant", "content": ""})]) for index in range(len(self.requests))
        )

    def _opening(self, index: int) -> bytes:
        """An event up to the token's text: everything else of it stays the same."""
        before, _, _ = self._chunk([_choice(index, {"content": ""})]).partition(b'"content":')
        return before + b'"content":'

    def token(self, index: int, token: Token) -> bytes:
        """See `Job`."""
        if not token.text:
            return b""
        if not self._openings:
            self._openings = [self._opening(index) for index in range(len(self.requests))]
        return self._openings[index] + orjson.dumps(token.text) + _CLOSING

    def finished(self, index: int, finished: Finished) -> bytes:
        """See `Job`."""
        return self._chunk([_choice(index, {}, finish_reason(finished))], timings=timings(finished))

    def end(self, results: Sequence[Finished]) -> bytes:
        """See `Job`."""
        usage = b""
        if self.include_usage:
            total = Total.of(results, len(self.requests))
            usage = self._chunk([], usage=total.openai(), **_warnings(results))
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
                    "index": index,
                    "message": {"role": "assistant", "content": each.text or "", "refusal": None},
                    "logprobs": None,
                    "finish_reason": finish_reason(each),
                }
                for index, each in enumerate(results)
            ],
            "usage": Total.of(results, len(self.requests)).openai(),
            "timings": timings(results[0]),
            **_warnings(results),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self.include_usage and "usage" not in more else {}
        body = dumps({**self._head("chat.completion.chunk"), **usage, **more, "choices": choices})
        return b"data: " + body + b"\n\n"


_CLOSING = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def _choice(index: int, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _warnings(results: Sequence[Finished]) -> dict[str, Any]:
    told = list(dict.fromkeys(line for each in results for line in each.warnings))
    return {"warnings": told} if told else {}

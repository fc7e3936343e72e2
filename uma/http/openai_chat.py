"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import attrs

from uma.constraints import Length, Range
from uma.http import abilities
from uma.http.dialect import Body
from uma.http.exchange import Exchange
from uma.http.fields import Common, read, sampling, urgency
from uma.http.gateway import Gateway
from uma.http.logprobs import chat_form
from uma.http.openai import DEFAULTS, StreamOptions, text_of
from uma.http.openai_job import Choice, ChoicesJob
from uma.http.usage import finish_reason, numbered, stop_reason
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
class ChatJob(ChoicesJob):
    """A chat completion: one request, with as many choices as it has answers."""

    kind = "chat.completion.chunk"
    text_key = b'"content":'

    def begin(self) -> bytes:
        """See `Job`. Each choice opens with its role."""
        opening = {"role": "assistant", "content": ""}
        return b"".join(self.chunk([_choice(place, opening)]) for place in range(self.requests[0].sampling.n))

    def token(self, index: int, token: Token) -> bytes:
        """See `Job`."""
        if token.logprobs is not None:
            form = chat_form([token.logprobs])
            return self.chunk([_choice(token.index, {"content": token.text}, logprobs=form)])
        return self.piece(token.index, token.text) if token.text else b""

    def delta(self, place: int, text: str = "", reason: str | None = None) -> Choice:
        """See `ChoicesJob`."""
        return _choice(place, {} if reason else {"content": text}, reason)

    def whole(self, results: Sequence[Finished]) -> Body:
        """See `Job`."""
        return {
            **self.head("chat.completion"),
            "choices": [
                {
                    "index": place,
                    "message": {"role": "assistant", "content": answer.text or "", "refusal": None},
                    "logprobs": chat_form(answer.logprobs),
                    "finish_reason": finish_reason(answer),
                    **stop_reason(answer),
                }
                for place, _, answer in numbered(results)
            ],
            **self.account(results),
        }


def _choice(
    index: int, delta: Mapping[str, Any], reason: str | None = None, logprobs: Mapping[str, Any] | None = None
) -> Choice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

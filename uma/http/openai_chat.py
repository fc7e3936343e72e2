"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import attrs

from uma.constraints import Json, Length, Range, Text
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.ask import ChatAsk, Generates, Tokenizes
from uma.http.content import content_of, question_start
from uma.http.dialect import Body
from uma.http.fields import MAX_MESSAGES, Common, MaxTokens
from uma.http.ignored import Ignored
from uma.http.logprobs import PendingLogprobs, chat_form, spelling
from uma.http.openai import OPENAI, Role, StreamOptions, input_tokens
from uma.http.openai_choices import Choice, ChoicesWriter
from uma.http.problem import Unsupported
from uma.http.reader import Reader
from uma.http.structured_outputs import StructuredFields, grammar_of
from uma.http.telemetry import TelemetryFields
from uma.http.thinking import BudgetFields, ReasoningBody, Wish
from uma.http.tools import Calls, Effort, Tools, check_calls, legacy, name_schemas, openai_choice, past_call
from uma.http.usage import calls_of, finish_reason, numbered, stop_reason
from uma.types import MAX_ANSWERS, Answer, Finished, Message, ReasoningDelta, Temperature, Token, ToolCallDelta


@attrs.frozen(kw_only=True)
class ChatMessage:
    """A message as the body has it; its content is read by `content_of`."""

    role: Role
    content: Any = None
    tool_calls: Calls | None = None
    function_call: Any = None
    tool_call_id: Annotated[str, Length(1, 128), Text()] | None = None
    name: Annotated[str, Length(1, 128), Text()] | None = None
    refusal: str | None = None
    reasoning_content: Annotated[str, Text()] | None = None
    """What the assistant thought; vLLM calls it `reasoning`."""
    reasoning: Annotated[str, Text()] | None = None


@attrs.frozen(kw_only=True)
class Conversation(Common, StructuredFields, BudgetFields):
    """What a chat's prompt is made from."""

    messages: Annotated[tuple[ChatMessage, ...], Length(1, MAX_MESSAGES, "messages")]
    model: str | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Effort | None = None
    reasoning: Any = None
    """Thinking as OpenRouter has it."""
    chat_template_kwargs: Annotated[dict[str, Any], Json()] | None = None
    """Template's variables as vLLM and llama-server have them; so are the next two fields."""
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


@attrs.frozen(kw_only=True)
class ChatBody(Conversation, TelemetryFields):
    """The fields that do something; the rest is named in `X-UMA-Ignored`."""

    verbose: bool | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Range(1, MAX_ANSWERS)] | None = None
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    temperature: Temperature | None = None
    response_format: Any = None
    logprobs: bool | None = None
    top_logprobs: abilities.TopLogprobs = None
    logit_bias: Any = None
    modalities: tuple[str, ...] | None = None
    audio: Any = None


def read_conversation(fields: Mapping[str, Any], reader: Reader) -> ChatAsk:
    """The prompt alone of a body that is not answered."""
    unused = partial(ChatWriter, include_usage=False)
    return ChatAsk(writer=unused, **_conversation(reader.body(fields, Conversation), reader))


def _read(fields: Mapping[str, Any], reader: Reader) -> ChatAsk:
    body = reader.generating(fields, ChatBody)
    if body.audio is not None or (body.modalities and set(body.modalities) != {"text"}):
        raise Unsupported.at("modalities", "answers are text alone; leave out modalities and audio")
    conversation = _conversation(body, reader)
    form = abilities.response_format(body.response_format, "response_format", reader)
    max_tokens = body.max_completion_tokens or body.max_tokens
    includes_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return ChatAsk(
        writer=partial(ChatWriter, include_usage=includes_usage),
        stream=body.stream,
        max_tokens=max_tokens,
        tokens_field="max_completion_tokens" if body.max_completion_tokens else "max_tokens",
        n=body.n,
        logprobs=abilities.chat_logprobs(body.logprobs, body.top_logprobs, reader.able),
        logit_bias=abilities.logit_bias(body.logit_bias, reader.able),
        grammar=grammar_of(body, reader, ("response_format", form), conversation["tool_choice"]),
        sampling={"temperature": body.temperature},
        shows_prompt=bool(body.verbose),
        **conversation,
    )


def _conversation(body: Conversation, reader: Reader) -> dict[str, Any]:
    """The fields of a `ChatAsk` that its prompt is made from."""
    legacy(body.functions, "functions")
    legacy(body.function_call, "function_call")
    question = question_start(["tool" if each.role == "function" else each.role for each in body.messages])
    messages = [
        _message(each, f"messages[{index}]", reader, is_question=index >= question)
        for index, each in enumerate(body.messages)
    ]
    if any(each.tool_calls for each in messages):
        check_calls(reader.able, "messages")
    tools = [each.function.tool for each in body.tools or ()]
    places, choice = openai_choice(body.tool_choice, tools)
    name_schemas(reader.names, places, "function.parameters")
    return {
        "body": body,
        "messages": messages,
        "continues": _goes_on(body, reader.ignored),
        "wish": _wish(body, reader),
        "tools": [tools[at] for at in places],
        "tool_choice": choice,
        "is_parallel": body.parallel_tool_calls,
    }


def _wish(body: Conversation, reader: Reader) -> Wish:
    """What the body says of thinking."""
    asked = ReasoningBody()
    if isinstance(body.reasoning, dict):
        asked = reader.part(body.reasoning, ReasoningBody, "reasoning")
        asked.note_ignored(reader.ignored)
    elif body.reasoning is not None:
        reader.ignored.add("reasoning")
    effort: Effort | None = reader.first(
        ("reasoning_effort", body.reasoning_effort), ("reasoning.effort", asked.effort)
    )
    budgets = [(field.name, getattr(body, field.name)) for field in attrs.fields(BudgetFields)]
    budget_field, budget = reader.named_first(("reasoning.max_tokens", asked.max_tokens), *budgets)
    return Wish(
        wanted=asked.wanted,
        field="reasoning",
        effort=effort,
        effort_field="reasoning_effort" if body.reasoning_effort else "reasoning.effort",
        budget=budget,
        budget_field=budget_field,
        variables=body.chat_template_kwargs,
    )


def _goes_on(body: Conversation, ignored: Ignored) -> bool:
    """Whether an assistant's message at the end is continued: unless the body asks for another turn."""
    wanted, opens, last = body.continue_final_message, body.add_generation_prompt, body.messages[-1]
    if wanted and opens:
        raise BadRequest.at(
            "continue_final_message", "an answer is continued, or add_generation_prompt begins another one"
        )
    if wanted and (last.role != "assistant" or last.tool_calls):
        raise BadRequest.at("continue_final_message", "the last message must be the assistant's, without tool_calls")
    if opens is False and last.role != "assistant":
        ignored.add("add_generation_prompt")
    return wanted is not False and not opens


def _message(message: ChatMessage, path: str, reader: Reader, *, is_question: bool) -> Message:
    legacy(message.function_call, f"{path}.function_call")
    # Models know `system`; OpenAI has renamed it.
    role = "system" if message.role == "developer" else message.role
    said, name = (message.refusal, "refusal") if message.content is None else (message.content, "content")
    text, seen = content_of(said, f"{path}.{name}", reader, is_question=is_question)
    calls = []
    for at, each in enumerate(message.tool_calls or ()):
        said_at = f"{path}.tool_calls[{at}].function"
        calls.append(past_call(each.id, each.function.name, each.function.arguments, said_at, reader.ignored))
    thought = message.reasoning_content or message.reasoning
    return Message(role, text, tuple(calls), message.tool_call_id, message.name, thought, seen)


@attrs.define
class ChatWriter(ChoicesWriter):
    """A chat completion: one request, with as many choices as it has answers."""

    kind = "chat.completion.chunk"
    text_key = b'"content":'
    prefix = "chatcmpl-"
    _pending: defaultdict[int, PendingLogprobs] = attrs.field(factory=lambda: defaultdict(PendingLogprobs), init=False)
    """Pending log probabilities by choice."""

    def begin(self) -> bytes:
        """Each choice opens with its role."""
        opening = {"role": "assistant", "content": ""}
        return b"".join(self.chunk([_choice(place, opening)]) for place in range(self.requests[0].sampling.n))

    def token(self, index: int, token: Token) -> bytes:
        more = self.timed(index)
        if self.requests[0].sampling.logprobs is None:
            return self.piece(token.index, token.text, more) if token.text else b""
        positions = self._pending[token.index].take(token)
        if not token.text:
            return b""
        return self.chunk([_choice(token.index, {"content": token.text}, logprobs=chat_form(positions))], **more)

    def part(self, index: int, part: ReasoningDelta | ToolCallDelta) -> bytes:
        self._pending[part.index].aside()
        if isinstance(part, ReasoningDelta):
            return self.chunk([_choice(part.index, {"reasoning_content": part.text})])
        if part.arguments:
            call: dict[str, Any] = {"index": part.call, "function": {"arguments": part.arguments}}
        else:
            function = {"name": part.name, "arguments": ""}
            call = {"index": part.call, "id": part.call_id, "type": "function", "function": function}
        return self.chunk([_choice(part.index, {"tool_calls": [call]})])

    def delta(self, place: int, text: str = "", reason: str | None = None) -> Choice:
        return _choice(place, {} if reason else {"content": text}, reason)

    def whole(self, results: Sequence[Finished]) -> Body:
        return {
            **self.head("chat.completion"),
            "choices": [
                {
                    "index": place,
                    "message": _said(answer),
                    "logprobs": _logprobs(answer),
                    "finish_reason": finish_reason(answer),
                    **stop_reason(answer),
                }
                for place, _, answer in numbered(results)
            ],
            **self.account(results),
        }


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    """Log probabilities of the message's own text."""
    if answer.logprobs is None:
        return None
    return chat_form(spelling(answer.logprobs, answer.text or "", answer.reasoning or ""))


def _said(answer: Answer) -> dict[str, Any]:
    """The message of a whole answer."""
    said: dict[str, Any] = {"role": "assistant", "content": answer.text or "", "refusal": None}
    if answer.reasoning:
        said["reasoning_content"] = answer.reasoning
    if calls := calls_of(answer):
        said["content"] = answer.text or None
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return said


def _choice(
    index: int, delta: Mapping[str, Any], reason: str | None = None, logprobs: Mapping[str, Any] | None = None
) -> Choice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


chat_completions = Generates(OPENAI, _read)
count_tokens = Tokenizes(read_conversation, input_tokens)
"""The prompt's tokens, as a chat with it would use them."""

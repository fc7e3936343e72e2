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
from uma.http.content import content_of, question_start, read_part
from uma.http.dialect import Body
from uma.http.exchange import Exchange
from uma.http.fields import (
    DRAWN,
    MAX_MESSAGES,
    Common,
    MaxTokens,
    all_tokens,
    first,
    named_first,
    of_output,
    read,
    read_generating,
    sampling,
    tokens_wanted,
    urgency,
)
from uma.http.gateway import Gateway
from uma.http.generation import small_work
from uma.http.ignored import Ignored
from uma.http.logprobs import PendingLogprobs, chat_form, spelling
from uma.http.media import MediaReader
from uma.http.openai import Role, StreamOptions
from uma.http.openai_job import Choice, ChoicesJob
from uma.http.problem import Unsupported
from uma.http.structured_outputs import StructuredFields, grammar_of
from uma.http.telemetry import Telemetry, TelemetryFields
from uma.http.thinking import BudgetFields, ReasoningBody, Wish, max_reasoning_tokens, thinking
from uma.http.tools import (
    Calls,
    Effort,
    Tools,
    check_calls,
    legacy,
    name_schemas,
    openai_choice,
    past_call,
    tool_fields,
    with_names,
)
from uma.http.usage import calls_of, finish_reason, numbered, stop_reason
from uma.types import (
    MAX_ANSWERS,
    Answer,
    Capabilities,
    Finished,
    Grammar,
    Message,
    ReasoningDelta,
    Request,
    Temperature,
    Token,
    ToolCallDelta,
)


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
    logprobs: Any = None
    top_logprobs: Any = None
    logit_bias: Any = None
    modalities: tuple[str, ...] | None = None
    audio: Any = None


async def chat_completions(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/chat/completions`."""
    job = await http.built(partial(_job, gateway, http))
    if job.is_verbose:
        found = await small_work(http, partial(gateway.source.tokenize, job.requests[0]))
        job.verbose = {"__verbose": {"prompt": found.text}}
    await gateway.generate(http, job)


async def count_tokens(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/chat/completions/input_tokens`: the prompt's tokens, as a chat with it would use them."""

    def request(fields: dict[str, Any]) -> Request:
        body = read(fields, Conversation, http)
        gateway.names.check(body.model, http)
        return Request(http.id, **prompt(gateway, body, http))

    found = await small_work(http, partial(gateway.source.tokenize, await http.built(request)))
    await http.answer_json({"object": "response.input_tokens", "input_tokens": len(found.token_ids)})


def _job(gateway: Gateway, http: Exchange, fields: dict[str, Any]) -> ChatJob:
    body = read_generating(fields, ChatBody, http)
    model = gateway.names.check(body.model, http)
    if body.audio is not None or (body.modalities and set(body.modalities) != {"text"}):
        raise Unsupported("modalities: answers are text alone; leave out modalities and audio")
    request = _request(gateway, body, http)
    usage_wanted = body.stream_options is not None and bool(body.stream_options.include_usage)
    is_unbounded = (body.max_completion_tokens or body.max_tokens) in (None, -1)
    job = ChatJob(
        [request],
        bool(body.stream),
        f"chatcmpl-{http.id}",
        model,
        include_usage=usage_wanted,
        is_unbounded=is_unbounded,
    )
    job.telemetry = Telemetry.of(body, stream=bool(body.stream))
    job.is_verbose = bool(body.verbose)
    return job


def _request(gateway: Gateway, body: ChatBody, http: Exchange) -> Request:
    able, wish = gateway.source.info.capabilities, _wish(body, http)
    fields = prompt(gateway, body, http, wish)
    params = sampling(
        gateway,
        body,
        DRAWN,
        **of_output(gateway, body),
        max_tokens=tokens_wanted(gateway, http, body.max_completion_tokens, "max_completion_tokens", body.n or 1)
        or tokens_wanted(gateway, http, body.max_tokens, "max_tokens", body.n or 1)
        or all_tokens(gateway, http, body.n or 1),
        temperature=body.temperature,
        n=None if body.n == 1 else abilities.answers(body.n, "n", able),
        grammar=_grammar(body, fields.get("tool_choice", "auto"), able, http),
        logprobs=abilities.chat_logprobs(body.logprobs, body.top_logprobs, able),
        logit_bias=abilities.logit_bias(body.logit_bias, able),
        max_reasoning_tokens=max_reasoning_tokens(wish, body.max_reasoning_tokens, able),
    )
    how = urgency(body, http)
    return Request(
        http.id,
        sampling=params,
        stream=bool(body.stream),
        **how,
        **fields,
    )


def _grammar(body: ChatBody, tool_choice: str, able: Capabilities, http: Exchange) -> Grammar | None:
    form = abilities.response_format(body.response_format, "response_format", able, http.names, http.ignored)
    return grammar_of(body, able, http, ("response_format", form), tool_choice)


def prompt(gateway: Gateway, body: Conversation, http: Exchange, wish: Wish | None = None) -> dict[str, Any]:
    """The fields of a `Request` that its prompt is made from; `wish` is what the body says of thinking."""
    wish = wish or _wish(body, http)
    able = gateway.source.info.capabilities
    legacy(body.functions, "functions")
    legacy(body.function_call, "function_call")
    question = question_start(["tool" if each.role == "function" else each.role for each in body.messages])
    media = MediaReader(able)
    messages = [
        _message(each, f"messages[{index}]", http.ignored, media, is_question=index >= question)
        for index, each in enumerate(body.messages)
    ]
    media.name(http.names, messages)
    if any(each.tool_calls for each in messages):
        check_calls(able, "messages")
    tools = [each.function.tool for each in body.tools or ()]
    places, choice = openai_choice(body.tool_choice, tools)
    name_schemas(http.names, places, "function.parameters")
    return {
        "messages": with_names(messages),
        "continue_final_message": _goes_on(body, http.ignored),
        **thinking(wish, able, http.ignored),
        **tool_fields([tools[at] for at in places], choice, able, is_parallel=body.parallel_tool_calls),
    }


def _wish(body: Conversation, http: Exchange) -> Wish:
    """What the body says of thinking."""
    asked = ReasoningBody()
    if isinstance(body.reasoning, dict):
        asked = read_part(body.reasoning, ReasoningBody, "reasoning", http.ignored)
        asked.note_ignored(http.ignored)
    elif body.reasoning is not None:
        http.ignored.add("reasoning")
    effort: Effort | None = first(http, ("reasoning_effort", body.reasoning_effort), ("reasoning.effort", asked.effort))
    budgets = [(field.name, getattr(body, field.name)) for field in attrs.fields(BudgetFields)]
    budget_field, budget = named_first(http, ("reasoning.max_tokens", asked.max_tokens), *budgets)
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
        raise BadRequest("continue_final_message: an answer is continued, or add_generation_prompt begins another one")
    if wanted and (last.role != "assistant" or last.tool_calls):
        raise BadRequest("continue_final_message: the last message must be the assistant's, without tool_calls")
    if opens is False and last.role != "assistant":
        ignored.add("add_generation_prompt")
    return wanted is not False and not opens


def _message(message: ChatMessage, path: str, ignored: Ignored, media: MediaReader, *, is_question: bool) -> Message:
    legacy(message.function_call, f"{path}.function_call")
    # Models know `system`; OpenAI has renamed it.
    role = "system" if message.role == "developer" else message.role
    said, name = (message.refusal, "refusal") if message.content is None else (message.content, "content")
    text, seen = content_of(said, f"{path}.{name}", ignored, media, is_question=is_question)
    calls = [
        past_call(
            each.id, each.function.name, each.function.arguments, f"{path}.tool_calls[{at}].function.arguments", ignored
        )
        for at, each in enumerate(message.tool_calls or ())
    ]
    thought = message.reasoning_content or message.reasoning
    return Message(role, text, tuple(calls), message.tool_call_id, message.name, thought, seen)


@attrs.define
class ChatJob(ChoicesJob):
    """A chat completion: one request, with as many choices as it has answers."""

    kind = "chat.completion.chunk"
    text_key = b'"content":'
    is_verbose: bool = attrs.field(default=False, init=False)
    """Whether `verbose` is wanted."""
    _pending: defaultdict[int, PendingLogprobs] = attrs.field(factory=lambda: defaultdict(PendingLogprobs), init=False)
    """Pending log probabilities by choice."""

    def begin(self) -> bytes:
        """See `Job`. Each choice opens with its role."""
        opening = {"role": "assistant", "content": ""}
        return b"".join(self.chunk([_choice(place, opening)]) for place in range(self.requests[0].sampling.n))

    def token(self, index: int, token: Token) -> bytes:
        """See `Job`."""
        more = self.timed(index)
        if self.requests[0].sampling.logprobs is None:
            return self.piece(token.index, token.text, more) if token.text else b""
        positions = self._pending[token.index].take(token)
        if not token.text:
            return b""
        return self.chunk([_choice(token.index, {"content": token.text}, logprobs=chat_form(positions))], **more)

    def part(self, index: int, part: ReasoningDelta | ToolCallDelta) -> bytes:
        """See `Job`."""
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
        """See `ChoicesJob`."""
        return _choice(place, {} if reason else {"content": text}, reason)

    def whole(self, results: Sequence[Finished]) -> Body:
        """See `Job`."""
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

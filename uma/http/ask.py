"""One path from a body to an answer: what a dialect has read becomes requests to the engine, whose events it writes.

A dialect fills an `Ask` and gives a `Writer`. What the model and the server can do, the bounds of tokens, thinking and
tools, prompts that must be tokenized before, quotas, waiting and streams are the same for all of them, and here or
behind here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from uma.http import abilities, fill_in
from uma.http.context_edits import ClearToolUses, edited
from uma.http.dialect import Body, Dialect, Writer
from uma.http.exchange import Exchange
from uma.http.fields import DRAWN, Common, all_tokens, allowed_tokens, context_window, of_output, sampling, urgency
from uma.http.gateway import Gateway
from uma.http.generation import small_work
from uma.http.prompts import has_mixed, prompts, with_ids
from uma.http.reader import Reader
from uma.http.telemetry import Telemetry, TelemetryFields
from uma.http.thinking import Wish, max_reasoning_tokens, thinking
from uma.http.tools import tool_fields, with_names
from uma.types import Grammar, Message, Request, SamplingParams, Tokenized, Tool

WriterOf = Callable[[Dialect, str, str, Sequence[Request], Telemetry | None, bool], Writer]
"""A `Writer`, but for what the dialect's own arguments to it are."""
WINDOWS = ("penalty_window", "dry_window")


@attrs.frozen(kw_only=True)
class Ask:
    """What a body asks to be generated, in the words that all dialects share."""

    body: Common
    """UMA's own fields."""
    writer: WriterOf
    stream: bool | None = None
    max_tokens: int | None = None
    """Maximum tokens of an answer; -1: as many as there may be."""
    tokens_field: str = "max_tokens"
    """The body's name for it."""
    default_tokens: int = -1
    """`max_tokens` of a body that does not say."""
    n: int | None = None
    best_of: int | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    grammar: Grammar | None = None
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    """Further parameters, which the dialect has under names of its own; a window of -1 is the whole context."""
    defaults: Mapping[str, float] = DRAWN
    """Figures of the dialect's documents, where nothing else says how tokens are drawn."""
    penalizes_output: bool = True
    """Whether penalties count what has been generated, all of it, and not the prompt."""

    @property
    def is_unbounded(self) -> bool:
        """Whether it asks for as many tokens as there may be."""
        return (self.default_tokens if self.max_tokens is None else self.max_tokens) == -1

    def requests(self, id: str, reader: Reader, common: Mapping[str, Any]) -> Sequence[Request]:
        """A request for each prompt, with `common` as further fields."""
        raise NotImplementedError


@attrs.frozen(kw_only=True)
class ChatAsk(Ask):
    """The next turn of a conversation."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    is_parallel: bool | None = None
    wish: Wish = Wish()
    continues: bool = True
    """Whether an answer that the conversation ends with is continued."""
    shows_prompt: bool = False
    """Whether the answer repeats the rendered prompt."""
    edits: Sequence[ClearToolUses] | None = None
    """How the conversation is edited before its model is given it."""

    def requests(self, id: str, reader: Reader, common: Mapping[str, Any]) -> Sequence[Request]:
        reader.media.name(reader.names, self.messages)
        request = Request(
            id,
            messages=with_names(self.messages),
            continue_final_message=self.continues,
            **thinking(self.wish, reader.able, reader.ignored),
            **tool_fields(self.tools, self.tool_choice, reader.able, is_parallel=self.is_parallel),
            **common,
        )
        return [request]


@attrs.frozen(kw_only=True)
class TextAsk(Ask):
    """Texts that follow prompts."""

    prompt: Any
    """One prompt or a list of them; see `prompts`."""
    gap: fill_in.Gap | None = None
    """The place to be filled in, where the texts come in the middle."""

    def requests(self, id: str, reader: Reader, common: Mapping[str, Any]) -> Sequence[Request]:
        requests = [
            Request(f"{id}-{index}" if index else id, parse_special=True, **common, **prompt)
            for index, prompt in enumerate(prompts(reader, self.prompt, "prompt"))
        ]
        reader.media.name_in_prompts(reader.names, requests)
        return requests


@attrs.frozen
class Said:
    """The whole answer to a body that asks for nothing to be generated."""

    body: Body


@attrs.frozen(eq=False)
class Generates:
    """An endpoint that generates."""

    dialect: Dialect
    read: Callable[[Mapping[str, Any], Reader], Ask | Said]

    async def __call__(
        self, gateway: Gateway, http: Exchange, keep: Callable[[Body], Awaitable[None]] | None = None
    ) -> None:
        """Answer one body; `keep` stores the answer (`Writer.keep`)."""
        reader = gateway.reader(http)
        ask, writer = await http.built(partial(self.begin, gateway, http, reader))
        if isinstance(ask, Said):
            await http.answer_json(ask.body)
            return
        if writer is None:
            assert isinstance(ask, TextAsk)
            ids = partial(with_ids, gateway.source, http.id, ask.prompt, "prompt")
            ask = attrs.evolve(ask, prompt=await small_work(http, ids))
            writer = self._writer(gateway, http, reader, ask)
        if isinstance(ask, TextAsk) and ask.gap is not None:
            writer.requests, writer.notes = await fill_in.filled(gateway, http, writer.requests, ask.gap)
        if isinstance(ask, ChatAsk) and ask.edits is not None:
            made = partial(edited, gateway.source, writer.requests[0], ask.edits)
            request, writer.edits = await small_work(http, made)
            writer.requests = [request]
        if isinstance(ask, ChatAsk) and ask.shows_prompt:
            writer.shown_prompt = (await small_work(http, partial(gateway.source.tokenize, writer.requests[0]))).text
        if keep is not None:
            writer.keep = keep
            writer.requests = [attrs.evolve(request, expects_more=True) for request in writer.requests]
        await gateway.generate(http, writer)

    def begin(
        self, gateway: Gateway, http: Exchange, reader: Reader, fields: dict[str, Any]
    ) -> tuple[Ask | Said, Writer | None]:
        """What a body asks, and its writer, which is None where none is needed, or a prompt must be tokenized before.

        Any thread. Raises `BadRequest` and `Unsupported` for what cannot be done.
        """
        ask = self.read(fields, reader)
        is_mixed = isinstance(ask, TextAsk) and has_mixed(ask.prompt)
        return ask, None if is_mixed or isinstance(ask, Said) else self._writer(gateway, http, reader, ask)

    def _writer(self, gateway: Gateway, http: Exchange, reader: Reader, ask: Ask) -> Writer:
        """Any thread. Raises `BadRequest` and `Unsupported` for what cannot be done."""
        requests = ask.requests(http.id, reader, _common(gateway, http, reader, ask))
        telemetry = Telemetry.of(ask.body, stream=bool(ask.stream)) if isinstance(ask.body, TelemetryFields) else None
        return ask.writer(self.dialect, http.id, reader.model, requests, telemetry, ask.is_unbounded)


@attrs.frozen(eq=False)
class Tokenizes:
    """An endpoint that tells what the prompt of a chat would be."""

    read: Callable[[Mapping[str, Any], Reader], ChatAsk]
    form: Callable[[Tokenized], Body]
    """Makes the answer."""
    is_whole: bool = False
    """Whether the body is the very one that generates, and checked as that."""

    async def __call__(self, gateway: Gateway, http: Exchange) -> None:
        """Answer one body."""
        reader = gateway.reader(http)

        def request(fields: dict[str, Any]) -> tuple[Request, Sequence[ClearToolUses] | None]:
            ask = self.read(fields, reader)
            common = _common(gateway, http, reader, ask) if self.is_whole else {}
            return ask.requests(http.id, reader, common)[0], ask.edits

        asked, edits = await http.built(request)
        found, more = await small_work(http, partial(gateway.source.tokenize, asked)), dict[str, Any]()
        if edits is not None:
            more = {"context_management": {"original_input_tokens": len(found.token_ids)}}
            asked, _ = await small_work(http, partial(edited, gateway.source, asked, edits))
            found = await small_work(http, partial(gateway.source.tokenize, asked))
        await http.answer_json({**self.form(found), **more})


def _common(gateway: Gateway, http: Exchange, reader: Reader, ask: Ask) -> dict[str, Any]:
    """The fields of a `Request` that do not depend on its prompt."""
    params = _sampling(gateway, http, reader, ask)
    adapters = {"model": reader.adapted_model, "lora": ask.body.lora}
    return {"sampling": params, "stream": bool(ask.stream), **adapters, **urgency(ask.body, http)}


def _sampling(gateway: Gateway, http: Exchange, reader: Reader, ask: Ask) -> SamplingParams:
    answers = max(ask.n or 1, ask.best_of or 1)
    asked = allowed_tokens(gateway, ask.max_tokens, ask.tokens_field)
    most = all_tokens(gateway, http, answers)
    if asked is None:
        asked = min(ask.default_tokens, most)
    windows = {name: context_window(gateway) for name in WINDOWS if ask.sampling.get(name) == -1}
    wish = ask.wish if isinstance(ask, ChatAsk) else Wish()
    own = {
        **(of_output(gateway, ask.body) if ask.penalizes_output else {}),
        "max_tokens": most if ask.is_unbounded else asked,
        "n": None if ask.n == 1 else abilities.answers(ask.n, "n", reader.able),
        "best_of": None if ask.best_of == (ask.n or 1) else abilities.answers(ask.best_of, "best_of", reader.able),
        "logprobs": ask.logprobs,
        "logit_bias": ask.logit_bias,
        "grammar": ask.grammar,
        "max_reasoning_tokens": max_reasoning_tokens(wish, ask.body.max_reasoning_tokens, reader.able),
        **ask.sampling,
        **windows,
    }
    return sampling(gateway, ask.body, ask.defaults, own)

"""Tools and thinking of one model, as its chat template supports them, and what a request asks of both.

A request that asks for neither is not changed. Belongs to the Trio thread.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import attrs
import trio

from uma import json_text
from uma.chat.families import GENERIC, Family, thinking_of
from uma.chat.generic import plain, with_calls, with_tools
from uma.chat.grammar import calls_grammar
from uma.chat.harmony import TO_ANSWER, TO_CALL, TO_NEXT, HarmonyParser
from uma.chat.lark import LarkRules, Specials
from uma.chat.parser import Parser
from uma.chat.schema import UnservableError, schema_of
from uma.chat.thought import thought_first
from uma.chat.whole_call import AnyParser, WholeCallParser
from uma.engine.intake.lanes import LaneLimiter
from uma.engine.intake.relaxed_tools import RelaxedRequest, RelaxedTools, can_call
from uma.engine.intake.rendering import family_of, has_switch
from uma.engine.worker.thinking import ThinkingBound
from uma.errors import BadRequest
from uma.json_schema import problem
from uma.llama.model import Model
from uma.llama.template import PLAIN_TURN
from uma.types import MAX_STOPS, Grammar, Request, SamplingParams, Tool
from uma.wrong import Wrong, renamed

CHOICES = ("auto", "none", "required", "named")
"""Values of `Capabilities.tools`: words of `tool_choice`, and that a tool can be named in it."""
_NOT_NAMES = ("auto", "none", "required")
_Compile = Callable[[SamplingParams], Awaitable[object]]
_TAIL_TOKENS = 16
"""Tokens at a prompt's end in which an opening mark of thinking, and white space behind it, are searched."""


class ChatAbilities:
    """Checks requests, prepares their messages, and makes the parsers for their answers."""

    def __init__(self, model: Model) -> None:
        self._vocab = model.vocab
        family = family_of(model.chat_template)
        self._family = None if isinstance(family, str) else family
        """How the model writes calls; None: in an unknown form, which `_unknown_form` describes."""
        self._unknown_form = family if isinstance(family, str) else ""
        self._thinking = thinking_of(model.chat_template.source)
        self._template = model.chat_template
        self._specials: Specials | None = None
        self._relaxed = RelaxedTools()
        # One at a time: the cost of a schema is bounded, but by seconds.
        self._lanes = LaneLimiter(1)

    @property
    def tool_choices(self) -> tuple[str, ...]:
        """Value of `Capabilities.tools`."""
        return CHOICES if self._family is not None and self._vocab.eog else ()

    @property
    def has_thinking(self) -> bool:
        """Value of `Capabilities.reasoning`."""
        return self._thinking is not None

    def prepared(self, request: Request) -> Request:
        """The request as the model's template can render it. Raises `BadRequest` for what it cannot support."""
        if lines := list(self._problems(request)):
            raise BadRequest(*lines)
        stop = request.sampling.stop
        if request.messages is not None and not self._template.is_own and len(stop) < MAX_STOPS:
            request = attrs.evolve(request, sampling=attrs.evolve(request.sampling, stop=(*stop, PLAIN_TURN)))
        messages, family = request.messages, self._family
        if messages is None or family is None:
            return request
        goes_on = request.continued is not None  # a message with calls can become one without
        if not family.shows_calls and any(message.tool_calls for message in messages):
            messages = with_calls(messages, family)
            return attrs.evolve(request, messages=messages, continue_final_message=goes_on)
        if family.knows_tools:
            return request
        tools = request.tools if request.tool_choice != "none" else ()
        if family is GENERIC and any(message.tool_calls or message.role == "tool" for message in messages):
            messages = plain(messages)
        elif not tools:
            return request
        messages = with_tools(messages, tools, family)
        return attrs.evolve(request, messages=messages, tools=(), continue_final_message=goes_on)

    def warnings(self, request: Request) -> tuple[str, ...]:
        """Parts of the request that have no effect with this model."""
        return tuple(self._without_effect(request))

    def _without_effect(self, request: Request) -> Iterator[str]:
        if request.reasoning in ("auto", "on") and not self.has_thinking:
            yield "reasoning: no thinking is told apart; this model's chat template has no marks of it that are known"
        if request.reasoning == "on" and self.has_thinking and not has_switch(self._template):
            yield "reasoning: on is auto; this model's chat template has no switch"
        if request.sampling.max_reasoning_tokens is not None and not self.has_thinking:
            yield "max_reasoning_tokens: has no effect; this model's chat template has no marks of thinking"
        for name in sorted((request.chat_template_kwargs or {}).keys() - self._template.switches):
            yield f"chat_template_kwargs.{name}: is not read by this model's chat template"

    def is_parsed(self, request: Request) -> bool:
        """Whether the request's answer is parsed."""
        if can_call(request) or request.sampling.grammar is None:
            return can_call(request) or request.reasoning is not None
        return self._thinks_first(request)

    def parser(self, request: Request, prompt: array[int]) -> AnyParser:
        """A parser for one answer of a request that `is_parsed`."""
        parser = self._parser(request, prompt)
        is_free = can_call(request) and request.tool_choice == "auto" and request.sampling.grammar is None
        tools = {tool.name: schema_of(tool) for tool in request.tools if not tool.strict}
        return WholeCallParser(parser, tools) if is_free and tools and not _is_answering(request) else parser

    def _parser(self, request: Request, prompt: array[int]) -> Parser | HarmonyParser:
        schemas = {tool.name: schema_of(tool) for tool in _tools(request)} if can_call(request) else {}
        splits, thinks_first = request.reasoning is not None, self._thinks_first(request)
        if self._has_channels:
            return HarmonyParser(schemas, splits_thinking=splits, ends_with_answer=thinks_first)
        return Parser(
            self._family_for(request),
            schemas,
            self._thinking,
            splits_thinking=splits,
            begins_thinking=self._begins_thinking(request, prompt),
            thinks_first=thinks_first,
        )

    def _family_for(self, request: Request) -> Family | None:
        """How calls are written, in an answer that the prompt opens or continues."""
        if self._family is None or request.continued is None:
            return self._family
        return attrs.evolve(self._family, to_answer="")

    def bounds_thinking(self, request: Request, prompt: array[int]) -> Callable[[int | None], ThinkingBound] | None:
        """Makes the bound of an answer's thinking, on any thread; None if the model does not think."""
        if self._thinking is None:
            return None
        closings = self._closings if can_call(request) else self._answering
        tail = prompt[-_TAIL_TOKENS:]
        return lambda limit: ThinkingBound(self._parser(request, tail), self.piece, closings, limit)

    @cached_property
    def _answering(self) -> list[list[int]]:
        """Marks, as tokens, that close thinking so that the answer follows."""
        assert self._thinking is not None
        mark = TO_ANSWER if self._has_channels else self._thinking.close
        return [self._vocab.tokenize(mark, add_special=False, parse_special=True).tolist()]

    @cached_property
    def _closings(self) -> list[list[int]]:
        """Marks that close thinking where a call can follow too: gpt-oss first chooses itself, then answers, or calls
        if it must.
        """
        if not self._has_channels:
            return self._answering
        free, call = (
            self._vocab.tokenize(mark, add_special=False, parse_special=True).tolist() for mark in (TO_NEXT, TO_CALL)
        )
        return [free, *self._answering, call]

    @property
    def _has_channels(self) -> bool:
        return self._family is not None and self._family.has_channels

    def _thinks_first(self, request: Request) -> bool:
        """Whether the request's own grammar begins behind the model's thinking. The answer's text is then what the
        grammar describes, so the request must ask for thinking to be separated.
        """
        is_held = request.sampling.grammar is not None and not can_call(request)
        return is_held and self._thinking is not None and _can_think(request)

    async def before_grammar(self, request: Request, prompt: array[int]) -> str:
        """Grammar of what comes before the text that the request's own grammar describes; empty if nothing does."""
        if self._thinking is None or not self._thinks_first(request):
            return ""
        rules = LarkRules(await self._known_specials())
        begins_thinking = self._begins_thinking(request, prompt)
        return thought_first(rules, self._thinking, begins_thinking=begins_thinking, has_channels=self._has_channels)

    async def constrained(self, request: Request, prompt: array[int]) -> SamplingParams:
        """Sampling of the answer: with tools, a grammar by which the model writes valid calls of them, or none."""
        if not can_call(request):
            return request.sampling
        assert self._family is not None
        specials = await self._known_specials()
        grammar = partial(self._grammar, request, specials, begins_thinking=self._begins_thinking(request, prompt))
        async with self._lanes.slot(request.priority) as slot:
            source = await slot.in_thread(grammar)
        return attrs.evolve(request.sampling, grammar=Grammar(lark=source))

    def _grammar(self, request: Request, specials: Specials, *, begins_thinking: bool) -> str:
        """Grammar for calls, on any thread. Raises `BadRequest` for a schema that this form of calls cannot express."""
        family = self._family_for(request)
        assert family is not None
        must_call, answer = request.tool_choice != "auto", _answer(request)
        if answer is not None and (found := problem(answer)) is not None:
            raise BadRequest.at(f"grammar.json_schema{found[0]}", f"{found[1]}")
        tools = _tools(request)
        can_think = not (_calls_at_once(request) or (must_call and _is_answering(request)))
        if answer is not None and not _can_think(request):
            can_think = begins_thinking  # as without tools: all text is the answer
        try:
            return calls_grammar(
                family,
                tools,
                specials,
                self._thinking if can_think else None,
                must_call=must_call,
                is_parallel=request.parallel_tool_calls and request.tool_choice in _NOT_NAMES,
                begins_thinking=begins_thinking,
                answer=answer,
            )
        except UnservableError as error:
            at = request.tools.index(tools[error.tool])
            raise BadRequest.at(f"tools[{at}].parameters{error.place}", f"{error.reason}") from None

    def known_relaxed(self, request: Request) -> RelaxedRequest:
        """The request without schema keywords that are known to have no grammar."""
        return self._relaxed.known(request)

    async def relaxed(self, request: Request, serves: Callable[[Grammar], bool]) -> RelaxedRequest:
        """The request without schema keywords that have no grammar, which takes time to find out."""
        if not can_call(request) or self._family is None:
            return RelaxedRequest(request)
        specials = await self._known_specials()

        def fits(tool: Tool) -> bool:
            assert self._family is not None
            try:
                source = calls_grammar(
                    self._family, [tool], specials, None, must_call=True, is_parallel=False, begins_thinking=False
                )
                return serves(Grammar(lark=source))
            except UnservableError:
                return False

        async with self._lanes.slot(request.priority) as slot:
            return await slot.in_thread(partial(self._relaxed.found, request, fits))

    async def blame(self, request: Request, error: BadRequest, compile_grammar: _Compile) -> BadRequest:
        """A copy of the error with the place in a schema, the answer's or a tool's, that no grammar can describe."""
        if request.sampling.grammar is not None:
            try:
                await compile_grammar(request.sampling)
            except BadRequest as found:
                return found
        for place, tool in enumerate(_tools(request)):
            try:
                await compile_grammar(SamplingParams(grammar=Grammar(json_schema=schema_of(tool))))
            except BadRequest as found:
                (line,) = renamed(found.lines, {"grammar.json_schema": f"tools[{place}].parameters"})
                field, why = (line.field, line.why) if isinstance(line, Wrong) else ("", line)
                return BadRequest.at(field, f"{why}; give tool_choice none, or leave the tool out")
        # Each by itself is within a limit that all together exceed.
        (line,) = error.lines
        return BadRequest.at("tools", line.why if isinstance(line, Wrong) else line)

    async def _known_specials(self) -> Specials:
        if self._specials is None:
            self._specials = await trio.to_thread.run_sync(self._read_specials)
        return self._specials

    def _read_specials(self) -> Specials:
        marks = self._marks
        return Specials(marks, sorted(set(self._vocab.special_ids) - set(marks.values()) - self._vocab.eog))

    @cached_property
    def _marks(self) -> dict[str, int]:
        """Special tokens with which calls and thinking are written, by spelling."""
        texts = [self._thinking.open, self._thinking.close] if self._thinking is not None else []
        texts += [] if self._family is None else self._family.texts
        special = set(self._vocab.special_ids)
        ids = {
            id for text in texts for id in self._vocab.tokenize(text, add_special=False, parse_special=True).tolist()
        }
        return {self._vocab.text_of(id): id for id in ids & special}

    def spellings(self, request: Request) -> Mapping[int, bytes]:
        """Spelling of control tokens, which have no text of their own, in the output of a parsed request."""
        return self._control_marks if self.is_parsed(request) else {}

    def piece(self, token: int) -> bytes:
        """Bytes of a token in the output of a request that `is_parsed`."""
        return self._control_marks.get(token) or self._vocab.piece(token)

    @cached_property
    def _control_marks(self) -> dict[int, bytes]:
        return {token: mark.encode() for mark, token in self._marks.items() if not self._vocab.piece(token)}

    def _begins_thinking(self, request: Request, prompt: array[int]) -> bool:
        """Whether the answer begins within thinking that the prompt has opened."""
        if self._thinking is None or _calls_at_once(request):
            return False
        if (answer := request.continued) is not None:
            return not answer.content
        return b"".join(map(self.piece, prompt[-_TAIL_TOKENS:])).rstrip().endswith(self._thinking.open.encode())

    def _problems(self, request: Request) -> Iterator[str]:
        yield from _wrong_tools(request)
        if can_call(request):
            yield from self._unable(request)

    def _unable(self, request: Request) -> Iterator[str]:
        if self._family is None:
            yield Wrong("tools", f"not available; the form of this model's calls is not parsed: {self._unknown_form}")
        elif not self._vocab.eog:
            yield Wrong("tools", "not available; this model's vocabulary has no token that ends a text")
        if request.messages is None:
            yield Wrong("tools", 'they go through the chat template; give messages: [{"role": "user", "content": …}]')
        if request.sampling.grammar is not None:
            yield from self._ungrammatical(request)

    def _ungrammatical(self, request: Request) -> Iterator[str]:
        """Why calls cannot be distinguished from an answer under the request's own grammar."""
        if request.tool_choice != "auto":
            yield Wrong(
                "grammar", f"with tool_choice {request.tool_choice} there are calls and no text; leave one of them out"
            )
        elif _answer(request) is None:
            yield Wrong(
                "grammar", "beside tools it is json_schema or json_object; leave it out, or give tool_choice none"
            )
        elif self._family is not None and self._family.is_bare:
            why = "this model's calls are JSON without a mark, so that no answer in JSON can be told from them; "
            yield Wrong("grammar", f"{why}leave it out, or give tool_choice none")


def _wrong_tools(request: Request) -> Iterator[str]:
    for place, message in enumerate(request.messages or ()):
        for at, call in enumerate(message.tool_calls):
            if not _is_object(call.arguments):
                yield Wrong(f"messages[{place}].tool_calls[{at}].arguments", "expected a JSON object, as text")
    names = [tool.name for tool in request.tools]
    yield from (
        Wrong("tools", f"{count} of them are called {name!r}; leave out all but one, or give each a name of its own")
        for name, count in Counter(names).items()
        if count > 1
    )
    words = (name for name in names if name in _NOT_NAMES)
    yield from (Wrong("tools", f"{name!r} is a word of tool_choice, not a name") for name in words)
    for place, tool in enumerate(request.tools):
        if tool.parameters and tool.parameters.get("type", "object") != "object":
            yield Wrong(f"tools[{place}].parameters.type", "expected 'object', as arguments have names")
    choice = request.tool_choice
    if choice not in _NOT_NAMES and choice not in names:
        yield Wrong("tool_choice", f"{choice!r} is none of {', '.join(_NOT_NAMES)}, and no tool is called so")
    elif choice == "required" and not names:
        yield Wrong("tool_choice", "required, but there are no tools")


def _answer(request: Request) -> dict[str, Any] | None:
    """The schema of an answer without calls, where the request's grammar has one."""
    grammar = request.sampling.grammar
    if grammar is None:
        return None
    return {"type": "object"} if grammar.json_object else grammar.json_schema


def _can_think(request: Request) -> bool:
    """Whether thinking can come before a grammar of the request's own."""
    return request.reasoning in ("auto", "on") and not _is_answering(request)


def _is_answering(request: Request) -> bool:
    """Whether the prompt ends within an answer, behind all thinking."""
    return request.continued is not None and bool(request.continued.content)


def _calls_at_once(request: Request) -> bool:
    """Whether the answer must begin with a call, also if the template opens thinking and has no switch for it."""
    return can_call(request) and request.tool_choice != "auto" and request.reasoning == "off"


def _tools(request: Request) -> tuple[Tool, ...]:
    """Tools that can be called: the one that `tool_choice` names, or all."""
    if request.tool_choice in _NOT_NAMES:
        return request.tools
    return tuple(tool for tool in request.tools if tool.name == request.tool_choice)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json_text.loads(text), dict)
    except (ValueError, RecursionError):
        return False

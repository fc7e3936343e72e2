"""What one model can do of tools and thinking, from its chat template, and what a request asks of it.

A request that asks for neither is not touched. Belongs to the Trio thread.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from functools import cached_property

import attrs

from uma.chat.families import GENERIC, family_of, thinking_of
from uma.chat.generic import told
from uma.chat.parser import Parser
from uma.errors import BadRequest
from uma.llama.model import Model
from uma.types import Request

CHOICES = ("auto", "none")
"""Values of `tool_choice` that this engine honours."""
_NOT_NAMES = ("auto", "none", "required")
_TAIL_TOKENS = 16
"""Tokens at a prompt's end in which an opening mark of thinking, and white space behind it, are looked for."""


class ChatAbilities:
    """Checks requests, prepares their messages, and makes the parsers for their answers."""

    def __init__(self, model: Model) -> None:
        self._vocab = model.vocab
        self._family = family_of(model.chat_template.source)
        self._thinking = thinking_of(model.chat_template.source)

    @property
    def tool_choices(self) -> tuple[str, ...]:
        """For `Capabilities.tools`."""
        return () if isinstance(self._family, str) else CHOICES

    @property
    def has_thinking(self) -> bool:
        """For `Capabilities.reasoning`."""
        return self._thinking is not None

    def prepared(self, request: Request) -> Request:
        """The request as the model's template can render it. Raises `BadRequest` for what cannot be honoured."""
        if lines := list(self._problems(request)):
            raise BadRequest("\n".join(lines))
        messages = request.messages
        if messages is None or self._family is not GENERIC:
            return request
        tools = request.tools if request.tool_choice != "none" else ()
        if not tools and not any(message.tool_calls or message.role == "tool" for message in messages):
            return request
        return attrs.evolve(request, messages=told(messages, tools), tools=())

    def is_parsed(self, request: Request) -> bool:
        """Whether the request's answer is parsed at all."""
        return request.reasoning is not None or bool(request.tools and request.tool_choice != "none")

    def parser(self, request: Request, prompt: array[int]) -> Parser:
        """A parser for one answer of a request that `is_parsed`."""
        has_tools = bool(request.tools) and request.tool_choice != "none"
        return Parser(
            self._family if has_tools and not isinstance(self._family, str) else None,
            {tool.name for tool in request.tools},
            self._thinking,
            splits_thinking=request.reasoning is not None,
            begins_thinking=self._begins_thinking(prompt),
        )

    @cached_property
    def control_marks(self) -> dict[int, str]:
        """Marks that are control tokens, which give no text of their own, by token id."""
        marks = [self._thinking.open, self._thinking.close] if self._thinking is not None else []
        if not isinstance(self._family, str):
            marks += filter(None, (self._family.open, self._family.close))
        ids = {mark: self._vocab.tokenize(mark, add_special=False, parse_special=True).tolist() for mark in marks}
        return {each[0]: mark for mark, each in ids.items() if len(each) == 1 and not self._vocab.piece(each[0])}

    def _begins_thinking(self, prompt: array[int]) -> bool:
        if self._thinking is None:
            return False
        pieces = (
            self._vocab.piece(token) or self.control_marks.get(token, "").encode() for token in prompt[-_TAIL_TOKENS:]
        )
        return b"".join(pieces).rstrip().endswith(self._thinking.open.encode())

    def _problems(self, request: Request) -> Iterator[str]:
        for place, message in enumerate(request.messages or ()):
            for at, call in enumerate(message.tool_calls):
                if not _is_object(call.arguments):
                    yield f"messages[{place}].tool_calls[{at}].arguments: expected a JSON object, as text"
        names = [tool.name for tool in request.tools]
        if len(set(names)) < len(names):
            yield "tools: two of them have the same name"
        yield from (f"tools: {name!r} is a word of tool_choice, not a name" for name in names if name in _NOT_NAMES)
        choice = request.tool_choice
        if choice not in _NOT_NAMES and choice not in names:
            yield f"tool_choice: {choice!r} is none of {', '.join(_NOT_NAMES)}, and no tool is called so"
        elif choice not in CHOICES:
            yield f"tool_choice: {choice!r} is not available; capabilities.tools lists what is"
        if request.tools and request.messages is None:
            yield "tools: they go through the chat template; give messages"
        if request.tools and choice != "none" and isinstance(self._family, str):
            yield f"tools: not available; the form of this model's calls is not parsed: {self._family}"
        if self.is_parsed(request) and request.sampling.stop and self.control_marks:
            yield "stop: not available with tools or reasoning, for this model's marks are control tokens"
        if not request.parallel_tool_calls and request.sampling.n > 1:
            yield "parallel_tool_calls: false is for one answer (n: 1)"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

"""Parser of answers that are nothing but the JSON of one call, bare or in a code fence: small models write calls so,
instead of in their own form.

It is a call only if it is the whole answer, the tool was offered, and the arguments validate: text that quotes JSON
stays text. So nothing is known before the end, and text that can still be a call is held back until then. Most other
text is recognised by its first characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from uma import json_text
from uma.chat.calls import NoCallError, ObjectCall, Reading
from uma.chat.parts import AnswerText, CallArguments, CallBegun, CallEnded, Part, Reasoning, joined
from uma.chat.schema import Schema, follows
from uma.chat.steps import StepParser

NOTE = "the whole answer was this call as plain JSON, without the marks of this model's calls"
"""Note of such a call."""
_FENCE = "```"
_MAX_LABEL = 16
"""Maximum length of the word behind a fence (json, tool_call)."""


class _FencedCall(ObjectCall):
    """A call with nothing but white space or a code fence around it."""

    is_complete = False
    """Whether the text so far is such a call."""

    def _read(self) -> Reading:
        char = yield from self._visible()
        is_fenced = char == _FENCE[0]
        if is_fenced:
            yield from self._rest_of_fence()
            label = ""
            while (char := (yield)) not in "\r\n":
                label += char
                if len(label) > _MAX_LABEL:
                    raise NoCallError("it is not a fence")
            char = yield from self._visible()
        if char != "{":
            raise NoCallError("it is not an object")
        yield from self._members()
        if is_fenced:
            if (yield from self._visible()) != _FENCE[0]:
                raise NoCallError("the fence is not closed")
            yield from self._rest_of_fence()
        self.is_complete = True
        yield from self._visible()
        raise NoCallError("text follows it")

    def _rest_of_fence(self) -> Reading:
        for expected in _FENCE[1:]:
            if (yield) != expected:
                raise NoCallError("it is not a fence")
        return _FENCE


class WholeCallParser:
    """A parser around another one, for answers that can be one call without marks."""

    def __init__(self, parser: StepParser, tools: Mapping[str, Schema]) -> None:
        """`tools` are the schemas of the arguments by name, of tools that can be called in this way."""
        self._parser = parser
        self._tools = tools
        self._call = _FencedCall(tools)
        self._held = ""
        """Text that can still be the call."""
        self._is_text = False

    @property
    def thoughts(self) -> list[tuple[int, int]]:
        """See `StepParser.thoughts`."""
        return self._parser.thoughts

    def push(self, text: str) -> list[Part]:
        """See `StepParser.push`."""
        return self._sifted(self._parser.push(text))

    def finish(self) -> list[Part]:
        """See `StepParser.finish`."""
        parts = self._sifted(self._parser.finish())
        name, arguments = self._call.name, self._call.arguments
        if self._is_text or not self._held:
            return parts
        if not self._call.is_complete or name is None or not follows(json_text.loads(arguments), self._tools[name]):
            return joined([*parts, AnswerText(self._held)])
        return [*parts, CallBegun(name), CallArguments(arguments), CallEnded(name, arguments, NOTE)]

    def _sifted(self, parts: Sequence[Part]) -> list[Part]:
        given: list[Part] = []
        for part in parts:
            if self._is_text or (isinstance(part, Reasoning) and not self._held):
                given.append(part)
                continue
            if isinstance(part, AnswerText):
                self._held += part.text
                if not self._can_be_call(part.text):
                    given.append(AnswerText(self._held))
                    self._is_text = True
            else:
                given += [AnswerText(self._held), part] if self._held else [part]
                self._is_text = True
        return joined(given)

    def _can_be_call(self, text: str) -> bool:
        for char in text:
            self._call.push(char)
            if self._call.problem:
                return False
        return True


AnyParser = StepParser | WholeCallParser
"""Parser of one answer."""

"""Parser of answers that are nothing but the JSON of one call, bare or in a code fence: small models write calls so,
instead of in their own form.

It is a call only if it is the whole answer, the tool was offered, and the arguments validate: text that quotes JSON
stays text. So nothing is known before the end, and text that can still be a call is held back until then. Most other
text is recognised by its first characters.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

from uma import json_text
from uma.chat.json_call import JsonCall
from uma.chat.parts import AnswerText, CallArguments, CallBegun, CallEnded, Part, Reasoning, joined
from uma.chat.schema import Schema, follows
from uma.chat.steps import StepParser

NOTE = "the whole answer was this call as plain JSON, without the marks of this model's calls"
"""Note of such a call."""
_FENCE = "```"
_MAX_LABEL = 16
"""Maximum length of the word behind a fence (json, tool_call)."""


class WholeCallParser:
    """A parser around another one, for answers that can be one call without marks."""

    def __init__(self, parser: StepParser, tools: Mapping[str, Schema]) -> None:
        """`tools` are the schemas of the arguments by name, of tools that can be called in this way."""
        self._parser = parser
        self._tools = tools
        self._call = JsonCall(tools.keys())
        self._held = ""
        """Text that can still be the call."""
        self._is_text = False
        self._is_whole = False
        """Whether the held text is a call, if nothing but white space follows."""
        self._reading = self._read()
        next(self._reading)

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
        if not self._is_whole or name is None or not follows(json_text.loads(arguments), self._tools[name]):
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
        try:
            for char in text:
                self._reading.send(char)
        except StopIteration:
            return False
        return True

    def _read(self) -> Generator[None, str, None]:
        """Read a call, one character at each `yield`. Ends early where the text is not one."""
        char = yield from _visible()
        fence = ""
        if char == _FENCE[0]:
            fence = _FENCE
            if not (yield from _spelled(fence[1:])):
                return
            label = ""
            while (char := (yield)) not in "\r\n":
                label += char
                if len(label) > _MAX_LABEL:
                    return
            char = yield from _visible()
        if char != "{":
            return
        self._call.push(char)
        while not self._call.is_whole:
            self._call.push((yield))
            if self._call.problem:
                return
        if fence:
            char = yield from _visible()
            if char != fence[0] or not (yield from _spelled(fence[1:])):
                return
        self._is_whole = True
        yield from _visible()


AnyParser = StepParser | WholeCallParser
"""Parser of one answer."""


def _visible() -> Generator[None, str, str]:
    """Read the next character that is not white space."""
    while (char := (yield)).isspace():
        pass
    return char


def _spelled(text: str) -> Generator[None, str, bool]:
    """Whether this text comes next."""
    for expected in text:
        if (yield) != expected:
            return False
    return True

"""What a model with tools can write, as a grammar: free text, until it opens a call; then that call's form and nothing
else. So every call that is parsed has arguments that validate against its tool's schema.

The grammar is one text in llguidance's form of Lark's notation. A mark that is one special token of the vocabulary has
two spellings: the token, and its text. Both open what the mark opens, as the parser sees it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from uma.chat.families import Family, Thinking
from uma.types import Tool

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Arguments look as they do where models were trained: as Python's `json.dumps` writes them."""
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY = r"(.|\n)"
_SPACE = r"[\s\x1c-\x1f]*"


@attrs.frozen
class Specials:
    """A vocabulary's special tokens, which no text spells: those that are marks, and the others but for its ends."""

    marks: Mapping[str, int]
    others: Sequence[int]


def schema_of(tool: Tool) -> dict[str, Any]:
    """The JSON Schema of a tool's arguments, which are an object always."""
    return {"type": "object", **tool.parameters} if tool.parameters else _NO_ARGUMENTS


def calls_grammar(
    family: Family,
    tools: Sequence[Tool],
    specials: Specials,
    thinking: Thinking | None,
    *,
    must_call: bool,
    is_parallel: bool,
    begins_thinking: bool,
) -> str:
    """Output of a model that can call `tools`; with `must_call` it consists of thinking and calls alone.

    Without `is_parallel` the output ends with its first call. `begins_thinking` says that the prompt ended with the
    opening mark; `thinking` is None where there can be none.
    """
    lark = _Lark(family, tools, specials, thinking, is_parallel=is_parallel)
    rest = lark.thinking_rest() if thinking and (begins_thinking or not must_call) else ""
    body = lark.only_calls(begins_thinking=begins_thinking) if must_call else lark.free()
    start = f"{rest} {body}" if begins_thinking else body
    if begins_thinking and not must_call:
        start = f"{start} | {lark.unfinished_thought()}"
    return "\n".join([f"start: {start}", *lark.rules.values()])


class _Lark:
    """Rules by name, made when they are first used."""

    def __init__(
        self, family: Family, tools: Sequence[Tool], specials: Specials, thinking: Thinking | None, *, is_parallel: bool
    ) -> None:
        self.rules: dict[str, str] = {}
        self._family = family
        self._tools = tools
        self._specials = specials
        self._thinking = thinking
        self._is_parallel = is_parallel

    def _rule(self, name: str, body: str) -> str:
        self.rules.setdefault(name, f"{name}: {body}")
        return name

    # Calls

    def _call(self) -> str:
        """One call's object, as the model was trained to write it."""
        if "call" not in self.rules:
            each = [
                f"{_string(self._head(tool))} {self._arguments(at)} {_string('}')}"
                for at, tool in enumerate(self._tools)
            ]
            self._rule("call", " | ".join(each))
        return "call"

    def _head(self, tool: Tool) -> str:
        return f'{{"name": {_quoted(tool.name)}, "{self._family.key}": '

    def _arguments(self, at: int) -> str:
        schema = schema_of(self._tools[at])
        style = {**_JSON_STYLE, **schema.get("x-guidance", {})}
        return self._rule(f"args_{at}", f"%json {json.dumps({**schema, 'x-guidance': style})}")

    def _more(self, between: str) -> str:
        return f"({_string(between)} {self._call()})*" if self._is_parallel else ""

    def _calls(self) -> str:
        """What follows the opening mark, with the closing one."""
        family = self._family
        if family.is_list:
            body = f"{_string(family.lead + '[')} {self._call()} {self._more(', ')} {_string(']' + family.trail)}"
        elif family.close:
            body = f"{_optional(family.lead)} {self._call()} {_optional(family.trail)}"
        else:
            body = f"{self._call()} {self._more(family.separator)}"
        close = f" {self._mark(family.close)}" if family.close else ""
        return self._rule("calls", body + close)

    def only_calls(self, *, begins_thinking: bool) -> str:
        """Thinking, where there can be some, and calls."""
        family = self._family
        if family.is_bare:
            calls = f"{self._call()} {self._more(family.separator)}"
        else:
            again = f"({_string(family.separator)} {self._mark(family.open)} {self._calls()})*"
            several = again if self._is_parallel and not family.is_list else ""
            calls = f"{self._mark(family.open)} {self._calls()} {several}"
        if self._thinking is None:
            return calls
        self._rule("SPACE", r"/[ \n]+/")
        if begins_thinking:
            return f"SPACE? {calls}"
        return f"({self._mark(self._thinking.open)} {self.thinking_rest()} SPACE?)? {calls}"

    def _bare(self) -> Iterator[str]:
        """Calls without a mark, with white space and other keys where models put them."""
        for at, tool in enumerate(self._tools):
            args, end = self._arguments(at), _string("}")
            for name, opening, close in (("BARE", "", ""), ("LIST", rf"\[{_SPACE}", _string("]"))):
                head = self._rule(f"{name}_{at}", f"/{_SPACE}{opening}{_named(tool.name)}{_ARGUMENTS_KEY}/")
                yield f"{head} {args} {end} {self._more(', ' if close else self._family.separator)} {close}"

    # Text and thinking

    def free(self) -> str:
        """Text, thinking and calls in any order."""
        if "free" in self.rules:
            return "free"
        self.rules["free"] = ""
        text = f"{self._text()}?"
        family = self._family
        ends = not self._is_parallel or (family.is_bare and not family.close)
        each = [text]
        each += [f"{opened} {self._calls()} {'' if ends else 'free'}" for opened in self._until(family.open)]
        if self._thinking is not None:
            for opened in self._until(self._thinking.open):
                each += [f"{opened} {self.thinking_rest()} free", f"{opened} {self.unfinished_thought()}"]
        if self._specials.others:
            each.append(f"{text} {_ids(self._specials.others)} free")
        if family.is_bare:
            each += self._bare()
        self.rules["free"] = "free: " + " | ".join(each)
        return "free"

    def thinking_rest(self) -> str:
        """The thinking behind its opening mark, with the closing one."""
        if "rest" not in self.rules:
            assert self._thinking is not None
            close = self._thinking.close
            self._rule("THOUGHT_END", f"/{_ANY}*{_literal(close)}/ & ~/{_ANY}*{_literal(close)}{_ANY}+/")
            each = ["THOUGHT_END"]
            if close in self._specials.marks:
                each.append(f"{self._thought()}? {_ids([self._specials.marks[close]])}")
            if others := self._specials_in_thought():
                each.append(f"{self._thought()}? {_ids(others)} rest")
            self._rule("rest", " | ".join(each))
        return "rest"

    def unfinished_thought(self) -> str:
        """Thinking in which the model ends its answer."""
        others = self._specials_in_thought()
        more = f"({self._thought()}? {_ids(others)})* " if others else ""
        return self._rule("unfinished", f"{more}{self._thought()}?")

    def _thought(self) -> str:
        assert self._thinking is not None
        return self._rule("THOUGHT", f"/{_ANY}+/ & ~/{_ANY}*{_literal(self._thinking.close)}{_ANY}*/")

    def _specials_in_thought(self) -> list[int]:
        assert self._thinking is not None
        marks = (token for mark, token in self._specials.marks.items() if mark != self._thinking.close)
        return [*self._specials.others, *marks]

    def _text(self) -> str:
        """Text without any mark, that begins no call."""
        return self._rule("TEXT", f"/{_ANY}+/ & ~/{_ANY}*({self._marks})({_ANY})*/{self._not_bare}")

    def _until(self, mark: str) -> Iterator[str]:
        """Text and the mark at its end, in each of the mark's spellings."""
        name = "TO_CALL" if mark == self._family.open else "TO_THOUGHT"
        once = f"/{_ANY}*{_literal(mark)}/ & ~/{_ANY}*({self._marks}){_ANY}+/"
        yield self._rule(name, once + self._not_bare)
        if mark in self._specials.marks:
            yield f"{self._text()}? {_ids([self._specials.marks[mark]])}"

    @property
    def _marks(self) -> str:
        """All marks that open something, as a regular expression."""
        marks = [self._family.open, *([self._thinking.open] if self._thinking is not None else [])]
        return "|".join(map(_literal, marks))

    @property
    def _not_bare(self) -> str:
        if not self._family.is_bare:
            return ""
        names = "|".join(_literal(_quoted(tool.name)) for tool in self._tools)
        return rf" & ~/{_SPACE}(\[{_SPACE})?({_named(names, is_pattern=True)}|{_ARGUMENTS_FIRST}){_ANY}*/"

    def _mark(self, mark: str) -> str:
        """A mark as the model was trained to write it: its token, where it has one."""
        token = self._specials.marks.get(mark)
        return _string(mark) if token is None else _ids([token])


_OTHER_KEYS = rf'("(type|id)"{_SPACE}:{_SPACE}"[^"\\]*"{_SPACE},{_SPACE})*'
_ARGUMENTS_KEY = rf'{_SPACE},{_SPACE}{_OTHER_KEYS}"(arguments|parameters)"{_SPACE}:{_SPACE}'
_ARGUMENTS_FIRST = rf'\{{{_SPACE}{_OTHER_KEYS}"(arguments|parameters)"'


def _named(name: str, *, is_pattern: bool = False) -> str:
    """A call's object up to its name, as a regular expression."""
    spelled = name if is_pattern else _literal(_quoted(name))
    return rf'\{{{_SPACE}{_OTHER_KEYS}"name"{_SPACE}:{_SPACE}({spelled})'


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _optional(text: str) -> str:
    return _string(text) if text else ""


def _literal(text: str) -> str:
    """A regular expression that matches only `text`."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _ids(tokens: Iterable[int]) -> str:
    ranges: list[list[int]] = []
    for token in sorted(tokens):
        if ranges and ranges[-1][1] == token - 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    return f"<[{','.join(f'{first}-{last}' if first < last else str(first) for first, last in ranges)}]>"

"""Translates a grammar in Lark's notation to one regular expression, for strings inside of JSON, which only allow
those.

Possible where no rule refers to itself. The expression matches the texts that the rules allow character by character:
as with Lark's own Earley parser, no lexer decides in advance where a terminal ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import attrs

MAX_PATTERN = 32_768
"""Maximum length of the expression: a rule's body is repeated wherever the rule is named."""
COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    "NUMBER": r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals of `%import common.…`."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|(//|\#)[^\n]*)|(?P<line>\n\s*)|(?P<string>"(\\.|[^"\\\n])*"i?)
    |(?P<regex>/(\\.|[^/\\\n])+/[imsx]*)|(?P<word>%[a-z]+|[!?]*_?[A-Za-z][A-Za-z0-9_]*)|(?P<number>-?[0-9]+)|(?P<mark>->|\.\.|[][(){}:|*+?~.,])""",
    re.VERBOSE,
)

_ESCAPES = {char: f"\\{char}" for char in "\\^$.|?*+()[]{}-/#&~"} | {"\n": r"\n", "\t": r"\t", "\r": r"\r"}


class NoPatternError(Exception):
    """The grammar is not a regular expression, or invalid; the message says why."""


def pattern_of(lark: str) -> str:
    """Regular expression, anchored at both ends, of the texts that the grammar's `start` allows.

    Raises `NoPatternError`.
    """
    return f"^(?:{_Patterns(_definitions(lark)).of('start')})$"


@attrs.frozen
class _Word:
    kind: str
    text: str


@attrs.define
class _Words:
    """Tokens of a grammar, read from the first to the last."""

    rest: list[_Word]
    """Tokens that are left, in reverse order."""

    def is_next(self, *texts: str) -> bool:
        return bool(self.rest) and self.rest[-1].kind != "string" and self.rest[-1].text in texts

    def take(self, *texts: str) -> bool:
        """Whether the next token is one of these; if so, it is consumed."""
        return self.is_next(*texts) and bool(self.rest.pop())

    def next(self, kind: str = "") -> str:
        """Consume the next token. Raises `NoPatternError` where it is not of the `kind`."""
        if not self.rest or (kind and self.rest[-1].kind != kind):
            raise NoPatternError(f"expected a {kind or 'word'}, not {self.rest[-1].text!r}" if self.rest else "cut off")
        return self.rest.pop().text


def _words(text: str) -> Iterator[_Word]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise NoPatternError(f"{text[at : at + 20]!r} is not known")
        assert found.lastgroup is not None
        if found.lastgroup != "space":
            yield _Word(found.lastgroup, "\n" if found.lastgroup == "line" else found.group())
        at = found.end()


def _definitions(text: str) -> dict[str, _Words | str]:
    """Definition of each name: its tokens, or a regular expression."""
    made: dict[str, _Words | str] = {}
    lines: list[list[_Word]] = [[]]
    for word in _words(text):
        if word.kind == "line":
            lines.append([])
        elif word.text == "|" and word.kind == "mark" and not lines[-1] and len(lines) > 1:
            lines = [row for row in lines if row]  # continues the line before
            lines[-1].append(word)
        else:
            lines[-1].append(word)
    for line in filter(None, lines):
        words = _Words(line[::-1])
        if words.take("%import"):
            made |= _imported(words)
        elif line[0].text.startswith("%"):
            raise NoPatternError(f"{line[0].text} is not available")
        else:
            name = words.next("word").lstrip("!?")
            if words.take("."):
                words.next("number")  # a priority does not change what is allowed
            if not words.take(":"):
                raise NoPatternError(f"{name}: expected a colon behind it")
            made[name] = words
    return made


def _imported(words: _Words) -> dict[str, str]:
    if words.next() != "common":
        raise NoPatternError("%import: only common is available")
    names = []
    if words.take("."):
        names.append(words.next("word"))
    elif words.take("("):
        while not words.take(")"):
            names.append(words.next("word"))
            words.take(",")
    alias = words.next("word") if words.take("->") else None
    if unknown := [name for name in names if name not in COMMON]:
        raise NoPatternError(f"%import: common.{unknown[0]} is not known")
    return {alias or name: COMMON[name] for name in names}


class _Patterns:
    """Regular expressions of a grammar's names."""

    def __init__(self, definitions: Mapping[str, _Words | str]) -> None:
        self._definitions = definitions
        self._made: dict[str, str] = {}
        self._begun: list[str] = []

    def of(self, name: str) -> str:
        """Regular expression of a name."""
        if name not in self._made:
            if name in self._begun:
                raise NoPatternError(f"{name} leads back to itself")
            definition = self._definitions.get(name)
            if definition is None:
                raise NoPatternError(f"{name} is not defined")
            self._begun.append(name)
            self._made[name] = definition if isinstance(definition, str) else self._whole(definition)
            self._begun.pop()
            if len(self._made[name]) > MAX_PATTERN:
                raise NoPatternError(f"{name} is longer than {MAX_PATTERN:,} characters as a regular expression")
        return self._made[name]

    def _whole(self, words: _Words) -> str:
        made = self._choice(words)
        if words.rest:
            raise NoPatternError(f"{words.rest[-1].text!r} is not known here")
        return made

    def _choice(self, words: _Words) -> str:
        ways = [self._row(words)]
        while words.take("|"):
            ways.append(self._row(words))
        return "|".join(ways)

    def _row(self, words: _Words) -> str:
        made = ""
        while words.rest and not words.is_next("|", ")", "]", "->"):
            made += self._repeated(words)
        if words.take("->"):
            words.next("word")  # the alias of this alternative
        return made

    def _repeated(self, words: _Words) -> str:
        atom = self._atom(words)
        if words.is_next("*", "+", "?"):
            return atom + words.next()
        if words.take("~"):
            least = words.next("number")
            return f"{atom}{{{least},{words.next('number') if words.take('..') else least}}}"
        return atom

    def _atom(self, words: _Words) -> str:
        for opening, closing, after in (("(", ")", ""), ("[", "]", "?")):
            if words.take(opening):
                inner = self._choice(words)
                if not words.take(closing):
                    raise NoPatternError(f"expected {closing!r}")
                return f"(?:{inner}){after}"
        if not words.rest:
            raise NoPatternError("cut off")
        kind, text = words.rest[-1].kind, words.next()
        if kind == "word":
            return f"(?:{self.of(text)})"
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            return f"(?{flags}:{body})"
        if kind == "string":
            return self._string(text, words)
        raise NoPatternError(f"{text!r} is not known here")

    def _string(self, text: str, words: _Words) -> str:
        value = _value(text)
        if words.take(".."):
            last = _value(words.next("string"))
            if len(value) != 1 or len(last) != 1:
                raise NoPatternError("a range is from one character to another")
            return f"[{_escaped(value)}-{_escaped(last)}]"
        return f"(?i:{_escaped(value)})" if text.endswith("i") else f"(?:{_escaped(value)})"


def _value(spelled: str) -> str:
    """Value of a quoted string."""
    try:
        value = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", spelled.removesuffix("i")))
    except ValueError:
        raise NoPatternError(f"{spelled} is no string") from None
    assert isinstance(value, str)
    return value


def _escaped(text: str) -> str:
    """Regular expression that matches only this text."""
    return "".join(_ESCAPES.get(char) or (f"\\x{{{ord(char):x}}}" if char < " " else char) for char in text)

"""Rules of a grammar in llguidance's variant of Lark's notation, and the spelling of texts in it.

A mark that is a special token of the vocabulary is spelled by that token, which no text matches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

import attrs


@attrs.frozen
class Specials:
    """Special tokens of a vocabulary, which no text spells: those that are marks, and all others except the ends of
    text.
    """

    marks: Mapping[str, int]
    others: Sequence[int]


class LarkRules:
    """Rules by name, made on first use."""

    def __init__(self, specials: Specials) -> None:
        self.specials = specials
        self._lines: dict[str, str] = {}
        self.chars = 0
        """Total length of all bodies, which compile time is proportional to."""
        longest_first = sorted(specials.marks, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __contains__(self, name: str) -> bool:
        return name in self._lines

    def add(self, name: str, body: str) -> str:
        """Define a rule, unless it exists, and return its name."""
        if name not in self._lines:
            self.complete(name, body)
        return name

    def begin(self, name: str) -> None:
        """Reserve a rule that its own body refers to; `complete` defines it."""
        self._lines[name] = ""

    def complete(self, name: str, body: str) -> None:
        """Define a rule, also one that `begin` has reserved."""
        self._lines[name] = f"{name}: {body}"
        self.chars += len(body)

    def grammar(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._lines.values()])

    def first_mark(self, text: str) -> str:
        """The first special token in a text; empty where there is none."""
        found = self._marks.search(text) if self._marks is not None else None
        return found[0] if found else ""

    def spelled(self, text: str) -> str:
        """A text as models write it, with special tokens for the marks in it; empty for an empty one."""
        if self._marks is None:
            return string(text)
        marks = self._marks.findall(text)
        between = self._marks.split(text)
        parts = [string(between[0])]
        for mark, after in zip(marks, between[1:], strict=True):
            parts += [ids([self.specials.marks[mark]]), string(after)]
        return " ".join(filter(None, parts))


def string(text: str) -> str:
    """A text as a Lark string; empty for an empty text, which Lark has no string for."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def ids(tokens: Iterable[int]) -> str:
    """Any one of these tokens."""
    ranges: list[list[int]] = []
    for token in sorted(tokens):
        if ranges and ranges[-1][1] == token - 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    return f"<[{','.join(f'{first}-{last}' if first < last else str(first) for first, last in ranges)}]>"

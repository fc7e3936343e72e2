"""Grammar of thinking: between its marks, and before an answer that another grammar constrains."""

from __future__ import annotations

from uma.chat.families import Thinking
from uma.chat.harmony_grammar import harmony_opening
from uma.chat.lark import LarkRules, ids
from uma.chat.schema import ANY, literal

HELD = "@held"
"""Placeholder for the request's own grammar, in the rules of what comes before it."""


class Thought:
    """Rules of one model's thinking, made on first use."""

    def __init__(self, rules: LarkRules, thinking: Thinking) -> None:
        self._rules = rules
        self._specials = rules.specials
        self.open = thinking.open
        self._close = thinking.close

    def rest(self) -> str:
        """Thinking behind its opening mark, with the closing mark."""
        if "rest" not in self._rules:
            close = self._close
            self._rules.add("THOUGHT_END", f"/{ANY}*{literal(close)}/ & ~/{ANY}*{literal(close)}{ANY}+/")
            ways = ["THOUGHT_END"]
            if self._rules.first_mark(close):
                ways.append(f"{self._text()}? {self._rules.spelled(close)}")
            if others := self._specials_inside():
                ways.append(f"{self._text()}? {ids(others)} rest")
            self._rules.add("rest", " | ".join(ways))
        return "rest"

    def unfinished(self) -> str:
        """Thinking within which the model ends its answer."""
        others = self._specials_inside()
        more = f"({self._text()}? {ids(others)})* " if others else ""
        return self._rules.add("unfinished", f"{more}{self._text()}?")

    def _text(self) -> str:
        return self._rules.add("THOUGHT", f"/{ANY}+/ & ~/{ANY}*{literal(self._close)}{ANY}*/")

    def _specials_inside(self) -> list[int]:
        first = self._rules.first_mark(self._close)
        marks = (token for mark, token in self._specials.marks.items() if mark != first)
        return [*self._specials.others, *marks]


def thought_first(rules: LarkRules, thinking: Thinking, *, begins_thinking: bool, has_channels: bool) -> str:
    """Grammar of thinking that ends with its closing mark, followed by what `HELD` stands for.

    `begins_thinking` says that the prompt ended with the opening mark; otherwise there can also be no thinking.
    """
    if has_channels:
        return harmony_opening(rules, HELD)
    rest = Thought(rules, thinking).rest()
    rules.add("SPACE", r"/[ \n]+/")
    if begins_thinking:
        return rules.grammar(f"{rest} SPACE? {HELD}")
    return rules.grammar(f"({rules.spelled(thinking.open)} {rest} SPACE?)? {HELD}")

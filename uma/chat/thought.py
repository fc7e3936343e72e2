"""What a model that thinks can write between its marks, and before the text that a grammar holds."""

from __future__ import annotations

from uma.chat.families import Thinking
from uma.chat.harmony_grammar import harmony_opening
from uma.chat.lark import LarkRules, ids
from uma.chat.schema import ANY, literal

HELD = "@held"
"""The text that a grammar of the request's own holds, in the rules of what comes before it."""


class Thought:
    """The rules of one model's thinking, made when they are first used."""

    def __init__(self, rules: LarkRules, thinking: Thinking) -> None:
        self._rules = rules
        self._specials = rules.specials
        self.open = thinking.open
        self._close = thinking.close

    def rest(self) -> str:
        """The thinking behind its opening mark, with the closing one."""
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
        """Thinking in which the model ends its answer."""
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
    """A grammar of thinking, which ends by its closing mark and not otherwise, and of what `HELD` stands for behind it.

    `begins_thinking` says that the prompt ended with the opening mark; else there can be no thinking, too.
    """
    if has_channels:
        return harmony_opening(rules, HELD)
    rest = Thought(rules, thinking).rest()
    rules.add("SPACE", r"/[ \n]+/")
    if begins_thinking:
        return rules.grammar(f"{rest} SPACE? {HELD}")
    return rules.grammar(f"({rules.spelled(thinking.open)} {rest} SPACE?)? {HELD}")

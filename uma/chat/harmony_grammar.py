"""Grammar of gpt-oss's output with tools: messages with headers, the last of which is an answer or a call."""

from __future__ import annotations

from collections.abc import Sequence

from uma.chat.call_rules import answer_rule, json_rule
from uma.chat.families import Family
from uma.chat.harmony import CHANNEL, ENDS, FINAL, MESSAGE, START
from uma.chat.lark import LarkRules, ids
from uma.chat.schema import ANY, Schema, literal, schema_of
from uma.types import Tool


def harmony_grammar(
    rules: LarkRules,
    family: Family,
    tools: Sequence[Tool],
    *,
    can_think: bool,
    must_call: bool,
    answer: Schema | None,
) -> str:
    """See `grammar.calls_grammar`. A call ends the output, so there is at most one."""
    thought = _message(rules, "analysis") if can_think else ""
    call = rules.add("call", " | ".join(_call(rules, tool, at) for at, tool in enumerate(tools)))
    if must_call:
        return rules.grammar(f"{thought}* {call}" if thought else call)
    before, begun = _before(rules, thought), rules.spelled(FINAL)
    if answer is not None:
        final = rules.add("final", f"{begun} {answer_rule(rules, answer)}")
        return rules.grammar(f"{before}* ({call} | {final})")
    final = rules.add("final", f"{begun} {_body(rules)}")
    channels = ("analysis", "commentary") if can_think else ("commentary",)
    unfinished = [rules.spelled(f"{CHANNEL}{channel}{MESSAGE}") + f" {_body(rules)}" for channel in channels]
    last = " | ".join([call, final, *unfinished])
    return rules.grammar(f"{before}* ({last})")


def harmony_opening(rules: LarkRules, held: str) -> str:
    """Grammar of thinking and preambles, followed by an answer that `held` stands for."""
    return rules.grammar(f"{_before(rules, _message(rules, 'analysis'))}* {rules.spelled(FINAL)} {held}")


def _before(rules: LarkRules, thought: str) -> str:
    """Messages before the last one. `thought` is the rule of thinking messages; empty: there are none."""
    return rules.add("before", " | ".join(filter(None, [thought, _message(rules, "commentary")])))


def _message(rules: LarkRules, channel: str) -> str:
    """A message that another one follows."""
    header, after = rules.spelled(f"{CHANNEL}{channel}{MESSAGE}"), rules.spelled(START)
    end = literal(ENDS[0])
    if ENDS[0] in rules.specials.marks:
        return rules.add(channel, f"{header} {_body(rules)} {rules.spelled(ENDS[0])} {after}")
    closed = rules.add(f"CLOSED_{channel.upper()}", f"/{ANY}*{end}/ & ~/{ANY}*({_marks()}){ANY}+/")
    return rules.add(channel, f"{header} {closed} {after}")


def _body(rules: LarkRules) -> str:
    """Text that does not end the message."""
    text = rules.add("BODY", f"/{ANY}*/ & ~/{ANY}*({_marks()}){ANY}*/")
    others = rules.specials.others
    return rules.add("body", f"{text} ({ids(others)} {text})*") if others else text


def _marks() -> str:
    return "|".join(map(literal, (*ENDS, START)))


def _call(rules: LarkRules, tool: Tool, at: int) -> str:
    """A call in the commentary channel. Its recipient stands behind the channel or before it: the model was trained on
    both.
    """
    name = tool.name
    arguments = json_rule(rules, f"args_{at}", schema_of(tool))
    heads = (
        f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}",
        f" to=functions.{name}{CHANNEL}commentary json{MESSAGE}",
    )
    return f"({' | '.join(rules.spelled(head) for head in heads)}) {arguments}"

"""How families of models write tool calls and thinking, recognised from the model's own chat template.

Most write a mark and then JSON. The families differ in their marks, and in whether the JSON can stand without one.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Family:
    """One way to write tool calls."""

    name: str
    open: str
    """The mark before a call, or before a list of them."""
    close: str = ""
    """The mark behind it; empty where there is none."""
    is_bare: bool = False
    """A call can begin the output without a mark."""
    knows_tools: bool = True
    """The template shows the model the tools; otherwise they are told in the system message."""
    is_list: bool = False
    """Calls stand in a JSON list behind one mark."""
    lead: str = ""
    """Text between the opening mark and the first call, as models of the family write it."""
    trail: str = ""
    """Text between the last call and the closing mark."""
    separator: str = "\n"
    """Text between two calls, outside of a list."""
    key: str = "arguments"
    """The arguments' key, as models of the family write it."""


@attrs.frozen
class Thinking:
    """The marks around a model's thinking, and the name of the template's switch for it, if it has one."""

    open: str
    close: str
    switch: str = ""


GENERIC = Family("generic", open="<tool_call>", close="</tool_call>", is_bare=True, knows_tools=False)
"""For models whose template knows nothing of tools."""

_HERMES = Family("hermes", open="<tool_call>", close="</tool_call>", lead="\n", trail="\n")
_LLAMA = Family("llama3", open="<|python_tag|>", is_bare=True, separator="; ", key="parameters")
_FAMILIES = (
    ("[TOOL_CALLS] [", Family("mistral", open="[TOOL_CALLS]", is_list=True, lead=" ")),
    ("[TOOL_CALLS]", Family("mistral", open="[TOOL_CALLS]", is_list=True)),
    ("<|tool|>", Family("phi", open="<|tool_call|>", close="<|/tool_call|>", is_list=True)),
    ("<|tool_call|>", Family("granite", open="<|tool_call|>", is_list=True)),
    ("<tool_call>", _HERMES),
    ("<|python_tag|>", _LLAMA),
    ("ipython", _LLAMA),
)
"""By a text that templates of the family contain; the first that fits counts."""

_OTHER_FORMS = (
    ("<|channel|>", "gpt-oss (harmony)"),
    ("\uff5ctool\u2581calls\u2581begin\uff5c", "DeepSeek"),
    ("[ARGS]", "Mistral's [ARGS]"),
    ("<function=", "Qwen3-Coder (XML)"),
    ("<arg_key>", "GLM (XML)"),
    ("<start_function_call>", "FunctionGemma"),
)
"""Forms that are known and cannot be parsed."""

_THINKING = (Thinking("<think>", "</think>"), Thinking("[THINK]", "[/THINK]"))
_SWITCH = "enable_thinking"


def family_of(template: str) -> Family | str:
    """The family of a chat template; where its calls cannot be parsed, the name of its form instead."""
    for mark, form in _OTHER_FORMS:
        if mark in template:
            return form
    for mark, family in _FAMILIES:
        if mark in template:
            return family
    return "an unknown form" if "tools" in template else GENERIC


def thinking_of(template: str) -> Thinking | None:
    """The thinking marks that a chat template knows; None where it has none."""
    for marks in _THINKING:
        if marks.close in template:
            return attrs.evolve(marks, switch=_SWITCH if _SWITCH in template else "")
    return None

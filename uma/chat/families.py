"""How families of models write tool calls and thinking, recognised from the model's own chat template.

A family has marks around its calls and a form of a single call (`uma/chat/forms.py`). A template is recognised by
texts that it must contain to show the model its own earlier calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import attrs

from uma.chat.forms import BracesForm, Form, NamedForm, ObjectForm, PairsForm


@attrs.frozen
class Family:
    """How the models of one family write tool calls: the marks around them, and what stands between."""

    name: str
    open: str
    """The mark before a call, or before a list of them."""
    close: str = ""
    """The mark behind it; empty where there is none."""
    form: Form = ObjectForm()
    """How one call is written between the marks."""
    is_bare: bool = False
    """A call can begin the output without a mark."""
    knows_tools: bool = True
    """The template shows the model the tools; otherwise they are told in the system message."""
    is_list: bool = False
    """Calls stand in a JSON list behind one mark."""
    is_block: bool = False
    """Calls stand one behind the other between two marks."""
    ends_answer: bool = False
    """Whether the model writes nothing more behind its calls: what would follow are their results."""
    has_channels: bool = False
    """The whole answer consists of messages with a header each, of which calls are one kind (`uma/chat/harmony.py`)."""
    lead: str = ""
    """Text between the opening mark and the first call, as models of the family write it."""
    trail: str = ""
    """Text between the last call and the closing mark."""
    separator: str = "\n"
    """Text between two calls, outside of a list."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that can be special tokens of a vocabulary."""
        return tuple(filter(None, (self.open, self.close, *self.form.marks)))


@attrs.frozen
class Thinking:
    """The marks around a model's thinking."""

    open: str
    close: str
    label: str = ""
    """Text right behind the opening mark that says what follows, and is no part of it."""


GENERIC = Family("generic", open="<tool_call>", close="</tool_call>", is_bare=True, knows_tools=False)
"""Form of calls of models whose template knows nothing of tools."""

_HERMES = Family("hermes", open="<tool_call>", close="</tool_call>", lead="\n", trail="\n")
_LLAMA = Family("llama3", open="<|python_tag|>", form=ObjectForm("parameters"), is_bare=True, separator="; ")
_MISTRAL = Family("mistral", open="[TOOL_CALLS]", is_list=True)
_CALLS_BEGIN, _CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL_BEGIN, _CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_CALL_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_HARMONY_MARKS = ("<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


_LINE_BEFORE_CLOSE = re.compile(r"(\n|\\n)</parameter>")
_LINE_AFTER_KEY = re.compile(r"</arg_key>(\n|\\n)")
"""A line break in a template: itself, or its escape in a string."""


def _deepseek(template: str) -> Family:
    """V3 and R1 put the arguments into a fenced block, V3.1 right behind the name."""
    special = (_CALL_BEGIN, _CALL_SEPARATOR, _CALL_END)
    is_fenced = "```json" in template
    form = NamedForm(
        before=f"{_CALL_BEGIN}function{_CALL_SEPARATOR}" if is_fenced else _CALL_BEGIN,
        after="\n```json\n" if is_fenced else _CALL_SEPARATOR,
        end=f"\n```{_CALL_END}" if is_fenced else _CALL_END,
        special=special,
    )
    return Family(
        "deepseek-v3" if is_fenced else "deepseek-v3.1",
        open=_CALLS_BEGIN,
        close=_CALLS_END,
        form=form,
        is_block=True,
        ends_answer=True,
        separator="\n" if is_fenced else "",
        knows_tools=_shows_tools(template),
    )


def _mistral_args(template: str) -> Family:
    id_mark = "[CALL_ID]" if "[CALL_ID]" in template else ""
    special = ("[ARGS]", id_mark) if id_mark else ("[ARGS]",)
    form = NamedForm(before="", after="[ARGS]", id_mark=id_mark, special=special)
    return Family("mistral-args", open="[TOOL_CALLS]", form=form, separator="", knows_tools=_shows_tools(template))


def _qwen_coder(template: str) -> Family:
    """Qwen puts values on lines of their own; Seed-OSS does not, and has a name of its own in the outer marks."""
    maker = "seed:" if "<seed:tool_call>" in template else ""
    form = PairsForm(
        before="<function=",
        after=">\n",
        key_open="<parameter=",
        key_close=">",
        value_close="</parameter>",
        padding="\n" if _LINE_BEFORE_CLOSE.search(template) else "",
        trail="\n",
        end="</function>",
    )
    return Family(
        "qwen3-coder", open=f"<{maker}tool_call>", close=f"</{maker}tool_call>", form=form, lead="\n", trail="\n"
    )


def _glm(template: str) -> Family:
    """GLM-4.5 and 4.6 write each mark on a line of its own, 4.7 all of them on one."""
    line = "\n" if _LINE_AFTER_KEY.search(template) else ""
    form = PairsForm(
        before="",
        after=line,
        key_open="<arg_key>",
        key_close=f"</arg_key>{line}<arg_value>",
        value_close="</arg_value>",
        padding="",
        trail=line,
        end="</tool_call>",
        special=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    )
    return Family("glm-4", open="<tool_call>", form=form)


def _gemma(open_: str, close: str, quote: str) -> Family:
    return Family("gemma", open=open_, close=close, form=BracesForm(quote), ends_answer=True, separator="")


def _harmony(template: str) -> Family:
    form = NamedForm(before=" to=functions.", after="<|message|>", special=_HARMONY_MARKS)
    return Family(
        "harmony",
        open="<|channel|>",
        form=form,
        ends_answer=True,
        has_channels=True,
        knows_tools=_shows_tools(template),
    )


_FAMILIES: tuple[tuple[str, Family | Callable[[str], Family | str]], ...] = (
    ("<|channel|>", _harmony),
    (_CALLS_BEGIN, _deepseek),
    ("<start_function_call>", _gemma("<start_function_call>", "<end_function_call>", "<escape>")),
    ("<|tool_call>", _gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    ("<arg_key>", _glm),
    ("<parameter=", _qwen_coder),
    ("[ARGS]", _mistral_args),
    ("[TOOL_CALLS] [", attrs.evolve(_MISTRAL, lead=" ")),
    ("[TOOL_CALLS]", _MISTRAL),
    ("<|tool|>", Family("phi", open="<|tool_call|>", close="<|/tool_call|>", is_list=True)),
    ("<|tool_call|>", Family("granite", open="<|tool_call|>", is_list=True)),
    ("invoke name=", lambda template: "calls of the form <invoke name=…>"),
    ("<function=", lambda template: "calls of the form <function=name>{…}"),
    ("<tool_call>", lambda template: _HERMES if "arguments" in template else "<tool_call> without arguments"),
    ("<|python_tag|>", _LLAMA),
    ("ipython", lambda template: _LLAMA if "parameters" in template else "an unknown form of ipython"),
)
"""Families by a text that their templates contain; the first that fits counts."""

THINKING = (
    Thinking("<|channel|>analysis<|message|>", "<|end|>"),
    Thinking("<|channel>", "<channel|>", label="thought\n"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
)
"""Marks of thinking that are known; the first that a template has counts."""


def family_of(template: str) -> Family | str:
    """The family of a chat template; where its calls cannot be parsed, the name of its form instead."""
    for mark, found in _FAMILIES:
        if mark in template:
            return found if isinstance(found, Family) else found(template)
    return "an unknown form" if _shows_tools(template) else GENERIC


def thinking_of(template: str) -> Thinking | None:
    """The thinking marks that a chat template knows; None where it has none."""
    return next((marks for marks in THINKING if all(part in template for part in _parts(marks))), None)


def _parts(marks: Thinking) -> tuple[str, ...]:
    """The special tokens of thinking's marks, which a template need not write in one piece."""
    if marks.open.startswith("<|channel|>"):
        return ("<|channel|>", "<|message|>")
    return (marks.close,)


def _shows_tools(template: str) -> bool:
    """Whether a template uses its `tools`, not only the word."""
    return re.search(r"\{[%{][^%}]*\btools\b", template) is not None

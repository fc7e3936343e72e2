"""Notations of tool calls and thinking, by family of models.

A family has marks around its calls, and a form of a single call (`uma/chat/forms.py`). Most templates show both
(`uma/chat/derive.py`). The families here are for templates that do not, and are recognised by texts in them.
"""

from __future__ import annotations

import re

import attrs

from uma.chat.forms import COUNT, KIND, BracesForm, ElementsForm, Form, NamedForm, ObjectForm, PairsForm


@attrs.frozen
class Family:
    """Notation of one family's tool calls: the marks around them, and the texts between."""

    name: str
    open: str
    """Mark before a call, or before a list of them."""
    close: str = ""
    """Mark behind it; empty where there is none."""
    form: Form = ObjectForm()
    """Form of one call between the marks."""
    is_bare: bool = False
    """Whether a call can begin the output without a mark."""
    knows_tools: bool = True
    """Whether the template shows the model the tools. Otherwise they are put into the system message."""
    shows_calls: bool = True
    """Whether the template shows the model its earlier calls. Otherwise they are put into the message's text."""
    is_list: bool = False
    """Whether calls stand in brackets behind one mark, with commas between them; the brackets are in `lead` and
    `trail`."""
    is_block: bool = False
    """Whether calls stand one behind the other between two marks."""
    is_single: bool = False
    """Whether the template allows one call in an answer at most."""
    ends_answer: bool = False
    """Whether the model writes nothing after its calls, because their results would follow."""
    has_channels: bool = False
    """Whether the whole answer consists of messages with headers, and calls are one kind of these
    (`uma/chat/harmony.py`)."""
    lead: str = ""
    """Text between the opening mark and the first call."""
    trail: str = ""
    """Text between the last call and the closing mark."""
    separator: str = "\n"
    """Text between two calls."""
    special: tuple[str, ...] = ()
    """Further texts that can be special tokens of a vocabulary."""
    silent: tuple[str, ...] = ()
    """Marks between thinking, answer and calls that are part of none. `{}` is the recipient of a message: the user, or
    a tool, whose calls then begin with that text."""
    to_answer: str = ""
    """Text behind the opening mark that begins an answer instead of a call. The prompt ends with the mark."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that can contain special tokens of a vocabulary."""
        return tuple(filter(None, (self.open, self.close, *self.form.texts, *self.special, *self.silent)))

    @property
    def header(self) -> str:
        """Text before a call, with `{}` for the tool's name; empty where there is none."""
        return next((text for text in self.silent if "{}" in text), "")


@attrs.frozen
class Thinking:
    """Marks around a model's thinking."""

    open: str
    close: str
    label: str = ""
    """Text right behind the opening mark that names what follows, and is not part of it."""
    signs: tuple[str, ...] = ()
    """Texts by which a template is recognised; empty: the closing mark."""


GENERIC = Family("generic", open="<tool_call>", close="</tool_call>", is_bare=True, knows_tools=False)
"""Family of models whose template does not support tools."""

_LLAMA = Family(
    "llama3", open="<|python_tag|>", form=ObjectForm(after='", "parameters": '), is_bare=True, separator="; "
)
"""Llama 3.1 to 3.3: their templates show no mark before a call, and refuse two calls in one message."""
_GRANITE = Family("granite", open="<|tool_call|>", is_list=True, lead="[", trail="]", separator=", ")
"""Granite 3, whose template does not show calls."""
_PHI = attrs.evolve(_GRANITE, name="phi", close="<|/tool_call|>")
"""Phi-4-mini, whose template does not show calls."""
_LFM2 = Family(
    "lfm2",
    open="<|tool_call_start|>",
    close="<|tool_call_end|>",
    form=PairsForm("", "(", "", "=", "", "", "", ")", between=", ", quote="'"),
    shows_calls=False,
    is_list=True,
    lead="[",
    trail="]",
    separator=", ",
)
"""LFM2, whose template does not show calls: they are part of the message's text."""
TO_USER = "user"
"""Recipient of an answer, where messages name their recipient."""
_FUNCTIONARY = Family("functionary", open=">>>", form=NamedForm("", "\n"), separator="", to_answer="all\n")
"""Functionary 3.2: the prompt ends with the mark, which also stands before an answer."""
_MUSE = Family(
    "muse",
    open="<atem:function_calls>",
    close="</atem:function_calls>",
    form=PairsForm(
        '<atem:invoke name="', '">\n', '<atem:parameter name="', '">', "</atem:parameter>", "", "\n", "</atem:invoke>"
    ),
    lead="\n",
    trail="\n",
    separator="<|eom|><|start|>assistant",
    silent=(" to={}<|message|>", "<|eom|>", "<|start|>assistant"),
)
"""Muse: thinking, answer and each call are messages with a header that names their recipient."""
_KIMI_K3 = Family(
    "kimi-k3",
    open="<|open|>tools<|sep|>",
    close="<|close|>tools<|sep|>",
    form=PairsForm(
        '<|open|>call tool="',
        f'" index="{COUNT}"<|sep|>',
        '<|open|>argument key="',
        f'" type="{KIND}"<|sep|>',
        "<|close|>argument<|sep|>",
        "",
        "",
        "<|close|>call<|sep|>",
    ),
    is_block=True,
    separator="",
    silent=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
"""Kimi K3: an answer has marks as well, and each argument states its type."""
_MINIMAX = "]<]minimax[>["
_MINIMAX_M3 = Family(
    "minimax-m3",
    open=f"{_MINIMAX}<tool_call>",
    close=f"{_MINIMAX}</tool_call>",
    form=ElementsForm(_MINIMAX, f'{_MINIMAX}<invoke name="', '">', f"{_MINIMAX}</invoke>"),
    is_block=True,
    lead="\n",
    trail="\n",
    separator="\n",
)
"""MiniMax M3, whose arguments are nested elements."""
_HARMONY_MARKS = ("<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


def _gemma(open_: str, close: str, quote: str) -> Family:
    return Family("gemma", open=open_, close=close, form=BracesForm(quote), ends_answer=True, separator="")


def _harmony(template: str) -> Family:
    form = NamedForm(before=" to=functions.", after="<|message|>")
    return Family(
        "harmony",
        open="<|channel|>",
        form=form,
        ends_answer=True,
        has_channels=True,
        special=_HARMONY_MARKS,
        knows_tools=shows_tools(template),
    )


_BY_HAND: tuple[tuple[str, Family], ...] = (
    (">>>all", _FUNCTIONARY),
    ("<atem:function_calls>", _MUSE),
    ("<|end_of_msg|>", _KIMI_K3),
    (_MINIMAX, _MINIMAX_M3),
    ("<start_function_call>", _gemma("<start_function_call>", "<end_function_call>", "<escape>")),
    ("<|tool_call>", _gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    ("<|tool|>", _PHI),
    ("<|tool_call|>", _GRANITE),
    ("List of tools: ", _LFM2),
    ("<|python_tag|>", _LLAMA),
    ("ipython", _LLAMA),
)
"""Families by a text in their templates; the first match counts. Gemma is among them because its arguments are not JSON
at any depth, and sorted, so that a few rendered calls do not show their notation."""

THINKING = (
    Thinking("<|channel|>analysis<|message|>", "<|end|>", signs=("<|channel|>", "<|message|>")),
    Thinking(" to=self<|message|>", "<|eom|><|start|>assistant", signs=(" to=self<|message|>",)),
    Thinking("<|open|>think<|sep|>", "<|close|>think<|sep|>", signs=("<|open|>", "<|end_of_msg|>")),
    Thinking("<mm:think>", "</mm:think>"),
    Thinking("<|channel>", "<channel|>", label="thought\n"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
)
"""Known marks of thinking; the first that a template contains counts."""


def with_channels(template: str) -> Family | None:
    """Family of a chat template whose answers consist of messages with headers; None for any other."""
    return _harmony(template) if "<|channel|>" in template else None


def by_hand(template: str) -> Family | str:
    """Family of a chat template that does not show its notation of calls itself, or the reason why it is unknown."""
    found = next((family for mark, family in _BY_HAND if mark in template), None)
    if found is not None:
        return found
    return "its chat template does not show how they are written" if shows_tools(template) else GENERIC


def thinking_of(template: str) -> Thinking | None:
    """Thinking marks of a chat template; None where it has none."""
    return next((marks for marks in THINKING if all(text in template for text in marks.signs or (marks.close,))), None)


def shows_tools(template: str) -> bool:
    """Whether a template uses its variable `tools`, and not only the word."""
    return re.search(r"\{[%{][^%}]*\btools\b", template) is not None

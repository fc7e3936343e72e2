"""How families of models write tool calls and thinking.

A family has marks around its calls and a form of a single call (`uma/chat/forms.py`). Most templates show it
(`uma/chat/derive.py`); what is here is of those that do not, recognised by texts that they must contain.
"""

from __future__ import annotations

import re

import attrs

from uma.chat.forms import COUNT, KIND, BracesForm, ElementsForm, Form, NamedForm, ObjectForm, PairsForm


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
    shows_calls: bool = True
    """The template shows the model its earlier calls; otherwise they are written into the message's text."""
    is_list: bool = False
    """Calls stand in brackets behind one mark, with commas between them; the brackets are in `lead` and `trail`."""
    is_block: bool = False
    """Calls stand one behind the other between two marks."""
    is_single: bool = False
    """The template shows one call in an answer at most."""
    ends_answer: bool = False
    """Whether the model writes nothing more behind its calls: what would follow are their results."""
    has_channels: bool = False
    """The whole answer consists of messages with a header each, of which calls are one kind (`uma/chat/harmony.py`)."""
    lead: str = ""
    """Text between the opening mark and the first call, as models of the family write it."""
    trail: str = ""
    """Text between the last call and the closing mark."""
    separator: str = "\n"
    """Text between two calls."""
    special: tuple[str, ...] = ()
    """Further texts that can be special tokens of a vocabulary."""
    silent: tuple[str, ...] = ()
    """Texts between thinking, answer and calls that are none of these. `{}` is whom a message is for: the user, or a
    tool, whose calls begin with that text, too."""
    to_answer: str = ""
    """Text behind the opening mark with which an answer begins in place of a call. The prompt ends with the mark."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that can have special tokens of a vocabulary in them."""
        return tuple(filter(None, (self.open, self.close, *self.form.texts, *self.special, *self.silent)))

    @property
    def header(self) -> str:
        """Text before a call, with `{}` for the tool's name; empty where there is none."""
        return next((text for text in self.silent if "{}" in text), "")


@attrs.frozen
class Thinking:
    """The marks around a model's thinking."""

    open: str
    close: str
    label: str = ""
    """Text right behind the opening mark that says what follows, and is no part of it."""
    signs: tuple[str, ...] = ()
    """Texts by which a template is known to have them; empty: the closing mark."""


GENERIC = Family("generic", open="<tool_call>", close="</tool_call>", is_bare=True, knows_tools=False)
"""Form of calls of models whose template knows nothing of tools."""

_LLAMA = Family(
    "llama3", open="<|python_tag|>", form=ObjectForm(after='", "parameters": '), is_bare=True, separator="; "
)
"""Llama 3.1 to 3.3: their templates show no mark before a call, and refuse two in one message."""
_GRANITE = Family("granite", open="<|tool_call|>", is_list=True, lead="[", trail="]", separator=", ")
"""Granite 3, whose template shows no calls."""
_PHI = attrs.evolve(_GRANITE, name="phi", close="<|/tool_call|>")
"""Phi-4-mini, whose template shows none either."""
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
"""LFM2, whose template shows none, and leaves them to the message's text."""
TO_USER = "user"
"""Whom an answer is for, where messages say so."""
_FUNCTIONARY = Family("functionary", open=">>>", form=NamedForm("", "\n"), separator="", to_answer="all\n")
"""Functionary 3.2: the prompt ends with the mark, which stands before an answer, too."""
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
"""Muse: thinking, answer and each call are messages with a header that says whom they are for."""
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
"""Kimi K3: an answer has marks as well, and each argument says of which type it is."""
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
"""MiniMax M3, whose arguments are elements within each other."""
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
        knows_tools=_shows_tools(template),
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
"""Families by a text that their templates contain; the first that fits counts. Gemma's arguments are no JSON at any
depth, and sorted, so that no few calls tell how they are written."""

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
"""Marks of thinking that are known; the first that a template has counts."""


def with_channels(template: str) -> Family | None:
    """The family of a chat template whose answers consist of messages with a header each; None for another."""
    return _harmony(template) if "<|channel|>" in template else None


def by_hand(template: str) -> Family | str:
    """The family of a chat template that does not show itself how calls are written; why they are not known, where it
    is none of these.
    """
    found = next((family for mark, family in _BY_HAND if mark in template), None)
    if found is not None:
        return found
    return "its chat template does not show how they are written" if _shows_tools(template) else GENERIC


def thinking_of(template: str) -> Thinking | None:
    """The thinking marks that a chat template knows; None where it has none."""
    return next((marks for marks in THINKING if all(text in template for text in marks.signs or (marks.close,))), None)


def _shows_tools(template: str) -> bool:
    """Whether a template uses its `tools`, not only the word."""
    return re.search(r"\{[%{][^%}]*\btools\b", template) is not None

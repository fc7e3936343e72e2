"""The prompt of a conversation: chat template, template variables, and an answer to be continued.

Safe to call from any thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs

from uma.chat.derive import derived
from uma.chat.families import Family, Thinking, by_hand, thinking_of, with_channels
from uma.errors import TemplateError, UmaError
from uma.llama.template import ChatTemplate
from uma.prefix import common_size
from uma.types import (
    EFFORT_NAMES,
    NO_EFFORT,
    THINKING_BUDGET,
    THINKING_SWITCHES,
    Message,
    ReasoningMode,
    Request,
    Tool,
)

_ANSWER, _THOUGHT = "UMA looks for this answer", "UMA looks for this thought"


def family_of(template: ChatTemplate) -> Family | str:
    """How calls are written, by the template; the reason if that is unknown."""
    found = with_channels(template.source)
    return found or derived(partial(template.render, opens_answer=False), UmaError) or by_hand(template.source)


def has_switch(template: ChatTemplate) -> bool:
    """Whether the template has a switch for thinking."""
    return bool(_switches(template, "off"))


def message_ends(template: ChatTemplate, request: Request, text: str) -> list[int]:
    """Lengths of the prompt `text`, in characters, at which other prompts are likely to differ: behind the last
    message, because the template can open thinking there that later turns do not show, and behind the system message,
    which requests of one program have in common.
    """
    messages, (tools, variables) = request.messages or (), _settings(template, request)
    asked = [messages]
    if len(messages) > 1 and messages[0].role == "system":
        asked.append((messages[0], Message(role="user", content=_ANSWER)))
    found = set[int]()
    for beginning in asked:
        try:
            found.add(common_size(text, template.render(beginning, tools, variables, opens_answer=False)))
        except TemplateError:
            continue
    return sorted(found - {0, len(text)})


def _settings(template: ChatTemplate, request: Request) -> tuple[tuple[Tool, ...], dict[str, Any]]:
    """Tools and variables for the template."""
    tools = request.tools if request.tool_choice != "none" else ()
    given, switched = request.chat_template_kwargs or {}, _switches(template, request.reasoning)
    return tools, {**given, **switched} if request.reasoning == "off" else {**switched, **given}


def rendered(template: ChatTemplate, request: Request) -> str:
    """The prompt of a request with messages. Raises `TemplateError`."""
    messages, (tools, variables) = request.messages or (), _settings(template, request)
    answer = request.continued
    if answer is None:
        return template.render(messages, tools, variables)
    head = template.render(messages[:-1], tools, variables)
    shape = attrs.evolve(answer, content=_ANSWER, reasoning=_THOUGHT if answer.reasoning else None)
    try:
        before = template.render(messages[:-1], tools, variables, opens_answer=False)
        shown = template.render((*messages[:-1], shape), tools, variables, opens_answer=False)
    except TemplateError:
        return head + answer.content
    if common_size(head, shown) < common_size(head, before):  # an answer changes the text before it
        return head + answer.content
    return _continued(head, shown, answer, thinking_of(template.source))


def _switches(template: ChatTemplate, mode: ReasoningMode | None) -> dict[str, Any]:
    if mode not in ("on", "off"):
        return {}
    at = 0 if mode == "on" else 1
    values = {name: switch[at] for name, switch in THINKING_SWITCHES.items()}
    if mode == "off":
        values[THINKING_BUDGET] = 0
    if NO_EFFORT in template.efforts:
        values |= dict.fromkeys(EFFORT_NAMES, NO_EFFORT if mode == "off" else template.efforts[-1])
    return {name: value for name, value in values.items() if name in template.switches}


def _continued(head: str, shown: str, answer: Message, thinking: Thinking | None) -> str:
    """The prompt, ending with the answer so far.

    `head` is the conversation before it, with the opening of an answer; `shown` is the same with an answer of `_ANSWER`
    (and `_THOUGHT`), as the template writes earlier turns. What the template writes between them is added here, too: an
    empty block of thinking, or the header of a channel.
    """
    common = common_size(head, shown)
    tail, (before, found, _) = head[common:], shown[common:].partition(_ANSWER)
    thought, text = answer.reasoning or "", answer.content
    if not found:
        return head + text
    if thought and _THOUGHT in before:
        opening, _, closing = before.partition(_THOUGHT)
        return head[:common] + opening + thought + (closing + text if text else "")
    if thinking is None:
        return head[:common] + before + text
    is_open = head.rstrip().endswith(thinking.open)
    # Line breaks within the marks follow the template; if it shows none, `<think>` has them.
    breaks = head.endswith("\n") if is_open else thinking.open == "<think>"
    closed = f"\n{thinking.close}\n\n" if breaks else thinking.close
    closed = thought + closed + text if text else thought
    if is_open and (thought or thinking.close not in before):
        return head + closed
    if thought:  # the template hides the thinking of earlier turns, so its form is unknown
        start = head[:common] if thinking.close in tail else head
        return start + thinking.open + (thinking.label or ("\n" if breaks else "")) + closed
    if thinking.close in tail and thinking.close not in before:
        return head + text
    return head[:common] + before + text

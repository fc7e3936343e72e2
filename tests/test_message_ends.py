"""Checkpoints are taken where later prompts still begin alike: behind the system's message, and behind the last one,
whatever a template opens there for the answer and shows of it afterwards.
"""

from __future__ import annotations

from contextlib import closing

import pytest
from reference import template, template_names

from uma.engine.intake.rendering import message_ends, rendered
from uma.llama.template import ChatTemplate
from uma.types import Message, Request

KINDS = ("LFM2", "NVIDIA-Nemotron", "Qwen3", "Qwen-Qwen3", "ibm-granite-granite-4", "llama-cpp-deepseek-r1")
"""How names of templates begin of models that have a state, or that think."""
MAX_OPENING_CHARS = 80
"""Maximum text with which a template opens an answer."""


def asked(*messages: Message) -> Request:
    return Request(id="a", messages=(Message(role="system", content="You are kind."), *messages))


@pytest.mark.parametrize("name", [name for name in template_names() if name.startswith(KINDS)])
def test_a_later_prompt_begins_with_what_was_read_up_to_a_message_end(name: str) -> None:
    question, answer = Message(role="user", content="Hello there"), Message(role="assistant", content="Good day.")
    request = asked(question)
    with closing(ChatTemplate(template(name), "<s>", "</s>")) as chat:
        text = rendered(chat, request)
        ends = message_ends(chat, request, text)
        later = rendered(chat, asked(question, answer, Message(role="user", content="And now?")))
        other = rendered(chat, asked(Message(role="user", content="Zebra?")))
    assert later[: max(ends)] == text[: max(ends)] and len(text) - max(ends) < MAX_OPENING_CHARS
    assert any("You are kind." in text[:end] and other[:end] == text[:end] for end in ends)

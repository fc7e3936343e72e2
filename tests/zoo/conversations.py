"""Conversations that every chat template must be able to show, or refuse with the reason."""

from __future__ import annotations

import json
from typing import Any

import attrs
from chat_templates import family_of

from uma.chat.families import GENERIC
from uma.chat.generic import plain, with_calls, with_tools
from uma.types import Message, ReasoningMode, Request, Tool, ToolCall

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITY_AND_DAYS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bern"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""A random model comes to the end of such an object."""
TOOLS = (Tool("weather", "Tells the weather.", CITY), Tool("time", "Tells the time.", CITY))

SYSTEM = Message("system", "Answer in one line.")
ASKED = Message("user", "Is it raining in Oslo and in Bern?")
SAID = Message("assistant", "It is raining in Oslo.")
THOUGHT = Message("assistant", "It is raining in Oslo.", reasoning="Bern is dry, so I leave it out.")
AGAIN = Message("user", "And in Rome?")
CALLS = tuple(
    ToolCall(f"call_{at}_of_two", "weather", json.dumps({"city": city})) for at, city in enumerate(("Oslo", "Bern"))
)
RESULTS = tuple(
    Message("tool", text, (), call.id, call.name)
    for text, call in zip(("Rain in Oslo.", "Sun in Bern."), CALLS, strict=True)
)
CALLING = Message("assistant", "", CALLS)
CALLING_ONE = Message("assistant", "", CALLS[:1])
THINKING_CALL = Message("assistant", "", CALLS[:1], reasoning="I must look.")

CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "plain": (ASKED,),
    "system": (SYSTEM, ASKED),
    "turns": (SYSTEM, ASKED, SAID, AGAIN),
    "two of the user": (SYSTEM, ASKED, AGAIN),
    "system again": (SYSTEM, ASKED, SAID, Message("system", "Now in two lines."), AGAIN),
    "thought": (SYSTEM, ASKED, THOUGHT, AGAIN),
}
"""Without calls."""
CALLED: dict[str, tuple[Message, ...]] = {
    "one result": (SYSTEM, ASKED, CALLING_ONE, RESULTS[0]),
    "two results": (SYSTEM, ASKED, CALLING, *RESULTS),
    "a result, then the user": (SYSTEM, ASKED, CALLING_ONE, RESULTS[0], AGAIN),
    "two results, then the user": (SYSTEM, ASKED, CALLING, *RESULTS, AGAIN),
    "call, then text": (SYSTEM, ASKED, CALLING_ONE, RESULTS[0], SAID, AGAIN),
    "text beside a call": (SYSTEM, ASKED, Message("assistant", "I look.", CALLS[:1]), RESULTS[0]),
    "thought before a call": (SYSTEM, ASKED, THINKING_CALL, RESULTS[0]),
}
"""With calls."""


@attrs.frozen
class Conversation:
    """One whose prompt is compared with llama-server's."""

    messages: tuple[Message, ...]
    reasoning: ReasoningMode
    tools: tuple[Tool, ...] = ()


PROMPTS: dict[str, Conversation] = {
    "plain, off": Conversation(CONVERSATIONS["plain"], "off"),
    **{name: Conversation(messages, "on") for name, messages in CONVERSATIONS.items()},
    "turns, off": Conversation(CONVERSATIONS["turns"], "off"),
    **{name: Conversation(messages, "on", TOOLS) for name, messages in CALLED.items()},
    "one result, off": Conversation(CALLED["one result"], "off", TOOLS),
    "begun": Conversation((SYSTEM, ASKED, SAID), "on"),
    "begun, off": Conversation((SYSTEM, ASKED, SAID), "off"),
    "begun behind a thought": Conversation((SYSTEM, ASKED, THOUGHT), "on"),
    "begun within a thought": Conversation((SYSTEM, ASKED, Message("assistant", "", reasoning="Bern is")), "on"),
}


def given(source: str, request: Request) -> Request | None:
    """A request as the engine gives it to a chat template; None where it is refused: the template's form of calls is
    not parsed.
    """
    family = family_of(source)
    if not request.tools:
        return request
    if isinstance(family, str):
        return None
    if not family.shows_calls:
        return attrs.evolve(request, messages=with_calls(request.messages or (), family))
    if family.knows_tools:
        return request
    messages = plain(request.messages or ()) if family is GENERIC else request.messages or ()
    return attrs.evolve(request, messages=with_tools(messages, request.tools, family), tools=())


def openai(message: Message) -> dict[str, Any]:
    """A message as OpenAI's dialect has it."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        body |= {"tool_call_id": message.tool_call_id}
    return body


def openai_tool(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI's dialect has it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }

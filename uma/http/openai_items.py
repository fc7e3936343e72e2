"""The items that a response of OpenAI's Responses API consists of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from uma.http.openai_tools import Called, custom_input
from uma.types import CutCall, ToolCall

ItemKind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
PREFIXES: Mapping[ItemKind, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
"""Beginnings of their ids."""
_EVENTS: Mapping[ItemKind, str] = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}


@attrs.define
class OutputItem:
    """One item of a response's output."""

    kind: ItemKind
    id: str
    call: ToolCall | CutCall | None = None
    called: Called | None = None
    """What the client calls the tool that is called."""
    text: str = ""
    """The message's text, the thinking, or the call's arguments as the model writes them."""
    logprobs: list[dict[str, Any]] = attrs.field(factory=list)
    """Log probabilities of a message's tokens, where they were asked for."""

    @property
    def call_id(self) -> str | None:
        """Id of the call that it belongs to."""
        return None if self.call is None else self.call.id

    @property
    def event(self) -> str:
        """What its text is called in the names of events."""
        return _EVENTS[self.kind]

    @property
    def text_key(self) -> str:
        """What its text is called in the event that ends it."""
        return {"function_call": "arguments", "custom_tool_call": "input"}.get(self.kind, "text")

    @property
    def part_kind(self) -> str:
        """The type of its content; empty for a call, which has none."""
        return _EVENTS[self.kind] if self.call is None else ""

    @property
    def shown_text(self) -> str:
        """Text as the client reads it: a custom tool's input instead of the arguments that it stands in."""
        return custom_input(self.text) if self.kind == "custom_tool_call" else self.text

    def part(self) -> dict[str, Any]:
        """Content part of the item."""
        more: dict[str, Any] = {"annotations": [], "logprobs": self.logprobs} if self.kind == "message" else {}
        return {"type": self.part_kind, "text": self.text, **more}

    def body(self, status: str, *, is_begun: bool = True) -> dict[str, Any]:
        """The item as answers have it, without its content where that has not begun."""
        head: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None and self.called is not None:
            space = {} if self.called.namespace is None else {"namespace": self.called.namespace}
            return {**head, "call_id": self.call.id, **space, "name": self.called.name, self.text_key: self.shown_text}
        content = [self.part()] if is_begun else []
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

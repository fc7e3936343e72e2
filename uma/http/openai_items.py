"""The items that a response of OpenAI's Responses API consists of."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from uma.types import CutCall, ToolCall

ItemKind = Literal["message", "reasoning", "function_call"]


@attrs.define
class OutputItem:
    """One item of a response's output."""

    kind: ItemKind
    id: str
    call: ToolCall | CutCall | None = None
    text: str = ""
    """The message's text, the thinking, or the call's arguments."""
    logprobs: list[dict[str, Any]] = attrs.field(factory=list)
    """Of a message's tokens, where they were asked for."""

    @property
    def call_id(self) -> str | None:
        """Of which call it is."""
        return None if self.call is None else self.call.id

    @property
    def event(self) -> str:
        """What its text is called in the names of events."""
        names = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
        return names[self.kind]

    @property
    def text_key(self) -> str:
        """What its text is called in the event that ends it."""
        return "arguments" if self.kind == "function_call" else "text"

    @property
    def part_kind(self) -> str:
        """The type of its content; empty for a call, which has none."""
        return {"message": "output_text", "reasoning": "reasoning_text", "function_call": ""}[self.kind]

    def part(self) -> dict[str, Any]:
        """Its content."""
        more: dict[str, Any] = {"annotations": [], "logprobs": self.logprobs} if self.kind == "message" else {}
        return {"type": self.part_kind, "text": self.text, **more}

    def body(self, status: str, *, is_begun: bool = True) -> dict[str, Any]:
        """The item as answers have it, without its content where that has not begun."""
        head: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None:
            return {**head, "call_id": self.call.id, "name": self.call.name, "arguments": self.text}
        content = [self.part()] if is_begun else []
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

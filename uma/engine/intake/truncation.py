"""Truncation: which turns of a conversation that exceeds the context are left out, oldest first.

Programs send the whole conversation with every request, so the choice is repeated each time from its beginning:
questions are replayed in order, and wherever the conversation did not fit, turns are dropped until some space is free.
The next request of the same conversation repeats these steps, so its prompt begins like the one before and is cached,
also with another `max_tokens` up to a quarter of the context. Cutting just enough at each turn would change the
beginning with every request, and the whole prompt would be read each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs
import trio

from uma.engine.worker.account import LeftOut
from uma.types import Message, Request

KEPT_SHARE = 0.6
"""Share of the space for turns that a cut leaves filled. Less forgets more at once, more would cut too often."""
MESSAGE_TOKENS = 12
"""Tokens counted for each message and call beside its text, more than templates write around it. A high count cuts a
little early; with a low one a prompt would not fit after the cut."""
INSTRUCTIONS = ("system", "developer")
"""Roles of messages that are never left out."""


@attrs.define(eq=False)
class Summary:
    """Summary that the model has written of omitted turns."""

    text: str = ""
    why_none: str = ""
    """Why there is no text, after an attempt."""
    tokens: int = 0
    """Tokens read and written for it that no request has been charged for."""
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """Held by the request that has it written."""


@attrs.frozen(kw_only=True)
class Cut:
    """A conversation without the turns that did not fit."""

    request: Request
    """The request with the remaining messages."""
    gone: frozenset[int] = frozenset()
    """Indices of the omitted messages."""
    summary: Summary = attrs.field(factory=Summary)
    """Summary of the omitted messages."""

    def told(self) -> tuple[LeftOut, tuple[str, ...]]:
        """Report for the reader, with its warnings. The first reader of a summary is charged for its tokens."""
        if not self.gone:
            return LeftOut(), ()
        summary, tokens = self.summary, self.summary.tokens
        summary.tokens = 0
        done = "were replaced by a summary" if summary.text else "were left out"
        done += f" ({tokens:,} tokens were read and written for it)" if tokens else ""
        why = f"; there is no summary of them: {summary.why_none}" if summary.why_none else ""
        line = f"{len(self.gone):,} messages of the oldest turns {done}, to fit the context{why}"
        return LeftOut(len(self.gone), summary.text, tokens), (line,)


def left_out(
    messages: Sequence[Message], tokens: Callable[[int], int], fixed_tokens: int, limit_tokens: int
) -> set[int]:
    """Indices of the messages to leave out, so that the prompt has at most `limit_tokens` if possible: whole turns
    first, then calls with their results of the last turn, whose question and last calls stay.

    `tokens` gives the number of a message's tokens; `fixed_tokens` are those of tools and instructions in front.
    """
    target = fixed_tokens + KEPT_SHARE * max(0, limit_tokens - fixed_tokens)
    total, gone, before = fixed_tokens, set[int](), ""
    old, turn, steps = deque[list[int]](), list[int](), deque[list[int]]()

    def asked() -> None:
        nonlocal total
        is_over = total > limit_tokens
        while is_over and total > target and (old or len(steps) > 1):
            part = (old or steps).popleft()
            gone.update(part)
            total -= sum(map(tokens, part))

    for at, message in enumerate(messages):
        if message.role in INSTRUCTIONS:
            total += tokens(at) if turn else 0
            continue
        if message.role == "assistant" and before != "assistant":
            asked()
        if message.role == "user" and before != "user":
            old.append([place for place in turn if place not in gone])
            turn, steps = [], deque()
        if message.role == "assistant" and message.tool_calls:
            steps.append([at])
        elif message.role == "tool" and steps:
            steps[-1].append(at)
        turn.append(at)
        total += tokens(at)
        before = message.role
    asked()
    return gone

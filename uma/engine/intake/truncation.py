"""Truncation: which turns of a conversation that has outgrown the context are left out, oldest first.

Programs send the whole conversation with every request, so the choice is made anew each time, from its beginning: each
question is taken in its order, as it was asked, and where the conversation did not fit then, turns went until it had
some space again. The next request of the same conversation repeats these steps, and begins as the one before it did:
its prefix is cached, also with another `max_tokens`: up to a quarter of the context none moves the cut. A cut at each
turn, just as large as needed, would move the beginning with every request, and all of the prompt would be read each
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import trio

from uma.engine.worker.account import LeftOut
from uma.types import Message, Request

KEPT_SHARE = 0.6
"""Share of the space for turns that is filled after a cut. Less would forget more at once, more would cut too often."""
MESSAGE_TOKENS = 12
"""Tokens counted for each message and call beside its text: more than templates write around it. Too many cut a little
earlier; with too few a prompt would not fit though it was cut."""
INSTRUCTIONS = ("system", "developer")
"""Roles of messages that are never left out."""


@attrs.define(eq=False)
class Summary:
    """What the model has made of turns that are left out."""

    text: str = ""
    why_none: str = ""
    """Why there is no text, where it is over."""
    tokens: int = 0
    """Tokens read and written for it that no request has been charged with."""
    is_over: trio.Event = attrs.field(factory=trio.Event)


@attrs.frozen(kw_only=True)
class Cut:
    """A conversation without the turns that did not fit."""

    request: Request
    """What is left."""
    gone: frozenset[int] = frozenset()
    """Places of the messages that are left out."""
    summary: Summary = attrs.field(factory=Summary)
    """What stands for them."""

    def told(self) -> tuple[LeftOut, tuple[str, ...]]:
        """What a reader is told of it, with its warnings. The first request that is told of a summary is charged with
        that.
        """
        if not self.gone:
            return LeftOut(), ()
        summary, tokens = self.summary, self.summary.tokens
        summary.tokens = 0
        done = "were replaced by a summary" if summary.text else "were left out"
        done += f" ({tokens:,} tokens were read and written for it)" if tokens else ""
        why = f"; there is no summary of them: {summary.why_none}" if summary.why_none else ""
        line = f"truncation: {len(self.gone):,} messages of the oldest turns {done}, to fit the context{why}"
        return LeftOut(len(self.gone), summary.text, tokens), (line,)


@attrs.frozen
class Turn:
    """A question with what followed it. Each part is the places of its messages."""

    question: Sequence[int]
    steps: Sequence[Sequence[int]] = ()
    """The calls of one message, with their results."""
    answer: Sequence[int] = ()
    instructions: Sequence[int] = ()
    """Instructions that came with it, behind the conversation's beginning: they stay."""


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """The turns of a conversation, behind the instructions that it begins with."""
    found = list[tuple[list[int], list[list[int]], list[int], list[int]]]()
    before, notes = "", list[int]()
    for at, message in enumerate(messages):
        if message.role in INSTRUCTIONS:
            if found:
                notes.append(at)
            continue
        if not found or (message.role == "user" and before != "user"):
            found.append(([], [], [], notes))
            notes = []
        question, steps, answer, _ = found[-1]
        if message.role == "assistant" and message.tool_calls:
            steps.append([at])
        elif message.role == "tool" and steps:
            steps[-1].append(at)
        elif message.role == "assistant" or steps or answer:
            answer.append(at)
        else:
            question.append(at)
        before = message.role
    if found:
        found[-1][3].extend(notes)
    return [Turn(*parts) for parts in found]


def left_out(
    turns: Sequence[Turn],
    tokens: Callable[[int], int],
    fixed_tokens: int,
    limit_tokens: int,
    kept_share: float = KEPT_SHARE,
) -> set[int]:
    """Places of the messages that go, so that the prompt has at most `limit_tokens`, where that can be reached.

    `tokens` counts those of a message. `fixed_tokens` are those of tools and of the instructions in front. The last
    question, and the last calls with their results, stay.
    """
    target = fixed_tokens + kept_share * max(0, limit_tokens - fixed_tokens)
    total, first = fixed_tokens, 0
    kept = [0] * len(turns)
    gone = [0] * len(turns)
    for at, turn in enumerate(turns):
        total += sum(map(tokens, turn.instructions))
        costs = [sum(map(tokens, step)) for step in turn.steps]
        for done, (cost, is_asked) in enumerate(_additions(turn, costs, tokens, is_last=at == len(turns) - 1)):
            kept[at] += cost
            total += cost
            if total <= limit_tokens or not is_asked:
                continue
            while total > target and first < at:
                total -= kept[first]
                first += 1
            while total > target and gone[at] < min(done, len(costs)) - 1:
                oldest = costs[gone[at]]
                total, kept[at], gone[at] = total - oldest, kept[at] - oldest, gone[at] + 1
    parts = [part for turn in turns[:first] for part in (turn.question, *turn.steps, turn.answer)]
    parts += [step for turn, n in zip(turns, gone, strict=True) for step in turn.steps[:n]]
    return {place for part in parts for place in part}


def _additions(
    turn: Turn, steps: Sequence[int], tokens: Callable[[int], int], *, is_last: bool
) -> Iterator[tuple[int, bool]]:
    """Tokens of the parts of a turn, as they came, and whether the model was asked behind each."""
    yield sum(map(tokens, turn.question)), True
    for step in steps:
        yield step, True
    yield sum(map(tokens, turn.answer)), is_last


def without(request: Request, gone: set[int]) -> Cut:
    """The request without the messages at these places."""
    kept = [message for at, message in enumerate(request.messages or ()) if at not in gone]
    return Cut(request=attrs.evolve(request, messages=kept), gone=frozenset(gone))

"""Compaction: a summary, written by the model itself, replaces the turns that are left out of a conversation.

The omitted turns are the beginning of the last prompts, so they are read from the cache to be summarised. The summary
stands for them until more turns are omitted. It is stored by their hash, because programs send the whole conversation
each time. The next summary is made of this one and of the turns behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from hashlib import blake2b
from itertools import takewhile

import attrs
import trio

from uma.engine.intake.truncation import INSTRUCTIONS, Cut, Summary
from uma.errors import UmaError
from uma.types import SUMMARY_HEADING, EventStream, Finished, Message, Request, SamplingParams

MAX_SUMMARY_TOKENS = 512
"""Maximum length of a summary."""
MAX_SUMMARY_SHARE = 0.125
"""Maximum share of the context that a summary takes."""
MAX_SUMMARY_SEC = 60.0
"""Maximum time that a request waits for its summary, after which it goes on without one."""
MAX_SUMMARIES = 1_024
"""Maximum summaries that are kept; the longest unused is dropped first."""
WISH = (
    "Summarise our conversation so far in at most 200 words, so that it can be gone on with: what was asked for, what "
    "was found, names, numbers and decisions. Write the summary alone."
)
"""Instruction to the model, behind the turns that are omitted."""
EXTRA_TOKENS = 64
"""Tokens counted for `SUMMARY_HEADING`, a little more than it takes."""

Generate = Callable[[Request], AbstractAsyncContextManager[EventStream]]


def summary_tokens(max_tokens: int) -> int:
    """Maximum length of a summary in a context of `max_tokens` tokens."""
    return max(1, min(MAX_SUMMARY_TOKENS, int(MAX_SUMMARY_SHARE * max_tokens)))


class Summaries:
    """The summaries of one model."""

    def __init__(self, max_tokens: int) -> None:
        self._most_tokens = summary_tokens(max_tokens)
        self._kept: OrderedDict[bytes, Summary] = OrderedDict()
        """Summaries by hash, with those that are being written, and those that timed out."""

    async def compacted(self, cut: Cut, sent: Request, generate: Generate) -> Cut:
        """The cut with a summary in place of the omitted turns; without one if there is none, and the reason."""
        known = {hash: summary.text for hash, summary in self._kept.items() if summary.text}
        plan = partial(_planned, cut, sent, known, self._most_tokens)
        hash, asked = await trio.to_thread.run_sync(plan, abandon_on_cancel=True)  # of 12,000 messages 0.2 s
        summary = await self._written(hash, asked, generate)
        if not summary.text:
            return attrs.evolve(cut, summary=summary)
        messages = _with_summary(cut.request.messages or (), summary.text)
        return attrs.evolve(cut, request=attrs.evolve(cut.request, messages=messages), summary=summary)

    async def _written(self, hash: bytes, asked: Request, generate: Generate) -> Summary:
        """The summary with this hash. One request has it written, and all others that need it wait for that."""
        summary = self._kept.setdefault(hash, Summary())
        self._kept.move_to_end(hash)
        if len(self._kept) > MAX_SUMMARIES:
            self._kept.popitem(last=False)
        async with summary.turn:
            if summary.text or summary.why_none:
                return summary
            try:
                async with generate(asked) as stream:
                    with trio.move_on_after(MAX_SUMMARY_SEC) as bound:
                        summary.text = (await _last(stream, summary)).strip()
                    if bound.cancelled_caught:
                        summary.why_none = f"it was not written within {MAX_SUMMARY_SEC:.0f} s (timeout)"
                        stream.cancel()
                        await _last(stream, summary)
                    elif not summary.text:
                        summary.why_none = "none was written"
            except UmaError as error:  # the next request tries again
                return Summary(why_none=error.message)
        return summary


def _planned(cut: Cut, sent: Request, known: Mapping[bytes, str], most: int) -> tuple[bytes, Request]:
    """Hash of the omitted messages, and the request for their summary, of at most `most` tokens. It includes the last
    summary that is `known`, by the hash of what it stands for, and the messages behind that.
    """
    every, gone = sent.messages or (), sorted(cut.gone)
    hashes = _hashes(sent, [every[at] for at in gone])
    count = max((count for count, hash in enumerate(hashes, 1) if hash in known), default=0)
    # Calls can follow whose question is not omitted: without it they make no sense.
    places = sorted(set(range(gone[-1] + 1)) - set(gone[:count]))
    behind = [every[at] for at in places if every[at].role not in INSTRUCTIONS]
    if count:
        behind = _with_summary(behind, known[hashes[count - 1]])
    before = takewhile(lambda message: message.role in INSTRUCTIONS, every)
    asked = attrs.evolve(
        sent,
        id=f"{sent.id}-summary"[-128:],
        messages=[*before, *_asking(behind)],
        sampling=SamplingParams(temperature=0, max_tokens=most, max_reasoning_tokens=most // 2),
        priority=-1,
        stream=False,
        truncation="auto",
        tool_choice="auto",  # tools stay: without them the prompt would begin differently, and not be cached
        reasoning="off",
    )
    return hashes[-1], asked


def _hashes(sent: Request, gone: Sequence[Message]) -> list[bytes]:
    """Hash of each beginning of the omitted messages."""
    instructions = [message for message in sent.messages or () if message.role in INSTRUCTIONS]
    found, hashes = repr((sent.model, sent.lora, instructions)).encode(), list[bytes]()
    for message in gone:
        pictures = "".join(media.data for media in message.media)
        found = blake2b(found + f"{message!r}{pictures}".encode(), digest_size=16).digest()
        hashes.append(found)
    return hashes


async def _last(stream: EventStream, summary: Summary) -> str:
    """Whole text of a stream; its tokens are counted in the summary."""
    async for event in stream:
        if isinstance(event, Finished):
            summary.tokens += event.usage.prompt_tokens + event.usage.completion_tokens
            return event.text or ""
    return ""


def _asking(messages: Sequence[Message]) -> list[Message]:
    """Messages with the instruction behind them, or in the last one if that is a question."""
    if messages[-1].role != "user":
        return [*messages, Message("user", WISH)]
    return [*messages[:-1], attrs.evolve(messages[-1], content=f"{messages[-1].content}\n\n{WISH}")]


def _with_summary(messages: Sequence[Message], summary: str) -> list[Message]:
    """Messages with a summary before the first question, in the same turn: many templates require alternating turns."""
    first = next((at for at, message in enumerate(messages) if message.role not in INSTRUCTIONS), len(messages))
    text, behind = f"{SUMMARY_HEADING}\n{summary}", list(messages[first:])
    if behind and behind[0].role == "user":
        behind[0] = attrs.evolve(behind[0], content=f"{text}\n\n{behind[0].content}")
    else:
        behind.insert(0, Message("user", text))
    return [*messages[:first], *behind]

"""A request's events with thinking and tool calls separated from the text, if it asks for that.

It is between the engine's stream and the reader, so it is the same in process and over the wire.
"""

from __future__ import annotations

import secrets
import string
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import attrs

from uma.chat.parts import AnswerText, CallArguments, CallBegun, CallBroken, CallCut, CallEnded, Part, Reasoning
from uma.chat.whole_call import AnyParser
from uma.engine.delivery.detokenize import TextStream
from uma.engine.delivery.stream import RequestStream
from uma.types import Answer, CutCall, Event, Finished, ReasoningDelta, Request, Token, ToolCall, ToolCallDelta, Usage

_LETTERS = string.ascii_letters + string.digits
_End = TypeVar("_End", Finished, Answer)
CALL_ID_CHARS = 9
"""Length of a call's id: Mistral's templates require it, others accept any."""


@attrs.define
class _ParsedAnswer:
    """One answer so far."""

    parser: AnyParser
    index: int
    text: str = ""
    thoughts: str = ""
    calls: list[ToolCall] = attrs.field(factory=list)
    warnings: list[str] = attrs.field(factory=list)
    begun: int = 0
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    """Arguments of the call that has begun, as far as they have come."""
    cut_call: CutCall | None = None
    call_offsets: list[int] = attrs.field(factory=list)
    last_token: int = 0
    ends: array[int] = attrs.field(factory=lambda: array("q"))
    """End of each token's text in the output, by characters."""


class ParsedStream:
    """`types.EventStream` around an engine's, for one reading task. Token texts contain only the answer itself.

    Every token is an event. Thinking and calls that it completes come before it, each kind in order.
    """

    def __init__(
        self,
        stream: RequestStream,
        request: Request,
        parser: Callable[[], AnyParser],
        piece: Callable[[int], bytes],
    ) -> None:
        """`piece` gives a token's bytes as the parser reads them."""
        self._stream = stream
        self._request = request
        self._parser = parser
        self._piece = piece
        self._answers: dict[int, _ParsedAnswer] = {}
        self._events: deque[Event] = deque()
        self.tap: Callable[[Token], bool] | None = None
        """See `types.EventStream.tap`."""
        self.ignored = stream.ignored
        """See `types.EventStream.ignored`."""

    def cancel(self) -> None:
        """See `types.EventStream.cancel`."""
        self._stream.cancel()

    def end_thinking(self) -> None:
        """See `types.EventStream.end_thinking`."""
        self._stream.end_thinking()

    def __aiter__(self) -> ParsedStream:
        return self

    async def __anext__(self) -> Event:
        """See `types.EventStream.__anext__`."""
        while True:
            while not self._events:
                self._take(await self._stream.__anext__())
            event = self._events.popleft()
            if type(event) is not Token or self.tap is None or not self.tap(event):
                return event

    def _take(self, event: Event) -> None:
        if isinstance(event, Token):
            self._take_token(event)
        elif isinstance(event, Finished):
            self._events.extend(self._ended(event))
        else:
            self._events.append(event)

    def _take_token(self, token: Token) -> None:
        answer = self._answer(token.index)
        answer.last_token = token.token_id
        answer.ends.append((answer.ends[-1] if answer.ends else 0) + len(token.text))
        deltas, text = self._events_of(answer, answer.parser.push(token.text))
        self._events.extend(deltas)
        self._events.append(token if text == token.text else attrs.evolve(token, text=text))

    def _answer(self, index: int) -> _ParsedAnswer:
        if index not in self._answers:
            self._answers[index] = _ParsedAnswer(self._parser(), index)
        return self._answers[index]

    def _events_of(self, answer: _ParsedAnswer, parts: Sequence[Part]) -> tuple[list[Event], str]:
        """Events for these parts, and the text among them."""
        events: list[Event] = []
        texts = []
        for part in parts:
            if isinstance(part, AnswerText):
                answer.text += part.text
                texts.append(part.text)
            elif isinstance(part, Reasoning):
                answer.thoughts += part.text
                events.append(ReasoningDelta(self._request.id, part.text, answer.index))
            elif isinstance(part, CallArguments):
                answer.arguments += part.text
                events.append(self._delta(answer, part.text))
            elif isinstance(part, CallBegun):
                answer.name, answer.call_id = part.name, "".join(secrets.choice(_LETTERS) for _ in range(CALL_ID_CHARS))
                answer.arguments = ""
                events.append(self._delta(answer, ""))
            else:
                self._end_call(answer, part)
        return events, "".join(texts)

    def _end_call(self, answer: _ParsedAnswer, part: CallEnded | CallBroken | CallCut) -> None:
        if not isinstance(part, CallBroken):
            answer.call_offsets.append(len(answer.text))
        if isinstance(part, CallEnded):
            answer.calls.append(ToolCall(answer.call_id, part.name, part.arguments))
            if part.note:
                answer.warnings.append(f"tool call {answer.begun} ({part.name}): {part.note}")
        elif isinstance(part, CallCut):
            answer.cut_call = CutCall(answer.call_id, part.name, answer.arguments, part.text)
            answer.warnings.append(f"tool call {answer.begun} ({part.name}): the output ended inside it")
        else:
            warning = f"tool call {answer.begun} ({part.name}): {part.reason}; it is in the text, and not in tool_calls"
            answer.warnings.append(warning)
        answer.begun += 1

    def _delta(self, answer: _ParsedAnswer, arguments: str) -> ToolCallDelta:
        return ToolCallDelta(self._request.id, answer.begun, answer.call_id, answer.name, arguments, answer.index)

    def _ended(self, finished: Finished) -> list[Event]:
        if not self._request.stream:
            self._parse_whole(finished)
        events: list[Event] = []
        self._answer(0)
        for answer in self._answers.values():
            deltas, text = self._events_of(answer, answer.parser.finish())
            if self._request.stream:
                events += deltas
                if text:
                    events.append(Token(finished.id, text, answer.last_token, answer.index))
        warnings = tuple(line for answer in self._answers.values() for line in answer.warnings)
        last = attrs.evolve(
            finished,
            usage=self._usage(finished),
            warnings=(*finished.warnings, *warnings),
            answers=tuple(self._finished(answer.index, answer) for answer in finished.answers),
        )
        return [*events, self._finished(finished.answers[0].index if finished.answers else 0, last)]

    def _usage(self, finished: Finished) -> Usage:
        """Usage with the tokens of thinking, if the request asks for thinking to be separated."""
        if self._request.reasoning is None:
            return finished.usage
        thought = sum(self._thought_tokens(end) for end in finished.answers or (finished,))
        return attrs.evolve(finished.usage, reasoning_tokens=thought)

    def _thought_tokens(self, end: Finished | Answer) -> int:
        index, count = (
            (end.index, end.completion_tokens) if isinstance(end, Answer) else (0, end.usage.completion_tokens)
        )
        answer = self._answer(index)
        # Text held back until the end has an event of its own, which is no token.
        ends = answer.ends[:count] if end.token_ids is None else _ends(map(self._piece, end.token_ids))
        return tokens_within(answer.parser.thoughts, ends)

    def _finished(self, index: int, end: _End) -> _End:
        """The answer's last event, with its calls, and its text without them."""
        answer = self._answer(index)
        end = attrs.evolve(end, tool_calls=tuple(answer.calls), cut_call=answer.cut_call)
        if end.text is None:
            return end
        reasoning = answer.thoughts if self._request.reasoning else None
        return attrs.evolve(end, text=answer.text, reasoning=reasoning, call_offsets=tuple(answer.call_offsets))

    def _parse_whole(self, finished: Finished) -> None:
        for end in finished.answers or (finished,):
            answer = self._answer(end.index if isinstance(end, Answer) else 0)
            self._events_of(answer, answer.parser.push(end.text or ""))


def _ends(pieces: Iterable[bytes]) -> Iterator[int]:
    """Ends of the texts of these tokens, in characters."""
    text, chars = TextStream(), 0
    for piece in pieces:
        chars += len(text.push(piece))
        yield chars


def tokens_within(spans: Sequence[tuple[int, int]], ends: Iterable[int]) -> int:
    """Number of tokens with a part in one of `spans`, which are in order: first character, and the one behind the last.

    `ends` are the ends of the tokens' texts. A token without text (half a character) counts by its position.
    """
    count = start = at = 0
    for end in ends:
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        if at == len(spans):
            break
        count += max(end, start + 1) > spans[at][0]
        start = end
    return count

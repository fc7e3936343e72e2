"""One answer, piece by piece, for a loop in another thread than the engine's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import trio

from uma.closing import Closing
from uma.errors import UmaError, WrongValues
from uma.llm.thread import Deadline, SourceThread
from uma.types import Event, Finished, Prompt, Request, Token
from uma.wrong import Wrong

AHEAD_EVENTS = 64
"""Maximum events of an `LLMStream` that wait for its reader; then the engine's own bound applies."""


class LLMStream(Closing):
    """A streamed answer: an iterator of its pieces of text. `LLM.stream` makes it; use it in one thread at a time.

    The engine computes a bounded number of tokens ahead of the loop that reads them. For asyncio it is also an async
    iterator, `async for text in llm.stream(…)`; cancelling the task that waits for a piece cancels the request.
    """

    def __init__(self, loop: SourceThread, request: Request, deadline: Deadline) -> None:
        self._loop = loop
        send, self._events = trio.open_memory_channel[Event](AHEAD_EVENTS)
        self.finished: Finished | None = None
        """The last event, with the finish reason, the usage and the metrics. None until the answer is complete, and if
        the stream was closed before that."""
        self._failures: list[Exception] = []
        self._id = request.id
        self._echoes = request.sampling.echo
        self._answers = request.sampling.n
        scope = trio.CancelScope()
        # The task has no reference to this stream: one that is left without `close` is collected, and so cancelled.
        loop.spawn(_produce, loop, request, deadline, send, scope, self._failures)
        self._finalizer = weakref.finalize(self, loop.post, scope.cancel)

    def __repr__(self) -> str:
        state = "ended" if self.finished is not None else "closed" if not self._finalizer.alive else "on its way"
        return f"<uma.LLMStream {self._id}: {state}>"

    def __iter__(self) -> LLMStream:
        return self

    def __next__(self) -> str:
        for event in self.events():
            if text := self._text(event):
                return text
        raise StopIteration

    def __aiter__(self) -> LLMStream:
        return self

    async def __anext__(self) -> str:
        try:
            while self.finished is None and (event := await self._loop.call_async(self._next)) is not None:
                if text := self._text(event):
                    return text
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    def events(self) -> Iterator[Event]:
        """What is still to come, as events: `Token`, `ReasoningDelta`, `ToolCallDelta`, and `Finished` at the end."""
        while self.finished is None and (event := self._loop.call(self._next)) is not None:
            yield event

    async def _next(self) -> Event | None:
        """The next event; None where there are no more. Runs on the loop."""
        try:
            event = await self._events.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            if self._failures:
                raise self._failures[0] from None
            return None
        if isinstance(event, Finished):
            self.finished = event
        return event

    def _text(self, event: Event) -> str | None:
        if self._answers > 1:
            hint = "llm.generate returns them all, and the tokens of `events` have their index"
            raise WrongValues(Wrong("n", f"the pieces of {self._answers} answers would be mixed; {hint}"))
        return event.text if isinstance(event, Token) or (self._echoes and isinstance(event, Prompt)) else None

    def close(self) -> None:
        """Cancel what is not generated yet. Harmless when repeated."""
        self._finalizer()


async def _produce(
    loop: SourceThread,
    request: Request,
    deadline: Deadline,
    send: trio.MemorySendChannel[Event],
    scope: trio.CancelScope,
    failures: list[Exception],
) -> None:
    async def produce() -> None:
        async with (await loop.live()).generate(request) as stream:
            async for event in stream:
                await send.send(event)

    with scope, send:
        try:
            await deadline.keep(produce)
        except UmaError as error:
            failures.append(error)

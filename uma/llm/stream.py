"""One answer, piece by piece, for a loop in another thread than the engine's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import trio

from uma.closing import Closing
from uma.errors import UmaError
from uma.llm.thread import SourceThread
from uma.types import Event, Finished, Prompt, Request, Token

AHEAD_EVENTS = 64
"""Maximum events of an `LLMStream` that wait for its reader; then the engine's own bound applies."""


class LLMStream(Closing):
    """An answer on its way: an iterator of its pieces of text. Made by `LLM.stream`; belongs to one thread at a time.

    The engine runs a bounded number of tokens ahead of the loop that takes them.
    """

    def __init__(self, loop: SourceThread, request: Request) -> None:
        self._loop = loop
        send, self._events = trio.open_memory_channel[Event](AHEAD_EVENTS)
        self.finished: Finished | None = None
        """The last event, with the reason of the end, usage and figures; None until the text is complete."""
        self._failures: list[Exception] = []
        self._echoes = request.sampling.echo
        scope = trio.CancelScope()
        # The task has no reference to this stream: one that is left without `close` is collected, and so cancelled.
        loop.spawn(_produce, loop, request, send, scope, self._failures)
        self._finalizer = weakref.finalize(self, loop.post, scope.cancel)

    def __iter__(self) -> LLMStream:
        return self

    def __next__(self) -> str:
        for event in self.events():
            if isinstance(event, Token | Prompt) and event.text and (self._echoes or isinstance(event, Token)):
                return event.text
        raise StopIteration

    def events(self) -> Iterator[Event]:
        """What is still to come, as events: `Token`, `ReasoningDelta`, `ToolCallDelta`, and `Finished` at the end."""
        while self.finished is None:
            try:
                event = self._loop.call(self._events.receive)
            except (trio.EndOfChannel, trio.ClosedResourceError):
                if self._failures:
                    raise self._failures[0] from None
                return
            if isinstance(event, Finished):
                self.finished = event
            yield event

    def close(self) -> None:
        """Cancel what is not generated yet. Harmless when repeated."""
        self._finalizer()


async def _produce(
    loop: SourceThread,
    request: Request,
    send: trio.MemorySendChannel[Event],
    scope: trio.CancelScope,
    failures: list[Exception],
) -> None:
    with scope, send:
        try:
            async with loop.source.generate(request) as stream:
                async for event in stream:
                    await send.send(event)
        except (UmaError, ValueError) as error:
            failures.append(error)

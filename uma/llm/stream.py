"""One answer, piece by piece, for a loop in another thread than the engine's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import TracebackType

import trio

from uma.errors import UmaError
from uma.llm.thread import EngineThread
from uma.types import Event, Finished, Prompt, Request, Token

AHEAD_EVENTS = 64
"""Maximum events of an `LLMStream` that wait for its reader; then the engine's own bound applies."""


class LLMStream:
    """An answer on its way: an iterator of its pieces of text. Made by `LLM.stream`; belongs to one thread at a time.

    The engine runs a bounded number of tokens ahead of the loop that takes them.
    """

    def __init__(self, loop: EngineThread, request: Request) -> None:
        self._loop = loop
        self._scope = trio.CancelScope()
        send, self._events = trio.open_memory_channel[Event](AHEAD_EVENTS)
        self.finished: Finished | None = None
        """The last event, with the reason of the end, usage and figures; None until the text is complete."""
        self._failure: Exception | None = None
        self._echoes = request.sampling.echo
        loop.spawn(self._produce, request, send)
        self._finalizer = weakref.finalize(self, loop.post, self._scope.cancel)

    async def _produce(self, request: Request, send: trio.MemorySendChannel[Event]) -> None:
        with self._scope, send:
            try:
                async with self._loop.engine.generate(request) as stream:
                    async for event in stream:
                        await send.send(event)
            except (UmaError, ValueError) as error:
                self._failure = error

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
                if self._failure is not None:
                    raise self._failure from None
                return
            if isinstance(event, Finished):
                self.finished = event
            yield event

    def close(self) -> None:
        """Cancel what is not generated yet. Harmless when repeated."""
        self._finalizer()

    def __enter__(self) -> LLMStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""What a chat needs of its user interface, and the plainest one: text in, text out.

The plain view puts the answers alone on standard output, so that a chat can be part of a script; everything else
goes to standard error.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext, suppress
from typing import Protocol

import attrs
import trio

from uma.cli import say
from uma.cli.terminal import TextOutput
from uma.types import ReasoningDelta, Token

PROMPT = "> "
DROPPED = "\x03"
"""Mark in place of a line: Ctrl-C dropped what was typed."""


Look = Callable[[], Awaitable[str]]
"""Tells in a word or two how far an answer is that has not begun. Can raise an `UmaError`."""


Show = Callable[[Token | ReasoningDelta], Awaitable[None]]
"""Shows more of an answer that is being written, or of the thinking before it, which is no part of it."""


class LineSource(Protocol):
    """What a chat reads its lines from."""

    async def read(self) -> str | None:
        """The next line, or `DROPPED`; None at the end."""

    def forget(self) -> None:
        """Keep the last line out of what later chats remember."""


class ChatView(Protocol):
    """How a chat talks to its person."""

    @property
    def lines(self) -> LineSource:
        """What the person types."""

    def tell(self, text: str) -> None:
        """Something about the chat, beside what is said in it."""

    def complain(self, text: str) -> None:
        """Something went wrong."""

    def listing(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names, each with what there is to say of it."""

    def talking(self) -> AbstractContextManager[object]:
        """The block of the whole chat: what is typed while no line is read is kept, and not shown among other text."""

    def answering(self, look: Look) -> AbstractAsyncContextManager[Show]:
        """A block in which an answer is shown as it is added to, and before its first word what `look` says."""


@attrs.define(eq=False)
class PlainLines:
    """The lines of a pipe, a file or a terminal that can do nothing but print."""

    _fd: int
    _prompt: str = ""
    """Written before each line, where a person types them."""
    _rest: bytes = b""
    _is_over: bool = False

    def forget(self) -> None:
        """See `LineSource.forget`: nothing is remembered."""

    async def read(self) -> str | None:
        """See `LineSource.read`. Bytes that are not UTF-8 come as surrogates, which no request takes."""
        if self._prompt:
            print(self._prompt, end="", flush=True)
        while b"\n" not in self._rest and not self._is_over:
            with suppress(PermissionError):  # a regular file cannot be waited on: it is always readable
                await trio.lowlevel.wait_readable(self._fd)
            await trio.lowlevel.checkpoint()
            data = os.read(self._fd, 65536)
            self._rest += data
            self._is_over = not data
        if not self._rest:
            return None
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "surrogateescape").removesuffix("\r")


@attrs.frozen
class PlainView(ChatView):
    """Text as it is."""

    lines: PlainLines
    _output: TextOutput

    def tell(self, text: str) -> None:
        say.plain(text)

    def complain(self, text: str) -> None:
        say.complain(text)

    def listing(self, rows: Sequence[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in rows)
        for name, words in rows:
            self.tell(f"{name:<{width}}  {words}")

    def talking(self) -> AbstractContextManager[object]:
        """See `ChatView.talking`: nothing but text is known of its terminal."""
        return nullcontext()

    @asynccontextmanager
    async def answering(self, look: Look) -> AsyncIterator[Show]:
        """See `ChatView.answering`: text alone is shown, and no thinking, as a script wants the answer alone."""

        async def show(event: Token | ReasoningDelta) -> None:
            if isinstance(event, Token):
                await self._output.write(event.text)

        try:
            yield show
        finally:
            self._output.end_line()

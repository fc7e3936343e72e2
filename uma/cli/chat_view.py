"""What a chat looks like: live Markdown on a terminal, plain text everywhere else.

The plain view puts the answers alone on standard output, so that a chat can be part of a script; everything else that
is to be said goes to standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import attrs
import trio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from uma.cli.editor import PROMPT, Editor, LineSource, PlainLines
from uma.cli.markdown import LiveMarkdown
from uma.cli.terminal import Output, SilentTyping, harmless

FRAME_SEC = 0.05
"""Between two drawings of an answer: quick enough to look alive, slow enough to cost nothing."""


class Answer(Protocol):
    """An answer that is being written."""

    async def add(self, text: str) -> None:
        """More of it."""


class View(Protocol):
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

    def answering(self) -> AbstractAsyncContextManager[Answer]:
        """A block in which an answer is shown as it is added to."""


def standard_view(commands: Iterable[str]) -> View:
    """The view that this process's standard input and output allow."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        return TerminalView(Console(highlight=False), Editor.on_terminal(commands, os.environ))
    return PlainView(PlainLines(0, PROMPT if is_terminal else ""), Output.standard())


@attrs.frozen
class TerminalView:
    """Colours, live Markdown, and line editing."""

    console: Console
    lines: Editor

    def tell(self, text: str) -> None:
        """As `View.tell`."""
        self.console.print(Text(harmless(text), style="dim"))

    def complain(self, text: str) -> None:
        """As `View.complain`."""
        self.console.print(Text(harmless(text), style="red"))

    def listing(self, rows: Sequence[tuple[str, str]]) -> None:
        """As `View.listing`."""
        grid = Table.grid(padding=(0, 2))
        for name, words in rows:
            grid.add_row(Text(name, style="bold"), Text(harmless(words)))
        self.console.print(grid)

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[Answer]:
        """As `View.answering`. However the block is left, the terminal is as it was before."""
        live, silence = LiveMarkdown(self.console, self.console.file), SilentTyping(sys.stdin.fileno())
        silence.begin()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_draw, live)
                nursery.start_soon(_suspend, live, silence)
                yield LiveAnswer(live)
                nursery.cancel_scope.cancel()
        finally:
            silence.end()
            live.finish()


@attrs.frozen
class LiveAnswer:
    """An answer drawn by a task beside the one that receives it."""

    _live: LiveMarkdown

    async def add(self, text: str) -> None:
        """As `Answer.add`."""
        self._live.add(text)


async def _draw(live: LiveMarkdown) -> None:
    while True:
        live.draw()
        await trio.sleep(FRAME_SEC)


async def _suspend(live: LiveMarkdown, silence: SilentTyping) -> None:
    """Let Ctrl-Z leave the shell a terminal as it should be, and go on from there when the shell says so."""
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN:
        return
    with trio.open_signal_receiver(signal.SIGTSTP) as arrivals:
        async for _ in arrivals:
            live.pause()
            silence.end()
            os.kill(os.getpid(), signal.SIGSTOP)
            silence.begin()


@attrs.frozen
class PlainView:
    """Text as it is."""

    lines: PlainLines
    _output: Output

    def tell(self, text: str) -> None:
        """As `View.tell`."""
        print(harmless(text), file=sys.stderr, flush=True)

    def complain(self, text: str) -> None:
        """As `View.complain`."""
        print(f"uma: error: {harmless(text)}", file=sys.stderr, flush=True)

    def listing(self, rows: Sequence[tuple[str, str]]) -> None:
        """As `View.listing`."""
        width = max(len(name) for name, _ in rows)
        for name, words in rows:
            self.tell(f"{name:<{width}}  {words}")

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[Answer]:
        """As `View.answering`."""
        try:
            yield PlainAnswer(self._output)
        finally:
            self._output.end_line()


@attrs.frozen
class PlainAnswer:
    """An answer written as it comes."""

    _output: Output

    async def add(self, text: str) -> None:
        """As `Answer.add`."""
        await self._output.write(text)

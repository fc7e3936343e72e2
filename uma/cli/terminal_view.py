"""A chat on a terminal: line editing, colours, and answers as live Markdown."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress

import attrs
import trio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from uma.cli.editor import Editor
from uma.cli.markdown import LiveMarkdown
from uma.cli.sanitize import sanitize
from uma.cli.source import LOOK_SEC
from uma.cli.table import wrapped
from uma.cli.terminal import SilentTyping
from uma.cli.view import ChatView, Look, Show
from uma.errors import UmaError
from uma.types import ReasoningDelta, Token

FRAME_SEC = 0.05
"""Interval between two drawings of an answer: quick enough to look alive, slow enough to cost nothing."""


@attrs.frozen
class TerminalView(ChatView):
    """Colours, live Markdown, and line editing."""

    console: Console
    lines: Editor
    _silence: SilentTyping

    @classmethod
    def standard(cls, commands: Iterable[str], *, keeps_history: bool) -> TerminalView:
        """A view on this process's terminal; `commands` are what Tab completes."""
        lines = Editor.on_terminal(commands, os.environ, keeps_history=keeps_history)
        return cls(Console(highlight=False), lines, SilentTyping(sys.stdin.fileno()))

    def tell(self, text: str) -> None:
        self._print(text, "dim")

    def complain(self, text: str) -> None:
        self._print(text, "red")

    def _print(self, text: str, style: str) -> None:
        lines = (part for line in sanitize(text).split("\n") for part in wrapped(line, self.console.width))
        self.console.print(Text("\n".join(lines), style=style))

    def listing(self, rows: Sequence[tuple[str, str]]) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column()
        grid.add_column(overflow="fold")  # a long path is to be copied
        for name, words in rows:
            grid.add_row(Text(name, style="bold"), Text(sanitize(words)))
        self.console.print(grid)

    def talking(self) -> AbstractContextManager[object]:
        """See `ChatView.talking`: the editor alone shows what is typed. Afterwards the terminal is as it was."""
        return self._silence

    @asynccontextmanager
    async def answering(self, look: Look) -> AsyncIterator[Show]:
        live = LiveMarkdown(self.console, self.console.file)

        async def show(event: Token | ReasoningDelta) -> None:
            (live.add if isinstance(event, Token) else live.think)(event.text)

        # A Ctrl-Z that comes too late for `_suspend` stops the process once the terminal is as it was.
        with _suspensions() as arrivals:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_draw, live)
                    nursery.start_soon(_look, live, look)
                    if arrivals is not None:
                        nursery.start_soon(_suspend, arrivals, live, self._silence)
                    yield show  # what draws is a task beside the one that receives
                    nursery.cancel_scope.cancel()
            finally:
                live.finish()


async def _draw(live: LiveMarkdown) -> None:
    while True:
        live.draw()
        await trio.sleep(FRAME_SEC)


async def _look(live: LiveMarkdown, look: Look) -> None:
    while not live.text:
        await trio.sleep(LOOK_SEC)
        with suppress(UmaError):  # the answer tells of it
            live.note = await look()


@contextmanager
def _suspensions() -> Iterator[AsyncIterator[int] | None]:
    """Ctrl-Z as it comes, instead of its stopping the process; None where the parent ignores it."""
    if sys.platform == "win32" or signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN:
        yield None
        return
    with trio.open_signal_receiver(signal.SIGTSTP) as arrivals:
        yield arrivals


async def _suspend(arrivals: AsyncIterator[int], live: LiveMarkdown, silence: SilentTyping) -> None:
    """Let Ctrl-Z leave the shell a terminal as it should be, and go on from there when the shell says so."""
    if sys.platform == "win32":
        return
    async for _ in arrivals:
        live.pause()
        silence.end()
        os.kill(os.getpid(), signal.SIGSTOP)
        silence.begin()

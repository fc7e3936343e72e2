"""Live Markdown: an answer is drawn while it is being written, and is left behind as ordinary text of the terminal.

Only the block that is still being written (a paragraph, a list, a piece of code) is ever drawn again; what is finished
is printed once and scrolls away like any other output. After each drawing the cursor returns to the open block's first
line, so that when the terminal is resized it is still where the next drawing has to begin, whatever the terminal made
of the old lines.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import IO, ClassVar

import attrs
from rich.box import HORIZONTALS
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.panel import Panel
from rich.segment import SegmentLines
from rich.syntax import Syntax
from rich.text import Text

from uma.cli.sanitize import sanitize

WIDEST = 100
"""Maximum columns of text: longer lines are hard to read, however wide the terminal."""
THOUGHT_LINES = 3
"""Lines of the thinking that are seen at a time: enough to see that it goes on, and where."""
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
ERASE_TO_LINE_END, ERASE_BELOW = "\x1b[K", "\x1b[J"

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_MAY_CONTINUE = re.compile(r"\s|$|[-*+](\s|$)|\d{1,9}([.)]|$)")
"""The first line after a blank one that can still belong to the list or quotation before it."""
_TRAILING_BLANKS = re.compile(r"(?: |\x1b\[[\d;]*m)+$")


def settled(text: str) -> int:
    """How much of `text`, from its beginning, is whole blocks that nothing written later can change."""
    end = position = 0
    fence = ""
    after_blank = False
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not mark[2].strip() and line.endswith("\n"):
                fence, end = "", position + len(line)
        elif mark:
            fence = mark[1]
            end = position if after_blank else end
        elif after_blank and not _MAY_CONTINUE.match(line.rstrip("\n")):
            end = position
        after_blank = not line.strip() and not fence
        position += len(line)
    return end


class _Code(CodeBlock):
    """Code between two rules, the first with its language: without lines at its sides it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich."""
        code = Syntax(str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True)
        name = None if self.lexer_name == "text" else self.lexer_name
        yield Panel(code, HORIZONTALS, title=name, title_align="left", border_style="dim", padding=0)


class _Markdown(Markdown):
    elements: ClassVar = {**Markdown.elements, "fence": _Code, "code_block": _Code}


def rendered(text: str, width: int, console: Console) -> list[str]:
    """Markdown as lines for a terminal of `width` columns, without blank lines around them."""
    lines = _laid_out(_Markdown(sanitize(text), code_theme="ansi_dark", hyperlinks=False), width, console)
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def _laid_out(what: RenderableType, width: int, console: Console) -> list[str]:
    """Lines of at most `width` columns, also where the terminal has got narrower since that was read."""
    options = console.options.update(width=min(width, WIDEST))
    with console.capture() as capture:
        console.print(SegmentLines(console.render_lines(what, options, pad=False), new_lines=True), crop=False, end="")
    return [_trimmed(line) for line in capture.get().removesuffix("\n").split("\n")]


def _trimmed(line: str) -> str:
    """Without the blanks that fill a line up: they would wrap when the terminal gets narrower."""
    trimmed = _TRAILING_BLANKS.sub("", line)
    return trimmed + "\x1b[0m" if "\x1b" in trimmed else trimmed


@attrs.define(eq=False)
class LiveMarkdown:
    """One answer on a terminal. Call `draw` as often as there is something new, and `finish` however it ends."""

    _console: Console
    _file: IO[str]
    note: str = attrs.field(default="", init=False)
    """What is shown as long as there is nothing of the answer; empty: dots."""
    _text: str = ""
    _n_printed: int = 0
    """Characters of `_text` that are printed for good."""
    _is_first_block: bool = True
    _width: int = 0
    """Width of the last drawing."""
    _drawn: tuple[int, int, int, int, str] | None = None
    """Characters of `_text` and `_thought`, columns and lines, and `note` of the last drawing."""
    _thought: str = ""
    _is_thought_shown: bool = False
    """The line that is left of the thinking is printed."""

    def add(self, text: str) -> None:
        """More of the answer; shown by the next `draw`."""
        self._text += text

    def think(self, text: str) -> None:
        """More of the thinking: its last lines are shown, dimmed, until the answer begins."""
        self._thought += text

    @property
    def text(self) -> str:
        """All of the answer so far."""
        return self._text

    def draw(self) -> None:
        """Show the answer as far as it has come, where it is not shown already, and dots where there is nothing yet."""
        width, height = self._size()
        now = (len(self._text), len(self._thought), width, height, self.note)
        if now == self._drawn:
            return
        self._drawn = now
        end = self._n_printed + settled(self._text[self._n_printed :])
        # Lines that the terminal has wrapped again count as one for it, until they are erased.
        out = HIDE_CURSOR + (ERASE_BELOW if width != self._width else "")
        out += (self._thought_for_good(width) if self._text.strip() else "") + self._for_good(end, width)
        self._width = width
        open_lines = rendered(self._text[self._n_printed :], width, self._console) or self._thinking(width)
        # The gap before this block is drawn with it; a block taller than the screen shows its end.
        lines = ([] if self._is_first_block else [""]) + open_lines
        lines = lines[-max(1, height - 1) :]
        out += "".join(f"{line}{ERASE_TO_LINE_END}\r\n" for line in lines[:-1]) + lines[-1] + ERASE_TO_LINE_END
        out += ERASE_BELOW + (f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else "") + "\r"
        self._write(out)

    def pause(self) -> None:
        """Take the open block off the screen, for the shell; the next `draw` shows it again, wherever the cursor is."""
        self._write(ERASE_BELOW + SHOW_CURSOR)
        self._drawn = None

    def finish(self) -> None:
        """Print what is open for good, and leave the cursor on the line below it."""
        width, _ = self._size()
        out = self._thought_for_good(width) + self._for_good(len(self._text), width)
        # The terminal can have wrapped the open block again since it was drawn.
        self._write(ERASE_BELOW + out + SHOW_CURSOR)

    def _thinking(self, width: int) -> list[str]:
        """The last lines of the thinking, or dots where there is none yet."""
        if not self._thought.strip() or self._is_thought_shown:
            return [self.note or "…"]
        recent = sanitize(self._thought[-THOUGHT_LINES * WIDEST :].strip())
        return _laid_out(Text(recent, style="dim"), width, self._console)[-THOUGHT_LINES:]

    def _thought_for_good(self, width: int) -> str:
        """The one line that stays of the thinking."""
        if not self._thought.strip() or self._is_thought_shown:
            return ""
        self._is_thought_shown, self._is_first_block = True, False
        n_words = len(self._thought.split())
        line = Text(f"(thought for {n_words:,} word{'' if n_words == 1 else 's'})", style="dim")
        return "".join(f"{row}{ERASE_TO_LINE_END}\r\n" for row in _laid_out(line, width, self._console))

    def _for_good(self, end: int, width: int) -> str:
        lines = rendered(self._text[self._n_printed : end], width, self._console)
        self._n_printed = end
        if not lines:
            return ""
        gap = [] if self._is_first_block else [""]
        self._is_first_block = False
        return "".join(f"{line}{ERASE_TO_LINE_END}\r\n" for line in gap + lines)

    def _size(self) -> tuple[int, int]:
        """Columns to fill and lines. The last column stays free: a full line leaves the cursor in doubt.

        Asked of the terminal itself: `COLUMNS` and `LINES`, which Rich believes first, tell what it had when a parent
        of this process began, and cursor moves that are off by a line leave stale text.
        """
        width = height = 0
        with suppress(OSError):  # no terminal, as with a file
            width, height = os.get_terminal_size(self._file.fileno())
        supposed = self._console.size
        return max(1, (width or supposed.width) - 1), height or supposed.height

    def _write(self, out: str) -> None:
        self._file.write(out)
        self._file.flush()

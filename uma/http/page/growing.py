"""Markdown as it grows, block by block.

A block that is followed by another one does not change any more, so each update parses only the text from the last
block on. What makes HTML of it is `markdown`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

MAX_BLOCK_CHARS = 32_768
"""A block that grows beyond this is shown as plain text: parsing it ten times a second would take all of a core."""
MAX_WHOLE_CHARS = 262_144
"""A finished text up to this length is parsed once as a whole, so that its references hold everywhere."""


class Parsed(NamedTuple):
    """A text's blocks, where each begins in it, and the references that it defines."""

    blocks: list[str]
    starts: list[int]
    env: dict[str, Any]


class GrowingText:
    """A text's blocks while it is being written, made by `parse` and `render` of `markdown`. One thread at a time."""

    def __init__(self, parse: Callable[[str, dict[str, Any]], Parsed], render: Callable[[str], list[str]]) -> None:
        self._parse = parse
        self._render = render
        self.blocks: list[str] = []
        self._settled = 0
        """Blocks that do not change any more."""
        self._begin = 0
        """Where the text after them begins."""
        self._env: dict[str, Any] = {}

    def update(self, text: str) -> None:
        """Bring `blocks` up to date; `text` begins with what it was the last time."""
        tail = _normal(text)[self._begin :]
        if len(tail) > MAX_BLOCK_CHARS:
            self.blocks[self._settled :] = [plain(tail)]
            return
        self.blocks[self._settled :], starts, self._env = self._parse(tail, self._env)
        # A line that is still being written can turn from a block of its own into more of the block before it.
        complete = tail.rfind("\n") + 1
        settled = max((index for index, start in enumerate(starts) if start < complete), default=0)
        if settled:
            self._begin += starts[settled]
            self._settled += settled

    def finish(self, text: str) -> None:
        """The text is complete: its blocks as a whole parse has them."""
        if len(text) <= MAX_WHOLE_CHARS:
            self.blocks = self._render(text)
        else:
            self.update(text)


def plain(text: str) -> str:
    """A text as one block, without any markup of its own."""
    return f"<pre>{escaped(text)}</pre>"


def escaped(text: str) -> str:
    """Text escaped for HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _normal(text: str) -> str:
    """Text with the line ends that the parser counts by. What a text begins with stays so as it grows."""
    return text.replace("\r\n", "\n").replace("\r", "\n")

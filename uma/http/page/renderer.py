"""Markdown rendered in a child process. A text that takes too long there is shown as it is, and delays only itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import trio

from uma.child import Child, ChildBusyError, ChildClosedError, ChildEndedError
from uma.http.page.growing import MAX_WHOLE_CHARS, Parsed, plain
from uma.net.logfmt import log

logger = logging.getLogger("uma.http")

PROGRAM = Path(__file__).with_name("markdown.py")
DEADLINE_SEC = 2.0
"""Maximum CPU time for one text. The longest that a model usually writes takes a twentieth of it."""
MAX_ANSWER_BYTES = 64 * MAX_WHOLE_CHARS


class Renderer:
    """One child process, started with the first text. Its methods belong to a thread that holds a token of `turns`."""

    def __init__(self) -> None:
        self.turns = trio.CapacityLimiter(1)
        """Limiter of the threads that render, one at a time."""
        self._is_warm = False
        self._child = Child(str(PROGRAM), None, deadline_sec=DEADLINE_SEC, max_answer_bytes=MAX_ANSWER_BYTES)

    async def warm(self) -> None:
        """Start the process now, which takes a while, so that no answer's first words wait for it."""
        if not self._is_warm:
            self._is_warm = True
            await trio.to_thread.run_sync(self.render, "", limiter=self.turns, abandon_on_cancel=True)

    def render(self, text: str) -> list[str]:
        """See `markdown.render`."""
        found = self._ask({"text": text})
        return [plain(text)] if found is None else found

    def parse(self, text: str, env: dict[str, Any]) -> Parsed:
        """See `markdown.parse`."""
        found = self._ask({"tail": text, "env": env})
        return Parsed([plain(text)], [0], env) if found is None else Parsed(*found)

    def close(self) -> None:
        """End the process for good. Harmless when repeated."""
        self._child.close()

    def _ask(self, question: dict[str, Any]) -> Any:
        try:
            return self._child.ask(question)
        except (TimeoutError, ChildBusyError, ChildEndedError, ChildClosedError, OSError) as error:
            log(logger, logging.WARNING, "page.not_rendered", reason=type(error).__name__)
            return None

"""Base of the parsers of a model's text, which comes in pieces cut anywhere and is read by a sequence of steps.

A step takes text from the front of what is pending, and says whether another step can follow at once; otherwise the
parser waits for the next piece. All parts that are then certain are returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from uma.chat.calls import CallReader, overlap, read_call
from uma.chat.parts import CallBroken, CallCut, CallEnded, Part, joined


class StepParser(ABC):
    """State of one answer's parser: pending text, parts, thinking and the current call. A subclass has the steps;
    `_step` is the current one.
    """

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._pending = ""
        self._parts: list[Part] = []
        self._call: CallReader | None = None
        self._raw = ""
        """Text of the current call, which becomes text again if it is not a call."""
        self._pushed_chars = 0
        self._thought_from: int | None = None
        self.thoughts: list[tuple[int, int]] = []
        """Ranges of the output that are thinking, marks included: index of the first character, and of the one behind
        the last. The last range is added once it has ended, or by `finish`."""

    def push(self, text: str) -> list[Part]:
        """Take a piece of text. Returns the parts that are now certain."""
        self._pushed_chars += len(text)
        self._pending += text
        return self._run()

    @abstractmethod
    def finish(self) -> list[Part]:
        """The remaining parts at the end of the output."""

    def _run(self) -> list[Part]:
        while self._pending and self._step():
            pass
        parts, self._parts = self._parts, []
        return joined(parts)

    @property
    def _at(self) -> int:
        """Number of characters of the output that were read."""
        return self._pushed_chars - len(self._pending)

    def _end_thought(self) -> None:
        if self._thought_from is not None and self._at > self._thought_from:
            self.thoughts.append((self._thought_from, self._at))
        self._thought_from = None

    def _read_call(self) -> bool:
        """The step within a call."""
        call = self._call
        assert call is not None
        taken = read_call(call, self._pending, self._parts)
        self._raw += self._pending[:taken]
        self._pending = self._pending[taken:]
        if call.problem:
            self._break(call.problem)
        elif call.is_whole:
            assert call.name is not None
            self._parts.append(CallEnded(call.name, call.arguments))
            self._call, self._raw = None, ""
            self._end_call()
        return self._call is None

    def _break(self, reason: str) -> None:
        """Treat the text of the current call as text."""
        call, self._call = self._call, None
        if call is not None and call.name is not None:
            self._parts.append(CallBroken(call.name, reason))
        raw, self._raw = self._raw, ""
        self._give_back(raw)

    def _cut(self) -> None:
        """The output ended inside of a call: it is a `CallCut` if its name is known, otherwise text."""
        call = self._call
        if call is None or call.name is None:
            self._break("")
            return
        self._parts.append(CallCut(call.name, self._raw))
        self._call, self._raw = None, ""

    @property
    @abstractmethod
    def is_thinking(self) -> bool:
        """Whether the next text is thinking."""

    @abstractmethod
    def _end_call(self) -> None:
        """Choose the step behind a complete call."""

    @abstractmethod
    def _give_back(self, raw: str) -> None:
        """Give out text that is not a call, and choose the step behind it."""


def first_mark(text: str, marks: Collection[str]) -> tuple[int, str]:
    """Index of the first of these marks in `text`, and the mark.

    Without one, the index from which on the text can be the beginning of a mark, and an empty string. Of two marks that
    begin alike the longer one counts, as long as the text can still become it.
    """
    found = min(((at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if found is None:
        return len(text) - max((overlap(text, mark) for mark in marks), default=0), ""
    at, _, mark = found
    can_be_longer = any(len(other) > len(text) - at and other.startswith(text[at:]) for other in marks)
    return at, "" if can_be_longer else mark

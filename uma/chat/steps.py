"""What the parsers of a model's text share: the text comes in pieces cut anywhere, and one step after another reads it.

A step takes text from the front of what is pending and says whether another can go on at once; else the next piece is
waited for. All that is certain by then is given as parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from uma.chat.calls import CallReader, overlap, read_call
from uma.chat.parts import CallBroken, CallCut, CallEnded, Part, joined


class StepParser(ABC):
    """Text, parts, thinking and the call of one answer. A subclass has the steps; `_step` is the one that reads."""

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._pending = ""
        self._parts: list[Part] = []
        self._call: CallReader | None = None
        self._raw = ""
        """Text of the current call, given back if it is none."""
        self._pushed_chars = 0
        self._thought_from: int | None = None
        self.thoughts: list[tuple[int, int]] = []
        """Where the output's thinking stands, its marks included: of each piece the first character, and the one behind
        the last. The last piece is there once it has ended, or with `finish`."""

    def push(self, text: str) -> list[Part]:
        """The parts that are certain once this text has come."""
        self._pushed_chars += len(text)
        self._pending += text
        return self._run()

    @abstractmethod
    def finish(self) -> list[Part]:
        """What is left when no more text comes."""

    def _run(self) -> list[Part]:
        while self._pending and self._step():
            pass
        parts, self._parts = self._parts, []
        return joined(parts)

    @property
    def _at(self) -> int:
        """How many characters of the output are read."""
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
        """What was taken for a call is text."""
        call, self._call = self._call, None
        if call is not None and call.name is not None:
            self._parts.append(CallBroken(call.name, reason))
        raw, self._raw = self._raw, ""
        self._give_back(raw)

    def _cut(self) -> None:
        """The output has ended inside what was taken for a call: it is one if its name is known by then, else text."""
        call = self._call
        if call is None or call.name is None:
            self._break("")
            return
        self._parts.append(CallCut(call.name, self._raw))
        self._call, self._raw = None, ""

    @property
    @abstractmethod
    def is_thinking(self) -> bool:
        """Whether the text that comes next is thinking."""

    @abstractmethod
    def _end_call(self) -> None:
        """Choose the step behind a whole call."""

    @abstractmethod
    def _give_back(self, raw: str) -> None:
        """Give the text of what is no call, and choose the step behind it."""


def first_mark(text: str, marks: Collection[str]) -> tuple[int, str]:
    """Where the first of these marks stands in `text`, and which it is.

    Without one it is the empty string, and the place that from which on the text can be a mark's beginning. Of two that
    begin alike the longer one counts, where the text can still come to be it.
    """
    found = min(((at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if found is None:
        return len(text) - max((overlap(text, mark) for mark in marks), default=0), ""
    at, _, mark = found
    can_be_longer = any(len(other) > len(text) - at and other.startswith(text[at:]) for other in marks)
    return at, "" if can_be_longer else mark

"""Parser of gpt-oss's channels ("harmony"): text cut anywhere in; answer, thinking and tool calls out.

An answer is a sequence of messages. Each has a header that names its channel, and its recipient if it is a call:
`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`. The prompt ends behind the first
`<|start|>assistant`. Text without a header is part of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from uma.chat.calls import reader_of
from uma.chat.forms import NamedForm
from uma.chat.parts import AnswerText, CallBegun, Part, Reasoning
from uma.chat.schema import Schema
from uma.chat.steps import StepParser, first_mark

START, CHANNEL, MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BODY = NamedForm(before="", after=MESSAGE)
"""Form of a call behind its recipient's name, where the header says nothing else."""
_BEGINNINGS = (START, CHANNEL, " to=")
TO_ANSWER = f"{ENDS[0]}{START}{FINAL}"
"""Text that ends the thinking, and begins the answer."""
TO_NEXT = f"{ENDS[0]}{START}"
"""Text that ends the thinking, so that any message can follow: a call, or the answer."""
TO_CALL = f"{TO_NEXT}{CHANNEL}commentary to=functions."
"""Text that ends the thinking, and begins a call."""
MAX_HEADER_CHARS = 256
"""Maximum length of a header; a longer one is text."""
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?"
    r"(?: to=(?P<to>[^\s<]+))?\s?"
    r"(?:<\|channel\|>(?P<channel>\w+))?"
    r"(?: to=(?P<also>[^\s<]+))?"
    r"\s?(?:<\|constrain\|>)?\w*",
    re.ASCII,
)


class HarmonyParser(StepParser):
    """Parser of one answer, like `parser.Parser` for other families. Headers and ends of messages are its marks."""

    def __init__(
        self, tools: Mapping[str, Schema], *, splits_thinking: bool = True, ends_with_answer: bool = False
    ) -> None:
        """Without `splits_thinking` thinking is text, with its header and its end. With `ends_with_answer`, everything
        behind the final message's header is the answer, whatever it looks like.
        """
        super().__init__(self._read_header)
        self._tools = tools
        self._splits = splits_thinking
        self._ends_with_answer = ends_with_answer
        self._part: type[AnswerText | Reasoning] = AnswerText
        self._keeps_end = False

    def finish(self) -> list[Part]:
        """The remaining parts at the end of the output."""
        if self._call is not None:
            self._cut()
        if self._pending:
            self._parts.append(
                self._part(self._pending) if self._step == self._read_body else AnswerText(self._pending)
            )
        self._pending = ""
        self._end_thought()
        return self._run()

    @property
    def is_thinking(self) -> bool:
        """See `StepParser`."""
        return self._thought_from is not None

    def _read_header(self) -> bool:
        """Read a header. Text that cannot be one is part of the answer."""
        window = self._pending[:MAX_HEADER_CHARS]
        if not any(begin.startswith(window[: len(begin)]) for begin in _BEGINNINGS):
            return self._leave_header()
        at = window.find(MESSAGE)
        if at < 0:
            return len(window) == MAX_HEADER_CHARS and self._leave_header()
        found = _HEADER.fullmatch(window[:at])
        if found is None:
            return self._leave_header()
        header, self._pending = self._pending[: at + len(MESSAGE)], self._pending[at + len(MESSAGE) :]
        self._open(header, found["channel"] or "", found["to"] or found["also"] or "")
        return True

    def _leave_header(self) -> bool:
        """Take the first character as text, so that no header is searched for at the same place again."""
        self._parts.append(AnswerText(self._pending[0]))
        self._pending = self._pending[1:]
        self._begin_message(AnswerText)
        return True

    def _open(self, header: str, channel: str, recipient: str) -> None:
        name = recipient.removeprefix("functions.")
        if recipient and name != recipient and name in self._tools:
            self._raw = header
            self._call = reader_of(_BODY, {name: self._tools[name]})
            for char in name + MESSAGE:
                self._call.push(char)
            self._parts.append(CallBegun(name))
            self._step = self._read_call
        elif recipient and recipient != "assistant":
            self._parts.append(AnswerText(header))
            self._begin_message(AnswerText)
        elif channel == "analysis":
            self._thought_from = self._at - len(header)
            if not self._splits:
                self._parts.append(AnswerText(header))
            self._begin_message(Reasoning if self._splits else AnswerText, keeps_end=not self._splits)
        else:
            self._begin_message(AnswerText)
            if channel == "final" and self._ends_with_answer:
                self._step = self._read_answer

    def _read_answer(self) -> bool:
        self._parts.append(AnswerText(self._pending))
        self._pending = ""
        return False

    def _begin_message(self, part: type[AnswerText | Reasoning], *, keeps_end: bool = False) -> None:
        self._part = part
        self._keeps_end = keeps_end
        self._step = self._read_body

    def _read_body(self) -> bool:
        at, mark = first_mark(self._pending, (*ENDS, START))
        if at:
            self._parts.append(self._part(self._pending[:at]))
        self._pending = self._pending[at:]
        if not mark:
            return False
        if mark != START:
            self._pending = self._pending[len(mark) :]
            if self._keeps_end:
                self._parts.append(AnswerText(mark))
        self._end_thought()
        self._step = self._read_header
        return True

    def _end_call(self) -> None:
        self._begin_message(AnswerText)

    def _give_back(self, raw: str) -> None:
        self._parts.append(AnswerText(raw))
        self._begin_message(AnswerText)

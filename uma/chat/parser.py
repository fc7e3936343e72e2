"""Incremental parser of a model's text: answer, thinking and tool calls.

No text is lost or reordered: text that looks like a call and is none comes out as text. Only the marks around thinking
and calls are left out, with the white space next to them. The parts do not depend on how the text is cut, except for
where a part's own text is divided.
"""

from __future__ import annotations

from collections.abc import Mapping

from uma.chat.calls import reader_of
from uma.chat.families import TO_USER, Family, Thinking
from uma.chat.forms import BracesForm, ObjectForm
from uma.chat.parts import AnswerText, Part, Reasoning, joined
from uma.chat.schema import Schema
from uma.chat.steps import StepParser, first_mark


class Parser(StepParser):
    """Parser of one answer: `push` each piece of its text, then call `finish` once."""

    def __init__(
        self,
        family: Family | None,
        tools: Mapping[str, Schema],
        thinking: Thinking | None,
        *,
        splits_thinking: bool = True,
        begins_thinking: bool = False,
        thinks_first: bool = False,
    ) -> None:
        """`tools` are the schemas of the tools' arguments by name; without any there are no calls. Without
        `splits_thinking` thinking is text, in which no call is searched for. `begins_thinking` says that the prompt
        ended with the opening mark. With `thinks_first` there is thinking only at the beginning, and everything after
        it is the answer, whatever it looks like.
        """
        super().__init__(self._read_opening if thinks_first else self._read_text)
        self._family = family if tools else None
        self._tools = tools
        self._silent: frozenset[str] = frozenset()
        """Marks that are left out."""
        self._begun = ""
        """End of the prompt that is the beginning of the output's first mark."""
        if family is not None:
            names = (TO_USER, *tools)
            self._silent = frozenset(mark.format(name) for mark in family.silent for name in names)
            if family.to_answer:
                self._begun = self._pending = family.open
                self._silent |= {family.open + family.to_answer}
        self._thinking = thinking
        self._splits = splits_thinking
        self._space = ""
        """White space that is text, unless a mark follows."""
        self._is_start = True
        """Whether nothing but white space, thinking or calls has come."""
        self._is_after_mark = False
        self._is_list = False
        self._needs_mark = False
        self._after_thinking = self._read_answer if thinks_first else self._read_text
        if begins_thinking and thinking:
            self._thought_from = 0
            self._step = self._read_thinking

    def finish(self) -> list[Part]:
        """The remaining parts at the end of the output."""
        parts = self._run()
        if self._is_start:
            self._pending = self._pending.removeprefix(self._begun)
        if self._step in (self._read_calls, self._read_call):
            self._cut()
        elif self._step == self._read_close:
            # Text behind a whole call that is not its closing mark.
            self._step = self._read_text
            self._pending, self._raw = self._raw + self._pending, ""
        parts += self._run()
        if self._step in (self._read_thinking, self._read_label):
            self._parts.append(self._thought(self._pending))
            self._pending = ""
            self._end_thought()
        else:
            self._emit_text(self._pending)
        self._pending = ""
        if self._space and not self._is_after_mark:
            self._parts.append(AnswerText(self._space))
        self._space = ""
        return joined([*parts, *self._run()])

    # Text and thinking

    @property
    def is_thinking(self) -> bool:
        """See `StepParser`."""
        return self._step in (self._read_thinking, self._read_label)

    def _read_text(self) -> bool:
        if self._is_bare_call():
            self._begin_calls("")
            return True
        marks = [*self._silent, *([self._thinking.open] if self._thinking else [])]
        if self._family is not None:
            marks.append(self._family.open)
        if self._family is not None and self._family.is_bare and self._is_start:
            # A call without a mark can begin here: read only up to the next character that is not white space.
            stripped = self._pending.lstrip()
            skipped = len(self._pending) - len(stripped)
            if skipped:
                self._emit_text(self._pending[:skipped])
                self._pending = stripped
                return bool(stripped)
        at, mark = first_mark(self._pending, marks)
        self._emit_text(self._pending[:at])
        self._pending = self._pending[at + len(mark) :]
        if not mark:
            return False
        if mark in self._silent:
            self._space, self._is_after_mark = "", True
        elif self._thinking is not None and mark == self._thinking.open:
            self._begin_thinking()
        else:
            self._begin_calls(mark)
        return True

    def _is_bare_call(self) -> bool:
        return bool(
            self._family is not None
            and self._family.is_bare
            and self._is_start
            and self._pending.startswith(("{", "["))
        )

    def _begin_thinking(self) -> None:
        assert self._thinking is not None
        self._thought_from = self._at - len(self._thinking.open)
        if self._splits:
            self._space, self._is_after_mark = "", True
        else:
            self._emit_text(self._thinking.open)
        self._step = self._read_label if self._splits and self._thinking.label else self._read_thinking

    def _read_label(self) -> bool:
        """Read the label behind the opening mark."""
        assert self._thinking is not None
        label = self._thinking.label
        if label != self._pending[: len(label)] and label.startswith(self._pending):
            return False
        self._pending = self._pending.removeprefix(label)
        self._step = self._read_thinking
        return True

    def _read_thinking(self) -> bool:
        assert self._thinking is not None
        at, mark = first_mark(self._pending, (self._thinking.close,))
        if at:
            self._parts.append(self._thought(self._pending[:at]))
        self._pending = self._pending[at + len(mark) :]
        if not mark:
            return False
        self._end_thought()
        if self._splits:
            self._is_after_mark = True
        else:
            self._parts.append(AnswerText(mark))
        self._is_start = True
        self._step = self._after_thinking
        return True

    def _read_opening(self) -> bool:
        """Read the mark that the output can begin with."""
        assert self._thinking is not None
        begun, mark = self._pending.lstrip(), self._thinking.open
        if begun.startswith(mark):
            self._pending = begun[len(mark) :]
            self._begin_thinking()
            return True
        if mark.startswith(begun):
            return False
        self._step = self._read_answer
        return True

    def _read_answer(self) -> bool:
        self._emit_text(self._pending)
        self._pending = ""
        return False

    def _thought(self, text: str) -> Part:
        return Reasoning(text) if self._splits else AnswerText(text)

    def _emit_text(self, text: str) -> None:
        if self._is_after_mark:
            text = text.lstrip()
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._parts.append(AnswerText(body))
            self._is_start = self._is_after_mark = False

    # Calls

    def _begin_calls(self, mark: str) -> None:
        self._raw, self._space = self._space + mark, ""
        self._is_list = mark.endswith("[")
        self._needs_mark = bool(mark)
        self._step = self._read_calls

    def _read_calls(self) -> bool:
        """Read up to a call's object: behind the mark, or behind a comma of a list."""
        assert self._family is not None
        char = self._pending[0]
        is_object = isinstance(self._family.form, ObjectForm)
        if (is_object or self._family.is_list) and char == "[" and not self._is_list and self._call is None:
            self._is_list = True
        elif char == "{" if is_object else not char.isspace():
            self._call = reader_of(self._family.form, self._tools)
            self._step = self._read_call
            return True
        elif not char.isspace():
            self._break("")
            return True
        self._raw += char
        self._pending = self._pending[1:]
        return True

    def _end_call(self) -> None:
        self._is_after_mark = True
        self._step = self._read_close

    def _read_close(self) -> bool:
        """Read behind a whole call: the next call of a list or its end, the closing mark, or text."""
        assert self._family is not None
        char = self._pending[0]
        held = (self._raw + char).lstrip()
        if not held:
            pass
        elif self._is_list:
            if held == ",":
                self._step = self._read_calls
            elif held == "]":
                self._is_list, self._raw = False, ""
                self._pending = self._pending[1:]
                return True
            else:
                return self._leave_calls()
        elif self._family.close and self._needs_mark:
            if held == self._family.close:
                self._raw, self._pending = "", self._pending[1:]
                self._is_start = True
                self._step = self._read_text
                return True
            if not self._family.close.startswith(held):
                return self._begin_next(held) or self._leave_calls()
        elif self._family.is_bare and char == "{":
            self._step = self._read_calls
            return True
        elif self._family.is_bare and held.rstrip() == ";":
            pass  # Llama's separator between calls
        else:
            return self._leave_calls()
        self._raw += char
        self._pending = self._pending[1:]
        return True

    def _begin_next(self, held: str) -> bool:
        """Begin another call of the open block, if `held` begins one; it was read as a possible end of the block."""
        assert self._family is not None
        form = self._family.form
        if not self._family.is_block or isinstance(form, BracesForm) or not form.before.startswith(held):
            return False
        self._pending, self._raw = self._raw + self._pending, ""
        self._step = self._read_calls
        return True

    def _leave_calls(self) -> bool:
        self._pending, self._raw = self._raw + self._pending, ""
        self._is_list = False
        self._is_start = False
        self._step = self._read_text
        return True

    def _give_back(self, raw: str) -> None:
        self._is_start = False
        self._is_list = False
        self._emit_text(raw)
        self._step = self._read_text

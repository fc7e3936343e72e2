"""From a model's text, in pieces cut anywhere, to answer, thinking and tool calls.

No text is lost and none changes its order: what looks like a call and is none comes out as text. Only the marks around
thinking and whole calls, and the white space next to them, are left out. The parts are the same however the text is
cut, but for where a part's own text is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from uma.chat.calls import CallReader, overlap, read_call, reader_of
from uma.chat.families import Family, Thinking
from uma.chat.forms import NamedForm, ObjectForm
from uma.chat.parts import CallBroken, CallEnded, Part, Reasoning, Text, joined
from uma.chat.schema import Schema


class Parser:
    """One answer's parser: `push` each piece of its text, then `finish` once."""

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
        """`tools` are the schemas of the tools' arguments by name. Without `splits_thinking` the thinking is text, in
        which no call is looked for.
        `begins_thinking` says that the prompt ended with the opening mark. With `thinks_first` there is thinking at the
        beginning at most, and all that follows is the answer, whatever it looks like.
        """
        self._family = family
        self._tools = tools
        self._thinking = thinking
        self._splits = splits_thinking
        self._parts: list[Part] = []
        self._pending = ""
        self._space = ""
        """White space that is text unless a mark follows."""
        self._is_start = True
        """Nothing but white space, thinking or calls has come."""
        self._is_after_mark = False
        self._call: CallReader | None = None
        self._raw = ""
        """All since the last whole call, or since the text before the mark."""
        self._is_list = False
        self._needs_mark = False
        self._pushed_chars = 0
        self._thought_from = 0
        self.thoughts: list[tuple[int, int]] = []
        """Where the output's thinking stands, its marks included: of each piece the first character, and the one behind
        the last. The last piece is there once it has ended, or with `finish`."""
        self._after_thinking = self._read_answer if thinks_first else self._read_text
        self._step: Callable[[], bool] = self._read_opening if thinks_first else self._read_text
        if begins_thinking and thinking:
            self._step = self._read_thinking

    def push(self, text: str) -> list[Part]:
        """The parts that are certain once this text has come."""
        self._pushed_chars += len(text)
        self._pending += text
        return self._run()

    def finish(self) -> list[Part]:
        """What is left when no more text comes."""
        parts = self._run()
        if self._step in (self._read_calls, self._read_object):
            self._break("the output ended inside it")
        elif self._step == self._read_close:
            # What follows a whole call and is no mark of its end.
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
            self._parts.append(Text(self._space))
        self._space = ""
        parts += self._take()
        return joined(parts)

    def _run(self) -> list[Part]:
        while self._pending and self._step():
            pass
        return joined(self._take())

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # Text and thinking

    def _read_text(self) -> bool:
        if self._is_bare_call():
            self._begin_calls("")
            return True
        marks = [self._thinking.open] if self._thinking else []
        if self._family is not None:
            marks.append(self._family.open)
        if self._family is not None and self._family.is_bare and self._is_start:
            # A call can stand here without a mark: no further than to the next character that is no white space.
            stripped = self._pending.lstrip()
            skipped = len(self._pending) - len(stripped)
            if skipped:
                self._emit_text(self._pending[:skipped])
                self._pending = stripped
                return bool(stripped)
        found = min(((at, mark) for mark in marks if (at := self._pending.find(mark)) >= 0), default=None)
        if found is None:
            keep = max((overlap(self._pending, mark) for mark in marks), default=0)
            at = len(self._pending) - keep
            self._emit_text(self._pending[:at])
            self._pending = self._pending[at:]
            return False
        at, mark = found
        self._emit_text(self._pending[:at])
        self._pending = self._pending[at + len(mark) :]
        if self._thinking is not None and mark == self._thinking.open:
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
        """The word behind the opening mark that says what follows."""
        assert self._thinking is not None
        label = self._thinking.label
        if label != self._pending[: len(label)] and label.startswith(self._pending):
            return False
        self._pending = self._pending.removeprefix(label)
        self._step = self._read_thinking
        return True

    def _read_thinking(self) -> bool:
        assert self._thinking is not None
        mark = self._thinking.close
        at = self._pending.find(mark)
        if at < 0:
            at = len(self._pending) - overlap(self._pending, mark)
            if at:
                self._parts.append(self._thought(self._pending[:at]))
            self._pending = self._pending[at:]
            return False
        if at:
            self._parts.append(self._thought(self._pending[:at]))
        self._pending = self._pending[at + len(mark) :]
        self._end_thought()
        if self._splits:
            self._is_after_mark = True
        else:
            self._parts.append(Text(mark))
        self._is_start = True
        self._step = self._after_thinking
        return True

    def _end_thought(self) -> None:
        if self._at > self._thought_from:
            self.thoughts.append((self._thought_from, self._at))

    @property
    def _at(self) -> int:
        """How many characters of the output are read."""
        return self._pushed_chars - len(self._pending)

    def _read_opening(self) -> bool:
        """The mark that the output can begin with."""
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
        return Reasoning(text) if self._splits else Text(text)

    def _emit_text(self, text: str) -> None:
        if self._is_after_mark:
            text = text.lstrip()
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._parts.append(Text(body))
            self._is_start = self._is_after_mark = False

    # Calls

    def _begin_calls(self, mark: str) -> None:
        self._raw, self._space = self._space + mark, ""
        self._is_list = False
        self._needs_mark = bool(mark)
        self._step = self._read_calls

    def _read_calls(self) -> bool:
        """Before a call's object: after the mark, or after a comma of a list."""
        assert self._family is not None
        char = self._pending[0]
        is_object = isinstance(self._family.form, ObjectForm)
        if is_object and char == "[" and not self._is_list and self._call is None:
            self._is_list = True
        elif char == "{" if is_object else not char.isspace():
            self._call = reader_of(self._family.form, self._tools)
            self._step = self._read_object
            return True
        elif not char.isspace():
            self._break("")
            return True
        self._raw += char
        self._pending = self._pending[1:]
        return True

    def _read_object(self) -> bool:
        call = self._call
        assert call is not None
        taken = read_call(call, self._pending, self._parts)
        self._raw += self._pending[:taken]
        self._pending = self._pending[taken:]
        if call.problem:
            self._break(call.problem)
        elif call.is_whole:
            self._end_call(call)
        return self._call is None

    def _end_call(self, call: CallReader) -> None:
        assert call.name is not None
        self._parts.append(CallEnded(call.name, call.arguments))
        self._call, self._raw = None, ""
        self._is_after_mark = True
        self._step = self._read_close

    def _read_close(self) -> bool:
        """After a whole call: the list's next one or its end, the closing mark, or what is text again."""
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
        """Another call of the block that is open, if `held` can begin one; it was read in doubt of the block's end."""
        assert self._family is not None
        form = self._family.form
        if not self._family.is_block or not isinstance(form, NamedForm) or not form.before.startswith(held):
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

    def _break(self, reason: str) -> None:
        """What was taken for a call is text."""
        call, self._call = self._call, None
        if call is not None and call.name is not None:
            self._parts.append(CallBroken(call.name, reason))
        raw, self._raw = self._raw, ""
        self._is_start = False
        self._is_list = False
        self._emit_text(raw)
        self._step = self._read_text

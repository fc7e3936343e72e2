"""The line editor of a chat on a terminal, with history.

It waits in a thread, so that Trio, and with it the engine or the session with the server, goes on meanwhile. The
thread does not outlive the wait: cancelling it ends the editor, which gives the terminal back as it was.
"""

from __future__ import annotations

import os
import re
import select
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import attrs
import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import ANSI, StyleAndTextTuples
from prompt_toolkit.formatted_text.utils import fragment_list_to_text
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.layout.processors import Processor, TabsProcessor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import get_cwidth

from uma.cli.slash import SET
from uma.cli.view import DROPPED, PROMPT

MAX_HISTORY_BYTES = 262_144
"""Maximum size of the history file as a chat begins; a longer one loses its older half."""
BLOCK = '"""'
"""What begins and ends a question of several lines, as in Ollama."""
OF_FILES = frozenset({"/image", "/load", "/save", "/save!"})
"""Commands of the chat that a file's name follows."""
CTRL_D = b"\x04"
"""What the end of the input, which a terminal makes of it, is typed with."""
MAX_ENTRY_CHARS = 8_192
"""Maximum length of a line that is kept: a pasted document is no line that anyone looks for again."""


@attrs.define(eq=False)
class Editor:
    """Line editing with history and completion of the chat's commands.

    Enter sends, but not within a `BLOCK`; Esc Enter or Ctrl-J begins a new line, Ctrl-C drops what is typed, Ctrl-D on
    an empty line is the end.
    """

    _session: PromptSession[str]
    _is_ending: bool = False

    @classmethod
    def on_terminal(cls, commands: Iterable[str], environ: Mapping[str, str], *, keeps_history: bool) -> Editor:
        """An editor on this process's terminal."""
        return cls(
            PromptSession(
                history=_history(history_path(environ)) if keeps_history else InMemoryHistory(),
                key_bindings=_keys(),
                completer=CommandCompleter(tuple(commands)),
                # Tab completes as in a shell: a menu would keep rows of the screen empty for itself.
                complete_style=CompleteStyle.READLINE_LIKE,
                multiline=True,
                prompt_continuation=" " * len(PROMPT),
                input_processors=[TabsProcessor(char1=" ", char2=" "), WordsWhole()],
                enable_suspend=True,
            )
        )

    async def read(self) -> str | None:
        """See `LineSource.read`. Cancelling it ends the editor, and waits until the terminal is as it was."""
        self._is_ending = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_when_cancelled)
            line = await trio.to_thread.run_sync(self._ask)
            nursery.cancel_scope.cancel()
        return line

    def forget(self) -> None:
        """See `LineSource.forget`: the line stays within reach of the arrow keys in this chat."""
        history = self._session.history
        if isinstance(history, LastingHistory):
            history.forget()

    def _take_typed_ahead(self) -> None:
        """Give the editor the lines that were typed while nothing read them. The terminal has made newlines of Enter,
        with which the editor begins another line of the same message.
        """
        given, typed = self._session.app.input, b""
        with suppress(OSError):  # the terminal has gone away, which the editor finds out
            while select.select([given.fileno()], [], [], 0)[0]:
                data = os.read(given.fileno(), MAX_ENTRY_CHARS) or CTRL_D
                typed += data
                if data == CTRL_D:
                    break
        keys: list[KeyPress] = []
        parser = Vt100Parser(keys.append)
        parser.feed(typed.decode(errors="surrogateescape").replace("\n", "\r"))
        parser.flush()
        store_typeahead(given, keys)

    def _ask(self) -> str | None:
        self._take_typed_ahead()
        prompt = PROMPT if os.environ.get("NO_COLOR") else ANSI(f"\x1b[1;36m{PROMPT}\x1b[0m")
        try:
            line = self._session.prompt(
                prompt, handle_sigint=False, set_exception_handler=False, pre_run=self._exit_if_ending
            )
            inner = line.strip().removeprefix(BLOCK).removesuffix(BLOCK).strip("\n") if _is_block(line) else ""
            # A block that begins with a slash is a question, as one behind a blank is.
            return f" {inner}" if inner.startswith("/") else inner or line
        except KeyboardInterrupt:
            return DROPPED
        except EOFError:
            return None

    async def _end_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            # An editor that is only about to start looks at this; a running one is told through its own loop.
            self._is_ending = True
            app = self._session.app
            if app.is_running and app.loop is not None:
                # A line that is sent this very moment closes the loop: the editor has ended by itself.
                with suppress(RuntimeError):
                    app.loop.call_soon_threadsafe(self._exit_if_ending)

    def _exit_if_ending(self) -> None:
        app = self._session.app
        if self._is_ending and app.future is not None and not app.future.done():
            app.exit(exception=EOFError)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        typed = event.current_buffer.text
        if _is_block(typed) and not typed.rstrip().endswith(BLOCK, len(BLOCK)):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _is_block(typed: str) -> bool:
    return typed.startswith(BLOCK)


class WordsWhole(Processor):
    """Fills a row of the screen with blanks before a word that would not fit in it: the library wraps at letters."""

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        """The line with these blanks, and where each letter stands in it."""
        room = transformation_input.width - len(PROMPT)
        letters = explode_text_fragments(transformation_input.fragments)
        shown: StyleAndTextTuples = []
        places: list[int] = []
        at = column = 0
        for word in re.finditer(r"\S+\s*|\s+", fragment_list_to_text(letters)):
            width = get_cwidth(word[0].rstrip())
            # The last column is the blank's behind the word, which would else begin the next row.
            if column and width < room <= column + width:
                shown.append(("", " " * (room - column)))
                at, column = at + room - column, 0
            shown += letters[word.start() : word.end()]
            places += range(at, at := at + len(word[0]))
            column = (column + get_cwidth(word[0])) % max(1, room)
        places.append(at)
        return Transformation(
            shown,
            source_to_display=lambda place: places[min(place, len(places) - 1)],
            display_to_source=lambda place: max(0, bisect_right(places, place) - 1),
        )


@attrs.frozen
class CommandCompleter(Completer):
    """Completes the word that begins with a slash, the file behind a command that takes one, and a name of `/set`."""

    commands: tuple[str, ...]

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """The commands that go on from what is typed."""
        typed = document.text
        if typed.startswith("/"):
            yield from (Completion(command, -len(typed)) for command in self.commands if command.startswith(typed))
        name, space, path = typed.partition(" ")
        if space and name in OF_FILES:
            yield from PathCompleter(expanduser=True).get_completions(Document(path), complete_event)
        if name == "/set":
            yield from (Completion(f"{field} ", -len(path)) for field in SET if space and field.startswith(path))


def history_path(environ: Mapping[str, str]) -> Path | None:
    """`$XDG_STATE_HOME/uma/chat-history`, by default in `~/.local/state`; None for a user without a home."""
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "uma" / "chat-history"
    try:
        return Path.home() / ".local" / "state" / "uma" / "chat-history"
    except RuntimeError:
        return None


def _history(path: Path | None) -> History:
    """A history in `path`, readable by its owner alone; where that cannot be, one for this chat only."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        _shorten(path)
    except OSError:
        return InMemoryHistory()
    return LastingHistory(str(path))


def _shorten(path: Path) -> None:
    """Keep the newer half of a file over `MAX_HISTORY_BYTES`, from the beginning of an entry on."""
    written = path.read_bytes()
    if len(written) > MAX_HISTORY_BYTES:
        begins = written.find(b"\n# ", len(written) - MAX_HISTORY_BYTES // 2)
        path.write_bytes(written[begins:] if begins >= 0 else b"")


class LastingHistory(FileHistory):
    """A history file; a line that cannot be written there (a full disk) is still remembered by this chat."""

    _last: tuple[int, int] = (0, 0)
    """Where the last entry begins and ends in the file."""

    def store_string(self, string: str) -> None:
        """Append `string` to the file, unless it is longer than `MAX_ENTRY_CHARS`."""
        self._last = (0, 0)
        if len(string) > MAX_ENTRY_CHARS:
            return
        path = Path(os.fsdecode(self.filename))
        with suppress(OSError):
            begin = path.stat().st_size
            super().store_string(string)
            self._last = begin, path.stat().st_size

    def forget(self) -> None:
        """Cut the last entry off again, unless another chat has written behind it."""
        begin, end = self._last
        path = Path(os.fsdecode(self.filename))
        with suppress(OSError):
            if end > begin and path.stat().st_size == end:
                os.truncate(path, begin)

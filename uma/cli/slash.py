"""The commands of a chat: lines that begin with a slash and are for the chat itself, not for the model."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Protocol

import attrs

from uma.cli import words
from uma.cli.conversation import Conversation
from uma.cli.view import View
from uma.types import Finished, ServerInfo

NO_ROOM = "/undo takes back the last turn, /reset starts over; a larger --n-ctx gives more room"


class Talk(Protocol):
    """The `Chat` as its commands know it."""

    view: View
    conversation: Conversation
    info: ServerInfo | None
    last: Finished | None
    last_file: Path | None
    is_over: bool

    def switch(self) -> None:
        """Go on with another model, where the server has one now."""


def _help(chat: Talk, _: str) -> None:
    chat.view.listing([(f"{name} {command.argument}".rstrip(), command.help) for name, command in COMMANDS.items()])
    chat.view.tell("Esc Enter begins a new line. A question that starts with a slash needs a space before it.")


def _reset(chat: Talk, _: str) -> None:
    chat.conversation.reset()
    kept = " The instructions stay." if chat.conversation.system is not None else ""
    chat.view.tell(f"The conversation starts over.{kept}")


def _system(chat: Talk, text: str) -> None:
    if text == "-":
        chat.conversation.system = None
    elif text:
        chat.conversation.system = text
    now = chat.conversation.system
    chat.view.tell("There are no instructions." if now is None else f"Instructions: {now}")


def _undo(chat: Talk, _: str) -> None:
    question = chat.conversation.undo()
    chat.view.tell("There is nothing to take back." if question is None else f"Taken back: {_short(question)}")


def _save(chat: Talk, name: str) -> None:
    default = chat.last_file or Path(f"uma-chat-{datetime.now():%Y-%m-%d-%H%M%S}.json")
    path = Path(name).expanduser() if name else default
    chat.conversation.save(path)
    chat.last_file = path
    chat.view.tell(f"Saved to {path}")


def _load(chat: Talk, name: str) -> None:
    if not name:
        chat.view.complain("which file? /load FILE")
        return
    path = Path(name).expanduser()
    chat.conversation = Conversation.load(path)
    chat.last_file = path
    turns = chat.conversation.turns
    last = f"; the last question was: {_short(turns[-1][0])}" if turns else ""
    chat.view.tell(f"{len(turns)} turn{'s' * (len(turns) != 1)} from {path}{last}")


def _stats(chat: Talk, _: str) -> None:
    if chat.last is None:
        chat.view.tell("There is no answer yet.")
        return
    rows = words.stats(chat.last)
    if chat.info is not None:
        used = chat.last.usage.prompt_tokens + chat.last.usage.completion_tokens
        rows.append(("context", f"{used:,} of {chat.info.limits.n_ctx:,} tokens used"))
    chat.view.listing(rows)


def _switch(chat: Talk, _: str) -> None:
    chat.switch()


def _quit(chat: Talk, _: str) -> None:
    chat.is_over = True


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


@attrs.frozen
class SlashCommand:
    """A command of the chat: what follows its name, what `/help` says of it, and what it does."""

    argument: str
    help: str
    act: Callable[[Talk, str], None]


COMMANDS: dict[str, SlashCommand] = {
    "/help": SlashCommand("", "the commands of the chat", _help),
    "/reset": SlashCommand("", "forget the conversation and start over", _reset),
    "/system": SlashCommand("[TEXT]", "instructions for the model: show, set, or remove them with -", _system),
    "/undo": SlashCommand("", "take back the last question and its answer", _undo),
    "/save": SlashCommand("[FILE]", "write the conversation to a file", _save),
    "/load": SlashCommand("FILE", "go on with a conversation from a file", _load),
    "/stats": SlashCommand("", "how fast the last answer was, and how full the context is", _stats),
    "/switch": SlashCommand("", "go on with another model, where the server has one now", _switch),
    "/quit": SlashCommand("", "leave", _quit),
}
"""The chat's commands, by name."""

"""What was said in a chat so far: the messages the next answer is asked with, and the file that keeps them.

Nothing half-finished is ever part of it: a question joins together with its answer, so that `/undo` and a failed
request leave it as it was.
"""

from __future__ import annotations

import json
import os
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs

from uma.cli.pictures import ChatPicture
from uma.errors import ConfigError
from uma.types import Message

FORMAT = "uma-chat"
VERSION = 1


class ChatFileError(ConfigError):
    """A saved chat cannot be read or written. Names the file and the reason."""

    code = "E_CHAT_FILE"


@attrs.frozen
class ChatTurn:
    """A question and its answer; one that is only asked has none yet."""

    question: str
    answer: str = ""
    reasoning: str = ""
    """What the model thought before it answered. The template decides how much of it later turns see."""
    pictures: tuple[ChatPicture, ...] = ()
    """Pictures of the question."""

    def asked(self) -> Message:
        """The question. Raises `ValueError` for a text that no model takes."""
        return Message("user", self.question, media=tuple(picture.as_sent() for picture in self.pictures))


@attrs.define
class ChatHistory:
    """Instructions, and questions each with its answer."""

    system: str | None = None
    turns: list[ChatTurn] = attrs.field(factory=list)
    stopped: ChatTurn | None = None
    """The last question, where it was stopped, or its answer was lost, before the first word: no part of what is asked
    with the next one."""

    def asking(self, question: ChatTurn) -> tuple[Message, ...]:
        """The messages with which `question` is asked. Raises `ValueError` for a text that no model takes."""
        messages = [Message("system", self.system)] if self.system is not None else []
        for turn in self.turns:
            answered = Message("assistant", turn.answer, reasoning=turn.reasoning or None)
            messages += [turn.asked(), answered]
        return (*messages, question.asked())

    def undo(self) -> str | None:
        """Take back the last turn, or the stopped question behind it; its question, or None where there is none."""
        if self.stopped is not None:
            question, self.stopped = self.stopped.question, None
            return question
        return self.turns.pop().question if self.turns else None

    def reset(self) -> None:
        """Forget every turn; the instructions stay."""
        self.turns.clear()
        self.stopped = None

    def save(self, path: Path) -> None:
        """Write to `path`, whole or not at all. Raises as `check_writable`."""
        check_writable(path)
        text = json.dumps(self._as_json(), indent=2, ensure_ascii=False) + "\n"
        try:
            _replace(path, text)
        except OSError as error:
            raise ChatFileError(f"{path}: cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> ChatHistory:
        """The conversation that `save` wrote (`ChatFileError` for anything else)."""
        try:
            return cls._of_json(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ChatFileError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ChatFileError(f"{path}: is no chat that /save wrote") from error

    def _as_json(self) -> dict[str, Any]:
        turns = [
            {"user": turn.question, "assistant": turn.answer}
            | ({"reasoning": turn.reasoning} if turn.reasoning else {})
            | ({"pictures": [picture.as_json() for picture in turn.pictures]} if turn.pictures else {})
            for turn in self.turns
        ]
        return {"format": FORMAT, "version": VERSION, "system": self.system, "turns": turns}

    @classmethod
    def _of_json(cls, table: Any) -> ChatHistory:
        if table["format"] != FORMAT or table["version"] != VERSION:
            raise ValueError("another format or version")
        system = None if table["system"] is None else _text(table["system"])
        return cls(system, [_turn(turn) for turn in table["turns"]])


def check_writable(path: Path) -> None:
    """Raise `ChatFileError` where no chat can be saved at `path`: another file than a saved chat is not overwritten."""
    if path.is_dir():
        raise ChatFileError(f"{path}: is a directory; name a file in it, such as {path / 'chat.json'}")
    if not path.absolute().parent.is_dir():
        raise ChatFileError(f"{path}: cannot be written: No such file or directory")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise ChatFileError(f"{path}: cannot be written: its folder can only be read")
    if path.exists():
        ChatHistory.load(path)  # a file of ours: it can be written again


def has_another(path: Path, own: Path | None) -> bool:
    """Whether another chat's file is at `path`, and not this chat's `own`: no save replaces that unasked."""
    return path.exists() and not (own is not None and own.exists() and path.samefile(own))


def default_name() -> str:
    """The name of a file that no chat has yet."""
    return f"uma-chat-{datetime.now():%Y-%m-%d-%H%M%S}.json"


def _turn(table: Any) -> ChatTurn:
    question, answer = _text(table["user"]), _text(table["assistant"])
    pictures = tuple(map(ChatPicture.of_json, table.get("pictures", ())))
    return ChatTurn(question, answer, _text(table.get("reasoning", "")), pictures)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is expected")
    return value


def _replace(path: Path, text: str) -> None:
    """Write beside `path` first, so that a full disk costs nothing that was there before."""
    handle, name = tempfile.mkstemp(prefix=".uma-", dir=path.absolute().parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123  (a descriptor, not a path)
            file.write(text)
        Path(name).replace(path)
    except OSError:
        os.unlink(name)  # noqa: PTH108
        raise

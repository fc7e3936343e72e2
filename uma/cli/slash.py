"""The commands of a chat: lines that begin with a slash and are for the chat itself, not for the model."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from uma.cli import words
from uma.cli.conversation import ChatFileError, ChatHistory, ChatTurn, check_writable, default_name, has_another
from uma.cli.pictures import ChatPicture, path_of
from uma.cli.view import ChatView
from uma.config import BUILTIN, settings
from uma.errors import UmaError
from uma.types import CHAT_SAMPLING, SAMPLER_FIELDS, Finished, SamplerSettings, SamplingParams, ServerInfo
from uma.wrong import nearest

SET = (*SAMPLER_FIELDS, "max_tokens", "seed")
"""Fields of `SamplingParams` that `/set` changes."""
NO_ROOM = "/shorten goes on without the oldest turns; /reset starts over"


@attrs.define(eq=False, kw_only=True)
class Talk(ABC):
    """What the commands know of a `Chat`: its conversation, with its person on one side and a model on the other."""

    view: ChatView
    conversation: ChatHistory
    sampling: SamplingParams
    info: ServerInfo | None = None
    model: str | None = None
    """Name of the model with one of its adapters; None: the model alone."""
    is_local: bool = False
    """The conversation began with a model in this process, and stays in it."""
    last: Finished | None = None
    """The end of the last answer; None where that was cut off."""
    last_file: Path | None = None
    """Where `/save` writes when no name is given."""
    pictures: list[ChatPicture] = attrs.field(factory=list)
    """Pictures that go with the next question."""
    again: ChatTurn | None = None
    """A question that is asked once the command is over: `/retry`'s, `/shorten`'s."""
    taken_back: ChatTurn | None = None
    """The turn that `/retry` asks again: it comes back where there is no other answer."""
    is_over: bool = False

    @abstractmethod
    async def switch(self, name: str) -> None:
        """Go on with another model: the one of this name, unless no memory holds it, or whatever the server has now."""

    @abstractmethod
    async def unusable(self) -> Mapping[str, str]:
        """Why a server does not load some of its models, by their names, where that is known."""

    @abstractmethod
    def shorten(self) -> None:
        """Leave out the oldest turns from now on, as many as it takes for a question to fit."""

    @abstractmethod
    def add_picture(self, path: Path) -> None:
        """Have this file's picture go with the next question. Raises `UmaError`."""


def _help(chat: Talk, _: str) -> None:
    chat.view.listing([(f"{name} {command.argument}".rstrip(), command.help) for name, command in COMMANDS.items()])
    others = ", ".join(f"{other} is {name}" for other, name in ALIASES.items())
    chat.view.tell(f"Other names: {others}.")
    chat.view.tell('Esc Enter begins a new line; between """ and """ Enter does.')
    chat.view.tell("A question that starts with a slash needs a space before it.")
    chat.view.tell("A line that is a picture's path, as when its file is dropped here, is /image with it.")


def _reset(chat: Talk, _: str) -> None:
    chat.conversation.reset()
    chat.last = None
    chat.last_file = None  # it keeps what was said until now
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


def _save(chat: Talk, name: str, *, replaces: bool = False) -> None:
    path = Path(name).expanduser() if name else chat.last_file or Path(default_name())
    check_writable(path)
    if not replaces and has_another(path, chat.last_file):
        raise ChatFileError(f"{path}: already exists, with another chat; `/save! {path}` overwrites it")
    chat.conversation.save(path)
    chat.last_file = path
    chat.view.tell(f"Saved to {path}")


def _load(chat: Talk, name: str) -> None:
    if not name:
        chat.view.complain("which file? /load FILE")
        return
    path = Path(name).expanduser()
    chat.conversation, chat.last = ChatHistory.load(path), None
    chat.last_file = path
    turns = chat.conversation.turns
    last = f"; the last question was: {_short(turns[-1].question)}" if turns else ""
    chat.view.tell(f"{len(turns)} turn{'s' * (len(turns) != 1)} from {path}{last}")


def _stats(chat: Talk, _: str) -> None:
    if chat.last is None:
        without = "There are no figures of the last answer: it was cut off, or came from a file."
        chat.view.tell(without if chat.conversation.turns else "There is no answer yet.")
        return
    rows = words.stats(chat.last)
    if chat.info is not None:
        used = chat.last.usage.prompt_tokens + chat.last.usage.completion_tokens
        rows.append(("context", f"{used:,} of {chat.info.limits.n_ctx:,} tokens used"))
    chat.view.listing(rows)


def _retry(chat: Talk, _: str) -> None:
    stopped, turns = chat.conversation.stopped, chat.conversation.turns
    if stopped is None and not turns:
        chat.view.tell("There is no question to ask again.")
        return
    chat.taken_back = turns.pop() if stopped is None else None
    last = stopped or chat.taken_back
    assert last is not None
    chat.again = ChatTurn(last.question, pictures=last.pictures)
    chat.view.tell(f"Asked again: {_short(chat.again.question)}")


def _image(chat: Talk, name: str) -> None:
    if name == "-":
        chat.pictures.clear()
    elif name:
        chat.add_picture(path_of(name))
        return
    with_it = ", ".join(picture.label() for picture in chat.pictures)
    chat.view.tell(f"With the next question: {with_it}" if with_it else "No picture goes with the next question.")


def _set(chat: Talk, text: str) -> None:
    name, _, value = text.partition(" ")
    name, value = name.removeprefix("--").replace("-", "_"), value.strip()
    if name and name not in SET:
        near = nearest(name, SET) or f"; there are {', '.join(SET)}"
        chat.view.complain(f"/set: no such parameter: {name}{near}")
    elif name and not value:
        chat.view.complain(f"/set {name}: which value? `-` takes yours back")
    else:
        if name:
            chat.sampling = with_value(chat.sampling, name, value)
        chat.view.listing([(field, _value_words(chat, field)) for field in ((name,) if name else SET)])


def with_value(sampling: SamplingParams, name: str, text: str) -> SamplingParams:
    """The parameters with one of `SET` changed; `-` leaves it out. Raises `UmaError` for what it cannot be."""
    try:
        if name == "seed" and not (text == "-" or text.isdecimal()):
            raise UmaError(f"/set seed: expected a whole number from 0, or -, not {text!r}")
        number = int(text) if name == "seed" and text != "-" else 0
        value = None if text == "-" else number if name == "seed" else settings()[name].parse(text, f"/set {name}")
        changed: dict[str, Any] = {name: value}
        return attrs.evolve(sampling, **changed)
    except ValueError as error:
        raise UmaError(f"/set {name}: {str(error).removeprefix(f'{name}: ')}") from None


def _value_words(chat: Talk, name: str) -> str:
    """What holds for the next answer, and whence where nothing was set here."""
    if (value := getattr(chat.sampling, name)) is not None:
        return str(value)
    if name == "seed":
        return "drawn for each answer"
    if chat.info is None:
        return "unset"
    if name == "max_tokens":
        return f"{chat.info.limits.default_max_tokens} (default)"
    suggested = chat.info.capabilities.suggested_sampling
    if name in suggested:
        return f"{suggested[name]:g} (the model's own, or the server's)"
    return f"{CHAT_SAMPLING.get(name, getattr(SamplerSettings(), name)):g} (default)"


async def _model(chat: Talk, name: str) -> None:
    if name:
        await chat.switch(name)
        return
    if chat.info is None:
        chat.view.tell("There is no model yet.")
        return
    adapted = words.with_adapters(chat.info)
    here = _here(chat.info) if chat.is_local and not adapted else chat.info.models
    refused = await chat.unusable()
    others = [name for name in here if name != chat.info.model.name and name not in refused]
    chat.view.listing(
        [
            ("model", words.model_line(chat.info.model)),
            ("file", chat.info.model.path),
            ("", words.context_line(chat.info)),
            *([("answers", chat.model or chat.info.model.name)] if adapted else []),
            *([("others", words.names(others)), ("", "/model NAME goes on with one of them")] if others else []),
            *(("refused", why) for why in refused.values()),
            *([("adapters", words.names(adapted))] if adapted else []),
        ]
    )


def _here(info: ServerInfo) -> list[str]:
    """Models that this process could load instead."""
    from uma.models import catalog  # noqa: PLC0415  (slow to import, and seldom needed with a server)

    found = [model for model in catalog.available(os.environ) if model.problem is None]
    own = BUILTIN if info.model.is_builtin else info.model.path
    return [model.name for model in found if own not in (model.name, str(model.path))]


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
    act: Callable[[Talk, str], Awaitable[None] | None]


COMMANDS: dict[str, SlashCommand] = {
    "/help": SlashCommand("", "the commands of the chat", _help),
    "/reset": SlashCommand("", "forget the conversation and start over", _reset),
    "/system": SlashCommand("[TEXT]", "instructions for the model: show, set, or remove them with -", _system),
    "/undo": SlashCommand("", "take back the last question and its answer", _undo),
    "/retry": SlashCommand("", "ask the last question again, for another answer", _retry),
    "/image": SlashCommand("[FILE]", "a picture for the next question: show, add, or take all away with -", _image),
    "/shorten": SlashCommand(
        "", "leave out the oldest turns from now on, once the context is full", lambda chat, _: chat.shorten()
    ),
    "/set": SlashCommand(
        "[NAME VALUE]",
        "show or set temperature, top_p, max_tokens, seed …; /temperature VALUE too",
        _set,
    ),
    "/save": SlashCommand("[FILE]", "write the conversation to a file; without a name, to its own", _save),
    "/save!": SlashCommand("FILE", "write it over a file that has another chat", partial(_save, replaces=True)),
    "/load": SlashCommand("FILE", "go on with a conversation from a file", _load),
    "/stats": SlashCommand("", "how fast the last answer was, and how full the context is", _stats),
    "/model": SlashCommand("[NAME]", "which model answers, of which others; with a name, go on with that one", _model),
    "/switch": SlashCommand(
        "", "go on with what the server has now, once it serves another model", lambda chat, name: chat.switch(name)
    ),
    "/quit": SlashCommand("", "leave; so do exit, quit and bye alone on a line", _quit),
}
"""The chat's commands, by name."""
ALIASES = {"/bye": "/quit", "/exit": "/quit", "/clear": "/reset", "/regenerate": "/retry", "/info": "/model"}
"""Names that other chats have for these commands."""
FAREWELLS = frozenset({"exit", "quit", "bye"})
"""Words that, alone on a line of a terminal, leave the chat instead of going to the model."""

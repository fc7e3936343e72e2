"""`uma chat`: a conversation. Ctrl-C stops an answer and never the chat; a server that goes away costs one answer and
never the conversation.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs

from uma.cli import words
from uma.cli.conversation import ChatFileError, ChatHistory, ChatTurn, check_writable, default_name, has_another
from uma.cli.generate import quiet
from uma.cli.options import load_settings, sampling_of
from uma.cli.pictures import ChatPicture, dropped
from uma.cli.slash import ALIASES, COMMANDS, FAREWELLS, NO_ROOM, SET, Talk
from uma.cli.source import Bond, Opened, begin_load, listed, open_source, told_progress
from uma.cli.terminal import TextOutput
from uma.cli.trio_run import Interrupts, run
from uma.cli.view import DROPPED, PROMPT, ChatView, PlainLines, PlainView
from uma.client import connect
from uma.config import Loaded
from uma.errors import (
    BadRequest,
    ConnectionLost,
    IdleTimeout,
    ModelError,
    PromptTooLarge,
    ShuttingDown,
    UmaError,
    UnknownModel,
)
from uma.models.names import NONE_HERE, adapter_in, one_meant, with_adapter, without_adapter
from uma.types import CHAT_SAMPLING, Finished, ReasoningDelta, Request, ServerInfo, Token, Truncation
from uma.wrong import nearest

HUNG_UP = (ConnectionLost, IdleTimeout)
"""Errors that end a session which the server has closed while no request ran."""
ASK_AGAIN = "/retry asks the question again, /undo takes it back."
__all__ = ["COMMANDS", "Chat", "main"]


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    loaded = quiet(load_settings(options))
    sampling = sampling_of(options, loaded)
    file = Path(options.load).expanduser() if options.load is not None else None
    conversation = ChatHistory.load(file) if file is not None else ChatHistory()
    if options.system is not None:
        conversation.system = options.system
    if options.save is not None:
        path = Path(options.save).expanduser()
        check_writable(path)
        if has_another(path, file):
            raise ChatFileError(
                f"{path}: already exists, with another chat (--save); name a new file, or go on with that by --load"
            )
    chat = partial(Chat, conversation=conversation, sampling=sampling, loaded=loaded, last_file=file)
    try:
        return run(partial(_chat, options, loaded, chat))
    except ModelError as error:
        (asked,) = options.positional_models or [None]
        if asked is None or NONE_HERE not in error.message or Path(asked).suffix == ".gguf":
            raise
        # A question can have been meant, and that is another command.
        ask = f"to ask the model that, `uma generate {shlex.quote(asked)}`"
        raise ModelError(f"{error.message}; {ask}") from None


def _elsewhere(name: str) -> str:
    """How a chat with a model is begun that the server has not got."""
    from uma.models import catalog  # noqa: PLC0415  (slow to import, and seldom needed with a server)

    try:
        catalog.resolve(name, os.environ)
    except ModelError as error:
        return f"; {error.message}"
    return f"; `uma chat {shlex.quote(name)}` takes it"


def _view(commands: Iterable[str], *, keeps_history: bool) -> ChatView:
    """The view that this process's standard input and output allow; with `keeps_history` later chats know its lines."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        from uma.cli.terminal_view import TerminalView  # noqa: PLC0415  (slow to import, and a pipe has no use for it)

        return TerminalView.standard(commands, keeps_history=keeps_history)
    return PlainView(PlainLines(0, PROMPT if is_terminal else ""), TextOutput.standard())


async def _chat(options: argparse.Namespace, loaded: Loaded, begin: Callable[..., Chat], interrupts: Interrupts) -> int:
    chat = begin(view=_view(COMMANDS, keeps_history=not options.no_history), interrupts=interrupts)
    chat.truncation = "compact" if options.compact else "auto" if options.keep_going else "off"
    with chat.view.talking():
        return await _talk(options, interrupts, chat)


async def _talk(options: argparse.Namespace, interrupts: Interrupts, chat: Chat) -> int:
    question: ChatTurn | None = None
    while True:
        failure: UmaError | None = None
        # Once there is a conversation, Ctrl-C costs it a load and no more.
        with interrupts.stopping(signals=() if chat.info is None else (signal.SIGINT,)) as opening:
            try:
                is_local = options.local or chat.is_local
                place = open_source(chat.loaded, interrupts, local=is_local, say=chat.view.tell, bond=chat.bond)
                async with place as opened:
                    opening.signals = ()
                    chat.meet(opened)
                    question = await chat.talk(question)
            except UmaError as error:
                if chat.info is None:
                    raise
                failure = error
        if failure is not None or opening.scope.cancelled_caught:
            chat.fail(failure, question)
            question = await chat.talk(None)
        if chat.is_over:
            chat.save(options.save)
            return 1 if chat.n_failed and not chat.is_interactive else 0


@attrs.define(eq=False, kw_only=True)
class Chat(Talk):
    """A conversation over a source of answers, which can go away and come back."""

    loaded: Loaded
    interrupts: Interrupts
    opened: Opened | None = None
    """None once the server is gone."""
    bond: Bond | None = None
    """Set once the conversation has begun on a server: it never goes on with another model unasked."""
    before: Loaded | None = None
    """Settings with the last model that was loaded in this process, until the one that was chosen instead is loaded."""
    has_told_base: bool = False
    """The model that answers next is a base model, which was said when it was chosen."""
    is_hung_up_on: bool = False
    """A server has closed the session, before the first word of an answer: the question is asked again, once."""
    refused: ChatTurn | None = None
    """The last question, where the conversation had become too long for it."""
    truncation: Truncation = "off"
    """What the server does with the oldest turns of what does not fit."""
    n_failed: int = 0
    n_asked: int = 0
    takes_commands: bool = attrs.field(factory=lambda: os.isatty(0))
    """Lines of a pipe are questions, whatever they begin with."""
    is_interactive: bool = attrs.field(factory=lambda: os.isatty(0) and os.isatty(1))

    def meet(self, opened: Opened) -> None:
        """Take a source into use, and introduce its model unless it is the same as before."""
        info, before = opened.source.info, self.info
        is_named = self.bond is not None and self.bond.name is not None
        self.model = opened.model if before is None or self.before is not None else self.model
        self.opened, self.info, self.before = opened, info, None
        self.bond = Bond(info.model, bool(info.models)) if opened.is_server else None
        self.is_local = not opened.is_server
        place = "served" if opened.is_server else "loaded in this process"
        if before is None:
            self._introduce(info, place)
        elif not (is_named or (self.is_hung_up_on and info == before)):
            self.view.tell(f"{words.model_line(info.model)} · {place}")
        is_new = before is None or before.model != info.model
        if not self.has_told_base:
            self._tell_base(is_base=is_new and not info.capabilities.chat)
        self.has_told_base = False

    @property
    def _is_switching(self) -> bool:
        """Whether the next question is the first to a model that was chosen by its name."""
        return self.before is not None or (self.bond is not None and self.bond.name is not None)

    def _introduce(self, info: ServerInfo, place: str) -> None:
        model = info.model
        self.view.tell(words.model_line(model))
        self.view.tell(f"{words.context_line(info)} · {place}")
        if adapted := words.with_adapters(info):
            self.view.tell(f"{self.model or model.name} answers; /model NAME has {words.names(adapted)}")
        if self.is_interactive:
            pictures = " /image FILE shows it a picture." if info.capabilities.vision else ""
            self.view.tell(f"/help tells the commands. Ctrl-C stops an answer, Ctrl-D leaves.{pictures}")

    async def talk(self, question: ChatTurn | None) -> ChatTurn | None:
        """Take turns until the user leaves, chooses a model that is loaded here, or asks a question while no source
        is open (that question).
        """
        while not self.is_over:
            if self.opened is None and (question is not None or self.before is not None):
                return question
            if question is not None:
                await self.ask(question)
            if self.is_hung_up_on:
                return question
            question = await self._next_question()
        return None

    async def _next_question(self) -> ChatTurn | None:
        """The next line that is a question; None after anything else."""
        line = await self.view.lines.read()
        if line is None:
            self.is_over = True
        elif line == DROPPED:
            self.view.tell("Ctrl-D or /quit leaves.")
        elif self.is_interactive and (path := dropped(line)) is not None:
            await self._obey(partial(self.add_picture, path))
        elif line.startswith("/") and self.takes_commands:
            await self.command(line)
            question, self.again = self.again, None
            return question
        elif self.is_interactive and line.strip().lower() in FAREWELLS:
            self.is_over = True
        elif line.strip():
            question, self.pictures = ChatTurn(line, pictures=tuple(self.pictures)), []
            return question
        return None

    def add_picture(self, path: Path) -> None:
        """See `Talk.add_picture`."""
        if self.info is not None and not self.info.capabilities.vision:
            raise BadRequest(words.BLIND)
        picture = ChatPicture.read(path)
        self._check_frame([*self.pictures, picture])
        self.pictures.append(picture)
        self.view.tell(f"{picture.label()} goes with the next question; /image - takes it away.")

    def _check_frame(self, pictures: Sequence[ChatPicture]) -> None:
        """Raise `BadRequest` for more than the server takes at once: all pictures of a conversation go with each."""
        if self.info is None or self.is_local:
            return
        every = [*pictures, *(picture for turn in self.conversation.turns for picture in turn.pictures)]
        size, most = sum(len(picture.base64) for picture in every), self.info.limits.max_frame_bytes
        if size >= most:
            raise BadRequest.at(
                pictures[-1].label(),
                f"the pictures of this chat would take {size:,} bytes, and the server takes "
                f"{most:,} (--max-frame-bytes); send a smaller one, or /reset",
            )

    async def ask(self, question: ChatTurn) -> None:
        """One turn: a question and its answer, which join the conversation together or not at all."""
        assert self.opened is not None
        self.n_asked += 1
        suggested = self.opened.source.info.capabilities.suggested_sampling
        try:
            request = Request(
                id=f"chat-{os.getpid()}-{self.n_asked}",  # nobody else's, to be told how far it is
                messages=self.conversation.asking(question),
                sampling=self.sampling.with_suggested({**CHAT_SAMPLING, **suggested}),
                priority=self.opened.source.info.limits.max_priority,  # a person waits for it
                reasoning="auto" if self.opened.source.info.capabilities.reasoning else None,
                truncation=self.truncation,
                model=self.model,
            )
        except ValueError as error:
            self.fail(UmaError(f"this cannot be asked: {error}"))
            return
        answer: list[str] = []
        thoughts: list[str] = []
        finished: Finished | None = None
        failure: UmaError | None = None
        async with self.view.answering(partial(told_progress, self.opened.source, request.id)) as show:
            with self.interrupts.stopping() as stop:
                try:
                    async with self.opened.source.generate(request) as stream:
                        stop.politely = stream.cancel
                        async for event in stream:
                            if isinstance(event, Token):
                                answer.append(event.text)
                                await show(event)
                            elif isinstance(event, ReasoningDelta):
                                thoughts.append(event.text)
                                await show(event)
                            elif isinstance(event, Finished):
                                finished = event
                except UmaError as error:
                    failure = error
        was_hung_up_on, self.is_hung_up_on = self.is_hung_up_on, False
        turn = attrs.evolve(question, answer="".join(answer), reasoning="".join(thoughts))
        if failure is not None:
            # The server closes a session that was idle for long: reconnecting needs no message.
            if isinstance(failure, HUNG_UP) and self.opened.is_server and not answer and not was_hung_up_on:
                self.opened, self.is_hung_up_on = None, True
            else:
                self.fail(failure, turn)
            return
        self.last, self.refused = finished or self.last, None
        self._conclude(turn, finished)

    def _conclude(self, turn: ChatTurn, finished: Finished | None) -> None:
        is_stopped = finished is None or finished.reason == "cancelled"
        has_other_answer = self.taken_back is not None
        self._keep(turn, is_whole=not is_stopped)
        if is_stopped and not turn.answer and not has_other_answer:
            self.conversation.stopped = turn
            self.view.tell(f"Stopped before the first word. {ASK_AGAIN}")
        elif is_stopped:
            self.view.tell(
                f"Stopped{'' if turn.answer else ' before the first word'}; the conversation goes on from here."
            )
        elif not turn.answer.strip():
            self.view.tell("The model answered with nothing.")
        if finished is not None:
            self._tell_how_it_went(finished)

    def _keep(self, turn: ChatTurn, *, is_whole: bool = False) -> None:
        """Add a turn with what there is of its answer; where there is nothing, the one that it was to replace."""
        taken_back, self.taken_back = self.taken_back, None
        self.conversation.stopped = None
        if turn.answer or is_whole:
            self.conversation.turns.append(turn)
        elif taken_back is not None:
            self.conversation.turns.append(taken_back)

    def _larger(self) -> str:
        """That a larger context helps, where the model can have one."""
        most = 0 if self.info is None else self.info.model.context_length
        is_helpful = self.info is None or not 0 < most <= self.info.limits.n_ctx
        return "; a larger --n-ctx holds more" if is_helpful else "; the model can have no longer context"

    def _tell_how_it_went(self, finished: Finished) -> None:
        assert self.info is not None
        if self.is_interactive and finished.usage.completion_tokens:
            self.view.tell(words.speed(finished))
        for warning in finished.warnings:
            self.view.tell(f"warning: {warning}")
        if finished.reason == "length":
            is_full = self._fills_context(finished)
            self.view.tell(
                f"The context is full: {NO_ROOM}{self._larger()}."
                if is_full
                else "Cut at the limit of max_tokens; /set max_tokens N changes it."
            )

    def _fills_context(self, finished: Finished) -> bool:
        used = finished.usage.prompt_tokens + finished.usage.completion_tokens
        return self.info is not None and used >= self.info.limits.n_ctx

    def fail(self, error: UmaError | None, turn: ChatTurn | None = None) -> None:
        """Say what went wrong (None: Ctrl-C stopped a load) and what can be done. What was shown of a turn's answer is
        kept, as after Ctrl-C.
        """
        self.n_failed += 1
        self.is_hung_up_on = False
        if error is None:
            self.opened = None
            self.view.tell("Stopped before the model was ready.")
        else:
            self.view.complain(error.message)
        is_begun = turn is not None and bool(turn.answer)
        is_lost = turn is not None and not is_begun and self.taken_back is None
        is_lost = is_lost and not isinstance(error, PromptTooLarge)
        if turn is not None:
            self._keep(turn)
        if isinstance(error, PromptTooLarge):
            self.view.lines.forget()
            if self.conversation.turns:
                self.refused = turn
                self.view.tell(
                    f"The conversation has become too long; the question was not kept. {NO_ROOM}{self._larger()}."
                )
            else:
                self.view.tell(f"That question is too long and was not kept{self._larger()}.")
        elif isinstance(error, (*HUNG_UP, ShuttingDown)) and self.before is None:
            self.opened = None
            kept = ", and so is the answer up to here" if is_begun else ""
            self.view.tell(f"The conversation is kept{kept}. The next question looks for the server again.")
        elif self.opened is None and self._is_switching and self.info is not None:
            self.bond = None if self.bond is None else Bond(self.info.model, is_one_of_several=True)
            self.loaded, self.before = self.before or self.loaded, None
            self.view.tell(f"The next question goes to {self.info.model.name} as before.")
        elif is_begun:
            self.view.tell("The answer up to here is kept.")
        if is_begun:
            self.last = None  # the figures of the answer before would be taken for its own
        if is_lost:
            self.conversation.stopped = turn
            if self.takes_commands:
                self.view.tell(ASK_AGAIN)

    def save(self, file: str | None) -> None:
        """Write the conversation at its end, where `--save` names a file: beside it, if that has another chat now."""
        if file is None:
            return
        path = Path(file).expanduser()
        if has_another(path, self.last_file):
            path = path.with_name(default_name())
            self.view.tell(f"{file} has another chat; this one is saved to {path}")
        self.conversation.save(path)

    def shorten(self) -> None:
        """Have the server leave out the oldest turns of what does not fit, unless there is room. A question that did
        not fit is asked again.
        """
        is_full = self.last is not None and self._fills_context(self.last)
        if self.refused is None and not is_full and (self.last is not None or not self.conversation.turns):
            self.view.tell("There is nothing to leave out: the context has room.")
            return
        self.truncation = "auto" if self.truncation == "off" else self.truncation
        self.view.tell("From now on the oldest turns are left out where the context is full.")
        self.again, self.refused = self.refused, None

    async def switch(self, name: str) -> None:
        """Take another model, from the next question on: of a server's several the one of this name, else whatever it
        has.
        """
        several = () if self.info is None else self.info.models
        if name and not several and self.info is not None and self.info.capabilities.adapters:
            self.model = self._adapted(name, self.info)
            self.view.tell(f"The next question goes to {self.model or self.info.model.name}.")
            return
        if name and self.bond is not None:
            if not several:
                assert self.info is not None
                only = self.info.model.name
                self.view.complain(f"this server has only {only}{'' if name == only else _elsewhere(name)}")
                return
            base, plus, adapter = name.partition("+")
            base = await self._meant(base, several)
            told = None if self.opened is None else await begin_load(self.opened.source, base)
            name = base + plus + adapter
            self.bond, self.opened, self.model = Bond(None, is_one_of_several=True, name=name), None, None
            self.view.tell(f"The next question goes to {name}.")
            self._tell_base(is_base=told is not None and told.is_base)
        elif self.bond is None:
            self._load_here(name)
        else:
            self.bond, self.model = Bond(None), None
            self.view.tell("The next question goes to whatever model the server has.")

    async def unusable(self) -> Mapping[str, str]:
        """See `Talk.unusable`."""
        models = {} if self.opened is None else await listed(self.opened.source)
        return {name: model.failure for name, model in models.items() if model.failure and model.state == "unloaded"}

    async def _meant(self, asked: str, several: Sequence[str]) -> str:
        """What a server of these models calls one. Of one that has come since, or is broken, the server tells. Raises
        what it says.
        """
        try:
            return one_meant(asked, {model: (model,) for model in several})
        except UnknownModel:
            async with connect(self.loaded.config.socket, model=asked, loads=False, waits=False):
                return asked

    def _load_here(self, name: str) -> None:
        """Have another model loaded in this process, before the next question. Raises `ModelError`."""
        from uma.models import catalog  # noqa: PLC0415  (slow to import, and seldom needed with a server)

        catalog.resolve(name, os.environ)
        config, origins = attrs.evolve(self.loaded.config, model=name), {**self.loaded.origins, "model": "/model"}
        self.before = self.before or self.loaded
        self.loaded, self.opened = attrs.evolve(self.loaded, config=config, origins=origins), None

    def _tell_base(self, *, is_base: bool) -> None:
        """Say of a model that was chosen that it answers nothing, before it is asked."""
        if is_base:
            self.view.tell(f"{words.BASE}.")
        self.has_told_base = is_base

    @staticmethod
    def _adapted(asked: str, info: ServerInfo) -> str | None:
        """What requests name for the model with an adapter; None for the model alone. Raises `UnknownModel`."""
        adapters, card = info.capabilities.adapters, info.model
        if base := without_adapter(asked, adapters):
            one_meant(base, {card.name: (card.name, card.title), **dict.fromkeys(words.with_adapters(info), ())})
        return None if adapter_in(asked, adapters) is None else with_adapter(card.name, asked, adapters)

    async def command(self, line: str) -> None:
        """Obey a line that begins with a slash."""
        name, _, argument = line.strip().partition(" ")
        if name.removeprefix("/") in SET:
            name, argument = "/set", line.strip().removeprefix("/")
        known = COMMANDS.get(ALIASES.get(name, name))
        if known is None:
            self.n_failed += 1
            every = [*COMMANDS, *ALIASES, *(f"/{field}" for field in SET)]
            near = nearest(name, every) or "; /help tells those there are"
            self.view.complain(f"no such command: {name}{near}")
            return
        await self._obey(partial(known.act, self, argument.strip()))

    async def _obey(self, act: Callable[[], Awaitable[None] | None]) -> None:
        try:
            if (under_way := act()) is not None:
                await under_way
        except UmaError as error:
            self.n_failed += 1
            self.view.complain(error.message)

"""`uma generate`: one prompt in, its text out as it comes, for people and for pipes.

Standard output carries the text alone (or with `--json` the protocol's events); notes, warnings and
errors go to standard error.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
from functools import partial

import attrs
import trio

from uma.cli import say, words
from uma.cli.answer_options import with_answer
from uma.cli.options import load_settings, sampling_of
from uma.cli.pictures import ChatPicture
from uma.cli.source import Opened, open_source, watched
from uma.cli.terminal import TextOutput
from uma.cli.trio_run import Interrupts, run
from uma.config import Loaded
from uma.errors import BadRequest, ConfigError, UmaError
from uma.types import (
    CHAT_SAMPLING,
    Capabilities,
    Event,
    Finished,
    Logprobs,
    Message,
    Priority,
    Prompt,
    ReasoningDelta,
    Request,
    SamplingParams,
    Token,
    ToolCallDelta,
)

WAIT_SEC = 1.0
"""Standard input that has not begun by then is told, since it can be a pipe that nothing ever comes from."""
REQUEST_ID = f"generate-{os.getpid()}"
"""Another process's request has another one, so that this one can be told how far it is."""
INTERRUPTED = 128 + signal.SIGINT


@attrs.frozen
class Task:
    """What the command line asks for, model aside."""

    prompt: str
    system: str | None
    raw: bool
    sampling: SamplingParams
    priority: Priority
    pictures: tuple[ChatPicture, ...] = ()
    """They stand before the prompt's text."""

    def request(self, capabilities: Capabilities, model: str | None = None) -> Request:
        """The request for a source of these `capabilities`, to its `model` of this name. Raises `ConfigError` for a
        prompt that no model takes, and for a picture where this one sees none.
        """
        if self.pictures and not capabilities.vision:
            raise ConfigError(f"--image: {words.BLIND}")
        templated = not self.raw and (capabilities.chat or self.system is not None or bool(self.pictures))
        try:
            return Request(
                id=REQUEST_ID,
                prompt=None if templated else self.prompt,
                messages=self._messages() if templated else None,
                sampling=self.sampling.with_suggested({**CHAT_SAMPLING, **capabilities.suggested_sampling}),
                priority=self.priority.value,
                model=model,
                stream=self.sampling.drawn_answers == 1,  # else their texts would be mixed
            )
        except ValueError as error:
            raise ConfigError(f"the prompt cannot be used: {error}") from None

    def _messages(self) -> tuple[Message, ...]:
        system = (Message("system", self.system),) if self.system is not None else ()
        return (*system, Message("user", self.prompt, media=tuple(picture.as_sent() for picture in self.pictures)))


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    loaded = quiet(load_settings(options))
    if options.raw and options.system is not None:
        raise ConfigError("--system needs the chat template that --raw leaves out; put it into the prompt instead")
    if options.raw and options.image:
        raise ConfigError("--image needs the chat template that --raw leaves out; leave out either")
    try:
        pictures = tuple(map(ChatPicture.read, options.image))
    except BadRequest as error:
        raise ConfigError(f"--image: {error.message}") from None
    task = Task(
        prompt=read_prompt(options.prompt, is_literal=options.raw),
        system=options.system,
        raw=options.raw,
        sampling=with_answer(sampling_of(options, loaded), options),
        priority=Priority[options.priority.upper()],
        pictures=pictures,
    )
    return run(partial(_generate, options, loaded, task))


def quiet(loaded: Loaded) -> Loaded:
    """Settings with a log of warnings alone, unless a level was chosen: the output is the text."""
    if loaded.origins["log_level"] != "default":
        return loaded
    return attrs.evolve(loaded, config=attrs.evolve(loaded.config, log_level="warning"))


def read_prompt(arguments: list[str], *, is_literal: bool) -> str:
    """The prompt from the command line and standard input, which goes where `-` stands, else after the words.

    Words are joined by blanks, and set off from standard input by a blank line, which a literal prompt goes without.
    The newline that ends a text file is dropped, except where the prompt is literal. Raises `ConfigError` for a
    prompt that is empty or not UTF-8.
    """
    reads_terminal = not arguments or "-" in arguments
    given = _from_standard_input() if reads_terminal or not sys.stdin.isatty() else ""
    if not is_literal:
        given = given.removesuffix("\n").removesuffix("\r")
    words_of_it = arguments if "-" in arguments else [*arguments, "-"]
    at = words_of_it.index("-")
    parts = [" ".join(words_of_it[:at]), given, " ".join(word for word in words_of_it[at + 1 :] if word != "-")]
    prompt = ("" if is_literal else "\n\n").join(filter(None, parts))
    if not prompt or (not is_literal and not prompt.strip()):
        raise ConfigError('the prompt is empty; write it after the command: uma generate "Tell me a story"')
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 from character {error.start + 1} on") from None
    return prompt


def _has_input(timeout_sec: float) -> bool:
    """Whether standard input has something to read, or its end, within this time."""
    return sys.platform == "win32" or bool(select.select([sys.stdin], [], [], timeout_sec)[0])


def _from_standard_input() -> str:
    if sys.stdin.isatty():
        say.note("reading the prompt from the keyboard; Ctrl-D on a line of its own ends it")
    elif not _has_input(WAIT_SEC):
        say.note("waiting for standard input, which is part of the prompt; without any: </dev/null")
    data = sys.stdin.buffer.read()
    if data and sys.stdin.isatty() and not data.endswith(b"\n"):
        say.plain("")  # what is said next has a line of its own
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on standard input is not UTF-8 from byte {error.start + 1} on") from None


async def _generate(options: argparse.Namespace, loaded: Loaded, task: Task, interrupts: Interrupts) -> int:
    async with open_source(loaded, interrupts, local=options.local, say=say.note) as opened:
        output, n_ctx = TextOutput.standard("utf-8" if options.json else None), opened.source.info.limits.n_ctx
        try:
            finished = await _stream(opened, task, output, interrupts, is_json=options.json)
        finally:
            # Whatever ends the text, the shell's prompt does not belong on its last line.
            if output.is_terminal:
                output.end_line()
        if not options.json:
            output.end_line()
    if finished is None:
        return INTERRUPTED
    for warning in finished.warnings:
        say.warn(warning)
    if options.stats:
        for name, value in words.stats(finished):
            say.plain(f"{name + ':':<21}{value}")
    has_form = task.sampling.grammar is not None
    if (line := words.cut(finished, n_ctx, has_form=has_form)) is not None:
        say.warn(line)
        if has_form:
            return 1
    if finished.reason == "cancelled":
        return INTERRUPTED
    model = opened.source.info.model
    if model.is_builtin and output.is_terminal and sys.stderr.isatty() and not words.demonstration(model, loaded):
        say.note(words.NEXT)
    return 0


async def _stream(
    opened: Opened, task: Task, output: TextOutput, interrupts: Interrupts, *, is_json: bool
) -> Finished | None:
    """Write the answer to `output`; its last event, or None where Ctrl-C came and nothing more followed."""
    able = opened.source.info.capabilities
    request = task.request(able, opened.model)
    if able.generate and not able.chat and not task.raw and sys.stderr.isatty():
        say.note(words.BASE)
    finished: Finished | None = None
    known: list[Logprobs] = []
    try:
        with interrupts.stopping() as stop:
            async with opened.source.generate(request) as stream:
                stop.politely = stream.cancel
                event: Event | None = await watched(opened.source, request.id, stream.__anext__)
                while event is not None:
                    if not isinstance(event, ReasoningDelta | ToolCallDelta):  # the command asks for neither
                        await output.write(as_json_line(event) if is_json else _text(event, task.sampling))
                    if isinstance(event, Prompt):
                        known += [logprob for logprob in event.logprobs or () if logprob is not None]
                    if isinstance(event, Token) and event.logprobs is not None:
                        known.append(event.logprobs)
                    if isinstance(event, Finished):
                        known += [
                            logprob for logprob in (event.prompt and event.prompt.logprobs) or () if logprob is not None
                        ]
                        known += [logprob for answer in event.answers for logprob in answer.logprobs or ()]
                    finished = event if isinstance(event, Finished) else None
                    event = await anext(stream, None)
    except UmaError as error:
        if is_json:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await output.write(as_json_line(error))
        if isinstance(error, BadRequest):  # a form that cannot be used, by the option that asks for it
            told = re.sub(r"^grammar\.(\w+)", lambda field: f"--{field[1].replace('_', '-')}", error.message)
            raise BadRequest(told) from None
        raise
    if known and not is_json:
        output.end_line()
        for line in words.logprobs(known):
            say.plain(line)
    return finished


def _text(event: Prompt | Token | Finished, sampling: SamplingParams) -> str:
    """What an event has to be written of."""
    if isinstance(event, Prompt):
        return event.text if sampling.echo else ""
    return _whole(event, sampling) if isinstance(event, Finished) else event.text


def _whole(finished: Finished, sampling: SamplingParams) -> str:
    """What has not been written yet: all answers, where there are several, a line between them."""
    echoed = [finished.prompt.text] if finished.prompt is not None and sampling.echo else []
    return "\n".join([*echoed, *(answer.text or "" for answer in finished.answers)]) or finished.text or ""


def as_json_line(event: Event | UmaError) -> str:
    """The protocol's event as a line of JSON."""
    from uma.protocol.codec import encode_event  # noqa: PLC0415  (only --json needs it)
    from uma.protocol.frames import HEADER_BYTES  # noqa: PLC0415
    from uma.protocol.messages import EosEvent, ErrorEvent, PromptEvent, TokenEvent, wire_event  # noqa: PLC0415

    match event:
        case Prompt():
            frame = encode_event(wire_event(PromptEvent, event))
        case Token():
            frame = encode_event(TokenEvent.of(event))
        case Finished():
            frame = encode_event(wire_event(EosEvent, event))
        case UmaError():
            frame = encode_event(ErrorEvent(event.code, event.message, REQUEST_ID, event.retry_after_ms))
    return frame[HEADER_BYTES:].decode() + "\n"

"""The parts that a model's output consists of, as the parser gives them."""

from __future__ import annotations

import attrs


@attrs.frozen
class AnswerText:
    """A piece of the answer itself."""

    text: str


@attrs.frozen
class Reasoning:
    """A piece of what stands between the thinking marks."""

    text: str


@attrs.frozen
class CallBegun:
    """A tool call has begun: its name is known."""

    name: str


@attrs.frozen
class CallArguments:
    """The next piece of the arguments' JSON of the call that has begun."""

    text: str


@attrs.frozen
class CallEnded:
    """The call is whole. `arguments` is a JSON object, as the model wrote it."""

    name: str
    arguments: str
    note: str = ""
    """What is to be told of the call."""


@attrs.frozen
class CallBroken:
    """The call that had begun is none: what the model wrote of it comes as `AnswerText`, for what `reason` says."""

    name: str
    reason: str


@attrs.frozen
class CallCut:
    """The output has ended inside the call that had begun. `text` is what the model wrote of it, with the mark and the
    white space before it.
    """

    name: str
    text: str


Part = AnswerText | Reasoning | CallBegun | CallArguments | CallEnded | CallBroken | CallCut


def joined(parts: list[Part]) -> list[Part]:
    """Neighbouring pieces of the same kind as one."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, AnswerText | Reasoning | CallArguments) and type(part) is type(last):
            whole[-1] = type(part)(last.text + part.text)
        else:
            whole.append(part)
    return whole

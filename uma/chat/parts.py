"""Parts of a model's output, as the parser returns them."""

from __future__ import annotations

import attrs


@attrs.frozen
class AnswerText:
    """A piece of the answer."""

    text: str


@attrs.frozen
class Reasoning:
    """A piece of the text between the thinking marks."""

    text: str


@attrs.frozen
class CallBegun:
    """Beginning of a tool call, once its name is known."""

    name: str


@attrs.frozen
class CallArguments:
    """The next piece of JSON of the current call's arguments."""

    text: str


@attrs.frozen
class CallEnded:
    """End of a complete call. `arguments` is a JSON object, as the model wrote it."""

    name: str
    arguments: str
    note: str = ""
    """Remark for the request's warnings."""


@attrs.frozen
class CallBroken:
    """End of what was not a call after all, for this `reason`. Its text follows as `AnswerText`."""

    name: str
    reason: str


@attrs.frozen
class CallCut:
    """End of the output inside of a call. `text` is what the model wrote of it, with the mark and the white space
    before it.
    """

    name: str
    text: str


Part = AnswerText | Reasoning | CallBegun | CallArguments | CallEnded | CallBroken | CallCut


def joined(parts: list[Part]) -> list[Part]:
    """Parts with adjacent pieces of the same kind merged."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, AnswerText | Reasoning | CallArguments) and type(part) is type(last):
            whole[-1] = type(part)(last.text + part.text)
        else:
            whole.append(part)
    return whole

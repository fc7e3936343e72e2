"""Chat templates: a conversation as the text that the model was trained on.

Templates come inside model files, so they are other people's programs: they run in jinja2's sandbox, with the few
names that Hugging Face's templates expect and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError
from jinja2 import TemplateError as JinjaError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from uma.errors import TemplateError
from uma.types import Message

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For models without a template: `User: …`, a blank line, `Assistant: …`, and so on, ending with `Assistant:`."""


class ChatTemplate:
    """A model's chat template, or the plain one where `source` is None. Safe to use from several threads."""

    def __init__(self, source: str | None, bos: str, eos: str) -> None:
        self.is_own = source is not None
        self.source = PLAIN_TEMPLATE if source is None else source
        self.bos = bos
        self.eos = eos

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, ready for the assistant's answer.

        Raises `TemplateError` with the reason (and line) where the template is broken or refuses these messages.
        """
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                bos_token=self.bos,
                eos_token=self.eos,
                tools=None,
                documents=None,
            )
        except _RefusedError as error:
            raise TemplateError(f"messages: the model's chat template refuses them: {error}") from None
        except (JinjaError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateError(f"messages: the model's chat template fails: {error}") from error

    @cached_property
    def _template(self) -> Template:
        try:
            return _environment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise TemplateError(f"the model's chat template is broken: line {error.lineno}: {error.message}") from error

    def needs_bos(self, rendered: str) -> bool:
        """Whether the tokenizer should add the beginning of text, as the template did not write it itself."""
        return not (self.bos and rendered.startswith(self.bos))


class _RefusedError(JinjaError):
    """A template called `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    # Not jinja2's own filter: that one escapes HTML, which models have not seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment

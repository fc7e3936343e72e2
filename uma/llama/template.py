"""Chat templates: a conversation as the text that the model was trained on.

Templates come inside model files, so they are other people's programs: they run in jinja2's sandbox, with the few
names that Hugging Face's templates expect and nothing else, and with bounds on how much they may loop and write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
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

MAX_STEPS = 1_000_000
"""Most steps of all of one rendering's `range` loops together."""
MAX_REPEATED = 1_000_000
"""Longest string or list that `*` may make."""
MAX_POWER_BITS = 4096
"""Largest integer that `**` may make."""


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
        template = self._template
        try:
            return template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                bos_token=self.bos,
                eos_token=self.eos,
                tools=None,
                documents=None,
                range=_bounded_range(),
            )
        except _RefusedError as error:
            raise TemplateError(f"messages: the model's chat template refuses them: {error}") from None
        except _FAULTS as error:
            raise TemplateError(
                f"messages: the model's chat template fails{_line_of(error)}: {error or type(error).__name__}"
            ) from error

    @cached_property
    def _template(self) -> Template:
        try:
            return _environment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise TemplateError(
                f"messages: the model's chat template is broken: line {error.lineno}: {error.message}"
            ) from error
        except _FAULTS as error:
            raise TemplateError(f"messages: the model's chat template is broken: {error}") from error

    def needs_bos(self, rendered: str) -> bool:
        """Whether the tokenizer should add the beginning of text, as the template did not write it itself."""
        return not (self.bos and rendered.startswith(self.bos))


_FAULTS = (JinjaError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""All that a program in the sandbox can raise."""


class _RefusedError(JinjaError):
    """A template called `raise_exception`."""


def _line_of(error: BaseException) -> str:
    """` in line N`, the innermost line of the template that was running; empty where none was."""
    line, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return f" in line {line}" if line else ""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which a short expression can also not make a giant."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse what would be too large to make."""
        if operator == "**" and isinstance(left, int) and left.bit_length() * abs(right) > MAX_POWER_BITS:
            raise OverflowError(f"the power has more than {MAX_POWER_BITS:,} bits")
        if operator == "*":
            for thing, times in ((left, right), (right, left)):
                if isinstance(thing, str | bytes | list | tuple) and len(thing) * times > MAX_REPEATED:
                    raise OverflowError(f"repeating gives more than {MAX_REPEATED:,} items")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (as its base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]
    return environment


def _bounded_range() -> Callable[..., range]:
    """`range` for one rendering, which may make `MAX_STEPS` steps in all, so that nested loops come to an end too."""
    left = MAX_STEPS

    def bounded(*bounds: int) -> range:
        nonlocal left
        steps = range(*bounds)
        left -= len(steps)
        if left < 0:
            raise OverflowError(f"its loops have more than {MAX_STEPS:,} steps")
        return steps

    return bounded


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own filter: that one escapes for HTML, which models have not seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

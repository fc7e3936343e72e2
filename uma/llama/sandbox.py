"""The sandbox in which a model's chat template runs, and the child process that runs templates which can take long.

Templates come inside model files, so they are other people's programs: they run in jinja2's sandbox, with the few
names that Hugging Face's templates expect and nothing else. This file is also a program, `main`, and imports next to
nothing but jinja2 and the standard library: the child starts in a fraction of the time that all of UMA would need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from uma import json_text
from uma.child import serve

MAX_STEPS = 1_000_000
"""Most steps of all of one rendering's `range` loops together."""
MAX_REPEATED = 1_000_000
"""Longest string or list that `*` can make."""
MAX_POWER_BITS = 4096
"""Largest integer that `**` can make."""
MAX_TEXT_CHARS = 16_000_000
"""Longest text that a rendering can give."""
MAX_MEMORY_BYTES = 2**30
"""Address space of the child process, where the system bounds that."""
DATE_FORM = "%d %b %Y"
"""Form of today's date in `date_string`, as Llama's templates have it. Without that name the templates of Llama 3.1 and
3.3 tell the model that it is the 26th of July 2024."""
DATETIME_FORM = "%b %d %Y"
"""Form of today's date in `datetime`, as Firefunction's templates have it."""


class UnusableError(Exception):
    """A template is broken, fails, or refuses the messages: the reason, as the end of a sentence about it."""


class RefusedError(UnusableError):
    """A template called `raise_exception`: these messages are not in the form that it demands."""


def compiled(source: str) -> Template:
    """A template, ready to be rendered. Raises `UnusableError`."""
    try:
        return environment().from_string(source)
    except TemplateSyntaxError as error:
        raise UnusableError(f"is broken: line {error.lineno}: {error.message}") from error
    except _FAULTS as error:
        raise UnusableError(f"is broken: {error}") from error


def rendered(template: Template, conversation: dict[str, Any], bos: str, eos: str) -> str:
    """The text of a conversation: its `messages`, its `tools` or None, the template's `switches`, and with
    `opens_answer` the beginning of the assistant's answer. A switch cannot take the name of another of these.

    Raises `UnusableError`.
    """
    tools = conversation["tools"]
    try:
        text = _attempt(template, conversation, bos, eos, tools)
    except RefusedError:
        raise
    except UnusableError:
        if tools is not None:
            raise
        # Templates that are made for use with tools alone, such as Hermes', go through them without asking.
        text = _attempt(template, conversation, bos, eos, [])
    if len(text) > MAX_TEXT_CHARS:
        raise UnusableError(f"fails: it gives more than {MAX_TEXT_CHARS:,} characters")
    return text


def _attempt(
    template: Template, conversation: dict[str, Any], bos: str, eos: str, tools: list[dict[str, Any]] | None
) -> str:
    try:
        return template.render(
            {
                "documents": None,
                "functions": "",
                "date_string": _strftime_now(DATE_FORM),
                "datetime": _strftime_now(DATETIME_FORM),
                **conversation["switches"],
                "messages": conversation["messages"],
                "add_generation_prompt": conversation["opens_answer"],
                "bos_token": bos,
                "eos_token": eos,
                "tools": tools,
                "range": _bounded_range(),
            }
        )
    except _RaisedError as error:
        raise RefusedError(f"refuses them: {error}") from None
    except _FAULTS as error:
        raise UnusableError(f"fails{_line_of(error)}: {error or type(error).__name__}") from error


_FAULTS = (JinjaError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""All that a program in the sandbox can raise."""


class _RaisedError(JinjaError):
    """A template called `raise_exception`, as Jinja hands it on."""


def _line_of(error: BaseException) -> str:
    """` in line N`, the innermost line of the template that was running; empty where none was."""
    line, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return f" in line {line}" if line else ""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which a short expression can also not make a giant. Lists can change, as Kimi K2's templates do
    it: what a template is given is its own copy.
    """

    intercepted_binops = frozenset(("*", "**"))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template can use an attribute of a value."""
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

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


def environment() -> _Environment:
    """A sandbox as Hugging Face's templates expect it: their whitespace rules, loop controls, and three functions."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _tojson
    environment.filters["safe"] = str  # nothing is escaped here, and what is safe would escape what is added to it
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]
    return environment


def _bounded_range() -> Callable[..., range]:
    """`range` for one rendering, which can make `MAX_STEPS` steps in all, so that nested loops come to an end too."""
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
    raise _RaisedError(message)


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
    # What a filter such as `map` gives is a list to a template's author.
    value = list(value) if isinstance(value, Iterator) else value
    return json_text.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main() -> None:
    """The child: take a template, then render conversations until the parent closes its end."""
    serve(_renderer, MAX_MEMORY_BYTES)


def _renderer(setup: list[str]) -> Callable[[dict[str, Any]], dict[str, str]]:
    source, bos, eos = setup
    template: Template | None = None

    def render(conversation: dict[str, Any]) -> dict[str, str]:
        nonlocal template
        try:
            template = template or compiled(source)
            return {"text": rendered(template, conversation, bos, eos)}
        except RefusedError as error:
            return {"refusal": str(error)}
        except UnusableError as error:
            return {"problem": str(error)}

    return render


if __name__ == "__main__":
    main()
